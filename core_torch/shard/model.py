"""Shards a model as a configuration says: with FSDP2, or with SimpleFSDP, compiled or not."""

from dataclasses import dataclass
from pathlib import Path

import torch

from core_torch.collectives import Axis, start_psum
from core_torch.config import ShardConfig
from core_torch.mesh import Mesh
from core_torch.models.decoder import Model
from core_torch.shard.access import local_shard
from core_torch.shard.base import Sharded
from core_torch.shard.compile import Compilation, compile_model
from core_torch.shard.cost import Costs, read_costs
from core_torch.shard.fsdp2 import shard_with_fsdp2
from core_torch.shard.layout import pack_shards, unpack_shards
from core_torch.shard.recompute import recompute_activations
from core_torch.shard.schedule import CompileOptions
from core_torch.shard.simple_fsdp import Precision, plan_of_module, simple_fsdp
from core_torch.shard.wrap import plan_units


@dataclass(slots=True)
class Simple(Sharded):
    """A model under ``simple_fsdp``; replicas are outside of its graph."""

    mesh: Mesh | None = None
    compilation: Compilation | None = None  # None: eager

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """See ``Sharded``: the mean over replicas, one all-reduce per unit, all in flight at once.

        Outside of the graph, so that the same graph serves local and synchronous steps.
        """
        assert self.mesh is not None
        axis = self.mesh.replica
        if not self.mean_over_replicas or axis.size == 1:
            return
        plan = plan_of_module(self.module)
        params = dict(self.module.named_parameters())
        flights = []
        for unit, names in self.units.items():
            grads = [grad for name in names if (grad := params[name].grad) is not None]
            shards = [local_shard(grad) for grad in grads]
            layouts = [plan.layouts[name] for name in names]
            flat = pack_shards(shards, layouts, shards[0].dtype)  # padded, as FSDP2's are
            flights.append((start_psum(flat, axis, scope=unit), shards, layouts))
        for pending, shards, layouts in flights:
            mean = pending.wait() * (1.0 / axis.size)
            means = unpack_shards(mean, layouts, plan.shard.index)
            for shard, part in zip(shards, means, strict=True):
                shard.copy_(part)


def shard_model(
    model: Model,
    mesh: Mesh,
    config: ShardConfig | None = None,
    *,
    compute_dtype: torch.dtype | None = None,
) -> Sharded:
    """Shards ``model`` in place.

    Args:
        model: full weights on the CPU; under tensor parallelism this rank's parts.
        mesh: the shard axis holds the model, the replica axis stays outside.
        config: method and compiler.
        compute_dtype: of forward and backward; None: as stored. Gradients are always
            reduced, and parameters kept, in the stored dtype.
    """
    config = config or ShardConfig()
    if config.recompute != "none":
        recompute_activations(model, model.blocks, config.recompute)
    if config.method == "fsdp2":
        return shard_with_fsdp2(
            model,
            mesh,
            compute_dtype=compute_dtype,
            reshard_after_forward=config.reshard_after_forward,
            forward_prefetch=config.forward_prefetch,
        )
    model.to(mesh.device)
    stored = next(model.parameters()).dtype
    joined = mesh.torch_mesh["shard", "tp"] if mesh.tp.size > 1 else None
    absent = Axis("replica", None, 1, 0, mesh.ledger)  # reduced over in finish_gradients
    simple_fsdp(
        model,
        mesh.torch_mesh["shard"],
        precision=Precision(compute_dtype=compute_dtype, reduce_dtype=stored),
        units={unit.name: unit.modules for unit in plan_units(model)},
        reshard_after_forward=config.reshard_after_forward,
        joined_mesh=joined,
        axes=(absent, mesh.shard),
    )
    units = plan_of_module(model).units
    if config.compile == "off":
        return Simple(model, units, mesh=mesh)
    options = CompileOptions(
        backend=config.compile,
        wrap=config.wrap,
        costs=read_costs(Path(config.costs)) if config.costs else Costs.typical(),
        memory_limit_bytes=config.memory_limit_mib << 20 or None,
    )
    return Simple(model, units, mesh=mesh, compilation=compile_model(model, options))
