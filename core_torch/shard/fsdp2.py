"""FSDP2: ``fully_shard`` on the shard axis alone, one group per unit.

Replicas are independent by construction, because FSDP2 knows nothing of the replica axis.
Its public all-reduce hook adds the mean over replicas where training is synchronous.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from core_torch.collectives import (
    Axis,
    CountedAllGather,
    CountedReduceScatter,
    Fence,
    start_psum,
)
from core_torch.mesh import Mesh
from core_torch.models.decoder import Model
from core_torch.shard.base import Sharded
from core_torch.shard.wrap import plan_units, unit_parameters


@dataclass(slots=True)
class Fsdp2(Sharded):
    """A model under ``fully_shard``."""

    fence: Fence = field(default_factory=Fence)  # of parameters that are written in a forward

    def free(self) -> None:
        """See ``Sharded``. Without ``reshard_after_forward`` the next forward would use them."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """See ``Sharded``.

        In synchronous training the earlier micro-batches keep their gradients unsharded, as
        under ``no_sync`` (4 bytes per parameter more for as long), so that the replica axis is
        reduced once; in local steps each is reduce-scattered at once.
        """
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(is_last or not self.mean_over_replicas)


def shard_with_fsdp2(
    model: Model,
    mesh: Mesh,
    *,
    compute_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
    forward_prefetch: int = 0,
) -> Fsdp2:
    """Shards ``model`` in place; see ``sharded.shard_model``."""
    plan = plan_units(model)
    sharded = Fsdp2(model, unit_parameters(model, plan), lookahead=forward_prefetch)
    model.to(mesh.device)
    stored = next(model.parameters()).dtype
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=stored)
    shard_mesh = mesh.torch_mesh["shard"]
    for unit in plan:
        modules = [model.get_submodule(name) for name in unit.modules]
        fully_shard(
            modules,
            mesh=shard_mesh,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
        )
        lead = modules[0]
        assert isinstance(lead, FSDPModule)
        # The setters are public, the base classes that they are annotated with are not.
        lead.set_custom_all_gather(CountedAllGather(mesh.shard, unit.name, sharded.fence))  # type: ignore[arg-type]
        lead.set_custom_reduce_scatter(CountedReduceScatter(mesh.shard, unit.name))  # type: ignore[arg-type]
        lead.set_all_reduce_hook(replica_mean(sharded, mesh.replica, unit.name))
    fully_shard(model, mesh=shard_mesh, mp_policy=policy)  # the root: no parameters of its own
    leads = [model.get_submodule(unit.modules[0]) for unit in plan]
    for i, lead in enumerate(leads):
        assert isinstance(lead, FSDPModule)
        ahead = leads[i + 1 : i + 1 + forward_prefetch]
        lead.set_modules_to_forward_prefetch(ahead)  # type: ignore[arg-type]
    return sharded


def replica_mean(sharded: Sharded, axis: Axis, unit: str) -> Callable[[Tensor], None]:
    """A hook that FSDP2 calls with a unit's reduced flat gradient, to change in place."""

    def hook(flat: Tensor) -> None:
        if sharded.mean_over_replicas:
            start_psum(flat, axis, scope=unit).wait()
            flat.mul_(1.0 / axis.size)

    return hook
