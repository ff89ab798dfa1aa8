"""Over which ranks a gradient is averaged, and what each phase sends over which axis."""

import itertools
from typing import Any

import numpy as np
import pytest

from parity_tests.cases import independent
from parity_tests.cases.equalities import TINY, VOCABULARY
from parity_tests.checks.trajectories import (
    STORMY,
    UNITS,
    Trajectory,
    assert_storm,
    launch,
    same,
    storm,
)
from parity_tests.harness import tolerances
from parity_tests.harness.jax_bridge import assemble
from parity_tests.harness.pool import RankPool
from parity_tests.harness.ulps import ErrorTable

TWO = storm([0], [1], [0, 1])
MODEL = tolerances.model("float64", layers=TINY.model.layers, width=VOCABULARY)


@pytest.fixture(scope="module")
def stormy(pool: RankPool) -> Trajectory:
    """2 x 2 ranks in which everything happens, looked at after each step."""
    return launch(pool, 2, 2, STORMY, faults=TWO, observed=True)


# --- gradients ---


def grads_of(
    pool: RankPool,
    replicas: int,
    shards: int,
    *,
    synchronous: bool,
    accumulate: int = 1,
    identities: list[int] | None = None,
) -> list[dict[str, np.ndarray]]:
    """Each replica's gradient of a first step that takes 8 rows on all ranks together."""
    changes = {
        "mesh": {"replicas": replicas, "shards": shards},
        "data": {"batch": 8 // (replicas * shards * accumulate)},
        "train": {"accumulate": accumulate},
    }
    ranks = pool.run(independent.gradients, changes, synchronous, identities)
    return assemble(ranks, replicas=replicas)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_local_gradient_is_the_mean_over_the_rows_of_its_replica_alone(
    pool: RankPool, errors: ErrorTable, accumulate: int
) -> None:
    for n, mine in enumerate(grads_of(pool, 2, 2, synchronous=False, accumulate=accumulate)):
        alone = independent.gradient_alone([n], rows=4)
        for name in alone:
            errors.check("local gradient", mine[name], alone[name], MODEL, where=name)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_synchronous_gradient_is_the_mean_over_the_rows_of_all_replicas(
    pool: RankPool, errors: ErrorTable, accumulate: int
) -> None:
    both = grads_of(pool, 2, 2, synchronous=True, accumulate=accumulate)
    alone = independent.gradient_alone([0, 1], rows=4)
    assert same(both[0], both[1])
    for name in alone:
        errors.check("synchronous gradient", both[0][name], alone[name], MODEL, where=name)


@pytest.mark.parametrize("shape", [(2, 2), (4, 1)], ids=str)
def test_synchronous_replicas_have_the_gradient_of_one_replica_on_four_shards(
    pool: RankPool, errors: ErrorTable, shape: tuple[int, int]
) -> None:
    hybrid = grads_of(pool, *shape, synchronous=True, identities=[0])
    [one] = grads_of(pool, 1, 4, synchronous=True, identities=[0])
    for mine in hybrid:
        for name in one:
            errors.check("gradient against 1x4", mine[name], one[name], MODEL, where=name)


@pytest.mark.parametrize("shape", [(2, 2), (4, 1)], ids=str)
def test_the_gradient_norm_does_not_jump_when_replicas_with_equal_data_part(
    pool: RankPool, shape: tuple[int, int]
) -> None:
    """E11. AdamW hides a gradient that is too small by a factor; the norm does not."""
    replicas, shards = shape
    parted, together = (
        launch(pool, replicas, shards, changes, identities=[0] * replicas)
        for changes in (
            {"sync": {"warmup": 2, "every": 2}, "train": {"steps": 3}},
            {"sync": {"method": "synchronous", "warmup": 0}, "train": {"steps": 3}},
        )
    )
    for mine, theirs in zip(parted.ranks, together.ranks, strict=True):
        assert column(mine, "grad_norm") == column(theirs, "grad_norm")
        assert column(mine, "loss") == column(theirs, "loss")
    assert same(parted.whole("theta", 3), together.whole("theta", 3))


def column(rank: Any, key: str) -> list[float]:
    """One field of all records."""
    return [record[key] for record in rank["records"]]


# --- bytes ---


def test_local_steps_are_silent_and_a_round_sends_the_shard_and_the_norms(
    stormy: Trajectory,
) -> None:
    for rank in stormy.ranks:
        total = [0, *column(rank, "replica_bytes")]
        sent = {step: total[step] - total[step - 1] for step in range(1, 14)}
        shard = sum(part["rows"].nbytes for part in rank["history"][0]["theta"].values())
        norms = 8 * len(UNITS) * 2  # float64, gathered from two replicas
        assert sent[1] >= shard  # FSDP2 pads the rows of its flat gradients
        assert sent[2] == sent[1] + 8 * 2  # replicas part: one checksum of each
        assert [sent[step] for step in (3, 5, 7, 9, 11, 13)] == [0] * 6
        assert [sent[step] for step in (4, 6, 8, 10, 12)] == [shard + norms] * 5
        forced = [d for d in traced(rank, 13, None) if d[0] == "replica"]
        assert sum(8 * numel for _, _, _, numel, _ in forced) == shard + norms


def test_a_round_sends_its_norms_twice_over_the_shard_axis(stormy: Trajectory) -> None:
    after_backward = list(
        itertools.dropwhile(lambda d: d[4] != "norms", traced(stormy.ranks[0], 3, 4))
    )
    mine = [tuple(d[1:]) for d in after_backward if d[0] == "shard"]
    own = ("all_reduce", "float64")
    assert mine == [(*own, 4, "norms"), *((*own, 1, unit) for unit in UNITS)]


def traced(rank: Any, after: int, until: int | None) -> list[Any]:
    """Dispatches between two inner steps; up to the end of the run for None."""
    begin = rank["history"][after]["dispatches"]
    end = None if until is None else rank["history"][until]["dispatches"]
    return rank["trace"][begin:end]


# --- order of collectives ---


def test_all_ranks_dispatch_the_same_collectives_in_the_same_order(stormy: Trajectory) -> None:
    """Evaluation, anomalies on one replica, a rollback and the forced round included."""
    assert_storm(stormy)
    traces = [rank["trace"] for rank in stormy.ranks]
    scopes = {dispatch[4] for dispatch in traces[0]}
    assert {"norms", "metrics", "evaluation", "checksum", *UNITS} == scopes
    order = [[(axis, op, dtype, scope) for axis, op, dtype, _, scope in t] for t in traces]
    assert all(mine == order[0] for mine in order)
    for group in ((0, 1), (2, 3)):  # shards of a replica
        assert agree([traces[rank] for rank in group], "shard")
    for group in ((0, 2), (1, 3)):  # replicas of a shard
        assert agree([traces[rank] for rank in group], "replica")


def agree(traces: list[Any], axis: str) -> bool:
    """Same operations with payloads of the same size over ``axis``."""
    over = [[d for d in trace if d[0] == axis] for trace in traces]
    return len(over[0]) > 0 and all(same(trace, over[0]) for trace in over)
