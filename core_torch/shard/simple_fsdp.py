"""SimpleFSDP: fully sharded data parallel as a parametrisation (arXiv:2411.00284).

    simple_fsdp(model, mesh)                # in place, like fully_shard
    model = compile_model(model)            # optional: see compile.py
    loss = loss_of(model(inputs)); loss.backward(); optimizer.step()

Parameters become DTensors that hold this rank's rows, under their plain names: state dicts,
optimizers and checkpoints see nothing else. Reading one in a forward gathers it:

    read(p) = gather(cast(rows of p))                                                (G2)
    d loss / d rows of p = mean over ranks of this rank's rows of d loss / d read(p)   (G3)

Equations (G1)..(G7) in docs/sharding/simple_fsdp.md.

There is no hook, no stream and no state machine, so the whole is one graph for a compiler, and
plain Python for a debugger. Where the paper's reading of a parameter is a DTensor
redistribution, ours is one operator with the same meaning (operators.py says why).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from core_torch.collectives import Axis, Ledger
from core_torch.errors import ConfigError
from core_torch.shard.compat import StridedShard
from core_torch.shard.layout import Layout
from core_torch.shard.operators import ShardPlan
from core_torch.shard.parametrise import Inside, Sharding, is_sharded_class, sharded_class
from core_torch.shard.wrap import Units, units_of

Mode = Literal["fully_shard", "replicate", "hybrid_shard"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Mixed precision. Parameters, their gradients and the optimizer keep the stored dtype."""

    compute_dtype: torch.dtype | None = None  # of gathered parameters and the root's inputs
    reduce_dtype: torch.dtype | None = None  # in which gradients are summed; None: as they come


def simple_fsdp(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    mode: Mode = "fully_shard",
    precision: Precision | None = None,
    units: Units = None,
    reshard_after_forward: bool = True,
    joined_mesh: DeviceMesh | None = None,
    axes: tuple[Axis, Axis] | None = None,
) -> nn.Module:
    """Shards ``module`` in place over ``mesh`` and returns it.

    Args:
        module: with full parameters, real or on the meta device, or with parameters that are
            DTensors of a tensor-parallel mesh already.
        mesh: 1-D for "fully_shard" and "replicate"; 2-D, replicas first, for "hybrid_shard".
        mode: shard over all ranks; copy to all; or shard inside a replica and copy across.
        precision: see ``Precision``.
        units: which modules are gathered as one where a compiled graph buckets by hand: names,
            nested lists of names, or classes; None: the elements of every module list, and each
            other child. See ``wrap.units_of``.
        reshard_after_forward: free gathered parameters after their use in the forward and gather
            them again in the backward; False keeps them, as pipelines want.
        joined_mesh: the mesh whose dims are those of ``mesh`` and then the tensor-parallel one;
            needed where parameters are DTensors already.
        axes: the replica and the shard axis, if bytes are to be entered in their ledger.

    Raises:
        ConfigError: a mesh of the wrong shape, units that do not fit the parameters, a module
            that keeps its parameters elsewhere, or one that is sharded already.
    """
    _check(module, mesh, mode)
    precision = precision or Precision()
    replica, shard = axes or _axes_of(mesh, mode)
    names = {p: name for name, p in module.named_parameters()}  # a tied one once
    cut = 1 if mode == "replicate" else shard.size
    plan = ShardPlan(
        layouts={name: _layout(name, p, cut) for p, name in names.items()},
        units=units_of(module, units),
        shard=shard,
        replica=replica,
        compute_dtype=precision.compute_dtype,
        reduce_dtype=precision.reduce_dtype,
        reshard_after_forward=reshard_after_forward,
    )
    sharded = {
        p: _distribute(p, plan.layouts[name], shard, mesh, joined_mesh) for p, name in names.items()
    }
    for child in list(module.modules()):
        if is_sharded_class(type(child)):  # see _check: nothing is left to do
            continue
        own = {key: p for key, p in child._parameters.items() if p is not None}
        inside = {key: Inside.of(p) for key, p in own.items() if isinstance(p, DTensor)}
        for key, p in own.items():
            child._parameters[key] = sharded[p]
        child._sharding = Sharding(plan, {key: names[p] for key, p in own.items()}, inside)  # type: ignore[assignment]
        kind = sharded_class(type(child), tuple(own), is_root=child is module)  # type: ignore[arg-type]
        child.__class__ = kind
    return module


def plan_of_module(module: nn.Module) -> ShardPlan:
    """The plan of a module that ``simple_fsdp`` has sharded.

    Raises:
        ConfigError: it has not.
    """
    sharding = module.__dict__.get("_sharding")
    if not isinstance(sharding, Sharding):
        raise ConfigError(
            f"{type(module).__name__} is not sharded", next="call simple_fsdp(module, mesh) first"
        )
    return sharding.plan


