"""Equalities between runs of the core that decide whether local SGD is computed correctly.

Each compares two ways to the same trajectory: with and without local SGD, on other meshes, with
other batches, against a method written out by hand. Bitwise where only exact operations differ,
else within the tolerance for runs that round on their own.
"""

from typing import Any

import numpy as np
import pytest

from parity_tests.cases import independent
from parity_tests.checks.trajectories import (
    NO_PENALTY,
    PENALTY,
    STORMY,
    Trajectory,
    assert_bitwise,
    assert_close,
    assert_same_decisions,
    assert_storm,
    differences,
    launch,
    same,
    storm,
)
from parity_tests.harness.pool import RankPool
from parity_tests.harness.ulps import ErrorTable

AVERAGING = {"lr": 1.0, "momentum": 0.0}
SYNCHRONOUS = {"method": "synchronous", "warmup": 0}
CLOUDY = {"train": {"steps": 11}}  # TINY's rounds: after steps 5, 8 and 11


# --- E1, E2: where local SGD is plain training ---


def test_one_replica_with_plain_averaging_trains_as_if_there_were_no_rounds(
    pool: RankPool, errors: ErrorTable
) -> None:
    sync = {"outer": AVERAGING, "penalty": {"clip": False}}
    local = launch(pool, 1, 2, CLOUDY | {"sync": sync})
    plain = launch(pool, 1, 2, CLOUDY | {"sync": SYNCHRONOUS})
    assert len(local.events) == 3 and not plain.events
    assert_close(errors, "E1 one replica", local, plain)


EVERY_STEP = {"every": 1, "warmup": 0, "outer": AVERAGING, "penalty": NO_PENALTY}
UNCLIPPED = {"optim": {"max_norm": 0.0, "lr": 0.05}, "train": {"steps": 5}}


def test_a_round_after_every_sgd_step_is_synchronous_training(
    pool: RankPool, errors: ErrorTable
) -> None:
    mesh = {"mesh": {"replicas": 2, "shards": 2}}
    local, plain = (
        Trajectory(pool.run(independent.run_with_sgd, UNCLIPPED | mesh | {"sync": sync}), 2)
        for sync in (EVERY_STEP, SYNCHRONOUS)
    )
    assert len(local.events) == 5 and not plain.events
    assert_close(errors, "E2 SGD every step", local, plain)


def test_a_round_after_every_adamw_step_is_not_synchronous_training(pool: RankPool) -> None:
    local, plain = (
        launch(pool, 2, 2, UNCLIPPED | {"sync": sync}) for sync in (EVERY_STEP, SYNCHRONOUS)
    )
    matrices = list(differences(local.whole("theta", 5), plain.whole("theta", 5)))
    assert max(matrices) > 1e-3


# --- E3: replicas that agree ---


@pytest.mark.parametrize(
    "shape, penalty",
    [
        ((4, 1), {}),
        pytest.param((4, 1), {"weigh": False}, marks=pytest.mark.only_full),
        pytest.param((4, 1), {"temperature_unit": "median"}, marks=pytest.mark.only_full),
        ((2, 2), {}),  # the shard axis does not care how replicas are weighed
    ],
    ids=str,
)
def test_replicas_with_equal_data_are_one_replica_bit_for_bit(
    pool: RankPool, shape: tuple[int, int], penalty: dict[str, Any]
) -> None:
    many, one = (run_of_equals(pool, n, shape[1], penalty) for n in (shape[0], 1))
    assert_bitwise(many, one, dict.fromkeys(range(shape[0]), 0))
    assert_storm(one, unequal=False)
    mixed = many.seen("weight")[~many.seen("rollback")]
    assert (mixed == 1 / shape[0]).all()
    for step in (2, many.steps):
        wide, narrow = many.stats(step), one.stats(step)
        assert all(same(wide[k], np.repeat(narrow[k], shape[0], axis=1)) for k in wide)


def test_three_replicas_with_equal_data_are_one_replica_up_to_rounding(
    pool: RankPool, errors: ErrorTable
) -> None:
    three, one = (run_of_equals(pool, n, 1, {}) for n in (3, 1))
    assert_close(errors, "E3 three equal replicas", three, one)
    np.testing.assert_array_equal(three.seen("anomalous")[..., 2:], one.seen("anomalous"))


