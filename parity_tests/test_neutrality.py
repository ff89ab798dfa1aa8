"""What must leave a run as it is: looking at it, ending it, other precisions, other models."""

import math

import numpy as np
import pytest

from parity_tests.cases import independent
from parity_tests.checks.trajectories import (
    PENALTY,
    STORMY,
    Trajectory,
    assert_bitwise,
    assert_storm,
    launch,
    same,
    storm,
)
from parity_tests.harness.pool import RankPool

TWO = storm([0], [1], [0, 1])


@pytest.fixture(scope="module")
def stormy(pool: RankPool) -> Trajectory:
    """2 x 2 ranks in which everything happens and at which nobody looks."""
    return launch(pool, 2, 2, STORMY, faults=TWO)


def test_evaluation_and_anchor_weights_leave_every_bit_of_the_trajectory(
    pool: RankPool, stormy: Trajectory
) -> None:
    train = STORMY["train"] | {"evaluate_every": 1}
    watched = launch(pool, 2, 2, STORMY | {"train": train}, faults=TWO, observed=True)
    assert_storm(stormy)
    assert_bitwise(watched, stormy, {0: 0, 1: 1})
    assert same(watched.events, stormy.events)
    for mine, theirs in zip(watched.ranks, stormy.ranks, strict=True):
        records = zip(mine["records"], theirs["records"], strict=True)
        for one, two in records:
            assert one["replica_bytes"] == two["replica_bytes"]
            assert repr(one["loss"]) == repr(two["loss"]) and two["validation_loss"] is None
            assert math.isfinite(one["validation_loss"])  # of the anchor, even with a NaN about
    told = [[r["validation_loss"] for r in rank["records"]] for rank in watched.ranks]
    assert told[1:] == told[:-1]
    parted = told[0][1:]  # from step 2 on the anchor, which changes in rounds only
    assert all((parted[i] == parted[i - 1]) == (i % 2 == 1) for i in range(1, len(parted)))


def test_anchor_weights_give_back_every_bit_even_after_an_error(pool: RankPool) -> None:
    mesh = {"replicas": 2, "shards": 2}
    changes = {"mesh": mesh, "sync": {"warmup": 0, "every": 2}}
    for told in pool.run(independent.anchor_weights_restore, changes, 3):
        assert told and all(told.values()), told


def test_a_round_writes_into_the_storage_that_parameters_have(stormy: Trajectory) -> None:
    for rank in stormy.ranks:
        places = [state["storage"] for state in [*rank["history"], rank["finished"]]]
        assert all(place == places[0] for place in places)


def test_live_parameters_are_the_anchor_after_a_round_but_in_storage_of_their_own(
    stormy: Trajectory,
) -> None:
    for step in (4, 6, 8, 10, 12, -1):
        for replica in range(2):
            assert same(stormy.whole("theta", step, replica), stormy.whole("anchor", step))
    for step in (5, 13):  # an inner step moves the parameters only
        assert same(stormy.whole("anchor", step), stormy.whole("anchor", step - 1))
        assert not same(stormy.whole("theta", step), stormy.whole("anchor", step))


def test_the_forced_round_moves_the_anchor_and_leaves_the_statistics(stormy: Trajectory) -> None:
    assert [event["forced"] for event in stormy.events] == [False] * 5 + [True]
    assert [event["round"] for event in stormy.events] == [1, 2, 3, 4, 5, 6]
    for rank in stormy.ranks:
        assert same(rank["finished"]["stats"], rank["history"][13]["stats"])
        assert rank["again"]  # a second finish does nothing
    assert not same(stormy.whole("anchor", -1), stormy.whole("anchor", 13))
    assert not same(stormy.stats(12), stormy.stats(10))


def test_a_run_that_ends_with_a_round_gets_no_forced_one(pool: RankPool) -> None:
    run = launch(pool, 2, 2, STORMY | {"train": {"steps": 4}})
    assert [event["forced"] for event in run.events] == [False]
    assert run.rank(0)["forced"] is None
    assert same(run.rank(0)["finished"]["anchor"], run.rank(0)["history"][4]["anchor"])


@pytest.mark.parametrize("shape", [(2, 2), (4, 1)], ids=str)
def test_a_tied_model_in_bfloat16_stays_finite_and_equal_on_all_replicas(
    pool: RankPool, shape: tuple[int, int]
) -> None:
    replicas, shards = shape
    changes = {
        "model": {"tied": True},
        "sync": {"every": 2, "warmup": 2, "penalty": PENALTY | {"warmup_rounds": 20}},
        "train": {"steps": 9, "dtype": "float32", "compute": "bfloat16"},
    }
    run = launch(pool, replicas, shards, changes)
    assert len(run.events) == 4 and run.events[0]["units"] == ["embedding", "layers.0", "layers.1"]
    assert not run.seen("anomalous").any() and run.seen("clip").min() < 1
    weight = run.seen("weight")
    assert (weight.max(-1) > 2 * weight.min(-1)).any()
    ended = [run.whole("theta", -1, replica) for replica in range(replicas)]
    assert all(same(theta, ended[0]) for theta in ended)
    for rank in run.ranks:
        assert all(math.isfinite(record["loss"]) for record in rank["records"])
    for x in ended[0].values():
        assert x.dtype == np.float32 and np.isfinite(x).all()
    assert not same(ended[0], run.whole("theta", 0))
