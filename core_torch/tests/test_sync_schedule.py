"""A round's exchanges run in order, each once, and never too many at a time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_torch.sync.schedule import InOrder

Events = list[tuple[str, int]]


def order(count: int, limit: int) -> tuple[Events, InOrder]:
    """A round, and the list that every start and finish will be entered in."""
    events: Events = []
    return events, InOrder(
        count,
        lambda u: events.append(("start", u)),
        lambda u: events.append(("finish", u)),
        limit=limit,
    )


def trace(count: int, limit: int) -> Events:
    """Every start and finish of a whole round, in order."""
    events, round_ = order(count, limit)
    round_.complete()
    assert round_.is_done
    return events


def said(events: Events) -> str:
    return " ".join(f"{kind[0]}{u}" for kind, u in events)


@settings(deadline=None)
@given(count=st.integers(0, 40), limit=st.integers(1, 45))
def test_each_exchange_starts_once_before_it_finishes_and_the_bound_holds(
    count: int, limit: int
) -> None:
    events = trace(count, limit)
    assert [u for kind, u in events if kind == "start"] == list(range(count))
    assert [u for kind, u in events if kind == "finish"] == list(range(count))
    assert all(events.index(("start", u)) < events.index(("finish", u)) for u in range(count))
    flying = [0]
    for kind, _ in events:
        flying.append(flying[-1] + (1 if kind == "start" else -1))
    assert max(flying) == min(count, limit), "as many as allowed, and no more"
    assert flying[-1] == 0


def test_the_next_exchange_starts_as_soon_as_the_oldest_has_finished() -> None:
    assert said(trace(4, 2)) == "s0 s1 f0 s2 f1 s3 f2 f3"


def test_a_limit_of_one_takes_one_unit_after_the_other() -> None:
    assert said(trace(3, 1)) == "s0 f0 s1 f1 s2 f2"


@settings(deadline=None)
@given(
    count=st.integers(1, 12),
    limit=st.integers(1, 5),
    reached=st.lists(st.integers(0, 15), max_size=20),
)
def test_reached_unit_by_unit_the_order_is_that_of_a_whole_round(
    count: int, limit: int, reached: list[int]
) -> None:
    events, round_ = order(count, limit)
    for u in reached:  # twice, backwards, beyond the end: as hooks may call
        round_.reach(u)
        assert ("finish", min(u, count - 1)) in events
    round_.complete()
    assert events == trace(count, limit)


def test_what_is_reached_leaves_as_many_in_flight_as_allowed() -> None:
    events, round_ = order(5, 2)
    round_.reach(1)
    assert said(events) == "s0 s1 f0 s2 f1 s3"


def test_a_verb_out_of_order_is_refused() -> None:
    _, round_ = order(3, 1)
    with pytest.raises(AssertionError):
        round_.start(1)
    round_.start(0)
    with pytest.raises(AssertionError):
        round_.start(1)  # one may be in flight
    with pytest.raises(AssertionError):
        round_.finish(1)
