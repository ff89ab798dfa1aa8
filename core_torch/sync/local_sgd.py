"""Local SGD in somebody's own training loop.

    mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replica", "shard"))
    fully_shard(model, mesh=mesh["shard"])                # or simple_fsdp(model, mesh["shard"])
    sync = local_sgd(model, optimizer, mesh, SyncConfig(method="edit", every=128))

    for batch in data:
        loss_of(model, batch).backward()
        sync.before_step()                # means of gradients, while training is synchronous
        optimizer.step()
        optimizer.zero_grad()
        sync.after_step()                 # a round if one is due, or none

    sync.finish()                         # no inner step is lost; the model holds the anchor

or, with the two calls around ``optimizer.step()`` and the last one made by themselves:

    with local_sgd(model, optimizer, mesh, SyncConfig(method="diloco", every=500)):
        ...
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from core_torch.collectives import start_psum
from core_torch.config import SyncConfig, check
from core_torch.errors import ConfigError
from core_torch.mesh import mesh_of
from core_torch.shard.access import local_shard
from core_torch.shard.compile import Compilation
from core_torch.shard.parametrise import is_sharded_class
from core_torch.shard.simple_fsdp import plan_of_module
from core_torch.shard.wrap import Units, units_of
from core_torch.sync import saved
from core_torch.sync.engine import LocalSGD
from core_torch.sync.events import RoundEvent, refuse_non_finite
from core_torch.sync.forward_sync import exchange_of, hook_forward
from core_torch.sync.methods import rules_of
from core_torch.sync.trigger import Clock, make_trigger
from core_torch.sync.units import check_copies, sync_units


def local_sgd(
    module: nn.Module,
    optimizer: Optimizer,
    mesh: DeviceMesh,
    config: SyncConfig,
    *,
    units: Units = None,
    compilation: Compilation | None = None,
    forward_prefetch: int = 0,
    clock: Clock = time.monotonic_ns,
) -> "ReplicaSync":
    """Keeps the replicas of ``module`` together. All ranks must call this together.

    Args:
        module: sharded on ``mesh["shard"]`` by ``fully_shard`` or ``simple_fsdp``, or plain if
            the mesh has no such dimension; equal on all replicas.
        optimizer: of its parameters.
        mesh: with the dimension "replica".
        config: method and settings; see ``SyncConfig``.
        units: what is exchanged as one, in order of the forward: see ``wrap.units_of``. None:
            FSDP2's groups, SimpleFSDP's units, or elements of module lists and other children.
        compilation: of ``compile_model``, if the module is compiled and rounds run inside the
            forward; before its first call.
        forward_prefetch: units that FSDP2 was told to gather before their turn.
        clock: of time triggers, monotonic nanoseconds.

    Raises:
        ConfigError: settings that cannot work, or a module that is not as above.
    """
    check(config)
    _refuse_replicated(module, mesh)
    groups = _groups(module, units)
    ours = {id(p) for p in module.parameters() if p.requires_grad}
    theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not theirs <= ours:
        raise ConfigError(
            f"the optimizer holds {len(theirs - ours)} parameters that the module does not have",
            likely="it was made before the module was sharded",
            next="shard the module first, then make the optimizer",
        )
    rules = rules_of(config)
    if rules.method.unit == "none":
        raise ConfigError(
            "method synchronous has no rounds",
            next="average gradients over the replicas with FSDP2's or DDP's own means",
        )
    own = mesh_of(mesh)
    kind, count = rules.method.unit, rules.fragments
    made = sync_units(module, groups, kind=kind, fragments=count, holders=own.holders)
    check_copies(made, rules.wire)
    sync = LocalSGD(made, optimizer, own, rules=rules, trigger=make_trigger(config, clock))
    handles: list[RemovableHandle] = []
    if rules.layerwise and compilation is not None:
        compilation.attach(exchange_of(sync))
    elif rules.layerwise:
        handles = hook_forward(sync, module, lookahead=forward_prefetch)
    return ReplicaSync(sync, optimizer, config, handles)


class ReplicaSync:
    """What ``local_sgd`` returns."""

    def __init__(
        self,
        engine: LocalSGD,
        optimizer: Optimizer,
        config: SyncConfig,
        handles: list[RemovableHandle],
    ) -> None:
        self.engine, self._config = engine, config
        self._optimizer, self._handles = optimizer, handles

    @property
    def is_synchronous(self) -> bool:
        """True while the next inner step averages gradients over the replicas."""
        return self.engine.is_synchronous

    @property
    def tokens(self) -> int:
        """Tokens of all replicas together, by what ``after_step`` was told."""
        return self.engine.votes.tokens

    @torch.no_grad()
    def before_step(self) -> None:
        """Call between backward and ``optimizer.step()``: means over the replicas in warm-up."""
        if not self.engine.is_synchronous or self.engine.axes.replica.size == 1:
            return
        flights = []
        for unit in self.engine.units:
            grads = [local_shard(p.grad) for p in unit.params if p.grad is not None]
            if grads:
                flat = torch.cat([grad.reshape(-1) for grad in grads])
                flight = start_psum(flat, self.engine.axes.replica, scope=unit.name)
                flights.append((flight, grads))
        for flight, grads in flights:
            mean = flight.wait() * (1.0 / self.engine.axes.replica.size)
            for grad, part in zip(grads, mean.split([g.numel() for g in grads]), strict=True):
                grad.copy_(part.view(grad.shape))

    def after_step(self, tokens: int = 0) -> RoundEvent | None:
        """Call after ``optimizer.step()``: a round if one is due.

        Args:
            tokens: that this replica has trained on in the step, for ``tokens``.

        Returns:
            The event of a round that is complete and was not told yet, if any.

        Raises:
            NonFinite: a replica diverged under a method that cannot leave it out.
        """
        event = self.engine.after_step(tokens)
        refuse_non_finite(event, self._config)
        return event

    def finish(self) -> list[RoundEvent]:
        """Call once at the end; see ``LocalSGD.finish``. Afterwards the model is the anchor."""
        events = self.engine.finish()
        for event in events:
            refuse_non_finite(event, self._config)
        return events

    @contextmanager
    def anchor_weights(self) -> Iterator[None]:
        """The model with what all replicas agreed on last, for evaluation; restores every bit."""
        with self.engine.anchor_weights():
            yield

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: tensors and JSON leaves; see ``saved.state_dict``."""
        return saved.state_dict(self.engine)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what ``state_dict`` gave on the same rank.

        Raises:
            CheckpointMismatch: it belongs to another model or method.
        """
        saved.load_state_dict(self.engine, state)

    def detach(self) -> None:
        """Removes the hooks from module and optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Self:
        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self.before_step()

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self.after_step()

        self._handles.append(self._optimizer.register_step_pre_hook(before))
        self._handles.append(self._optimizer.register_step_post_hook(after))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finish()
        self.detach()


