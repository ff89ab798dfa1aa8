"""What ranks send each other: in one order everywhere, nothing between rounds, truly counted."""

import pytest

from core_torch.collectives import Dispatch
from core_torch.config import StreamingConfig, TimedConfig
from core_torch.tests.engine_runs import Fault, Life
from core_torch.tests.test_engine import METHODS, SECOND, aedit, each_method, edit, lives, rows

BAD: list[Fault] = [(4, 1, "1.weight", float("nan")), (7, 0, "2.weight", float("inf"))]
COUNT = 7 * 5 + 3 * 7 + 3 * 3 + 2 * 3  # elements of the model


def sent(
    life: Life, axis: str = "replica", first: int = 0, last: int | None = None
) -> list[Dispatch]:
    """What a rank has dispatched over an axis."""
    trace = life.sync.axes.replica.ledger.trace or []
    return [dispatch for dispatch in trace[first:last] if dispatch.axis == axis]


def assert_in_step(ranks: list[Life], shards: int) -> None:
    """Ranks that meet on an axis dispatch the same, one after the other."""
    for rank, life in enumerate(ranks):
        assert sent(life) == sent(ranks[rank % shards])
        assert sent(life, "shard") == sent(ranks[rank // shards * shards], "shard")


@each_method
def test_ranks_that_meet_dispatch_the_same_and_nothing_between_rounds(name: str) -> None:
    faults = BAD if "edit" in name else []
    ranks = lives(METHODS[name], shards=2, faults=faults)
    assert all(life.error is None for life in ranks)
    assert_in_step(ranks, 2)
    for life in ranks:
        begun = {e.step for e in life.events}
        begun |= {step + 1 for step in begun} if METHODS[name].rounds_in_forward else set()
        for t in range(3, 14):  # after the warm-up
            first, last = life.marks[t - 1], life.marks[t]
            assert bool(sent(life, "replica", first, last)) <= (t in begun), f"step {t}"


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_three_speeds_an_empty_round_and_an_early_end(layerwise: bool, wire: str) -> None:
    timed = TimedConfig(min_total_steps=12, step_weight=0.5)
    sync = aedit(every="6s", layerwise=layerwise, wire=wire, timed=timed)
    ranks = lives(
        sync,
        replicas=3,
        shards=2,
        steps=20,
        step_ns=[SECOND, 2 * SECOND, 3 * SECOND],
        faults=BAD,
    )
    assert_in_step(ranks, 2)
    events = ranks[0].events
    assert {e.empty for e in events} == {False, True}
    assert [e.steps for e in events][:2] == [[6, 3, 2], [12, 6, 4]]


def test_a_replica_that_ends_early_serves_the_others() -> None:
    ranks = lives(aedit(), replicas=3, steps=12, leaves={1: 4})
    assert_in_step(ranks, 1)
    assert [life.sync.step for life in ranks][1] == 4
    assert ranks[0].events[-1].steps[1] == 0 and ranks[0].events[-1].weight[0][1] == 0
    assert all(life.sync.votes.agreed_tokens >= 12 * 3 * 4 for life in ranks)
    x, y, z = ([p.tolist() for p in life.state.model.parameters()] for life in ranks if life.state)
    assert x == y == z


def test_a_checkpoint_and_an_evaluation_send_nothing_over_replicas() -> None:
    for sync in (edit(), aedit(), rows("streaming_diloco"), rows("co2", wire="int8")):
        plain, watched = lives(sync), lives(sync, watched=True, looks=True)
        for one, two in zip(plain, watched, strict=True):
            assert sent(one) == sent(two) and one.forwards == two.forwards


@pytest.mark.parametrize(
    ("wire", "one_round"),
    [
        ("fp32", 8 * COUNT),
        ("bf16", 3 * 2 * COUNT),
        ("int8", 3 * 4 * (256 + 4)),  # a block of 256 and a scale for each of the small units
    ],
)
def test_coded_exchanges_are_counted_as_what_is_sent(wire: str, one_round: int) -> None:
    [life, *_] = lives(edit(wire=wire, warmup=0), replicas=3, steps=6)
    norms = 3 * 4 * 8  # those of four units on three replicas
    checksums = 3 * 8
    ledger = life.sync.axes.replica.ledger
    assert ledger.bytes_over("replica") == 2 * (one_round + norms) + checksums


def test_a_fragment_sends_its_own_elements_only() -> None:
    streaming = StreamingConfig(fragments=2, delay=1)
    [life, _] = lives(rows("streaming_diloco", warmup=0, streaming=streaming), steps=8)
    sizes = [d.numel for d in sent(life) if d.op == "all_reduce"]
    first, second = 7 * 5 + 3 * 3, 3 * 7 + 2 * 3  # every other unit; fragment 1 is due at H / 2
    assert sizes == [second, first, second, first, first, second]  # the last two close the run
