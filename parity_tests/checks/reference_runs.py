"""The reference's side of the comparison: free traces, kept for the session, and single phases.

Its inner step is compiled here in three programs (gradients, their mean over replicas, clip and
AdamW) in place of one for each kind of step, by moving the border of ``jax.jit`` and nothing
else: half the compiling, and a phase can be run alone on the core's inputs. That the shipped
steps give the same is a test of its own.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import jax
import numpy as np

from parity_tests.checks import cells
from parity_tests.checks.cells import Cell, Fault
from reference_jax import ddp, fsdp
from reference_jax import train as reference_train
from reference_jax.aedit import Timed
from reference_jax.co2 import Co2
from reference_jax.data import batch_of_all, by_documents
from reference_jax.edit import Penalty
from reference_jax.fsdp import Inner, StepReport, TrainState, place, to_host
from reference_jax.gpt2 import Gpt2Config
from reference_jax.local_sgd import NonFinite, SyncState
from reference_jax.mesh import EVERYWHERE, ONE_EACH, PER_REPLICA, make_mesh, put
from reference_jax.model import Arrays, LlamaConfig, forward, shapes
from reference_jax.streaming import Streaming
from reference_jax.sync.penalty import NormStats
from reference_jax.train import Host, Record, Run, TrainConfig, event_of, run_round, units_of

gradients = jax.jit(fsdp.gradients, static_argnames=("config", "compute", "z_loss"))
update = jax.jit(fsdp.update, static_argnames=("config", "inner"))
average_over_replicas = jax.jit(ddp.average_over_replicas)
logits_of = jax.jit(forward, static_argnames="config")


class Trace(NamedTuple):
    """A run of the reference by itself."""

    records: list[Record]
    error: str | None


@contextmanager
def separate_programs() -> Iterator[None]:
    """Runs ``train`` with the programs of this file."""
    parts: dict[str, Any] = {"gradients": gradients, "update": update}
    steps = {
        name: getattr(reference_train, name).__wrapped__ for name in ("local_step", "warmup_step")
    }
    with (
        mock.patch.multiple(fsdp, **parts),
        mock.patch.multiple(ddp, average_over_replicas=average_over_replicas, **parts),
        mock.patch.multiple(reference_train, **steps),
    ):
        yield


def model_of(cell: Cell) -> LlamaConfig:
    """The cell's model as the reference configures it."""
    fields = dict(cells.MODELS[cell.model], layers=cell.layers)
    if fields.get("kind") == "gpt2":
        return Gpt2Config(**fields, context=cells.SEQUENCE)
    scaling = fields.pop("rope_scaling", {})
    return LlamaConfig(**fields, **{f"rope_{name}": value for name, value in scaling.items()})


def config_of(cell: Cell) -> TrainConfig:
    """The cell's run as the reference configures it; one shard."""
    optim = dict(cells.OPTIM)
    lr = optim.pop("lr")
    compute = None if cell.compute == "same" else cell.compute
    return TrainConfig(
        model=model_of(cell),
        method=cell.method,
        replicas=cell.replicas,
        shards=1,
        steps=cell.steps,
        every=cell.every,
        warmup=0 if cell.method == "synchronous" else cell.warmup,
        accumulate=cell.accumulate,
        inner=Inner(**optim, compute=compute),
        lr=lr,
        warmup_tokens=3 * cell.tokens_per_step,
        penalty=Penalty(**dict(cell.penalty)),
        **settings_of(cell),
        **cells.SCHEDULE,  # type: ignore[arg-type]
    )


def settings_of(cell: Cell) -> dict[str, Any]:
    """What the cell says of its method, in the words of the reference."""
    given = dict(cell.sync)
    found: dict[str, Any] = {"wire": given.get("wire", "fp32")}
    found["streaming"] = Streaming(**dict(given.get("streaming", ())))
    found["co2"] = Co2(**dict(given.get("co2", ())))
    interval: dict[str, Any] = {"interval_ns": cell.every * cells.SECOND, "step_ns": cell.step_ns}
    found["timed"] = Timed(**interval, **dict(given.get("timed", ())))
    return found


def initial(cell: Cell) -> Host:
    """Weights that both cores start from."""
    return cells.parameters_of(cell, shapes(model_of(cell)))


def batch(cell: Cell, micro_step: int, shards: int) -> tuple[np.ndarray, ...]:
    """Inputs and targets, and documents if rows hold several; [R, S, B, T] each."""
    dealt = batch_of_all(
        cells.tokens_of(cell),
        step=micro_step,
        replicas=cell.replicas,
        shards=shards,
        batch=cells.ROWS // shards,
        sequence=cells.SEQUENCE,
        seed=cells.DATA_SEED,
    )
    return by_documents(*dealt, end_of_text=cells.END) if cell.packing == "documents" else dealt


def trace(cell: Cell) -> Trace:
    """The reference by itself, on one shard; shared by all cells that differ in sharding."""
    return _trace(cell.on_one_shard)


