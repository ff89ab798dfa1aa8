"""The variants: each shards the same model in its own way.

A builder takes an ``Objective`` with full weights and the mesh and returns the module to call,
``module(tokens_BT, targets_BT) -> loss``. The loss belongs to the module, so that every
compiler sees all of the forward.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from core_torch.collectives import PlainBuffers
from core_torch.config import ModelConfig
from core_torch.mesh import Mesh
from core_torch.models.build import init_weights
from core_torch.models.llama import Llama
from core_torch.models.loss import token_loss
from core_torch.shard.wrap import plan_units


class Objective(Llama):
    """Token ids and targets in, loss out."""

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:  # type: ignore[override]
        return token_loss(super().forward(tokens_BT), targets_BT)


Builder = Callable[[Objective, Mesh], nn.Module]


def build_objective(config: ModelConfig, *, seed: int) -> Objective:
    """The model with its loss, on the CPU, with full weights that depend on ``seed`` only."""
    model = Objective(config, config.vocabulary)
    init_weights(model, config, seed=seed)
    return model


def fsdp2_eager(model: Objective, mesh: Mesh) -> nn.Module:
    """FSDP2 with nothing set."""
    _fully_shard(model, mesh)
    return model


def fsdp2_best(model: Objective, mesh: Mesh) -> nn.Module:
    """FSDP2 with everything that its public methods offer on a CPU."""
    for block in model.layers:  # the forward alone, so that FSDP2's hooks stay outside
        block.forward = torch.compile(block.forward, fullgraph=True)
    units = _fully_shard(model, mesh)
    for i, unit in enumerate(units):
        unit.set_custom_all_gather(AsynchronousAllGather())  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(ExchangeAndSum())  # type: ignore[arg-type]
        unit.set_modules_to_forward_prefetch(units[i + 1 : i + 2])
        unit.set_modules_to_backward_prefetch(units[max(i - 1, 0) : i])
    return model


def fsdp2_compiled(model: Objective, mesh: Mesh) -> nn.Module:
    """FSDP2, then one torch.compile over it; its hooks break the graph between the units."""
    _fully_shard(model, mesh)
    return _compiled(model)


def ddp_compiled(model: Objective, mesh: Mesh) -> nn.Module:
    """DDP, then one torch.compile over it; whole weights on every rank."""
    group = mesh.shard.group
    # The only buffers are the rotary tables, which are constant and equal on all ranks.
    return _compiled(DistributedDataParallel(model, process_group=group, broadcast_buffers=False))


def simple_fsdp_eager(model: Objective, mesh: Mesh) -> nn.Module:
    """SimpleFSDP as it is without a compiler."""
    return _simple_fsdp(model, mesh)


def simple_fsdp_compiled(
    backend: Literal["inductor", "aot_eager"], wrap: Literal["none", "manual", "auto"]
) -> Builder:
    """A builder of SimpleFSDP under a compiler, with one of its plans of buckets."""

    def build(model: Objective, mesh: Mesh) -> nn.Module:
        from core_torch.shard.calibrate import measured_costs
        from core_torch.shard.compile import compile_model
        from core_torch.shard.schedule import CompileOptions

        module = _simple_fsdp(model, mesh)
        options = CompileOptions(backend=backend, wrap=wrap)
        if wrap == "auto":
            options = replace(options, costs=measured_costs(mesh.shard, mesh.device))
        module.compilation = compile_model(module, options)  # type: ignore[assignment]
        return module

    return build


BUILDERS: dict[str, Builder] = {
    "fsdp2_eager": fsdp2_eager,
    "fsdp2_best": fsdp2_best,
    "fsdp2_compiled": fsdp2_compiled,
    "ddp_compiled": ddp_compiled,
    "simple_fsdp_eager": simple_fsdp_eager,
    "simple_fsdp_aot": simple_fsdp_compiled("aot_eager", "manual"),
    "simple_fsdp_compiled_none": simple_fsdp_compiled("inductor", "none"),
    "simple_fsdp_compiled_manual": simple_fsdp_compiled("inductor", "manual"),
    "simple_fsdp_compiled_auto": simple_fsdp_compiled("inductor", "auto"),
}


def _simple_fsdp(model: Objective, mesh: Mesh) -> nn.Module:
    from core_torch.shard.simple_fsdp import simple_fsdp

    units = {unit.name: unit.modules for unit in plan_units(model)}
    return simple_fsdp(model, mesh.torch_mesh["shard"], units=units)


def _compiled(module: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(module)  # type: ignore[assignment]
    return compiled


def _fully_shard(model: Objective, mesh: Mesh) -> list[FSDPModule]:
    """Applies FSDP2 per unit and to the root; the units' leads in order of the forward."""
    shard_mesh = mesh.torch_mesh["shard"]
    leads: list[FSDPModule] = []
    for unit in plan_units(model):
        modules = [model.get_submodule(name) for name in unit.modules]
        fully_shard(modules, mesh=shard_mesh)
        lead: nn.Module = modules[0]
        assert isinstance(lead, FSDPModule)
        leads.append(lead)
    fully_shard(model, mesh=shard_mesh)  # the root: no parameters of its own
    return leads


@dataclass(frozen=True, slots=True)
class AsynchronousAllGather(PlainBuffers):
    """Never waits where it starts: without CUDA streams this alone makes a prefetch overlap."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Starts gathering one unit; FSDP2 waits before it reads the result."""
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=True)


@dataclass(frozen=True, slots=True)
class ExchangeAndSum(PlainBuffers):
    """A reduce-scatter that sends each gradient once; gloo's own is an all-reduce inside."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sums, or averages, the ranks' rows for this one, in rank order; complete on return."""
        ranks, own = group.size(), group.rank()
        rows = input_tensor.view(ranks, -1)
        width = rows.shape[1]
        splits = [0 if rank == own else width for rank in range(ranks)]
        # Only ranks in the middle must copy to leave their own row out.
        ends = {0: rows[1:], ranks - 1: rows[:-1]}
        sent = ends[own] if own in ends else torch.cat((rows[:own], rows[own + 1 :]))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.view(-1), sent.view(-1), splits, splits, group=group)
        parts = [*received[:own], rows[own], *received[own:]]
        torch.add(parts[0], parts[1], out=output_tensor)
        for part in parts[2:]:
            output_tensor.add_(part)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(ranks)
        return None
