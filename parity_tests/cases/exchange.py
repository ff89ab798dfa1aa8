"""Sync rounds carried by a compiled forward, against the same rounds between two steps.

The engine is a stand-in whose exchange is small and does not commute with anything: the mean
over replicas, mixed with this rank's own rows by the number of the round. What matters is when
it is called and which values the forward reads. Imports no jax.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from core_torch.collectives import Pending, start_psum
from core_torch.mesh import Mesh
from core_torch.models import token_loss
from core_torch.models.llama import Llama
from core_torch.shard.access import local_shard
from core_torch.shard.compile import Compilation
from core_torch.shard.exchange import Exchange
from core_torch.shard.simple_fsdp import plan_of_module
from parity_tests.cases.sharded_training import ADAMW, How, Told, batch, collectives_of, sharded
from parity_tests.harness.rank_mesh import mesh_for

STEPS, EVERY = 6, 2  # so rounds are due after steps 2 and 4, and the last step leaves none due
REPLICAS, SHARDS = 2, 2


class Engine:
    """Exchanges units when it is told to, and keeps a log of every call."""

    def __init__(self, model: Llama, mesh: Mesh, limit: int) -> None:
        self.units = plan_of_module(model).units
        self.limit, self.axis = limit, mesh.replica
        params = dict(model.named_parameters())
        self.rows = [[local_shard(params[n]) for n in names] for names in self.units.values()]
        self.is_due = False
        self.round = 0
        self.flights: dict[int, Pending] = {}
        self.done = 0  # units of the round
        self.log: list[str] = []

    def exchange(self) -> Exchange:
        """What a compiled forward is told."""
        sizes = [sum(x.numel() * x.element_size() for x in rows) for rows in self.rows]
        return Exchange(
            units=self.units,
            limit=self.limit,
            begin=self.begin,
            start=self.start,
            finish=self.finish,
            end=self.end,
            payload_bytes=sizes,
            ranks=self.axis.size,
        )

    def begin(self) -> bool:
        self.log.append("begin" if self.is_due else "ordinary")
        if not self.is_due:
            return False
        self.is_due, self.done = False, 0
        self.round += 1
        return True

    def start(self, u: int) -> None:
        assert not torch.is_grad_enabled() and u not in self.flights
        self.log.append(f"start {u}")
        flat = torch.cat([x.reshape(-1) for x in self.rows[u]])
        self.flights[u] = start_psum(flat, self.axis, scope=f"exchange {u}")

    def finish(self, u: int) -> None:
        self.log.append(f"finish {u}")
        mean = self.flights.pop(u).wait() / self.axis.size
        for x, new in zip(self.rows[u], mean.split([x.numel() for x in self.rows[u]]), strict=True):
            x.lerp_(new.view(x.shape), 1.0 - 0.1 * self.round)
        self.done += 1

    def end(self) -> None:
        self.log.append("end")
        for u in range(self.done, len(self.rows)):
            self.start(u)
            self.finish(u)

    @torch.no_grad()
    def between_steps(self) -> None:
        """The whole round at once."""
        if self.begin():
            self.end()


def both_schedules(how: How, limit: int = 2, accumulate: int = 1) -> Told:
    """Trains the same compiled model twice: rounds in the forward, and between steps.

    Args:
        how: see sharded_training.py.
        limit: exchanges in flight.
        accumulate: micro-batches of a step.
    """
    mesh = mesh_for(REPLICAS, SHARDS)
    model, compilation = sharded(how, mesh)
    engine = Engine(model, mesh, limit)
    if compilation is not None:
        compilation.attach(engine.exchange())
    begin = [local_shard(p).clone() for p in model.parameters()]
    told: Told = {}
    for name in ("in the forward", "between steps"):
        if name == "in the forward" and compilation is None:
            continue
        engine.round, engine.log = 0, []
        with torch.no_grad():
            for p, first in zip(model.parameters(), begin, strict=True):
                local_shard(p).copy_(first)
        told[name] = trained(model, mesh, engine, accumulate, at_once=name == "between steps")
    return told | ({} if compilation is None else summary(compilation))


def trained(model: Llama, mesh: Mesh, engine: Engine, accumulate: int, *, at_once: bool) -> Told:
    """Losses, and digests of parameters after each forward and of each step's gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    told: Told = {"losses": [], "parameters": [], "gradients": [], "graphs": [], "evaluated": []}
    for step in range(STEPS):
        with torch.no_grad():  # also with a round due: it must wait for the training forward
            loss_of(model, mesh, 1000 + step)
        told["evaluated"].append(len(engine.log))
        for k in range(accumulate):
            loss = loss_of(model, mesh, step * accumulate + k)
            told["losses"].append(loss.item())
            told["parameters"].append(digest(local_shard(p) for p in model.parameters()))
            loss.backward()
        grads = [local_shard(p.grad) for p in model.parameters() if p.grad is not None]
        told["gradients"].append(digest(grads))
        optimizer.step()
        optimizer.zero_grad()
        told["graphs"].append({group: dict(seen) for group, seen in counters.items()})
        engine.is_due = (step + 1) % EVERY == 0 and step + 1 < STEPS
        told["evaluated"].append(len(engine.log))
        if at_once:
            engine.between_steps()
    return told | {"calls": engine.log}


def loss_of(model: Llama, mesh: Mesh, number: int) -> Tensor:
    """Of this rank's rows of a micro-batch; every replica has its own."""
    inputs, targets = batch(REPLICAS * number + mesh.replica.index, mesh.shard.index, SHARDS)
    return token_loss(model(inputs), targets)


def digest(tensors: Iterable[Tensor]) -> str:
    """Of every bit."""
    found = hashlib.sha256()
    for x in tensors:
        found.update(x.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def summary(compilation: Compilation) -> dict[str, Any]:
    """Programs, collectives and kernels."""
    return {
        "programs": [program.name for program in compilation.programs],
        "forward": collectives_of(compilation.program("forward")),
        "round": collectives_of(compilation.program("round")),
        "kernels": {
            name: [id(i.run) for i in compilation.program(name).instructions if i.kind == "compute"]
            for name in ("forward", "round")
        },
    }