@torch.no_grad()
def materialise(
    module: nn.Module, device: torch.device, fill: Callable[[str, torch.Size], Tensor]
) -> None:
    """Gives parameters that were sharded on the meta device memory and weights, in place.

    Tied parameters stay tied. Buffers are the model's own business.

    Args:
        module: sharded by ``simple_fsdp``.
        device: of the weights.
        fill: the full parameter from its name and shape, equal on all ranks, of which each
            keeps its rows: so weights depend on no mesh. Under tensor parallelism the shape is
            that of this rank's part.
    """
    plan = plan_of_module(module)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, param in module.named_parameters():
        assert isinstance(param, DTensor)
        layout = plan.layouts[name]
        full, old = fill(name, layout.shape), param.to_local()
        if layout.shards > 1:
            start, count = layout.rows(plan.shard.index)
            full = full[start : start + count]
        made[param] = nn.Parameter(
            DTensor.from_local(
                full.to(device, old.dtype, copy=True),
                param.device_mesh,
                param.placements,
                run_check=False,
                shape=param.shape,
                stride=param.stride(),
            ),
            requires_grad=param.requires_grad,
        )
    for child in module.modules():
        for key, p in child._parameters.items():
            if p is not None:
                child._parameters[key] = made[p]


def _check(module: nn.Module, mesh: DeviceMesh, mode: Mode) -> None:
    wanted = 2 if mode == "hybrid_shard" else 1
    if mesh.ndim != wanted:
        raise ConfigError(
            f"mode {mode!r} needs a mesh of {wanted} dims, got {mesh.ndim}: {mesh}",
            next='mesh["shard"] for "fully_shard", mesh["replica", "shard"] for "hybrid_shard"',
        )
    for name, child in module.named_modules():
        where = f"module {name!r}" if name else "the root"
        is_bare = bool(name) and not child._parameters  # stages of a pipeline may share those
        if is_sharded_class(type(child)) and not is_bare:
            raise ConfigError(
                f"{where} is sharded already",
                next="call simple_fsdp once, on the root; units say what is gathered as one",
            )
        if isinstance(child, nn.RNNBase):
            raise ConfigError(
                f"{where}, a {type(child).__name__}, keeps its weights in a list of its own",
                likely="a gathered weight would never reach its kernel",
            )


def _axes_of(mesh: DeviceMesh, mode: Mode) -> tuple[Axis, Axis]:
    """The replica and the shard axis of a mesh that is not Twinshard's own."""
    ledger = Ledger()
    found = [
        Axis(name, mesh.get_group(dim), mesh.size(dim), mesh.get_local_rank(dim), ledger)
        for dim, name in enumerate(("replica", "shard")[-mesh.ndim :])
    ]
    if mode == "hybrid_shard":
        return found[0], found[1]
    return Axis("replica", None, 1, 0, ledger), found[0]


def _layout(name: str, param: Tensor, shards: int) -> Layout:
    local = param.to_local() if isinstance(param, DTensor) else param
    return Layout(name, local.shape, shards if local.ndim else 1)  # a scalar cannot be cut


@torch.no_grad()
def _distribute(
    param: nn.Parameter,
    layout: Layout,
    shard: Axis,
    mesh: DeviceMesh,
    joined_mesh: DeviceMesh | None,
) -> nn.Parameter:
    """The parameter with this rank's rows only, as a DTensor."""
    local = param.to_local() if isinstance(param, DTensor) else param.detach()
    last: Placement = Replicate() if layout.shards == 1 else Shard(0)
    placements = [*[Replicate()] * (mesh.ndim - 1), last]
    if layout.shards > 1:
        start, count = layout.rows(shard.index)
        local = local[start : start + count].clone()
    if isinstance(param, DTensor):
        if joined_mesh is None:
            raise ConfigError(
                f"parameter {layout.name} is a DTensor on {param.device_mesh} already",
                next='give joined_mesh, for instance mesh["shard", "tp"]',
            )
        mesh, placements = joined_mesh, [*placements, *param.placements]
        split = _times_cut(param)
        if split > 1 and layout.shards > 1:  # rows were cut by tensor parallelism first
            placements[-1 - param.device_mesh.ndim] = StridedShard(0, split_factor=split)
    distributed = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=param.shape, stride=param.stride()
    )
    return nn.Parameter(distributed, requires_grad=param.requires_grad)


def _times_cut(param: DTensor) -> int:
    """Into how many parts tensor parallelism has cut dimension 0."""
    sizes: Sequence[int] = param.device_mesh.shape
    cut = [n for n, p in zip(sizes, param.placements, strict=True) if p.is_shard(0)]
    return int(torch.Size(cut).numel())
