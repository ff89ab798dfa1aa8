"""The trigger turns counts of steps into "together", "part now" and "round now"."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_torch.sync.trigger import StepTrigger


def due(trigger: StepTrigger, steps: int) -> list[int]:
    return [t for t in range(steps + 1) if trigger.due(t) is not None]


def test_without_warm_up_replicas_part_before_the_first_step() -> None:
    trigger = StepTrigger(warmup=0, every=3)
    assert [t for t in range(10) if trigger.joins(t)] == [0]
    assert not any(trigger.is_synchronous(t) for t in range(10))
    assert due(trigger, 10) == [3, 6, 9]


def test_the_interval_counts_from_the_end_of_the_warm_up() -> None:
    trigger = StepTrigger(warmup=5, every=4)
    assert [t for t in range(20) if trigger.is_synchronous(t)] == [0, 1, 2, 3, 4]
    assert [t for t in range(20) if trigger.joins(t)] == [5]
    assert due(trigger, 20) == [9, 13, 17]


@settings(deadline=None)
@given(warmup=st.integers(0, 30), every=st.integers(1, 30))
def test_rounds_are_as_many_as_whole_intervals_and_replicas_part_once(
    warmup: int, every: int
) -> None:
    trigger, steps = StepTrigger(warmup=warmup, every=every), 90
    assert len(due(trigger, steps)) == (steps - warmup) // every
    assert sum(trigger.joins(t) for t in range(steps + 1)) == 1
    assert sum(trigger.is_synchronous(t) for t in range(steps)) == warmup
    assert not any(trigger.due(t) is not None and trigger.is_synchronous(t) for t in range(steps))


def test_the_answer_depends_on_the_step_alone_so_asking_twice_is_free() -> None:
    trigger = StepTrigger(warmup=0, every=2)
    assert [trigger.due(4) for _ in range(3)] == [0] * 3
    with pytest.raises(AttributeError):
        trigger.every = 5  # type: ignore[misc]
