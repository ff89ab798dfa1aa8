"""SimpleFSDP over every mesh and below every other way to cut a model. Imports no jax.

All results are whole tensors, put together by DTensor itself: so the placements that a parameter
claims are tested with its numbers.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from core_torch.models import token_loss
from core_torch.shard.compile import compile_model
from core_torch.shard.simple_fsdp import simple_fsdp
from parity_tests.cases.equalities import Account, Changes, account_of, begin
from parity_tests.cases.resume import commit_at, resumed
from parity_tests.cases.sharded_modules import odd_model, odd_rows
from parity_tests.cases.sharded_training import ADAMW, batch, compiler, gradients_of, llama
from parity_tests.harness.rank_mesh import mesh_for
from parity_tests.harness.torch_bridge import to_numpy

FLOAT64 = {"dtype": "float64"}
TENSOR_PARALLEL: dict[str, ParallelStyle] = {
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(),
    "feed_forward.w1": ColwiseParallel(),
    "feed_forward.w3": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(),
}


def steps_of(model: nn.Module, index: int, ranks: int, count: int = 2) -> dict[str, Any]:
    """Losses, and whole gradients and parameters, of a few AdamW steps."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    told: dict[str, Any] = {"losses": [], "grads": []}
    for step in range(count):
        inputs, targets = batch(step, index, ranks)
        loss = token_loss(model(inputs), targets)
        loss.backward()
        told["losses"].append(loss.item())
        told["grads"].append({name: whole(grad) for name, grad in gradients_of(model)})
        optimizer.step()
        optimizer.zero_grad()
    told["params"] = {name: whole(p) for name, p in model.named_parameters()}
    return told


def whole(x: Tensor) -> Any:
    """All rows; a collective."""
    return to_numpy(x.full_tensor() if isinstance(x, DTensor) else x)


def over_mesh(mode: Any, options: dict[str, Any] | None) -> dict[str, Any]:
    """Four ranks in one mode; in hybrid mode, two replicas of two shards."""
    mesh = mesh_for(2, 2) if mode == "hybrid_shard" else mesh_for(1, 4)
    torch_mesh = mesh.torch_mesh if mode == "hybrid_shard" else mesh.torch_mesh["shard"]
    axes = (mesh.replica, mesh.shard) if mode == "hybrid_shard" else (mesh.axis("pp"), mesh.shard)
    model = simple_fsdp(llama(FLOAT64), torch_mesh, mode=mode, axes=axes)
    if options is not None:
        compile_model(model, compiler(options))
    index = mesh.replica.index * mesh.shard.size + mesh.shard.index
    mesh.ledger.trace = []
    told = steps_of(model, index, 4)
    half = (mesh.ledger.trace or [])[: len(mesh.ledger.trace or []) // 2]  # of the first step
    return told | {"collectives": [(d.axis, d.op) for d in half]}


def odd_over_mesh(mode: Any) -> dict[str, Any]:
    """Uneven and tiny parameters in every mode."""
    mesh = mesh_for(2, 2) if mode == "hybrid_shard" else mesh_for(1, 4)
    torch_mesh = mesh.torch_mesh if mode == "hybrid_shard" else mesh.torch_mesh["shard"]
    model = simple_fsdp(odd_model(), torch_mesh, mode=mode)
    index = mesh.replica.index * mesh.shard.size + mesh.shard.index
    return odd_gradients(model, index, 4)


def odd_gradients(model: nn.Module, index: int, ranks: int) -> dict[str, Any]:
    """Whole gradients of the odd model."""
    rows = odd_rows(index, ranks)
    token_loss(model(rows), rows.roll(1, dims=1)).backward()
    return {name: whole(grad) for name, grad in gradients_of(model)}


def tensor_parallel(hidden: int, options: dict[str, Any] | None) -> dict[str, Any]:
    """Sharded over two ranks, each of which is two tensor-parallel ranks."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("shard", "tp"))
    model = llama(FLOAT64 | {"hidden": hidden})
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], TENSOR_PARALLEL)
    simple_fsdp(model, mesh["shard"], joined_mesh=mesh)
    if options is not None:
        compile_model(model, compiler(options))
    told = steps_of(model, mesh.get_local_rank("shard"), 2)
    rows = dict(model.named_parameters())["layers.0.attention.wq.weight"]
    assert isinstance(rows, DTensor)
    return told | {"rows": tuple(rows.to_local().shape), "placements": str(rows.placements)}


def handed_over(first: Changes, then: Changes, folder: str, stop: int) -> Account:
    """A run that commits at step ``stop`` and goes on under another configuration."""
    state = begin(first)
    assert state is not None
    commit_at(state, Path(folder), stop)
    return account_of(resumed(then, folder))
