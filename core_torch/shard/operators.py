"""The two operators of SimpleFSDP: gather a parameter, scatter its gradient.

Each parameter's gather is *one* node of a traced graph and carries the parameter's name, so a
pass need not guess which casts, waits and slices belong together. The gradient of ``gather``
is ``scatter``: the *mean* over ranks of the full gradient, cut into this rank's rows. (A bare
reduce-scatter gives the sum, and the learning rate then depends on the number of ranks.)

Operators of a graph take tensors, numbers and strings; what else they need to know stands in
a ``ShardPlan`` that they find by its number. The same functions, given several names instead of
one, are the bucketed collectives of compiled graphs.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from core_torch.collectives import (
    Axis,
    Pending,
    PendingRows,
    rows_sent,
    start_all_gather,
    start_psum,
    start_reduce_scatter,
)
from core_torch.shard.exchange import Exchange
from core_torch.shard.layout import (
    Layout,
    pack_gradients,
    pack_shards,
    unpack_gathered,
    unpack_shards,
)

_numbers = itertools.count()
_PLANS: WeakValueDictionary[int, "ShardPlan"] = WeakValueDictionary()


@dataclass(eq=False, slots=True, weakref_slot=True)
class ShardPlan:
    """How one model is sharded. A second model has a second plan: nothing is shared."""

    layouts: dict[str, Layout]  # by parameter name
    units: dict[str, list[str]]  # unit -> parameter names, in order of the forward
    shard: Axis
    replica: Axis
    compute_dtype: torch.dtype | None = None  # None: as stored
    reduce_dtype: torch.dtype | None = None  # None: as the gradient comes
    reshard_after_forward: bool = True
    exchange: Exchange | None = None  # of sync units, if compiled forwards carry rounds
    number: int = field(default_factory=lambda: next(_numbers))

    def __post_init__(self) -> None:
        _PLANS[self.number] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardPlan":
        return self  # a copied model is sharded over the same ranks

    def lends(self, name: str, dtype: torch.dtype) -> bool:
        """True if gathering gives the parameter, stored in ``dtype``, itself and not a copy."""
        return self.layouts[name].shards == 1 and self.compute_dtype in (None, dtype)

    def scope(self, names: Sequence[str]) -> str:
        """Who asks for a collective of these parameters: their unit, or both ends of the range."""
        owners = [unit for unit, held in self.units.items() if any(n in held for n in names)]
        if len(names) == 1:
            return names[0]
        return owners[0] if len(owners) == 1 else f"{owners[0]}..{owners[-1]}"


def plan_of(number: int) -> ShardPlan:
    """The plan of a living model."""
    return _PLANS[number]


class GatherInFlight(NamedTuple):
    """Parameters on their way: in one buffer, or whole on every rank and only cast."""

    pending: Pending | None
    whole: list[Tensor]
    layouts: list[Layout]

    def wait(self) -> list[Tensor]:
        """The full parameters."""
        if self.pending is None:
            return self.whole
        return unpack_gathered(self.pending.wait(), self.layouts)


def start_gather(shards: list[Tensor], plan: ShardPlan, names: Sequence[str]) -> GatherInFlight:
    """Starts gathering parameters of one dtype, all sharded or none of them.

    Args:
        shards: this rank's rows of each.
        plan: of the model.
        names: of the parameters.
    """
    layouts = [plan.layouts[name] for name in names]
    dtype = plan.compute_dtype or shards[0].dtype
    if layouts[0].shards == 1:
        return GatherInFlight(None, [shard.to(dtype) for shard in shards], layouts)
    flat = pack_shards(shards, layouts, dtype)
    pending = start_all_gather(flat, plan.shard, scope=plan.scope(names))
    return GatherInFlight(pending, [], layouts)


def start_scatter(
    gradients: list[Tensor], plan: ShardPlan, names: Sequence[str]
) -> Pending | PendingRows:
    """Starts the sum over the shard axis of full gradients of one dtype.

    Args:
        gradients: one per name; **emptied**.
        plan: of the model.
        names: of the parameters, all sharded or none of them.
    """
    layouts = [plan.layouts[name] for name in names]
    dtype = plan.reduce_dtype or gradients[0].dtype
    if layouts[0].shards > 1:
        packed = pack_gradients(gradients, layouts, rows_sent(plan.shard), dtype)
        return start_reduce_scatter(packed, plan.shard, scope=plan.scope(names))
    flat = torch.cat([gradient.reshape(-1).to(dtype) for gradient in gradients])
    gradients.clear()
    return start_psum(flat, plan.shard, scope=plan.scope(names))


def start_replica_sum(flat: Tensor, plan: ShardPlan, names: Sequence[str]) -> Pending:
    """Starts the sum over the replica axis of what the shard axis has summed; in place."""
    return start_psum(flat, plan.replica, scope=plan.scope(names))


def mean_shards(
    flat: Tensor, plan: ShardPlan, names: Sequence[str], dtype: torch.dtype
) -> list[Tensor]:
    """This rank's rows of the mean gradients, from their flat sum; changes ``flat``."""
    layouts = [plan.layouts[name] for name in names]
    flat *= 1.0 / (plan.shard.size * plan.replica.size)
    return unpack_shards(flat.to(dtype), layouts, plan.shard.index)


def _gather(shard: Tensor, plan: int, name: str) -> Tensor:
    [full] = start_gather([shard], plan_of(plan), (name,)).wait()
    return full.clone() if full is shard else full  # an operator's result is new memory


def _scatter(gradient: Tensor, plan: int, name: str, dtype: torch.dtype) -> Tensor:
    of, names = plan_of(plan), (name,)
    flat = start_scatter([gradient], of, names).wait()
    if of.replica.size > 1:
        flat = start_replica_sum(flat, of, names).wait()
    return mean_shards(flat, of, names, dtype)[0]


def _fake_gather(shard: Tensor, plan: int, name: str) -> Tensor:
    of = plan_of(plan)
    return shard.new_empty(of.layouts[name].shape, dtype=of.compute_dtype or shard.dtype)


def _fake_scatter(gradient: Tensor, plan: int, name: str, dtype: torch.dtype) -> Tensor:
    of = plan_of(plan)
    return gradient.new_empty(of.layouts[name].local_shape(of.shard.index), dtype=dtype)


def _remember(ctx: Any, inputs: tuple[Tensor, int, str], output: Tensor) -> None:
    shard, ctx.plan, ctx.name = inputs
    ctx.dtype = shard.dtype


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return scatter(gradient, ctx.plan, ctx.name, ctx.dtype), None, None


_library = torch.library.Library("twinshard", "DEF")
_library.define("gather(Tensor shard, int plan, str name) -> Tensor")
_library.define("scatter(Tensor gradient, int plan, str name, ScalarType dtype) -> Tensor")
_library.impl("gather", _gather, "CompositeExplicitAutograd")
_library.impl("scatter", _scatter, "CompositeExplicitAutograd")
torch.library.register_fake("twinshard::gather", _fake_gather, lib=_library)
torch.library.register_fake("twinshard::scatter", _fake_scatter, lib=_library)
torch.library.register_autograd(
    "twinshard::gather", _backward, setup_context=_remember, lib=_library
)

gather = torch.ops.twinshard.gather.default
scatter = torch.ops.twinshard.scatter.default
