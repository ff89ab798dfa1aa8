"""Random runs by the clock, for test_timed_rounds.py: the shipped loop, engine, votes, commits."""

from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple, cast
from unittest import mock

import numpy as np
import torch
import torch.nn as nn

from core_torch import train as core_train
from core_torch.cli.session import Session
from core_torch.config import CheckpointConfig, RunConfig, SyncConfig, TimedConfig
from core_torch.tests.engine_runs import Life, begin, config_of
from core_torch.tests.fake_ranks import World, make_world
from core_torch.train import TrainState, finish, train

SECOND = 10**9
HALVES = {"front": ["0.weight", "1.weight"], "back": ["2.weight", "3.weight"]}


class Schedule(NamedTuple):
    """One run by the clock."""

    seed: int
    config: RunConfig
    step_ns: list[int]  # of each replica, about
    leaves_after: list[int | None]  # inner steps after which a replica has no more data


def random_schedule(seed: int) -> Schedule:
    """Speeds up to 1:12, intervals from less than a step to longer than the run."""
    rng = np.random.default_rng(seed)
    replicas, shards = int(rng.integers(2, 5)), int(rng.choice([1, 1, 1, 2]))
    steps = int(rng.integers(3, 9))
    step_ns = [int(x) * SECOND for x in rng.integers(1, 13, size=replicas)]
    if rng.random() < 0.2:
        step_ns = [step_ns[0]] * replicas
    warmup = int(rng.choice([0, 0, 1, 3, steps, steps + 2]))
    leaves: list[int | None] = [None] * replicas
    if rng.random() < 0.4 and warmup <= steps:
        for n in rng.choice(replicas, size=int(rng.integers(1, replicas + 1)), replace=False):
            leaves[n] = int(rng.integers(warmup, steps + 1))
    sync = SyncConfig(
        method="aedit",
        every=f"{rng.integers(1, 50)}s",
        warmup=warmup,
        layerwise=bool(rng.random() < 0.5),
        prefetch_units=int(rng.integers(1, 3)),
        wire=rng.choice(["fp32", "fp32", "bf16", "int8"]).item(),
        offload=bool(rng.random() < 0.2),
        timed=TimedConfig(
            min_total_steps=int(rng.choice([1, 2, 10, 40])),
            step_weight=float(rng.choice([0.0, 0.5, 1.0])),
        ),
    )
    config = config_of(sync, replicas=replicas, shards=shards, steps=steps)
    commits = CheckpointConfig(every=int(rng.choice([0, 1, 3])))
    return Schedule(seed, replace(config, checkpoint=commits), step_ns, leaves)


def live_to_the_end(schedule: Schedule, world: World, rank: int) -> Life:
    """One rank from its first step to its end, with the commits of the command line.

    A commit takes all ranks of the world. So a replica that leaves makes none, and nobody can.
    """
    mesh = world.meshes[rank]
    n, m = mesh.replica.index, mesh.shard.index
    jitter = np.random.default_rng([schedule.seed, n]).integers(0, schedule.step_ns[n], size=7)
    life = Life(n, m, schedule.step_ns[n], tuple(int(x) for x in jitter))
    begin(schedule.config, mesh, life, HALVES)
    state, leaves = life.state, schedule.leaves_after[n]
    assert state is not None
    session = cast(Session, SimpleNamespace(config=schedule.config, state=state))

    def commit() -> None:
        if life.commits[-1:] != [state.common_step]:
            seat = world.everyone[rank]
            seat.group.meet(seat.index, ("commit", state.common_step), None)
            life.commits.append(state.common_step)

    for record in train(state) if leaves != 0 else ():
        life.events += [] if record.round is None else [record.round]
        if Session._commit_is_due(session):
            commit()
        if leaves is not None and record.step >= leaves:
            break
    if not any(x is not None for x in schedule.leaves_after):
        commit()
    life.events += finish(state)
    return life


def stroll(state: TrainState, *, synchronous: bool) -> tuple[float, float]:
    """Stands for an inner step: a forward with its hooks, and a move in place of training."""
    life = cast(Life, state.corpus)
    assert state.sync is not None
    cast(nn.Module, state.model)(torch.ones(1, 5, dtype=torch.float64))
    state.tokens = state.sync.votes.tokens
    length = 0.01 * (1 + (state.step + (0 if synchronous else 3 * life.identity)) % 7)
    with torch.no_grad():
        for p in state.model.parameters():
            p.add_(p, alpha=length)
    return 1.0, 1.0


def live_all(schedule: Schedule) -> list[Life]:
    """All ranks of a schedule."""
    mesh = schedule.config.mesh
    world = make_world(mesh.replicas, mesh.shards)
    with mock.patch.object(core_train, "inner_step", stroll):
        return world.room.run(lambda rank: live_to_the_end(schedule, world, rank), mesh.ranks)