def run_of_equals(
    pool: RankPool, replicas: int, shards: int, penalty: dict[str, Any]
) -> Trajectory:
    """All replicas see the same data and meet the same faults."""
    sync = STORMY["sync"] | {"penalty": PENALTY | penalty}
    everyone = range(replicas)
    faults = storm(everyone, everyone, everyone)
    changes = STORMY | {"sync": sync}
    return launch(pool, replicas, shards, changes, identities=[0] * replicas, faults=faults)


# --- E4: methods that are special cases ---

RULES = {"post_local_sgd": AVERAGING, "diloco": {"lr": 0.7, "momentum": 0.9}}


@pytest.mark.parametrize(
    ("shape", "method"),
    [
        ((2, 2), "diloco"),
        ((4, 1), "post_local_sgd"),
        pytest.param((4, 1), "diloco", marks=pytest.mark.only_full),
        pytest.param((2, 2), "post_local_sgd", marks=pytest.mark.only_full),
    ],
)
def test_edit_without_penalty_is_the_method_written_out_by_hand(
    pool: RankPool, errors: ErrorTable, shape: tuple[int, int], method: str
) -> None:
    replicas, shards = shape
    off = {"outer": RULES[method], "penalty": NO_PENALTY}
    edit = launch(pool, replicas, shards, CLOUDY | {"sync": off})
    row = launch(pool, replicas, shards, CLOUDY | {"sync": {"method": method}})
    mesh = {"mesh": {"replicas": replicas, "shards": shards}}
    by_hand = CLOUDY | mesh | {"sync": SYNCHRONOUS}
    if method == "diloco":
        ranks = pool.run(independent.diloco_with_torch_sgd, by_hand, 3, 2, 0.7, 0.9)
    else:
        ranks = pool.run(independent.post_local_sgd_in_numpy, by_hand, 3, 2)
    assert len(edit.events) == len(row.events) == 3
    assert max(differences(edit.whole("theta", 4, 0), edit.whole("theta", 4, 1))) > 1e-3
    for name, run in (("edit", edit), ("row", row)):
        hand = Trajectory([told_by(history) for history in ranks], replicas)
        for replica in range(replicas):
            assert_close(errors, f"E4 {method}, {name}", run, hand, replica=replica)


def told_by(history: list[Any]) -> dict[str, Any]:
    """A run written out by hand, in the form of an account."""
    return {"events": [], "history": history, "finished": history[-1]}


LATE = {"method": "streaming_diloco", "every": 4, "warmup": 2}


def test_methods_that_use_an_exchange_late_are_those_written_out_by_hand(
    pool: RankPool, errors: ErrorTable
) -> None:
    by_hand = CLOUDY | {"mesh": {"replicas": 2, "shards": 2}, "sync": SYNCHRONOUS}
    streaming = {"fragments": 2, "delay": 1, "mix": 0.25}
    told = {
        "co2": pool.run(independent.co2_in_numpy, by_hand, 3, 2, 1.0, 0.5, 0.01),
        "streaming": pool.run(independent.streaming_in_numpy, by_hand, 4, 2, 1, 0.25, (0.7, 0.9)),
    }
    rows = {
        "co2": {"method": "co2", "co2": {"clip": 0.01}},
        "streaming": LATE | {"streaming": streaming},
    }
    for name, sync in rows.items():
        run = launch(pool, 2, 2, CLOUDY | {"sync": sync})
        hand = Trajectory([told_by(history) for history in told[name]], 2)
        if name == "streaming":  # by hand the run is left as it is
            run.ranks = [rank | {"finished": rank["history"][-1]} for rank in run.ranks]
        assert len(run.events) >= 3
        for replica in range(2):
            assert_close(errors, f"E4 {name}", run, hand, replica=replica)


# --- E6, E7: other meshes, other batches ---


