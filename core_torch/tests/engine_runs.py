"""Runs of the shipped loop and engine on ranks that are threads, with a tiny inner step.

The model is a chain of four small matrices, one unit each, which a replica trains on random
numbers of its own. So a run takes milliseconds, and everything that a round may get wrong still
shows: anchors, momenta, the inner optimizer, hooks, counters, messages.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
import torch.nn as nn

from core_torch import train as core_train
from core_torch.adamw import AdamW
from core_torch.checkpoint.snapshot import restore, snapshot
from core_torch.checkpoint.state import SavedState, Shard
from core_torch.collectives import Ledger, psum
from core_torch.config import DataConfig, MeshConfig, RunConfig, SyncConfig, TrainConfig
from core_torch.errors import NonFinite
from core_torch.mesh import Mesh
from core_torch.shard.base import Sharded
from core_torch.sync.build import build_engine
from core_torch.sync.engine import LocalSGD
from core_torch.sync.events import RoundEvent
from core_torch.tests.fake_ranks import World, make_world
from core_torch.train import TrainState, finish, train

SHAPES = {"0.weight": (7, 5), "1.weight": (3, 7), "2.weight": (3, 3), "3.weight": (2, 3)}
UNITS = {f"unit{i}": [name] for i, name in enumerate(SHAPES)}
Fault = tuple[int, int, str, float]  # after this step, on this replica, parameter, value


@dataclass
class Life:
    """What a rank is, and what happened to it. It rides through the loop in place of the data."""

    identity: int  # whose numbers it draws
    shard: int
    step_ns: int  # of its virtual clock
    jitter_ns: tuple[int, ...] = (0,)  # each below step_ns
    faults: list[tuple[int, str, float]] = field(default_factory=list)
    state: TrainState | None = None
    is_watched: bool = False  # keep ``history``
    looks: bool = False  # evaluates after each step
    leaves_after: int | None = None  # inner steps after which there are no more data
    forwards: list[str] = field(default_factory=list)  # parameters right after each
    history: list[str] = field(default_factory=list)  # everything after each step, at last the end
    commits: list[int] = field(default_factory=list)
    theta: list[list[bytes]] = field(default_factory=list)  # parameters after each step
    marks: list[int] = field(default_factory=list)  # dispatches before each step, and at the end
    events: list[RoundEvent] = field(default_factory=list)
    closing: int = 0  # of the events were told by finish
    error: str | None = None

    def clock(self) -> int:
        """Nanoseconds since the run began: what its steps took. Shard 0 tells the truth."""
        if self.state is None:
            return 0
        step = self.state.step
        now = step * self.step_ns + self.jitter_ns[step % len(self.jitter_ns)]
        return (1 + 3 * self.shard) * now

    @property
    def sync(self) -> LocalSGD:
        """The engine."""
        assert self.state is not None and self.state.sync is not None
        return self.state.sync


def config_of(
    sync: SyncConfig, *, replicas: int = 2, shards: int = 1, steps: int = 13, dtype: str = "float64"
) -> RunConfig:
    """A run of the made-up model."""
    return RunConfig(
        mesh=MeshConfig(replicas=replicas, shards=shards),
        data=DataConfig(sequence=4, batch=1),
        sync=sync,
        train=TrainConfig(steps=steps, dtype=dtype),  # type: ignore[arg-type]
    )


def begin(config: RunConfig, mesh: Mesh, life: Life, units: dict[str, list[str]] = UNITS) -> Life:
    """Model, optimizer and engine of one rank."""
    dtype = getattr(torch, config.train.dtype)
    layers = [nn.Linear(shape[1], shape[0], bias=False, dtype=dtype) for shape in SHAPES.values()]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):  # equal on all replicas, not on all shards
            p.copy_(numbers(p.shape, [i, life.shard]))
    optimizer = AdamW(model.parameters(), lr=0.05, eps=1e-4)
    optimizer.init_state()
    sharded = Sharded(model, units)
    sync = build_engine(sharded, optimizer, mesh, config.sync, clock=life.clock)
    untyped: Any = (config, mesh, life, model, sharded, optimizer, sync)
    life.state = TrainState(*untyped)
    if sync is not None:
        sync.votes.enough_tokens = life.state.planned_tokens
    return life


def numbers(shape: Sequence[int], seed: list[int]) -> torch.Tensor:
    """Normal draws that depend on nothing but ``seed``."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=tuple(shape)))


