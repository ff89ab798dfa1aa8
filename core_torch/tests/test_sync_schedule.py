"""A round's exchanges run in order, each once, and never too many at a time."""

from hypothesis import given, settings
from hypothesis import strategies as st

from core_torch.sync.schedule import start_ahead


def trace(count: int, limit: int) -> tuple[list[tuple[str, int]], list[int]]:
    """Every start and finish in order, and the results."""
    events: list[tuple[str, int]] = []

    def start(u: int) -> str:
        events.append(("start", u))
        return f"flight {u}"

    def finish(u: int, flight: str) -> int:
        assert flight == f"flight {u}", "each unit gets its own exchange back"
        events.append(("finish", u))
        return 10 * u

    return events, start_ahead(count, start, finish, limit=limit)


@settings(deadline=None)
@given(count=st.integers(0, 40), limit=st.integers(1, 45))
def test_each_exchange_starts_once_before_it_finishes_and_the_bound_holds(
    count: int, limit: int
) -> None:
    events, results = trace(count, limit)
    assert [u for kind, u in events if kind == "start"] == list(range(count))
    assert [u for kind, u in events if kind == "finish"] == list(range(count))
    assert all(events.index(("start", u)) < events.index(("finish", u)) for u in range(count))
    flying = [0]
    for kind, _ in events:
        flying.append(flying[-1] + (1 if kind == "start" else -1))
    assert max(flying) == min(count, limit), "as many as allowed, and no more"
    assert flying[-1] == 0
    assert results == [10 * u for u in range(count)]


def test_the_next_exchange_starts_as_soon_as_the_oldest_has_finished() -> None:
    events, _ = trace(4, 2)
    assert " ".join(f"{kind[0]}{u}" for kind, u in events) == "s0 s1 f0 s2 f1 s3 f2 f3"


def test_a_limit_of_one_takes_one_unit_after_the_other() -> None:
    events, _ = trace(3, 1)
    assert " ".join(f"{kind[0]}{u}" for kind, u in events) == "s0 f0 s1 f1 s2 f2"