# Over 4 shards: 7, 7, 7, 6 rows; 2, 2, 1 and none.
@pytest.mark.parametrize("hidden", [pytest.param(27, marks=pytest.mark.only_full), 5])
def test_one_replica_follows_the_same_trajectory_on_one_two_and_four_shards(
    pool: RankPool, errors: ErrorTable, hidden: int
) -> None:
    faults = storm([0], [0], [0])
    runs = {}
    for shards in (1, 2, 4):
        batch = {"model": {"hidden": hidden}, "data": {"batch": 4 // shards}}
        runs[shards] = launch(pool, 1, shards, STORMY | batch, faults=faults)
        assert_storm(runs[shards], unequal=False)
    for shards in (2, 4):
        assert_same_decisions(runs[shards], runs[1])
        for what in ("theta", "anchor"):
            assert_close(errors, f"E6 {shards} shards", runs[shards], runs[1], what=what)


def test_two_replicas_follow_the_same_trajectory_on_one_and_two_shards(
    pool: RankPool, errors: ErrorTable
) -> None:
    one, two = (
        launch(pool, 2, shards, STORMY | {"data": {"batch": 4 // shards}}, faults=TWO)
        for shards in (1, 2)
    )
    assert_storm(one)
    assert_same_decisions(two, one)
    for replica in range(2):
        for what in ("theta", "anchor"):
            assert_close(errors, "E6 two replicas", two, one, what=what, replica=replica)


TWO = storm([0], [1], [0, 1])


def test_accumulation_equals_one_big_batch_and_crosses_the_replica_axis_once_a_step(
    pool: RankPool, errors: ErrorTable
) -> None:
    big, small = (
        launch(pool, 2, 2, accumulating(micro_batches), faults=TWO) for micro_batches in (1, 4)
    )
    assert_storm(big)
    assert_same_decisions(small, big)
    for replica in range(2):
        for what in ("theta", "anchor"):
            assert_close(errors, "E7 accumulation", small, big, what=what, replica=replica)
    for run in (big, small):  # step 1 is synchronous, step 3 local; four units
        assert [calls_in(run, step, "replica", "all_reduce") for step in (1, 3)] == [4, 0]
    assert [calls_in(big, step, "shard", "reduce_scatter") for step in (1, 3)] == [4, 4]
    assert [calls_in(small, step, "shard", "reduce_scatter") for step in (1, 3)] == [4, 16]


def accumulating(micro_batches: int) -> dict[str, Any]:
    """``STORMY`` with 4 sequences per rank and inner step."""
    train = STORMY["train"] | {"accumulate": micro_batches}
    return STORMY | {"train": train, "data": {"batch": 4 // micro_batches}}


def calls_in(run: Trajectory, step: int, axis: str, op: str) -> int:
    """Dispatches of ``op`` over ``axis`` by rank 0 in one inner step."""
    rank = run.ranks[0]
    begin, end = (rank["history"][t]["dispatches"] for t in (step - 1, step))
    return sum(dispatch[:2] == (axis, op) for dispatch in rank["trace"][begin:end])


# --- E14: who is who ---


def test_permuted_replicas_change_nothing_beyond_rounding(
    pool: RankPool, errors: ErrorTable
) -> None:
    order = [2, 0, 3, 1]  # replica n of the second run is replica order[n] of the first
    place = {old: new for new, old in enumerate(order)}
    faults = storm([0], [1], range(4))
    moved = [(step, place[n], name, value) for step, n, name, value in faults]
    first = launch(pool, 4, 1, STORMY, faults=faults)
    second = launch(pool, 4, 1, STORMY, identities=order, faults=moved)
    assert_storm(first)
    assert_same_decisions(second, first, order)
    assert_close(errors, "E14 permuted replicas", second, first, what="anchor")


def test_two_replicas_that_change_places_change_no_bit(pool: RankPool) -> None:
    swapped = [(step, 1 - n, name, value) for step, n, name, value in TWO]
    first = launch(pool, 2, 2, STORMY, faults=TWO)
    second = launch(pool, 2, 2, STORMY, identities=[1, 0], faults=swapped)
    assert_storm(first)
    assert_bitwise(second, first, {0: 1, 1: 0})