def inner_step(state: TrainState, *, synchronous: bool) -> tuple[float, float]:
    """Stands for the shipped one: a forward with its hooks, a backward, AdamW."""
    life = cast(Life, state.corpus)
    assert state.sync is not None
    dtype = next(state.model.parameters()).dtype
    rows = numbers((6, 7), [life.identity, state.step, life.shard]).to(dtype)
    out = cast(nn.Module, state.model)(rows[:, :5])
    life.forwards.append(digest(state.model.parameters()))
    loss = (out - rows[:, 5:]).square().mean()
    loss.backward()
    for p in state.model.parameters():
        if synchronous and p.grad is not None:
            p.grad = psum(p.grad, state.mesh.replica, scope="gradient") / state.mesh.replica.size
    state.tokens = state.sync.votes.tokens
    state.optimizer.step()
    state.optimizer.zero_grad()
    return loss.item(), 0.0


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Of every bit."""
    found = hashlib.sha256()
    for x in tensors:
        found.update(x.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def bits(life: Life) -> str:
    """Everything that a trajectory consists of, without moving it."""
    saved = in_memory(life)
    tensors = [*saved.own.items(), *saved.shared.items()]
    scalars = {k: v for k, v in saved.scalars.items() if not k.endswith("_bytes")}
    return digest(x.local for _, x in sorted(tensors)) + json.dumps(scalars)


def in_memory(life: Life) -> SavedState:
    """What a checkpoint would hold, as if it had been written and read."""
    assert life.state is not None
    with unseen(life.state.mesh.ledger):
        saved = snapshot(life.state)
    shared, own = (
        {k: Shard(x.local.clone(), *x[1:]) for k, x in part.items()} for part in saved[:2]
    )
    return SavedState(shared, own, json.loads(json.dumps(saved.scalars)))


@contextmanager
def unseen(ledger: Ledger) -> Iterator[None]:
    """Keeps what a test looks at out of the ledger: CO2* gathers its anchor to show it."""
    kept = ledger.bytes.copy(), ledger.calls.copy(), ledger.trace
    ledger.trace = None
    yield
    ledger.bytes, ledger.calls, ledger.trace = kept


def live(life: Life, stop: Callable[[Life], bool] | None = None) -> Life:
    """Trains to the end and finishes, or until ``stop`` says so after a step."""
    state = life.state
    assert state is not None
    trace = state.mesh.ledger.trace
    assert trace is not None
    try:
        life.marks.append(len(trace))
        for record in train(state):
            life.events += [] if record.round is None else [record.round]
            with torch.no_grad():
                for step, name, value in life.faults:
                    if step == state.step:
                        dict(state.model.named_parameters())[name].view(-1)[-1] = value
            life.theta.append([p.detach().numpy().tobytes() for p in state.model.parameters()])
            if life.is_watched:
                life.history.append(bits(life))
            life.marks.append(len(trace))
            if life.looks:
                look(life, state)
            if stop is not None and stop(life):
                return life
            if life.leaves_after == state.step:
                break
        closing = finish(state)
        life.events += closing
        life.closing = len(closing)
    except NonFinite as error:
        life.error = str(error)
    if life.is_watched:
        life.history.append(bits(life))
    return life


@torch.no_grad()
def look(life: Life, state: TrainState) -> None:
    """What an evaluation does, with the anchor and with the parameters."""
    model = cast(nn.Module, state.model)
    rows = numbers((2, 5), [1]).to(next(model.parameters()).dtype)
    model.eval()
    with life.sync.anchor_weights():
        model(rows)
    model(rows)
    model.train()


def run(
    config: RunConfig,
    *,
    identities: Sequence[int] | None = None,
    step_ns: Sequence[int] | None = None,
    faults: Sequence[Fault] = (),
    stop: Callable[[Life], bool] | None = None,
    after: Callable[[World, int, Life], Life] | None = None,
    watched: bool = False,
    looks: bool = False,
    leaves: dict[int, int] | None = None,
) -> list[Life]:
    """All ranks of a run, replica-major.

    Args:
        config: see ``config_of``.
        identities: of the replicas; by default all different.
        step_ns: of each replica's clock; by default time stands still.
        faults: values to write into the last element of a parameter, on the last shard.
        stop: see ``live``.
        after: what a rank does with its life once it is over.
        watched: keep everything after each step.
        looks: also evaluate after each step.
        leaves: replica -> inner steps after which it has no more data.
    """
    replicas, shards = config.mesh.replicas, config.mesh.shards
    world = make_world(replicas, shards)

    def one(rank: int) -> Life:
        n, m = divmod(rank, shards)
        mine = [(s, name, value) for s, at, name, value in faults if at == n and m == shards - 1]
        identity = n if identities is None else identities[n]
        each = 0 if step_ns is None else step_ns[n]
        life = Life(identity, m, each, faults=mine, is_watched=after is not None or watched)
        life.leaves_after, life.looks = (leaves or {}).get(n), looks
        live(begin(config, world.meshes[rank], life), stop)
        return life if after is None else after(world, rank, life)

    with mock.patch.object(core_train, "inner_step", inner_step):
        return world.room.run(one, replicas * shards)


def resumed(world: World, rank: int, life: Life) -> Life:
    """The rest of a run that was stopped, by a rank that knows nothing but what was saved."""
    assert life.state is not None
    saved = in_memory(life)
    again = begin(
        life.state.config,
        world.meshes[rank],
        Life(
            life.identity,
            life.shard,
            life.step_ns,
            life.jitter_ns,
            life.faults,
            is_watched=True,
        ),
    )
    assert again.state is not None
    restore(again.state, saved)
    return live(again)
