"""Local SGD in loops that are not Twinshard's: a small torch model, torch's own optimizers.

Imports no jax. Four ranks, 2 replicas x 2 shards; every replica has data of its own.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from core_torch.config import SyncConfig
from core_torch.errors import TwinshardError
from core_torch.shard.access import local_shard
from core_torch.shard.compile import compile_model
from core_torch.shard.schedule import CompileOptions
from core_torch.shard.simple_fsdp import simple_fsdp
from core_torch.sync.local_sgd import ReplicaSync, local_sgd
from parity_tests.cases.equalities import configured
from parity_tests.harness.rank_mesh import mesh_for
from parity_tests.harness.torch_bridge import to_numpy

Told = dict[str, Any]
SETTINGS: dict[str, Any] = {"method": "edit", "every": 3, "warmup": 2}


class Tower(nn.Module):
    """A stem, blocks, a head; rows that two shards cut unevenly."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.head = nn.Linear(7, 3)
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=draw) / 3)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 5) -> (B, 3)"""
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: Tensor = self.head(x)
        return out


def sharded(how: str, mesh: DeviceMesh, seed: int = 0) -> tuple[nn.Module, Any]:
    """A tower under one of the ways to shard it, and its compilation if there is one."""
    model = Tower(seed).double()
    if how == "plain":
        return model, None
    if how == "fsdp2":
        for part in (model.stem, *model.blocks, model.head):
            fully_shard(part, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        return model, None
    if how == "fsdp2 root":  # stem and head in the root's group, as many loops have it
        for part in model.blocks:
            fully_shard(part, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        return model, None
    simple_fsdp(model, mesh["shard"])
    if how == "simple_fsdp":
        return model, None
    return model, compile_model(model, CompileOptions(backend="aot_eager"))


def data_of(step: int, replica: int, shard: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one rank and step."""
    draw = np.random.default_rng([step, replica, shard])
    scale = 1 + 3 * replica
    pair = draw.normal(size=(4, 5)) * scale, draw.normal(size=(4, 3))
    return torch.from_numpy(pair[0]), torch.from_numpy(pair[1])