def _refuse_replicated(module: nn.Module, mesh: DeviceMesh) -> None:
    """Parameters that are already kept equal over the replicas leave nothing to do."""
    for name, p in module.named_parameters():
        names = p.device_mesh.mesh_dim_names or () if isinstance(p, DTensor) else ()
        if "replica" in names:
            raise ConfigError(
                f"parameter {name} lies on the mesh dimensions {names}",
                likely="the module averages gradients over the replicas in every step (HSDP)",
                next='shard it on mesh["shard"] alone',
            )


def _groups(module: nn.Module, units: Units) -> dict[str, list[str]]:
    """Units as the sharding gathers them, unless they are given."""
    if units is not None:
        return units_of(module, units)
    if is_sharded_class(type(module)):
        plan = plan_of_module(module)
        if plan.replica.size > 1:
            raise ConfigError(
                "the module is sharded with replicas of its own (hybrid_shard)",
                next='simple_fsdp(module, mesh["shard"])',
            )
        return plan.units
    if not any(isinstance(m, FSDPModule) for m in module.modules()):
        return units_of(module)
    groups: dict[str, list[str]] = {}
    names = dict(module.named_modules())
    for param, _ in module.named_parameters():
        parts = param.split(".")[:-1]
        around = [".".join(parts[:i]) for i in range(len(parts), -1, -1)]
        home = next((n for n in around if isinstance(names[n], FSDPModule)), "")
        groups.setdefault(home or "root", []).append(param)
    return groups
