"""Every other row of the table of methods, both cores side by side."""

from collections import Counter

import pytest

from parity_tests.checks.cells import LAYERWISE, ROWS_OF_METHODS, Cell
from parity_tests.checks.methods import check_layerwise, check_method
from parity_tests.harness.pool import RankPool
from parity_tests.harness.ulps import ErrorTable

# The plain ones are also in test_golden.py, and all in ``twinshard parity run``.
PLAIN = {"co2-2x2-float64-tiny", "co2_star-2x2-float64-tiny", "streaming_diloco-2x2-float64-tiny"}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=pytest.mark.only_full) if str(row) in PLAIN else row
        for row in ROWS_OF_METHODS
    ],
    ids=str,
)
def test_thirteen_steps_of_a_method_agree_step_by_step(
    pool: RankPool, errors: ErrorTable, row: Cell
) -> None:
    run = check_method(pool, errors, row)
    assert len(run.events) >= 3
    if row.method in ("co2", "co2_star"):
        is_on = dict(dict(row.sync).get("co2", ())).get("staleness", True)
        assert (run.seen("gap").max() > 1.01) == is_on


@pytest.mark.parametrize("row", LAYERWISE, ids=str)
def test_a_forward_that_carries_a_round_agrees_with_the_references(
    pool: RankPool, errors: ErrorTable, row: Cell
) -> None:
    run = check_layerwise(pool, errors, row)
    assert run.seen("clip").min() < 1


def test_every_method_and_wire_is_met_twice() -> None:
    assert {str(row) for row in ROWS_OF_METHODS} >= PLAIN
    counted = Counter(row.method for row in ROWS_OF_METHODS)
    assert min(counted[m] for m in ("streaming_diloco", "co2", "co2_star", "aedit")) >= 2
    wires = Counter(dict(row.sync).get("wire") for row in ROWS_OF_METHODS)
    assert wires["int8"] >= 2 and wires["bf16"] >= 1