def one_step(model: nn.Module, step: int, mesh: DeviceMesh, factor: float = 1.0) -> float:
    """Loss and gradients of this rank's data."""
    x, y = data_of(step, mesh.get_local_rank("replica"), mesh.get_local_rank("shard"))
    loss = factor * ((model(x) - y) ** 2).mean()
    torch.autograd.backward(loss)
    return float(loss)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """PyTorch's own AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def told_of(model: nn.Module, losses: list[float], events: list[Any]) -> Told:
    """A run as plain data."""
    rows = {name: to_numpy(local_shard(p)) for name, p in model.named_parameters()}
    return {"losses": losses, "events": [asdict(e) for e in events if e], "params": rows}


def run(how: str, changes: dict[str, Any], form: str = "explicit", steps: int = 9) -> Told:
    """Trains with the calls written out, or inside the context manager."""
    mesh = mesh_for(2, 2).torch_mesh
    model, compilation = sharded(how, mesh)
    optimizer = optimizer_of(model)
    config = configured(SyncConfig(), SETTINGS | changes)
    sync = local_sgd(model, optimizer, mesh, config, compilation=compilation)
    losses, events = [], list[Any]()
    if form == "with":
        with sync:
            for step in range(steps):
                losses.append(one_step(model, step, mesh))
                optimizer.step()
                optimizer.zero_grad()
        hooks = optimizer._optimizer_step_post_hooks, optimizer._optimizer_step_pre_hooks
        assert not any(hooks), "hooks outlive the context"
    else:
        for step in range(steps):
            losses.append(one_step(model, step, mesh))
            sync.before_step()
            optimizer.step()
            optimizer.zero_grad()
            events.append(sync.after_step())
        events += sync.finish()
        sync.detach()
    return told_of(model, losses, events)


def resumed(how: str, changes: dict[str, Any], stop: int, steps: int = 9) -> Told:
    """Takes all state at ``stop``, builds everything anew, loads it and goes on."""
    mesh = mesh_for(2, 2).torch_mesh
    config = configured(SyncConfig(), SETTINGS | changes)
    losses, events = [], list[Any]()
    kept: dict[str, Any] = {}
    for first, last in ((0, stop), (stop, steps)):
        model, compilation = sharded(how, mesh)
        optimizer = optimizer_of(model)
        sync = local_sgd(model, optimizer, mesh, config, compilation=compilation)
        if kept:
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])
            sync.load_state_dict(kept["sync"])
        for step in range(first, last):
            losses.append(one_step(model, step, mesh))
            events.append(_explicit(sync, optimizer))
        if last == stop:
            once, again = sync.state_dict(), sync.state_dict()
            assert str(once["scalars"]) == str(again["scalars"])
            kept = {"sync": once, "optimizer": optimizer.state_dict()}
            kept["model"] = {k: v.detach().clone() for k, v in model.state_dict().items()}
        else:
            events += sync.finish()
        sync.detach()
    return told_of(model, losses, events)


def _explicit(sync: ReplicaSync, optimizer: torch.optim.Optimizer) -> Any:
    sync.before_step()
    optimizer.step()
    optimizer.zero_grad()
    return sync.after_step()


def two_models(changes: tuple[dict[str, Any], dict[str, Any]], together: bool) -> list[Told]:
    """Two models with methods of their own, step by step in turn or one after the other."""
    mesh = mesh_for(2, 2).torch_mesh
    made = []
    for seed, change in enumerate(changes):
        model, _ = sharded("fsdp2", mesh, seed)
        optimizer = optimizer_of(model)
        config = configured(SyncConfig(), SETTINGS | change)
        made.append((model, optimizer, local_sgd(model, optimizer, mesh, config)))
    losses: list[list[float]] = [[], []]
    events: list[list[Any]] = [[], []]

    def step_of(i: int, step: int) -> None:
        model, optimizer, sync = made[i]
        losses[i].append(one_step(model, step + 100 * i, mesh))
        events[i].append(_explicit(sync, optimizer))

    order = [(i, s) for s in range(9) for i in range(2)]
    for i, s in order if together else sorted(order):
        step_of(i, s)
    for i, (_, _, sync) in enumerate(made):
        events[i] += sync.finish()
        sync.detach()
    return [told_of(made[i][0], losses[i], events[i]) for i in range(2)]


def _fsdp2(seed: int = 0) -> nn.Module:
    return sharded("fsdp2", mesh_for(2, 2).torch_mesh, seed)[0]


def _hybrid() -> nn.Module:
    model = Tower()
    fully_shard(model, mesh=mesh_for(2, 2).torch_mesh)
    return model


def _half() -> nn.Module:
    return Tower().bfloat16()


def _different() -> nn.Module:
    return Tower(seed=mesh_for(2, 2).replica.index)


def round_past_the_hooks() -> str:
    """What is said if a due round finds a module in eval mode."""
    mesh = mesh_for(2, 2).torch_mesh
    model, _ = sharded("fsdp2", mesh)
    optimizer = optimizer_of(model)
    sync = local_sgd(model, optimizer, mesh, SyncConfig(method="edit", every=1))
    try:
        for step in range(3):
            one_step(model.train(step == 0), step, mesh)
            _explicit(sync, optimizer)
    except TwinshardError as error:
        return f"{sync.engine.step} {error.what}"
    finally:
        sync.detach()
    return "nothing"


# What cannot work: how the model is made, changes to SETTINGS, and what else is wrong.
WRONG: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "foreign optimizer": (_fsdp2, {}, "optimizer"),
    "replicated by FSDP2": (_hybrid, {}, ""),
    "stored in half precision": (_half, {}, ""),
    "no replicas": (_fsdp2, {}, "mesh"),
    "unused setting": (_fsdp2, {"method": "diloco", "penalty": {"clip": False}}, ""),
    "no rounds": (_fsdp2, {"method": "synchronous", "warmup": 0}, ""),
    "too many fragments": (
        _fsdp2,
        {"method": "streaming_diloco", "every": 36, "streaming": {"fragments": 9}},
        "",
    ),
    "different replicas": (_different, {"warmup": 0}, ""),
}


def refusals() -> dict[str, str]:
    """What is refused, and the first line of why."""
    whole, said = mesh_for(2, 2).torch_mesh, {}
    for name, (make, changes, what) in WRONG.items():
        model = make()
        optimizer = optimizer_of(Tower() if what == "optimizer" else model)
        config = configured(SyncConfig(), SETTINGS | changes)
        try:
            local_sgd(model, optimizer, whole["shard"] if what == "mesh" else whole, config)
            said[name] = "nothing"
        except TwinshardError as error:
            said[name] = " ".join(error.what.split())
    return said
