"""Whole runs of both cores: each phase from the other's inputs, and each core by itself."""

import itertools

import numpy as np
import pytest

from parity_tests.checks.cells import (
    ARCHITECTURES,
    COVERING,
    DOCUMENTS,
    DTYPES,
    END,
    LLAMAS,
    MESHES,
    METHODS,
    OPTIM,
    SIMPLE,
    Cell,
)
from parity_tests.checks.reference_runs import batch
from parity_tests.checks.training import check_training
from parity_tests.harness.pool import RankPool
from parity_tests.harness.ulps import ErrorTable
from reference_jax.model import IGNORE


def test_sixteen_steps_agree_phase_by_phase_and_run_against_run(
    pool: RankPool, errors: ErrorTable, cell: Cell, is_full: bool
) -> None:
    # Float64 says whether a phase is right; whether float32 is as accurate, whole runs show too,
    # here on four ranks by default, and elsewhere in test_golden.py and ``twinshard parity run``.
    if cell.replicas == 1 and cell.dtype == "float32" and not is_full:
        pytest.skip("float32 of one replica: only with --full")
    run_and_compare(pool, errors, cell, locked=is_full or cell.dtype == "float64")


def test_sixteen_steps_agree_under_simple_fsdp(
    pool: RankPool, errors: ErrorTable, simple_cell: Cell, is_full: bool
) -> None:
    run_and_compare(pool, errors, simple_cell, locked=is_full)


@pytest.mark.parametrize("of_a_kind", ARCHITECTURES, ids=str)
def test_sixteen_steps_of_another_architecture_agree(
    pool: RankPool, errors: ErrorTable, of_a_kind: Cell, is_full: bool
) -> None:
    run_and_compare(pool, errors, of_a_kind, locked=is_full)


def test_sixteen_steps_agree_where_rows_hold_several_documents(
    pool: RankPool, errors: ErrorTable
) -> None:
    run_and_compare(pool, errors, DOCUMENTS, locked=False)
    inputs, targets, documents = batch(DOCUMENTS, 0, shards=2)
    counts_RS = (targets != IGNORE).sum(axis=(2, 3))
    assert len(np.unique(counts_RS)) > 1, "all ranks have the same number of targets"
    assert documents.max() > 2 and (targets[inputs == END] == IGNORE).all()


def run_and_compare(pool: RankPool, errors: ErrorTable, cell: Cell, *, locked: bool) -> None:
    """The check, and that there was something to see."""
    run = check_training(pool, errors, cell, locked=locked)
    assert run.error is None and run.steps == 16
    assert len(run.events) == (0 if cell.method == "synchronous" else 4)
    assert (run.recorded(1, "grad_norm") > OPTIM["max_norm"]).all(), "no gradient was clipped"
    if cell.method == "edit":
        assert run.seen("clip").min() < 1


def test_the_cells_cover_every_pair_of_choices() -> None:
    axes = (METHODS, MESHES, DTYPES, LLAMAS)
    chosen = [(c.method, c.mesh, c.dtype, c.model) for c in COVERING]
    for i, j in itertools.combinations(range(4), 2):
        pairs = {(choice[i], choice[j]) for choice in chosen}
        assert pairs == set(itertools.product(axes[i], axes[j]))
    phase_by_phase = [c for c in COVERING if c.dtype == "float64"]
    assert {c.method for c in phase_by_phase} == set(METHODS)
    assert {c.mesh for c in phase_by_phase} == set(MESHES)
    assert {c.model for c in phase_by_phase} == set(LLAMAS)


def test_simple_fsdp_meets_every_mesh_and_method_in_runs_that_are_traced_anyway() -> None:
    shardings = {"simple_fsdp", "simple_fsdp_aot"}
    met = {(cell.mesh, cell.sharding) for cell in SIMPLE}
    assert met == set(itertools.product(MESHES[1:], shardings))
    assert {cell.method for cell in SIMPLE} == set(METHODS)
    assert {cell.on_one_shard for cell in SIMPLE} <= {cell.on_one_shard for cell in COVERING}
    # By default the compiled ones; eager SimpleFSDP has the bits of FSDP2 (test_simple_fsdp.py).
    assert {cell.sharding for cell in SIMPLE[1::4]} == {"simple_fsdp_aot"}
