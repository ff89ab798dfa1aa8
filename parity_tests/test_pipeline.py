"""Replicas cut into stages of a pipeline train as one process does, in float64.

The reference of each comparison has neither stages nor shards: the same rows are micro-batches
of a single rank of each replica.
"""

from typing import Any

import numpy as np
import pytest

from parity_tests.checks import pipeline, trajectories
from parity_tests.checks.pipeline import Staged
from parity_tests.checks.trajectories import (
    PENALTY,
    Trajectory,
    assert_close,
    assert_same_decisions,
    assert_storm,
    storm,
)
from parity_tests.harness.pool import RankPool
from parity_tests.harness.ulps import ErrorTable

Changes = dict[str, Any]
SYNCHRONOUS = {"method": "synchronous", "warmup": 0}
EDIT = {"every": 2, "warmup": 2, "penalty": PENALTY}
DILOCO = {"method": "diloco", "every": 3, "warmup": 2}
INTERLEAVED = {"pipeline": "interleaved", "virtual_stages": 2}


def full(*case: Any) -> Any:
    """A case that others see most of."""
    return pytest.param(*case, marks=pytest.mark.only_full)


def pair(
    pool: RankPool,
    mesh: dict[str, int],
    sync: dict[str, Any],
    shard: dict[str, Any],
    *,
    layers: int = 2,
    ranks: int = 4,
    faults: Any = (),
) -> tuple[Staged, Trajectory]:
    """A run on ``mesh`` with a few micro-batches, and one with whole replicas on the same rows."""
    replicas, shards, parts = mesh.get("replicas", 1), mesh.get("shards", 1), max(2, mesh["pp"])
    train = {"steps": 13 if faults else 6, "evaluate_every": 4}
    common: Changes = {"sync": sync, "model": {"layers": layers}}
    cut = common | {"mesh": mesh, "shard": shard, "train": train | {"accumulate": parts}}
    whole = common | {"train": train | {"accumulate": parts * shards}}
    staged = pipeline.launch(pool, cut, faults=faults, ranks=ranks)
    return staged, trajectories.launch(pool, replicas, 1, whole, faults=faults)


def check(errors: ErrorTable, name: str, staged: Staged, whole: Trajectory) -> None:
    """Losses, gradient norms, all that rounds have decided, and every tensor after each step."""
    per_replica = len(staged.ranks) // staged.replicas
    for place, rank in enumerate(staged.ranks):
        theirs = whole.ranks[place // per_replica]["records"]
        for key in ("loss", "grad_norm", "lr", "tokens"):
            mine, others = ([line[key] for line in lines] for lines in (rank["records"], theirs))
            np.testing.assert_allclose(mine, others, rtol=1e-12, err_msg=key)
        held_out, known = (lines[3]["validation_loss"] for lines in (rank["records"], theirs))
        assert known > 1
        np.testing.assert_allclose(held_out, known, rtol=1e-12)
    if whole.events:
        assert_same_decisions(staged, whole)
    for replica in range(staged.replicas):
        assert_close(errors, f"pipeline {name}", staged, whole, replica=replica)
        if whole.events:
            assert_close(errors, f"pipeline {name}", staged, whole, what="anchor", replica=replica)


CASES = [
    ({"pp": 2, "shards": 2}, EDIT, {}, 2),
    ({"pp": 2, "shards": 2}, SYNCHRONOUS, INTERLEAVED | {"method": "simple_fsdp"}, 5),
    ({"replicas": 2, "pp": 2}, DILOCO, INTERLEAVED, 4),
    full({"replicas": 2, "pp": 2}, SYNCHRONOUS, {}, 3),
    full({"pp": 2, "shards": 2}, DILOCO, {"method": "simple_fsdp"}, 2),
    full({"pp": 2, "shards": 2}, SYNCHRONOUS, INTERLEAVED | {"reshard_after_forward": False}, 4),
]


@pytest.mark.parametrize(("mesh", "sync", "shard", "layers"), CASES, ids=str)
def test_stages_train_as_one_process(
    pool: RankPool,
    errors: ErrorTable,
    mesh: dict[str, int],
    sync: dict[str, Any],
    shard: dict[str, Any],
    layers: int,
) -> None:
    staged, whole = pair(pool, mesh, sync, shard, layers=layers)
    assert bool(staged.events) is (sync is not SYNCHRONOUS)
    check(errors, f"{mesh} {sync.get('method', 'edit')}", staged, whole)


def test_the_penalty_decides_over_all_stages(pool: RankPool, errors: ErrorTable) -> None:
    faults = storm(flagged=[1], infected=[0], everyone=[0, 1])
    staged, whole = pair(pool, {"replicas": 2, "pp": 2}, EDIT, {}, faults=faults)
    assert_storm(staged)
    assert_same_decisions(staged, whole)
    for replica in range(2):
        assert_close(errors, "pipeline storm", staged, whole, replica=replica)
