"""Over which ranks a gradient is averaged, and what each phase sends over which axis."""

import itertools
from typing import Any

import numpy as np
import pytest

from parity_tests.cases import independent
from parity_tests.cases.equalities import TINY, VOCABULARY
from parity_tests.harness import tolerances
from parity_tests.harness.jax_bridge import assemble
from parity_tests.harness.pool import RankPool
from parity_tests.harness.ulps import ErrorTable
from parity_tests.trajectories import STORMY, UNITS, Trajectory, assert_storm, launch, same, storm

TWO = storm([0], [1], [0, 1])
MODEL = tolerances.model("float64", layers=TINY.model.layers, width=VOCABULARY)


@pytest.fixture(scope="module")
def stormy(pool: RankPool) -> Trajectory:
    """2 x 2 ranks in which everything happens, looked at after each step."""
    return launch(pool, 2, 2, STORMY, faults=TWO, observed=True)


# --- gradients ---


def grads_of(
    pool: RankPool, replicas: int, shards: int, *, synchronous: bool, accumulate: int = 1
) -> list[dict[str, np.ndarray]]:
    """Each replica's gradient of the first step: 4 rows for each replica of two, 8 for one."""
    batch = 8 // (replicas * shards * accumulate)
    changes = {
        "mesh": {"replicas": replicas, "shards": shards},
        "data": {"batch": batch},
        "train": {"accumulate": accumulate},
    }
    return assemble(pool.run(independent.gradients, changes, synchronous), replicas=replicas)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_local_gradient_is_the_mean_over_the_replicas_own_rows(
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


def test_synchronous_training_on_two_replicas_has_the_gradients_of_four_shards(
    pool: RankPool, errors: ErrorTable
) -> None:
    """One replica of four shards draws eight rows; two replicas that share them must agree."""
    changes = {"train": {"steps": 1}, "sync": {"method": "synchronous", "warmup": 0}}
    hybrid = independent.gradient_alone([0], rows=8)
    [whole] = grads_of(pool, 1, 4, synchronous=True)
    for name in hybrid:
        errors.check("gradient on 1x4", whole[name], hybrid[name], MODEL, where=name)
    assert changes
