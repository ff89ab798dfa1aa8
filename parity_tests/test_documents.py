"""Rows of several documents: both cores attend alike, and both sharding cores pass them on."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity_tests.cases import documents
from parity_tests.harness.pool import RankPool
from reference_jax.gpt2 import Gpt2Config
from reference_jax.model import LlamaConfig, forward

SHARDING: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "simple_fsdp": {"method": "simple_fsdp"},
    "compiled": {"method": "simple_fsdp", "compile": "aot_eager"},
}


@pytest.mark.parametrize("kind", documents.KINDS)
def test_both_cores_leave_no_document(kind: str) -> None:
    model, (ids, numbers) = documents.model_of(kind), documents.rows()
    known = {"kind": kind, **documents.SIZES}
    config = LlamaConfig(**known) if kind != "gpt2" else Gpt2Config(**known, context=len(ids[0]))
    params = {name: jnp.array(p.detach().numpy()) for name, p in model.named_parameters()}
    theirs = forward(
        params, jnp.array(ids.numpy()), config=config, documents_BT=jnp.array(numbers.numpy())
    )
    with torch.no_grad():
        ours, without = model(ids, documents_BT=numbers), model(ids)
    assert (ours - without).abs().max() > 0.01
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "sharding"),
    [
        ("qwen3", "fsdp2"),
        ("gpt2", "simple_fsdp"),
        *(
            pytest.param(kind, sharding, marks=pytest.mark.only_full)
            for kind in documents.KINDS
            for sharding in SHARDING
            if (kind, sharding) not in (("qwen3", "fsdp2"), ("gpt2", "simple_fsdp"))
        ),
    ],
)
def test_shards_of_rows_with_documents_have_the_gradient_of_all(
    pool: RankPool, kind: str, sharding: str
) -> None:
    found = pool.run(documents.distance, kind, SHARDING[sharding])
    assert [x is not None and x < 1e-13 for x in found[:2]] == [True, True], found
