"""What an owner does with a sharded module: states, copies, optimizers, misuse. Imports no jax.

Each function runs on all ranks of the pool over a mesh of its first ranks.
"""

import copy
import io
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from core_torch.errors import ConfigError, TwinshardError
from core_torch.models.build import draw
from core_torch.shard.access import is_sharded, local_shard
from core_torch.shard.compile import compile_model
from core_torch.shard.simple_fsdp import materialise, simple_fsdp
from parity_tests.cases import sharded_training as training
from parity_tests.cases.part_mesh import mesh_over
from parity_tests.cases.sharded_modules import (
    loss_of,
    odd_model,
    odd_rows,
    odd_step,
    sharded_llama,
)
from parity_tests.cases.sharded_training import ADAMW, compiler, gradients_of
from parity_tests.harness.rank_mesh import mesh_for
from parity_tests.harness.torch_bridge import shards_of, to_numpy


def states(tied: bool) -> dict[str, Any] | None:
    """Keys of the state dict, and what is left after a load into another model."""
    built = sharded_llama(2, tied=tied)
    if built is None:
        return None
    model, mesh = built
    other = sharded_llama(2, tied=tied)
    assert other is not None
    with torch.no_grad():
        for p in other[0].parameters():
            local_shard(p).zero_()
    missing = other[0].load_state_dict(model.state_dict())
    return {
        "keys": list(model.state_dict()),
        "named": [name for name, _ in model.named_parameters()],
        "problems": [*missing.missing_keys, *missing.unexpected_keys],
        "sharded": all(is_sharded(x) for x in model.state_dict().values()),
        "loss": loss_of(model, mesh).item(),
        "loaded": loss_of(other[0], mesh).item(),
    }


def copies(options: dict[str, Any] | None) -> dict[str, Any] | None:
    """Trains a model for three steps and then its deep copy, which nobody has touched."""
    built = sharded_llama(2, tied=True)
    if built is None:
        return None
    model, mesh = built
    twin = copy.deepcopy(model)
    told: dict[str, Any] = {}
    for name, trained in (("model", model), ("twin", twin)):
        if options is not None:
            compile_model(trained, compiler(options))
        optimizer = torch.optim.AdamW(trained.parameters(), **ADAMW)
        losses = []
        for step in range(3):
            loss = loss_of(trained, mesh, step)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        told[name] = {"losses": losses, "params": shards_of(trained.named_parameters())}
        told[f"{name} is tied"] = (
            trained.output._parameters["weight"] is (trained.tok_embeddings._parameters["weight"])
        )
    return told


def refusals() -> dict[str, str] | None:
    """What each misuse is answered with: the error's type and text."""
    built = sharded_llama(2)
    if built is None:
        return None
    model, mesh = built
    norm = model.norm

    def assign() -> None:
        norm.weight = nn.Parameter(torch.zeros(16))

    def step_too_early() -> None:
        loss = loss_of(model, mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        loss.backward()

    def write_to_rows_too_early() -> None:
        loss = loss_of(model, mesh)
        for p in model.parameters():
            local_shard(p).add_(0.1)  # as checkpoints and core_torch.adamw do
        loss.backward()

    misuses = {
        "pickle": lambda: torch.save(model, io.BytesIO()),
        "assign": assign,
        "twice": lambda: simple_fsdp(model, mesh.torch_mesh["shard"]),
        "lstm": lambda: simple_fsdp(nn.LSTM(2, 2), mesh.torch_mesh["shard"]),
        "mesh": lambda: simple_fsdp(odd_model(), mesh.torch_mesh["shard"], mode="hybrid_shard"),
        "step": step_too_early,
        "rows": write_to_rows_too_early,
    }
    return {name: refusal(misuse) for name, misuse in misuses.items()}


def refusal(misuse: Any) -> str:
    """Type and text of the library's error; empty if nothing is raised."""
    try:
        misuse()
    except (ConfigError, TwinshardError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def clipped(max_norm: float) -> dict[str, Any]:
    """Norm and gradients under torch's own clipping, over four ranks, scalars included."""
    mesh = mesh_for(1, 4)
    model = simple_fsdp(odd_model(), mesh.torch_mesh["shard"])
    odd_step(model, odd_rows(mesh.shard.index, 4))
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return {"norm": whole.item(), "grads": shards_of(gradients_of(model))}


def optimized(flags: dict[str, Any]) -> dict[str, Any] | None:
    """Three steps of torch's AdamW on sharded parameters, and on plain copies of the rows."""
    built = sharded_llama(2)
    if built is None:
        return None
    model, mesh = built
    rows = [local_shard(p).clone() for p in model.parameters()]
    mine = torch.optim.AdamW(model.parameters(), **ADAMW, **flags)
    plain = torch.optim.AdamW(rows, **ADAMW, **flags)
    for step in range(3):
        loss_of(model, mesh, step).backward()
        for row, p in zip(rows, model.parameters(), strict=True):
            assert p.grad is not None
            row.grad = local_shard(p.grad).clone()
        mine.step()
        plain.step()
        mine.zero_grad()
    return {
        "sharded": [to_numpy(p) for p in model.parameters()],
        "plain": [to_numpy(row) for row in rows],
        "states": len(mine.state),
    }


def from_meta(shards: int) -> dict[str, Any] | None:
    """Rows of a model that was sharded before it had memory: each rank keeps its own."""
    mesh = mesh_over(1, shards)
    if mesh is None:
        return None
    with torch.device("meta"):
        model = training.llama({})
    simple_fsdp(model, mesh.torch_mesh["shard"])
    is_meta = all(p.is_meta for p in model.parameters())
    materialise(model, torch.device("cpu"), lambda n, s: draw(n, torch.empty(s), seed=0))
    return {"was meta": is_meta, "params": shards_of(model.named_parameters())}
