"""Runs in which replicas fail, compared between the cores, with proof of what they exercised."""

import dataclasses

import numpy as np

from parity_tests.checks.cells import Cell
from parity_tests.checks.core_runs import CoreRun
from parity_tests.checks.training import check_training
from parity_tests.harness.pool import RankPool
from parity_tests.harness.ulps import ErrorTable

QUIET = "tok_embeddings.weight"  # its last element: no gradient, no loss; see cells.tokens_of
LOUD = "layers.0.attention.wq.weight"
NAN, INF = float("nan"), float("inf")

# Rounds after steps 4, 6, 8, 10, 12, 14 and, forced, 15. In that order from the third: replica 0
# takes a large, finite step; replica 1 meets a NaN in loss and gradient; the embedding has nobody
# left to follow; then no unit has.
STORM = Cell(
    method="edit",
    replicas=2,
    shards=2,
    dtype="float64",
    model="odd",
    steps=15,
    every=2,
    faults=(
        (7, 0, QUIET, 20.0),
        (9, 1, LOUD, NAN),
        (11, 0, QUIET, 1e30),
        (11, 1, QUIET, 1e30),
        (13, 0, LOUD, NAN),
        (13, 1, LOUD, INF),
    ),
)
# Four replicas with cold statistics, one of which makes a step of 500 before the first round.
SPIKE = dataclasses.replace(
    STORM,
    replicas=4,
    shards=1,
    model="tiny",
    steps=8,
    penalty=tuple((dict(STORM.penalty) | {"warmup_rounds": 20}).items()),
    faults=((3, 2, QUIET, 500.0),),
)
# The second round meets a NaN that no penalty leaves out.
WITHOUT_PENALTY = dataclasses.replace(
    STORM, method="diloco", every=4, steps=12, faults=((9, 1, QUIET, NAN),)
)


def check_faults(pool: RankPool, errors: ErrorTable, *, locked: bool = True) -> None:
    """EDiT through a storm."""
    run = check_training(pool, errors, STORM, locked=locked)
    assert_storm(run)


def check_spike(pool: RankPool, errors: ErrorTable, *, locked: bool = True) -> None:
    """The test against the median, which needs no statistics."""
    run = check_training(pool, errors, SPIKE, locked=locked)
    flagged = run.seen("flagged")
    assert flagged.sum() == 1 and flagged[0, 0, 2] and run.seen("anomalous")[0, 0, 2]
    assert len(run.events) == 3 and run.seen("finite").all()


def check_non_finite(pool: RankPool, errors: ErrorTable, *, locked: bool = True) -> None:
    """Without a penalty both cores end at the round that met the NaN, and not before."""
    run = check_training(pool, errors, WITHOUT_PENALTY, locked=locked)
    assert run.error == "NonFinite" and run.steps == 9 and len(run.events) == 1


def assert_storm(run: CoreRun) -> None:
    """Every part of the penalty has acted in ``run``, or its comparison proves little."""
    anomalous, finite, weight = run.seen("anomalous"), run.seen("finite"), run.seen("weight")
    rollback = run.seen("rollback")
    assert len(run.events) >= 3 and run.events[-1]["forced"]
    assert run.seen("clip").min() < 1, "nothing was clipped"
    assert (run.seen("flagged") & anomalous & finite).any(), "nobody was flagged"
    assert (~finite).any() and rollback.any(axis=1).sum() >= 2
    assert rollback.all(axis=1).any() and not rollback.all()
    least = np.where(weight > 0, weight, INF).min(axis=-1)
    assert (weight.max(axis=-1) > 2 * least).any(), "all weights are alike"
