"""Logits, losses and gradients of both cores, from the same weights on the same tokens."""

import pytest

from parity_tests.checks.cells import ARCHITECTURES, Cell
from parity_tests.checks.training import check_forward
from parity_tests.harness.pool import RankPool
from parity_tests.harness.ulps import ErrorTable

MIXED = Cell(
    method="synchronous", replicas=2, shards=2, dtype="float32", model="gqa", compute="bfloat16"
)


def test_forward_and_gradients_agree(
    pool: RankPool, errors: ErrorTable, cell: Cell, is_full: bool
) -> None:
    if cell.shards == 1 and not is_full:
        pytest.skip("one shard is seen in whole runs; with --full here too")
    check_forward(pool, errors, cell)


@pytest.mark.only_full  # test_documents.py has their logits, whole runs their gradients
@pytest.mark.parametrize("of_a_kind", ARCHITECTURES, ids=str)
def test_forward_and_gradients_of_another_architecture_agree(
    pool: RankPool, errors: ErrorTable, of_a_kind: Cell
) -> None:
    check_forward(pool, errors, of_a_kind)


def test_bfloat16_over_float32_masters_agrees_within_roundings_of_bfloat16(
    pool: RankPool, errors: ErrorTable
) -> None:
    check_forward(pool, errors, MIXED)
