"""Taps of a run of the trainer.

    state = build(config, mesh, corpus)
    with tap(state, folder):
        for record in train(state): ...

The trainer and the rounds call a ``RunTaps`` at the points that it writes; units of an eager
model have forward hooks. A compiled model is one graph, of which only the end is seen.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from core_torch import __version__
from core_torch.collectives import Dispatch
from core_torch.config import RunConfig
from core_torch.data.corpus import Corpus
from core_torch.errors import ConfigError
from core_torch.mesh import Mesh
from core_torch.models import Model
from core_torch.models.decoder import Decoder
from core_torch.shard.base import Sharded
from core_torch.shard.model import Simple
from core_torch.sync.engine import LocalSGD
from core_torch.sync.meeting import Meeting
from core_torch.sync.penalty import NormStats
from core_torch.sync.sync_round import Finished
from core_torch.sync.unit_state import UnitState
from core_torch.sync.units import SyncUnit
from core_torch.taps.recorder import Named, Recorder, Shards
from core_torch.trace import Key, Tracer

PHASES = "init data forward backward grad clip optim".split()
ROUND_PHASES = "delta vote merge clip outer params end".split()


class Run(Protocol):
    """What taps need of ``train.TrainState``, which comes later in the reading order."""

    config: RunConfig
    mesh: Mesh
    corpus: Corpus
    model: Model
    sharded: Sharded
    sync: LocalSGD | None
    step: int
    tokens: int
    taps: "RunTaps | None"

    @property
    def optimizer(self) -> Optimizer:
        """The inner one."""


def tap(
    state: Run,
    folder: Path | str,
    *,
    resumed: bool = False,
    keep_tensors: bool = False,
    weights_hash: str = "",
) -> "RunTaps":
    """Begins to write the trace of a run, until the taps are closed.

    Args:
        state: built, and restored if it is resumed.
        folder: of the trace, the same on all ranks.
        resumed: go on with the trace in ``folder``, which the same run has begun.
        keep_tensors: see ``Tracer``.
        weights_hash: of the initial weights, if they are known whole.

    Raises:
        TraceError: see ``Tracer``.
        ConfigError: the model is cut over tp, where no rank has rows of a whole tensor.
    """
    mesh = state.mesh
    if mesh.tp.size > 1:
        raise ConfigError("no trace is written under tensor parallelism", next="--mesh.tp 1")
    if mesh.pp.size > 1:
        raise ConfigError("no trace is written of a pipeline's stages", next="--mesh.pp 1")
    rank = mesh.replica.index * mesh.shard.size + mesh.shard.index
    tracer = Tracer(
        folder,
        rank,
        describe(state, weights_hash),
        keep_tensors=keep_tensors,
        resume_at=state.step if resumed else None,
    )
    return RunTaps(state, tracer)


class RunTaps:
    """Writes the trace of one rank; ``train`` and ``Rounds`` call it. Made by ``tap``."""

    def __init__(self, state: Run, tracer: Tracer) -> None:
        mesh = state.mesh
        self._run, self._tracer = state, tracer
        shards = Shards(mesh.shard.size, mesh.shard.index)
        self._recorder = Recorder(tracer, mesh.replica.index, shards, step=state.step)
        unit_of = {name: unit for unit, names in state.sharded.units.items() for name in names}
        self._params = [Named(unit_of[n], n, p) for n, p in state.model.named_parameters()]
        self._named = {named.name: named for named in self._params}
        self._k: int | None = None  # micro-batch in the forward
        self._before: tuple[UnitState, list[Tensor]] | None = None  # of the unit being finished
        self._handles = self._hooks()
        state.taps = self
        mesh.ledger.listener = self._dispatched
        if state.sync is not None:
            state.sync.rounds.observer = self
        if not tracer.continues:
            for named in self._params:
                self._recorder.of_parameter("init", named, "", named.param.detach())
            tracer.mark(state.step)

    def close(self) -> None:
        """Leaves the run as it was, and closes the files."""
        for handle in self._handles:
            handle.remove()
        self._run.taps = self._run.mesh.ledger.listener = None
        if self._run.sync is not None:
            self._run.sync.rounds.observer = None
        self._tracer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # What the trainer calls, in this order.

    def data(self, k: int, inputs_BT: Tensor, targets_BT: Tensor) -> None:
        """A micro-batch is about to enter the forward."""
        self._recorder.step, self._k = self._run.step + 1, k
        self._recorder.of_batch("data", None, f"inputs.{k}", inputs_BT)
        self._recorder.of_batch("data", None, f"targets.{k}", targets_BT)

    def logits(self, logits_BTV: Tensor | None) -> None:
        """The forward has ended. What runs again in the backward is not written twice.

        None: the loss was made in chunks, and nobody has seen all logits.
        """
        assert self._k is not None, "no micro-batch in the forward"
        if logits_BTV is not None:
            self._recorder.output("head", self._k, logits_BTV)
        self._k = None

    def gradients(self, loss: Tensor) -> None:
        """Loss of the replica, and gradients before clipping."""
        self._recorder.of_replica("forward", "loss", loss=float(loss))
        for named in self._params:
            if named.param.grad is not None:
                self._recorder.of_parameter("grad", named, "", named.param.grad)

    def clipped(self, norm: Tensor, factor: Tensor | None) -> None:
        """By which factor gradients were multiplied, if by any."""
        by = 1.0 if factor is None else float(factor)
        self._recorder.of_replica("clip", "gradient", norm=float(norm), factor=by)

    def end_step(self) -> None:
        """An inner step and the rounds that belong after it are over."""
        self._tracer.mark(self._run.step)

    # What rounds call: core_torch.sync.observer.Observer.

    @torch.no_grad()
    def measured(
        self, meeting: Meeting, units: list[SyncUnit], states: Iterator[UnitState]
    ) -> None:
        """See ``Observer``."""
        if not meeting.is_empty:
            for unit, state in zip(units, states, strict=True):
                deltas = [a - x for a, x in zip(state.anchor, unit.shards(), strict=True)]
                self._of_unit(meeting, "sync.delta", unit, "", deltas)
        seen, verdict = meeting.measured, meeting.measured.verdict
        columns = {
            "norm": seen.norm_UR.tolist(),
            "finite": verdict.is_finite_R.tolist(),
            "flagged": verdict.is_flagged_R.tolist(),
            "rearmed": verdict.is_rearmed_R.tolist(),
            "anomalous": verdict.is_anomaly_R.tolist(),
            "weight": seen.weight_UR.tolist(),
        }
        for i, unit in enumerate(units):
            for n, steps in enumerate(meeting.steps):
                vote = {name: column[i][n] for name, column in columns.items()}
                self._agreed(meeting, "sync.vote", unit.name, "vote", n, **vote, steps=steps)

    def combined(self, meeting: Meeting, unit: SyncUnit, total: Tensor, state: UnitState) -> None:
        """See ``Observer``."""
        parts = total.split([a.numel() for a in state.anchor])
        shaped = [x.view(a.shape) for x, a in zip(parts, state.anchor, strict=True)]
        self._of_unit(meeting, "sync.merge", unit, "", shaped, is_agreed=True)
        self._before = (state, [x.clone() for x in unit.shards()])

    @torch.no_grad()
    def finished(self, meeting: Meeting, i: int, unit: SyncUnit, done: Finished) -> None:
        """See ``Observer``."""
        assert self._before is not None, "finished before it was combined"
        (old, theta), self._before = self._before, None
        self._agreed(
            meeting,
            "sync.clip",
            unit.name,
            "outer",
            None,
            norm=float(done.combined_norm),
            clip=float(done.clip),
            gap=float(done.gap),
            rollback=not meeting.measured.accept_U[i],
        )
        moved = [new - a for new, a in zip(done.state.anchor, old.anchor, strict=True)]
        self._of_unit(meeting, "sync.outer", unit, "/anchor", moved, is_agreed=True)
        velocity = done.state.velocity
        self._of_unit(meeting, "sync.outer", unit, "/velocity", velocity, is_agreed=True)
        written = [new - x for new, x in zip(unit.shards(), theta, strict=True)]
        self._of_unit(meeting, "sync.params", unit, "", written)

    def concluded(self, meeting: Meeting, units: list[SyncUnit], stats: NormStats | None) -> None:
        """See ``Observer``."""
        about = {"forced": meeting.forced, "empty": meeting.is_empty}
        self._agreed(meeting, "sync.end", None, "round", None, **about)
        if stats is None:
            return
        fields = {name.removesuffix("_R"): x for name, x in stats._asdict().items()}
        columns = {name: x[meeting.members].tolist() for name, x in fields.items()}
        for i, unit in enumerate(units):
            for n in range(len(meeting.steps)):
                held = {name: column[i][n] for name, column in columns.items()}
                self._agreed(meeting, "sync.end", unit.name, "statistics", n, **held)

    def _of_unit(
        self,
        meeting: Meeting,
        phase: str,
        unit: SyncUnit,
        suffix: str,
        tensors: list[Tensor],
        *,
        is_agreed: bool = False,
    ) -> None:
        """Writes this rank's rows of a sync unit; what all agree on only on replica 0."""
        replica = self._recorder.replica
        if is_agreed and replica > 0:
            return
        where = (None if is_agreed else replica, meeting.number)
        for name, x in zip(unit.names, tensors, strict=True):
            key = Key(meeting.step, phase, unit.name, name + suffix, *where)
            self._tracer.tensor(key, self._recorder.part(x, self._named[name].param))

    def _agreed(
        self,
        meeting: Meeting,
        phase: str,
        unit: str | None,
        name: str,
        replica: int | None,
        **value: Any,
    ) -> None:
        """Writes numbers that all ranks know, on the first of them."""
        if self._recorder.replica == self._recorder.shards.index == 0:
            self._tracer.value(Key(meeting.step, phase, unit, name, replica, meeting.number), value)

    def _dispatched(self, dispatch: Dispatch) -> None:
        size = dispatch.numel * getattr(torch, dispatch.dtype).itemsize
        step = self._recorder.step
        self._tracer.collective(step, dispatch.op, dispatch.axis, size, dispatch.scope)

    def _rate(self) -> None:
        config, group = self._run.config, self._run.optimizer.param_groups[0]
        tokens = self._run.tokens + config.tokens_per_step
        self._recorder.of_replica("optim", "rate", lr=float(group["lr"]), tokens=tokens)

    def _hooks(self) -> list[RemovableHandle]:
        """Of the optimizer, and of the units of an eager decoder but for the last, the logits."""
        model = self._run.model
        handles = self._recorder.watch(
            self._run.optimizer, self._params, before=lambda: None, after=self._rate
        )
        if isinstance(model, Decoder) and not is_compiled(self._run.sharded):
            if len(model.tables) == 1:
                handles.append(model.tok_embeddings.register_forward_hook(self._saw("embedding")))
            else:  # the sum of what the tables give
                handles.append(model.layers[0].register_forward_pre_hook(self._entered))
            for i, layer in enumerate(model.layers):
                handles.append(layer.register_forward_hook(self._saw(f"layers.{i}")))
        return handles

    def _entered(self, module: nn.Module, args: Any) -> None:
        if self._k is not None:
            self._recorder.output("embedding", self._k, args[0])

    def _saw(self, unit: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            if self._k is not None:
                self._recorder.output(unit, self._k, output)

        return hook


def is_compiled(sharded: Sharded) -> bool:
    """True for a model that runs as one graph."""
    return isinstance(sharded, Simple) and sharded.compilation is not None


def describe(state: Run, weights_hash: str) -> dict[str, Any]:
    """What ``meta.json`` says of a run."""
    config, mesh = state.config, state.mesh
    settings = dataclasses.asdict(config)
    text = json.dumps(settings, sort_keys=True).encode()
    vocabulary = state.model.vocabulary
    rounds = [] if state.sync is None else [f"sync.{name}" for name in ROUND_PHASES]
    return {
        "core": "core_torch",
        "versions": {"twinshard": __version__, "torch": torch.__version__},
        "method": config.sync.method,
        "mesh": {"replicas": mesh.replica.size, "shards": mesh.shard.size},
        "dtype": config.train.dtype,
        "compute": config.train.compute,
        "config": settings,
        "config_hash": hashlib.sha256(text).hexdigest(),
        "weights_hash": weights_hash,
        "data_hash": state.corpus.train_hash(),
        "model": {
            "layers": config.model.layers,
            # Terms of the longest dot product: over the vocabulary, or over a step's tokens.
            "width": max(vocabulary, config.model.hidden, config.tokens_per_step),
        },
        "taps": [*PHASES, *rounds],
        "flags": {
            "sharding": config.shard.method,
            "compile": config.shard.compile,
            "in_forward": config.sync.rounds_in_forward,
            "wire": config.sync.wire,
        },
    }
