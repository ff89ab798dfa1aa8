"""``twinshard bench sync`` on each rank: two replicas of one shard, a core each.

Phase "pace": tokens per second of EDiT and A-EDiT when one replica is slow, against what the
replicas do alone. Phase "overlap": how much of a round's exchanges the forward hides.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from core_torch.bench.measure import batch_of
from core_torch.bench.plan import EXPOSED_UNITS, OVERLAPS, PACES, Size
from core_torch.collectives import gather_json
from core_torch.config import RunConfig, ShardConfig, SyncConfig
from core_torch.data.corpus import open_corpus
from core_torch.errors import ConfigError
from core_torch.evaluation import evaluate
from core_torch.mesh import Mesh
from core_torch.models import token_loss
from core_torch.models.build import init_weights
from core_torch.models.llama import Llama
from core_torch.shard.compat import graphs_compiled
from core_torch.shard.model import shard_model
from core_torch.sync.build import build_engine
from core_torch.sync.rounds import Wait
from core_torch.train import build, finish, train

OnEvent = Callable[[dict[str, Any]], None]
FOREVER = 1_000_000_000  # steps between rounds of a replica that trains alone


def measure(job: dict[str, Any], mesh: Mesh, emit: OnEvent) -> dict[str, Any]:
    """Runs one phase; the result is equal on all ranks."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[mesh.replica.index % len(cores)]})
    torch.set_num_threads(1)
    try:
        if job["phase"] == "pace":
            return measure_pace(job, mesh, emit)
        return measure_overlap(job, mesh, emit)
    finally:
        os.sched_setaffinity(0, set(cores))


def measure_pace(job: dict[str, Any], mesh: Mesh, emit: OnEvent) -> dict[str, Any]:
    """Pace, steps and loss of both methods.

    A replica is slowed down by sleeping after each step for ``slow - 1`` times what its step
    takes alone, so a slow machine is imitated that computes the same.
    """
    told: dict[str, Any] = {}
    corpus = open_corpus(Path(job["data"]))
    pace = PACES[job["size"]]
    alone: list[float] = []
    sleep = 0.0
    for replica in range(mesh.replica.size):
        config = _run(job, "edit", every=FOREVER)
        state = build(config, mesh, corpus)
        seconds = []
        if replica == mesh.replica.index:
            for record in train(state):
                seconds.append(record.seconds)
                if record.step == pace.alone_steps:
                    break
            own = statistics.median(seconds[pace.warm_steps :])
            is_slow = replica == mesh.replica.size - 1
            sleep = (job["slow"] - 1) * own if is_slow else 0.0
            alone.append(config.tokens_per_step / mesh.replica.size / (own + sleep))
        dist.barrier()
        emit({"event": "bench", "variant": f"replica {replica} alone", "step": 0})
    speeds = [x for own in gather_json(alone, device=mesh.device) for x in own]
    told["alone_tokens_per_second"] = speeds
    for method in ("edit", "aedit"):
        every: int | str = pace.every if method == "edit" else f"{job['seconds']}s"
        state = build(_run(job, method, every=every), mesh, corpus)
        marks = []
        for record in train(state):
            time.sleep(sleep)
            if record.round is not None and not record.round.empty:
                marks.append((time.perf_counter(), record.round.steps))
            emit({"event": "bench", "variant": method, "step": record.step})
        finish(state)
        if len(marks) < 2:
            raise ConfigError(
                f"{method} had {len(marks)} rounds, too few for a pace",
                next="more --steps, or fewer --seconds between rounds",
            )
        per_step = state.config.tokens_per_step / mesh.replica.size
        between = sum(sum(steps) for _, steps in marks[1:]) * per_step
        speed = between / (marks[-1][0] - marks[0][0])
        told[method] = {
            "pace": statistics.fmean(gather_json(speed, device=mesh.device)) / sum(speeds),
            "steps": gather_json(state.step, device=mesh.device),
            "loss": evaluate(state),
            "rounds": len(marks),
            "tokens": int(sum(gather_json(state.step, device=mesh.device)) * per_step),
        }
    return told


def _run(job: dict[str, Any], method: Any, *, every: int | str) -> RunConfig:
    config = PACES[job["size"]].config
    timed = (
        replace(config.sync.timed, min_total_steps=1) if method == "aedit" else config.sync.timed
    )
    sync = replace(config.sync, method=method, every=every, timed=timed)
    return replace(config, sync=sync, train=replace(config.train, steps=job["steps"]))