@functools.cache
def _trace(cell: Cell) -> Trace:
    class Faulty(FaultyRun):
        faults = cell.faults

    records: list[Record] = []
    with separate_programs(), mock.patch.object(reference_train, "Run", Faulty):
        run = reference_train.train(
            config_of(cell), lambda i: batch(cell, i, 1), params=initial(cell)
        )
        try:
            records.extend(run)
        except NonFinite:
            return Trace(records, "NonFinite")
    return Trace(records, None)


class FaultyRun(Run):
    """A run in which parameters are overwritten between two steps."""

    faults: ClassVar[tuple[Fault, ...]] = ()

    def inner_step(
        self,
        inputs: np.ndarray,
        targets: np.ndarray,
        documents: np.ndarray | None = None,
        *,
        lr: float,
    ) -> StepReport:
        if any(step == self.step for step, *_ in self.faults):
            params_R = self.host(self.state.params)
            inject(params_R, self.faults, self.step)
            self.state = self.state._replace(params=place(params_R, self.mesh, axis=1))
        return super().inner_step(inputs, targets, documents, lr=lr)


def inject(params_R: Host, faults: tuple[Fault, ...], step: int) -> None:
    """Writes the faults that follow ``step`` into the last elements of [R, ...] parameters."""
    for after, replica, name, value in faults:
        if after == step:
            params_R[name][replica].reshape(-1)[-1] = value


class Locked:
    """Single phases of the reference, each on inputs of the core.

    Args:
        cell: the comparison.
        shards: S of the reference's mesh: 1, or the cell's for arrays that live where the
            core's do.
    """

    def __init__(self, cell: Cell, shards: int) -> None:
        self.cell, self.shards, self.config = cell, shards, config_of(cell)
        self.mesh, self.start = make_mesh(cell.replicas, shards), initial(cell)

    def gradients(self, params_R: Host, t: int, *, synchronous: bool) -> tuple[np.ndarray, Arrays]:
        """[R] loss and gradients of inner step ``t``, counted from 1."""
        k = self.cell.accumulate
        parts = [batch(self.cell, i, self.shards) for i in range((t - 1) * k, t * k)]
        tokens = [
            put(np.concatenate(side, axis=2), self.mesh, PER_REPLICA)
            for side in zip(*parts, strict=True)
        ]
        with jax.set_mesh(self.mesh):
            loss_R, grads = gradients(
                place(params_R, self.mesh, axis=1),
                *tokens,
                config=self.config.model,
                compute=self.config.inner.compute,
            )
            grads = average_over_replicas(grads) if synchronous else grads
        return np.array(loss_R), grads

    def update(self, state: TrainState, grads_R: Host, lr: float) -> tuple[TrainState, np.ndarray]:
        """Clip and AdamW; also the [R] gradient norms."""
        with jax.set_mesh(self.mesh):
            grads = place(grads_R, self.mesh, axis=1)
            new, norm_R = update(
                state, grads, lr, config=self.config.model, inner=self.config.inner
            )
        return new, np.array(norm_R)

    def round(
        self, state: TrainState, sync: SyncState, *, forced: bool
    ) -> tuple[TrainState, SyncState, dict[str, Any], Arrays]:
        """States after a round, its event without the counts, and D."""
        with jax.set_mesh(self.mesh):
            state, sync, done = run_round(state, sync, self.config, forced=forced)
            names = [unit for unit, _ in units_of(self.config)]
            return state, sync, event_of(done, names), done.combined

    def state(self, params_R: Host, moments_R: Sequence[Host], steps: Host) -> TrainState:
        """An inner state from host arrays [R, ...], both moments, and [R] step counts."""
        params, mean, square = (place(x, self.mesh, axis=1) for x in (params_R, *moments_R))
        counts = {name: put(x, self.mesh, ONE_EACH) for name, x in steps.items()}
        return TrainState(params, mean, square, counts)

    def sync(self, anchor: Host, velocity: Host, stats: Mapping[str, np.ndarray]) -> SyncState:
        """An outer state from host arrays without a replica axis."""
        fields = {k: put(v, self.mesh, EVERYWHERE) for k, v in stats.items()}
        a, b = (place(x, self.mesh, axis=0) for x in (anchor, velocity))
        return SyncState(a, b, NormStats(**fields))


def on_ranks(cell: Cell, arrays: Mapping[str, Any], *, axis: int) -> Arrays:
    """Arrays where the cell's ranks hold theirs, rows padded.

    Args:
        cell: the comparison.
        arrays: of the reference, on that mesh already or on another; or host arrays.
        axis: of the rows: 1 after a replica axis, else 0.
    """
    mesh = make_mesh(cell.replicas, cell.shards)
    first = next(iter(arrays.values()))
    if isinstance(first, jax.Array):
        if first.sharding.mesh.devices.shape == mesh.devices.shape:  # type: ignore[attr-defined]
            return dict(arrays)
        arrays = to_host(dict(arrays), model_of(cell), axis=axis)
    return place(arrays, mesh, axis=axis)
