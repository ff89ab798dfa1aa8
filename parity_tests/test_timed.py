"""A-EDiT on real processes: by a virtual clock, and by a real one with a slow replica.

The schedules of core_torch/tests/test_timed_rounds.py, two hundred of them, run on threads.
"""

from typing import Any

import pytest

from parity_tests.cases import equalities, timed
from parity_tests.checks.trajectories import PENALTY, Trajectory, assert_bitwise, same
from parity_tests.harness.pool import RankPool

SECOND = 10**9
SYNC: dict[str, Any] = {
    "method": "aedit",
    "warmup": 2,
    "penalty": PENALTY,
    "timed": {"min_total_steps": 1},
}


def changes_of(shape: tuple[int, int], steps: int, **sync: Any) -> dict[str, Any]:
    """A run by the clock."""
    return {
        "mesh": {"replicas": shape[0], "shards": shape[1]},
        "model": {"layers": 1},
        "train": {"steps": steps},
        "sync": SYNC | sync,
    }


def assert_in_step(ranks: list[Any], shards: int) -> None:
    """Ranks that meet on an axis dispatch the same, one after the other; all end on one anchor."""
    for rank, told in enumerate(ranks):
        for axis, peer in (("replica", rank % shards), ("shard", rank // shards * shards)):
            mine, theirs = ([x for x in r["trace"] if x[0] == axis] for r in (told, ranks[peer]))
            assert mine == theirs
        assert same(told["theta"], ranks[rank % shards]["theta"])
        assert told["agreed"] == ranks[0]["agreed"]
        for one, two in zip(told["events"], ranks[0]["events"], strict=True):
            assert repr(one | {"step": 0}) == repr(two | {"step": 0})


def test_equal_speeds_by_the_clock_are_edit_bit_for_bit(pool: RankPool) -> None:
    aedit = changes_of((2, 2), 11, every="3s", layerwise=True)
    edit = aedit | {"sync": aedit["sync"] | {"method": "edit", "every": 3, "timed": {}}}
    one, two = (
        Trajectory(pool.run(equalities.run, changes, None, [], False, [SECOND] * 2), 2)
        for changes in (aedit, edit)
    )
    rounds = [run.ranks[0]["events"] + run.ranks[0]["closing"] for run in (one, two)]
    assert repr(rounds[0]) == repr(rounds[1]) and len(rounds[0]) == 3
    assert_bitwise(one, two, {0: 0, 1: 1})


@pytest.mark.parametrize(
    ("shape", "step_ns", "leaves", "sync"),
    [
        ((4, 1), [1, 2, 3, 5], [0, 0, 0, 0], {"every": "6s", "layerwise": True}),
        ((4, 1), [1, 1, 2, 3], [0, 5, 0, 2], {"every": "4s", "layerwise": False, "wire": "int8"}),
        ((2, 2), [2, 7], [9, 0], {"every": "1s", "layerwise": True, "wire": "bf16"}),
    ],
    ids=str,
)
def test_replicas_of_unequal_speed_meet_in_the_same_rounds(
    pool: RankPool,
    shape: tuple[int, int],
    step_ns: list[int],
    leaves: list[int],
    sync: dict[str, Any],
) -> None:
    costs = [SECOND * ns for ns in step_ns]
    ranks = pool.run(timed.run, changes_of(shape, 10, **sync), costs, leaves, [0] * 4)
    assert_in_step(ranks, shape[1])
    made = [rank["steps"] for rank in ranks[:: shape[1]]]
    counted = [sum(e["steps"][n] for e in ranks[0]["events"]) for n in range(shape[0])]
    assert counted == [steps - 2 for steps in made] and len(set(made)) > 1


def test_a_slow_process_makes_fewer_steps_and_nobody_waits_outside_rounds(pool: RankPool) -> None:
    """Replica 1 sleeps three times as long after every step; the clock is the machine's."""
    changes = changes_of((2, 1), 20, every="0.8s", layerwise=True)
    told = pool.run(timed.run, changes, [], [0, 0], [50, 150])
    ranks = [rank for rank in told if rank is not None]
    assert_in_step(ranks, 1)
    fast, slow = (rank["steps"] for rank in ranks)
    assert fast > slow, (fast, slow)
    assert len(ranks[0]["events"]) >= 2
    assert ranks[0]["agreed"] >= 20 * 2 * 16  # as planned: steps, replicas, tokens of each
    for n, rank in enumerate(ranks):
        inside = {e["step"] for e in ranks[n]["events"]}
        for step in range(3, rank["steps"] + 1):
            first, last = rank["marks"][step - 1 : step + 1]
            has_sent = any(x[0] == "replica" for x in rank["trace"][first:last])
            assert not has_sent or step - 1 in inside, f"replica {n}, step {step}"
