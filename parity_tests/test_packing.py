"""Rows of several documents train and evaluate as if each document were alone in the model."""

from typing import Any

import numpy as np
import pytest

from parity_tests.cases import packing
from parity_tests.harness.pool import RankPool

SYNCHRONOUS = {"method": "synchronous", "warmup": 0}
CASES: list[Any] = [
    ({"replicas": 2, "shards": 2}, {}, {}),
    ({"pp": 2, "shards": 2}, {}, {}),
    ({"tp": 2, "shards": 2}, {"method": "simple_fsdp"}, {}),
    pytest.param(
        {"replicas": 2, "shards": 2},
        {"method": "simple_fsdp", "compile": "aot_eager"},
        {"loss_chunk": 5},
        marks=pytest.mark.only_full,
    ),
]


@pytest.mark.parametrize(("mesh", "shard", "train"), CASES, ids=str)
def test_a_document_is_alone_in_its_row_on_every_mesh(
    pool: RankPool, mesh: dict[str, int], shard: dict[str, Any], train: dict[str, Any]
) -> None:
    changes = {
        "mesh": mesh,
        "shard": shard,
        "train": {"accumulate": 2, **train},
        "data": {"packing": "documents"},
        "model": {"hidden": 28},
        "sync": SYNCHRONOUS,
    }
    told = pool.run(packing.step, changes)
    alone = packing.alone(changes)
    seen = [0, 2] if "replicas" in mesh else [0, 1, 2]  # the loss is of the replica's own rows
    for numbers in told:
        np.testing.assert_allclose(np.array(numbers)[seen], np.array(alone)[seen], rtol=1e-12)


def test_rows_by_documents_are_not_those_of_a_stream(pool: RankPool) -> None:
    changes = {"sync": SYNCHRONOUS, "mesh": {"replicas": 2, "shards": 2}}
    for seen, alone in zip(pool.run(packing.step, changes)[0], packing.alone(changes), strict=True):
        assert abs(seen - alone) > 1e-3
