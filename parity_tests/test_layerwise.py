"""A round inside the next forward is the whole round right after the step, bit for bit (E5)."""

import itertools
from typing import Any

import pytest

from parity_tests.cases import layerwise
from parity_tests.checks.trajectories import STORMY, Trajectory, assert_storm, same, storm
from parity_tests.harness.pool import RankPool

Choice = tuple[str, int, str, int]  # sharding, prefetch, recompute, micro-batches
SHARDINGS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "simple": {"method": "simple_fsdp"},
    "compiled": {"method": "simple_fsdp", "compile": "aot_eager"},
}
EVERY = list(itertools.product(SHARDINGS, (0, 1), ("none", "full"), (1, 3)))
COVERING = [
    ("fsdp2", 0, "none", 1),
    ("fsdp2", 0, "none", 3),
    ("fsdp2", 1, "full", 3),
    ("simple", 0, "full", 1),
    ("simple", 1, "none", 1),
    ("simple", 1, "none", 3),
    ("compiled", 0, "none", 3),
    ("compiled", 1, "full", 1),
]
TWO = [list(fault) for fault in storm([0], [1], [0, 1])]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All 24 combinations with ``--full``, else eight that hold every pair."""
    if "choice" in metafunc.fixturenames:
        chosen = EVERY if metafunc.config.getoption("full") else COVERING
        metafunc.parametrize("choice", chosen, ids=lambda c: "-".join(map(str, c)))


def test_the_eight_hold_every_pair_of_choices() -> None:
    for i, j in itertools.combinations(range(4), 2):
        assert {(c[i], c[j]) for c in COVERING} == {(c[i], c[j]) for c in EVERY}


def changes_of(choice: Choice, layers: int, *, layerwise: bool) -> dict[str, Any]:
    """``STORMY`` under a choice. FSDP2 prefetches parameters, the others exchanges."""
    sharding, prefetch, recompute, accumulate = choice
    shard = SHARDINGS[sharding] | {"recompute": recompute}
    sync = STORMY["sync"] | {"layerwise": layerwise}
    if sharding == "fsdp2":
        shard = shard | {"forward_prefetch": prefetch}
    else:
        sync = sync | {"prefetch_units": 1 + prefetch}
    train = STORMY["train"] | {"accumulate": accumulate}
    return STORMY | {
        "mesh": {"replicas": 2, "shards": 2},
        "model": {"layers": layers},
        "sync": sync,
        "shard": shard,
        "train": train,
    }


Wholes = dict[tuple[str, int], list[Any]]  # sharding, micro-batches -> what all ranks told


@pytest.fixture(scope="module")
def wholes() -> Wholes:
    """Eager runs with whole rounds and no option; made when they are needed."""
    return {}


def test_rounds_in_the_forward_are_whole_rounds_bit_for_bit(
    pool: RankPool, wholes: Wholes, choice: Choice, pytestconfig: pytest.Config
) -> None:
    layers, accumulate = 2 if pytestconfig.getoption("full") else 1, choice[3]
    # The shardings add up micro-batches in another order, and else do the same arithmetic.
    eager = "simple" if accumulate > 1 and choice[0] != "fsdp2" else "fsdp2"
    if (eager, accumulate) not in wholes:
        plain = changes_of((eager, 1, "none", accumulate), layers, layerwise=False)
        wholes[eager, accumulate] = pool.run(layerwise.run, plain, TWO)
    whole = wholes[eager, accumulate]
    inside = pool.run(layerwise.run, changes_of(choice, layers, layerwise=True), TWO)
    assert len(whole[0]["forwards"]) == 13 * accumulate
    assert_storm_in(whole)
    assert_same_run(inside, whole)


def assert_storm_in(ranks: list[Any]) -> None:
    """Flag, NaN, rollback, clip and unequal weights were all seen."""
    run = Trajectory([rank | {"history": [None]} for rank in ranks], replicas=2)
    assert_storm(run)


def assert_same_run(inside: list[Any], whole: list[Any]) -> None:
    """Losses, parameters after each forward, events, and everything at the end."""
    for one, two in zip(inside, whole, strict=True):
        assert one["error"] is None and one["again"]
        for k, (mine, theirs) in enumerate(zip(one["forwards"], two["forwards"], strict=True)):
            assert repr(mine) == repr(theirs), f"forward {k}"
        assert repr(events_of(one)) == repr(events_of(two))
        for key in ("theta", "anchor", "velocity", "exp_avg", "exp_avg_sq", "adam_step", "stats"):
            assert same(one["finished"][key], two["finished"][key]), key


def events_of(rank: Any) -> list[Any]:
    """All rounds, whenever they were told."""
    events: list[Any] = rank["events"] + rank["closing"]
    return events


TIED = STORMY | {
    "mesh": {"replicas": 2, "shards": 2},
    "model": {"layers": 1, "tied": True},
    "train": {"steps": 7},
}
TWICE = TIED | {"model": {"layers": 1}, "train": {"steps": 5}}
WHOLE, INSIDE = (STORMY["sync"] | {"layerwise": is_inside} for is_inside in (False, True))


@pytest.mark.parametrize("sharding", ["fsdp2", pytest.param("simple", marks=pytest.mark.only_full)])
def test_a_tied_model_and_being_looked_at_change_nothing(pool: RankPool, sharding: str) -> None:
    changes = TIED | {"shard": SHARDINGS[sharding]}
    train = TIED["train"] | {"evaluate_every": 1}
    whole = pool.run(layerwise.run, changes | {"sync": WHOLE})
    seen = pool.run(layerwise.run, changes | {"sync": INSIDE, "train": train}, [], True)
    assert [e["step"] for e in events_of(whole[0])] == [4, 6, 7]
    assert_same_run(seen, whole)


@pytest.mark.parametrize(
    "shard",
    [
        pytest.param({"forward_prefetch": 1, "recompute": "full"}, marks=pytest.mark.only_full),
        {"method": "simple_fsdp"},
    ],
    ids=str,
)
def test_a_unit_that_a_forward_uses_twice_is_exchanged_once(
    pool: RankPool, shard: dict[str, Any]
) -> None:
    whole, inside = (
        pool.run(layerwise.run_with_a_unit_used_twice, TWICE | {"sync": sync, "shard": shard})
        for sync in (WHOLE, INSIDE)
    )
    assert [e["step"] for e in events_of(whole[0])] == [4, 5]
    assert_same_run(inside, whole)