def measure_overlap(job: dict[str, Any], mesh: Mesh, emit: OnEvent) -> dict[str, Any]:
    """Times of rounds after the step, one exchange after the other, and inside the forward."""
    size, warm = OVERLAPS[job["size"]]
    eager = ShardConfig()
    by_turn = Rounding(mesh, size, eager, SyncConfig(layerwise=False, prefetch_units=1))
    whole = Rounding(mesh, size, eager, SyncConfig(layerwise=False))
    inside = Rounding(mesh, size, eager, SyncConfig())
    graph = ShardConfig(method="simple_fsdp", compile=job["backend"])
    compiled = Rounding(mesh, size, graph, SyncConfig())
    entries = {"one by one": by_turn, "whole": whole, "layerwise": inside, "compiled": compiled}
    graphs = 0
    for number in range(warm + job["rounds"]):
        for name, entry in entries.items():
            entry.steps_to_round()
            emit({"event": "bench", "variant": name, "step": number})
        if number == warm - 1:
            graphs = graphs_compiled()
            for entry in entries.values():
                entry.forget()
    full = by_turn.exposed(mesh)
    told: dict[str, Any] = {
        "units": by_turn.names,
        "exchange_ms_per_unit": full,
        "forward_ms_per_unit": 1e3 * statistics.median(inside.forwards) / len(by_turn.names),
    }
    for name, entry in (("layerwise", inside), ("compiled", compiled)):
        exposed = entry.exposed(mesh)
        hidden = 1 - sum(exposed[EXPOSED_UNITS:]) / sum(full[EXPOSED_UNITS:])
        told[name] = {"hidden_fraction": hidden, "exposed_ms_per_unit": exposed}
        told[name]["round_ms"] = entry.round_ms(mesh)
    told["layerwise"]["whole_round_ms"] = whole.round_ms(mesh)
    told["compiled"]["recompilations_at_rounds"] = graphs_compiled() - graphs
    told["compiled"]["backend"] = job["backend"]
    return told


class Rounding:
    """One model that has a round every other step, and the times of it."""

    def __init__(self, mesh: Mesh, size: Size, shard: ShardConfig, sync: SyncConfig) -> None:
        self._mesh, self._size = mesh, size
        self._model = Llama(size.model, size.model.vocabulary)
        init_weights(self._model, size.model, seed=0)
        sharded = shard_model(self._model, mesh, shard)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, foreach=True)
        config = replace(sync, every=2)
        engine = build_engine(sharded, self._optimizer, mesh, config, clock=time.monotonic_ns)
        assert engine is not None
        self._engine = engine
        self.names = [unit.name for unit in engine.units]
        self._step = 0
        self.forget()

    def forget(self) -> None:
        """Empties all times: what follows is warm."""
        self._waits: list[list[float]] = []
        self._plain: list[float] = []
        self._with_round: list[float] = []
        self.forwards: list[float] = []

    def steps_to_round(self) -> None:
        """Two steps; the second one, or the first one of the next call, carries a round."""
        for _ in range(2):
            shape, vocabulary = (self._size.batch, self._size.sequence), self._model.vocabulary
            rank = self._mesh.replica.index
            inputs, targets = batch_of(vocabulary, shape, seed=0, step=self._step, rank=rank)
            dist.barrier()
            waits: list[Wait] = []
            self._engine.rounds.waits = waits
            began = time.perf_counter()
            logits = self._model(inputs)
            forward = time.perf_counter() - began
            token_loss(logits, targets).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._engine.after_step()
            seconds = time.perf_counter() - began
            self._step += 1
            if waits:
                self._waits.append([wait.seconds for wait in waits])
                self._with_round.append(seconds)
            elif self._step > 1:
                self._plain.append(seconds)
                self.forwards.append(forward)

    def exposed(self, mesh: Mesh) -> list[float]:
        """Milliseconds that each unit's exchange has blocked, the slower replica's; medians."""
        own = [1e3 * statistics.median(unit) for unit in zip(*self._waits, strict=True)]
        everyone = gather_json(own, device=mesh.device)
        return [max(unit) for unit in zip(*everyone, strict=True)]

    def round_ms(self, mesh: Mesh) -> float:
        """What a round adds to a step, in milliseconds; the slower replica's."""
        own = statistics.median(self._with_round) - statistics.median(self._plain)
        return 1e3 * max(gather_json(own, device=mesh.device))
