"""Training a tiny Llama under FSDP2 and under SimpleFSDP, told step by step. Imports no jax.

Row r of step t is a function of both numbers, and rank m of M takes the rows of its M-th part,
so the mean over ranks is the mean over the same rows on every mesh. ``alone`` computes it in
one process without any sharding.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from core_torch.collectives import Dispatch
from core_torch.config import ModelConfig
from core_torch.mesh import Mesh
from core_torch.models import build_model, token_loss
from core_torch.models.llama import Block, Llama
from core_torch.shard.compile import Compilation, compile_model
from core_torch.shard.cost import Costs
from core_torch.shard.program import Program
from core_torch.shard.recompute import recompute_activations
from core_torch.shard.schedule import CompileOptions, timeline_of
from core_torch.shard.simple_fsdp import Precision, simple_fsdp
from core_torch.shard.wrap import plan_units
from parity_tests.cases.part_mesh import mesh_over
from parity_tests.harness.torch_bridge import TORCH_DTYPES, shards_of, to_numpy

VOCABULARY, SEQUENCE, ROWS, LAYERS = 61, 8, 4, 2
ADAMW: dict[str, Any] = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}  # eps: see equalities.py

# method: "simple_fsdp" or "fsdp2"; shards: ranks; tied; hidden: width; dtype: stored; compute:
# dtype of forward and backward; recompute: of blocks; reshard: after the forward; options: of the
# compiler, if any; regional: each block compiled by itself
How = dict[str, Any]
Told = dict[str, Any]


def llama(how: How) -> Llama:
    """The model with full weights, the same on every rank."""
    shape = ModelConfig(
        vocabulary=VOCABULARY,
        dim=16,
        layers=LAYERS,
        heads=4,
        kv_heads=2,
        hidden=how.get("hidden", 27),  # uneven over 2 and 4 ranks, as the vocabulary is
        context=SEQUENCE,
        init_std=0.2,
        tied=how.get("tied", False),
    )
    dtype = TORCH_DTYPES[how.get("dtype", "float32")]
    model = build_model(shape, VOCABULARY, seed=0, dtype=dtype)
    assert isinstance(model, Llama)
    return model


def batch(step: int, index: int, shards: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one rank."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(0, VOCABULARY, (ROWS, SEQUENCE + 1), generator=generator)
    mine = rows.chunk(shards)[index]
    return mine[:, :-1], mine[:, 1:]


def sharded(how: How, mesh: Mesh) -> tuple[Llama, Compilation | None]:
    """The model under ``how``, and its compilation if it is compiled."""
    model = llama(how)
    if "recompute" in how:
        recompute_activations(model, (Block,), how["recompute"])
    compute = TORCH_DTYPES[how["compute"]] if "compute" in how else None
    if how["method"] == "fsdp2":
        with_fsdp2(model, mesh, compute)
        return model, None
    simple_fsdp(
        model,
        mesh.torch_mesh["shard"],
        precision=Precision(compute_dtype=compute, reduce_dtype=torch.float32 if compute else None),
        units={unit.name: unit.modules for unit in plan_units(model)},
        reshard_after_forward=how.get("reshard", True),
        axes=(mesh.axis("pp"), mesh.shard),
    )
    if how.get("regional", False):
        for block in model.layers:
            compile_model(block, compiler({}))
    options = how.get("options")
    return model, None if options is None else compile_model(model, compiler(options))


def compiler(options: dict[str, Any]) -> CompileOptions:
    """``aot_eager`` unless ``options`` say otherwise."""
    torch.compiler.reset()  # torch limits the compilations of all models of a process together
    return CompileOptions(**{"backend": "aot_eager", **options})


def with_fsdp2(model: Llama, mesh: Mesh, compute: torch.dtype | None) -> None:
    """FSDP2 as shipped, its own collectives included."""
    reduce = torch.float32 if compute else None
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    shard = mesh.torch_mesh["shard"]
    for unit in plan_units(model):
        fully_shard([model.get_submodule(m) for m in unit.modules], mesh=shard, mp_policy=policy)
    fully_shard(model, mesh=shard, mp_policy=policy)


def trained(how: How, steps: int) -> Told | None:
    """Trains for ``steps`` steps with AdamW; None on a rank outside the mesh.

    Returns:
        Losses; this rank's gradients of each step and its parameters at the end; the collectives
        of the last step's forward and backward; and what was compiled.
    """
    mesh = mesh_over(1, how["shards"])
    if mesh is None:
        return None
    model, compilation = sharded(how, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    told: Told = {"losses": [], "grads": []}
    for step in range(steps):
        told |= traced_step(model, mesh, batch(step, mesh.shard.index, mesh.shard.size), told)
        optimizer.step()
        optimizer.zero_grad()
    told["params"] = shards_of(model.named_parameters())
    if compilation is not None:
        told["compiled"] = summary(compilation)
    return told


def traced_step(model: nn.Module, mesh: Mesh, rows: tuple[Tensor, Tensor], told: Told) -> Told:
    """One forward and backward; adds loss and gradients, returns the collectives of both."""
    trace: list[Dispatch] = []
    mesh.ledger.trace = trace
    loss = token_loss(model(rows[0]), rows[1])
    middle = len(trace)
    loss.backward()
    told["losses"].append(loss.item())
    told["grads"].append(shards_of(gradients_of(model)))
    seen = [tuple(dispatch) for dispatch in trace]
    mesh.ledger.trace = None
    return {"forward": seen[:middle], "backward": seen[middle:]}


def gradients_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Gradients by parameter; those that are None are left out."""
    for name, p in model.named_parameters():
        if p.grad is not None:
            yield name, p.grad


def summary(compilation: Compilation) -> Told:
    """Collectives of each compiled program, and estimates of memory."""
    forward, backward = (compilation.program(name) for name in ("forward", "backward"))
    times = timeline_of(forward, backward, compilation.carried, Costs.typical())
    return {
        "programs": [program.name for program in compilation.programs],
        "buckets": [[p.name for p in held] for held in compilation.buckets],
        "forward": collectives_of(forward),
        "backward": collectives_of(backward),
        "saved_bytes": saved_bytes(forward, compilation.carried),
        "peak_bytes": times.peak_bytes,
    }


def collectives_of(program: Program) -> list[tuple[str, str, str]]:
    """Starts and waits in order: (kind, operation, bucket)."""
    return [(i.kind, i.op, i.name) for i in program.instructions if i.op is not None]


def saved_bytes(forward: Program, carried: dict[int, int]) -> int:
    """What the forward keeps for the backward; parameters and the batch apart."""
    outside = {forward.values[number].storage for number in forward.inputs}
    kept = [out for o in carried.values() if (out := forward.outputs[o]) is not None]
    storages = {forward.values[number].storage for number in kept} - outside
    return sum(forward.values[number].nbytes for number in storages)


def alone(how: How, steps: int = 1) -> Told:
    """The same training in one process without sharding: losses, gradients, parameters."""
    model = llama(how)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    told: Told = {"losses": [], "grads": []}
    for step in range(steps):
        inputs, targets = batch(step, 0, 1)
        loss = token_loss(model(inputs), targets)
        torch.autograd.backward(loss)
        told["losses"].append(loss.item())
        told["grads"].append({name: to_numpy(grad) for name, grad in gradients_of(model)})
        optimizer.step()
        optimizer.zero_grad()
    told["params"] = {name: to_numpy(p) for name, p in model.named_parameters()}
    return told
