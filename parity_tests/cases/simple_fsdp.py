"""What ranks do to show SimpleFSDP by itself: one forward and backward of a model in each mode."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from core_torch.config import RunConfig
from core_torch.mesh import Mesh
from core_torch.models import Model, build_model, token_loss
from core_torch.shard.compile import compile_model
from core_torch.shard.fsdp2 import shard_with_fsdp2
from core_torch.shard.schedule import CompileOptions
from core_torch.shard.simple_fsdp import Mode, Precision, simple_fsdp
from core_torch.shard.wrap import plan_units
from core_torch.train import DTYPES
from parity_tests.cases.equalities import Account, Changes, configured
from parity_tests.cases.training import Whole
from parity_tests.harness.rank_mesh import mesh_for
from parity_tests.harness.torch_bridge import load_parameters, shards_of


def step(
    changes: Changes,
    batch: Sequence[np.ndarray],
    params: Whole,
    mode: Mode,
    how: str,
) -> Account:
    """Loss, gradients, and the collectives of forward and backward on this rank.

    Args:
        changes: to the default configuration.
        batch: inputs and targets, (R, S, B, T) each.
        params: initial weights.
        mode: of ``simple_fsdp``.
        how: "fsdp2" (then ``mode`` is "fully_shard"), "eager", or what is compiled with aot_eager:
            "none", "manual".
    """
    config: RunConfig = configured(RunConfig(), changes)
    mesh = mesh_for(config.mesh.replicas, config.mesh.shards)
    neighbour = sharded(built(config, params), mesh, mode, Precision(compute_dtype=torch.float32))
    model = built(config, params)
    if how == "fsdp2":
        shard_with_fsdp2(model, mesh)
    else:
        sharded(model, mesh, mode, Precision())
    if how in ("none", "manual"):
        compile_model(model, CompileOptions(backend="aot_eager", wrap=how))
    mesh.ledger.trace = []
    at = mesh.replica.index, mesh.shard.index
    inputs, targets = (torch.from_numpy(side[at].astype(np.int64)) for side in batch)
    loss = token_loss(model(inputs), targets)
    after_forward = len(mesh.ledger.trace)
    torch.autograd.backward(loss)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    trace: list[Any] = [tuple(dispatch) for dispatch in mesh.ledger.trace]
    del neighbour  # it had to be there until now
    return {
        "loss": float(loss),
        "grads": shards_of(grads),
        "forward": trace[:after_forward],
        "backward": trace[after_forward:],
    }


def built(config: RunConfig, params: Whole) -> Model:
    """The full model with these weights."""
    dtype = DTYPES[config.train.dtype]
    model = build_model(config.model, config.model.vocabulary, seed=0, dtype=dtype)
    load_parameters(model, params)
    return model


def sharded(model: Model, mesh: Mesh, mode: Mode, precision: Precision) -> Model:
    """The model under ``simple_fsdp``, bytes counted in the ledger of ``mesh``."""
    is_hybrid = mode == "hybrid_shard"
    replica = mesh.replica if is_hybrid else mesh.axis("pp")  # one that is absent
    simple_fsdp(
        model,
        mesh.torch_mesh["replica", "shard"] if is_hybrid else mesh.torch_mesh["shard"],
        mode=mode,
        precision=precision,
        units={unit.name: unit.modules for unit in plan_units(model)},
        axes=(replica, mesh.shard),
    )
    return model
