"""Faults put into the shipped core, inside the running ranks: unmodified checks must see them.

Each mutant is met by the cheapest comparison that should notice it; ``--full`` runs them all,
otherwise one of each kind. What only the formulas of one file can show, such as the third flag
in a row, is in test_pure_functions.py.
"""

import dataclasses
from functools import partial
from typing import Protocol

import pytest

from parity_tests.checks.cells import Cell
from parity_tests.checks.faults import STORM, check_faults, check_spike
from parity_tests.checks.ledger import UNEVEN, UNEVEN_SIMPLE, check_ledger
from parity_tests.checks.simple_fsdp import PLACED, Placed, check_step
from parity_tests.checks.training import check_forward, check_training
from parity_tests.harness import mutants
from parity_tests.harness.pool import RankPool
from parity_tests.harness.ulps import ErrorTable


class Check(Protocol):
    """Compares the cores; raises AssertionError where they differ."""

    def __call__(self, pool: RankPool, errors: ErrorTable) -> object: ...


MODEL = Cell(method="diloco", replicas=1, shards=4, dtype="float64", model="gqa")
# Rounds after steps 4, 6 and, forced, 7.
CALM = dataclasses.replace(STORM, model="tiny", steps=7, faults=())
SIMPLE_FORWARD = dataclasses.replace(
    MODEL, replicas=2, shards=2, model="odd", blocks=1, sharding="simple_fsdp"
)
ACCUMULATING = dataclasses.replace(MODEL, steps=3)


def step_of(pool: RankPool, errors: ErrorTable, *, placed: Placed, how: str) -> None:
    """One forward and backward under SimpleFSDP."""
    check_step(pool, errors, placed, how)


def ledger_of(pool: RankPool, errors: ErrorTable, *, cell: Cell) -> None:
    """Compares bytes, not numbers; the table stays empty."""
    check_ledger(pool, cell)


forward = partial(check_forward, cell=MODEL)
free = partial(check_training, cell=CALM, locked=False)
phases = partial(check_training, cell=CALM, free=False)
accumulation = partial(check_training, cell=ACCUMULATING, locked=False)
storm = partial(check_faults, locked=False)
spike = partial(check_spike, locked=False)
ledger = partial(ledger_of, cell=UNEVEN)
ODD, TIED, _ = PLACED
CHECKS: dict[str, Check] = {
    "forward": forward,
    "free": free,
    "phases": phases,
    "accumulation": accumulation,
    "storm": storm,
    "spike": spike,
    "ledger": ledger,
    "simple eager": partial(step_of, placed=ODD, how="eager"),
    "simple tied": partial(step_of, placed=TIED, how="manual"),
    "simple forward": partial(check_forward, cell=SIMPLE_FORWARD),
    "simple ledger": partial(ledger_of, cell=UNEVEN_SIMPLE),
}
SEEN_BY: dict[str, tuple[str, ...]] = {
    "forward": (
        "rotary pairs halves",
        "rotary frequencies in float32",
        "rotary scaling ignored",
        "RMSNorm without eps",
        "RMSNorm's eps outside the mean",
        "attention sees the future",
        "attention scale off by 1e-6",
        "gate and value exchanged",
    ),
    "free": (
        "the outer step climbs",
        "outer momentum dropped",
        "Nesterov is heavy ball",
        "cold statistics flag",
        "the median is the lower middle",
        "statistics are not seeded",
        "larger steps weigh more",
        "no clip",
        "clip amplifies",
        "first moment not corrected",
        "second moment not corrected",
        "the step counts from 0",
        "decay not times the learning rate",
        "eps under the root",
        "warm-up ignored",
        "cosine to zero",
        "local gradients divided by N M",
        "synchronous gradients summed",
        "gradient norm of one shard",
        "learning rate of the step before",
        "gains decay",
        "pseudo-gradient of the wrong sign",
        "norms of one shard",
        "norm for the clip of one shard",
        "plain mean in place of the penalty",
        "stale anchor",
        "stale velocity",
        "parameters not replaced",
        "clipped but not scaled",
        "a forced round moves the statistics",
        "a round one step early",
        "a round right after the warm-up",
        "warm-up one step longer",
    ),
    "phases": ("no weight decay", "gradient clip without 1e-6", "clip with eps subtracted"),
    "accumulation": ("micro-batches summed", "one micro-batch for all"),
    "storm": (
        "a rollback moves the anchor",
        "a rollback moves the velocity",
        "nobody is healed",
        "finite is decided in the run's dtype",
        "small norms are flagged too",
        "anomalies enter the mean",
        "anomalies enter the variance",
        "weights not renormalised after exclusion",
        "zero times NaN",
        "a rollback takes an outer step",
    ),
    "ledger": ("local gradients averaged over replicas",),
    "spike": ("no spike test before the statistics are warm",),
    "simple eager": (
        "gradients of the shards summed",
        "the plan of the model before",
        "padding kept, rows cut",
        "chunks packed by place, not by rank",
        "rows of the other ranks not awaited",
        "gathered again without its view",
        "another parameter of that shape gathered again",
        "kept for the backward in an eager model",
    ),
    "simple tied": (
        "mean over the shards alone",
        "one use of a tied weight dropped",
        "kept for the backward in a graph",
        "a collective for each parameter",
    ),
    "simple forward": ("synchronous gradients summed under SimpleFSDP",),
    "simple ledger": ("local gradients averaged under SimpleFSDP",),
}
FORMULAS_ONLY = {"re-armed one flag late", "the mean counts the excluded"}
CHOSEN = {
    "outer momentum dropped",
    "local gradients divided by N M",
    "no weight decay",
    "nobody is healed",
    "weights not renormalised after exclusion",
    "no spike test before the statistics are warm",
    "local gradients averaged over replicas",
    "gradients of the shards summed",
    "one use of a tied weight dropped",
}
PAIRS = [(check, mutant) for check, names in SEEN_BY.items() for mutant in names]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All mutants with ``--full``, else the chosen ones."""
    if "mutant" in metafunc.fixturenames:
        is_full = metafunc.config.getoption("full")
        pairs = [pair for pair in PAIRS if is_full or pair[1] in CHOSEN]
        metafunc.parametrize(("check", "mutant"), pairs)


def test_every_mutant_is_met_by_a_check() -> None:
    met = [mutant for _, mutant in PAIRS]
    assert len(met) == len(set(met)) and CHOSEN <= set(met)
    assert set(met) | FORMULAS_ONLY == set(mutants.MUTANTS)


# These run as tests of their own elsewhere, on the same or on larger cells.
SEEN_TO_PASS = {
    "forward",
    "accumulation",
    "storm",
    "spike",
    "ledger",
    "simple eager",
    "simple tied",
    "simple ledger",
}
CONTROLS = [
    pytest.param(name, marks=pytest.mark.only_full) if name in SEEN_TO_PASS else name
    for name in CHECKS
]


@pytest.mark.parametrize("check", CONTROLS)
def test_without_a_fault_the_check_passes(pool: RankPool, check: str) -> None:
    CHECKS[check](pool, ErrorTable())


def test_a_fault_in_the_core_is_noticed(pool: RankPool, check: str, mutant: str) -> None:
    with pool.mutated(mutant), pytest.raises(AssertionError):
        CHECKS[check](pool, ErrorTable())
