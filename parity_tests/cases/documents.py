"""A step on rows of several documents, under each sharding core. Imports no jax."""

from typing import Any

import torch
from torch import Tensor

from core_torch.config import ModelConfig, ShardConfig
from core_torch.models import Model, build_model, token_loss
from core_torch.shard.access import local_shard
from core_torch.shard.model import shard_model
from parity_tests.cases.part_mesh import mesh_over

SEQUENCE, VOCABULARY = 12, 31
SIZES: dict[str, Any] = dict(vocabulary=VOCABULARY, dim=16, layers=1, heads=4, kv_heads=2)
SIZES |= dict(hidden=20, init_std=0.3)
KINDS = ("llama", "qwen3", "gpt2")


def model_of(kind: str) -> Model:
    """With full weights, the same on every rank."""
    config = ModelConfig(kind=kind, **SIZES, context=SEQUENCE)  # type: ignore[arg-type]
    return build_model(config, VOCABULARY, seed=0, dtype=torch.float64)


def rows() -> tuple[Tensor, Tensor]:
    """(4, SEQUENCE) ids, and the numbers of their documents, which differ from row to row."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (4, SEQUENCE), generator=generator)
    return ids, torch.randint(2, (4, SEQUENCE), generator=generator).cumsum(dim=1)


def gradients(model: Model, ids: Tensor, documents: Tensor) -> dict[str, Tensor]:
    """This rank's part of the gradient of the mean loss."""
    token_loss(model(ids, documents_BT=documents), ids).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    return {name: local_shard(grad) for name, grad in found.items() if grad is not None}


def distance(kind: str, shard: dict[str, Any]) -> float | None:
    """Largest difference of a gradient on two shards from that of one process."""
    mesh = mesh_over(1, 2)
    if mesh is None:
        return None
    (ids, documents), index = rows(), mesh.shard.index
    whole = gradients(model_of(kind), ids, documents)
    model = model_of(kind)
    sharded = shard_model(model, mesh, ShardConfig(**shard))
    sharded.begin_micro_batch(is_last=True)
    mine = gradients(model, *(x.chunk(2)[index] for x in (ids, documents)))
    worst = 0.0
    for name, part in mine.items():
        chunk = -(-len(whole[name]) // 2)
        own = whole[name][index * chunk : (index + 1) * chunk]
        worst = max(worst, (part - own).abs().max().item() if len(own) else 0.0)
    assert mine.keys() == whole.keys() and max(x.abs().max() for x in whole.values()) > 0.01
    return worst
