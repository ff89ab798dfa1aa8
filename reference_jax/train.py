"""Chapter 10. Training: which step and which round, when.

You learn that a method is two decisions a step, taken by a Python ``if``.

    t = 1, 2, ...   inner step t
    (T1) eta_t = schedule(t * tokens per step)
    (T2) synchronous, or t <= W:  warmup_step;  else  local_step
    (T3) t = W (or before step 1 if W = 0): take the anchor
    (T4) a round of the method's own kind if (L3) says so
    (T5) after the last step: one forced round, unless one has just been

Why small programs and an ``if`` on the host? One program with ``lax.cond`` inside would hold
the exchange of a round in *every* step, and ``where`` would even run it.

Who communicates: this file nothing; the functions it calls, as their chapters say.

``train`` yields a ``Record`` per inner step with everything a comparison needs, on the host and
without padding. ``perturb`` makes a replica sick right before a round is measured.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike

from reference_jax.data import batch_of_all
from reference_jax.ddp import warmup_step
from reference_jax.diloco import diloco_round
from reference_jax.edit import Penalty, edit_round
from reference_jax.fsdp import (
    Inner,
    StepReport,
    TrainState,
    init_state,
    local_step,
    place,
    replicate,
    to_host,
)
from reference_jax.local_sgd import (
    NonFinite,
    Round,
    SyncState,
    is_due,
    post_local_sgd_round,
    replicas_are_equal,
    take_anchor,
)
from reference_jax.mesh import PER_REPLICA, make_mesh, pretend_devices, put
from reference_jax.model import LlamaConfig, Units, init_params, shapes, units, whole_model
from reference_jax.schedules import learning_rate
from reference_jax.sync.penalty import effective_replicas

Host = dict[str, np.ndarray]
Batches = Callable[[int], tuple[np.ndarray, np.ndarray]]  # micro-step, from 0 -> two [R, S, B, T]
Perturb = Callable[[int, Host], Host]  # (step, params [R, ...]) -> params


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """One run. Unset outer scalars take the method's default."""

    model: LlamaConfig
    method: str  # synchronous, post_local_sgd, diloco or edit
    replicas: int
    shards: int
    steps: int
    every: int = 128  # H
    warmup: int = 0  # W
    accumulate: int = 1  # micro-batches per inner step
    inner: Inner = Inner()
    lr: float = 2e-3  # peak
    shape: str = "cosine"
    warmup_tokens: int = 0
    total_tokens: int = 0  # 0: those of the run
    final_ratio: float = 0.1
    decay_share: float = 0.2
    outer_lr: float | None = None
    outer_momentum: float | None = None
    penalty: Penalty = Penalty()


class Record(NamedTuple):
    """One inner step, and the round after it if there was one; unpadded host arrays."""

    step: int
    tokens: int  # over all replicas, this step included
    lr: float
    loss_R: np.ndarray
    grad_norm_R: np.ndarray  # before clipping
    grads: Host  # [R, ...] before clipping
    inner_params: Host  # [R, ...] right after the inner step
    params: Host  # [R, ...] after the round, if any; else the same
    exp_avg: Host  # [R, ...]
    exp_avg_sq: Host  # [R, ...]
    counts: Host  # [R] AdamW steps of every parameter
    anchor: Host | None  # [...]; None before replicas part
    velocity: Host | None
    stats: Host | None  # fields of NormStats, (U, R)
    event: dict[str, Any] | None  # fields of the core's RoundEvent
    combined: Host | None  # D of that round, before clipping


def units_of(config: TrainConfig) -> Units:
    """What one exchange of the method covers."""
    return units(config.model) if config.method == "edit" else whole_model(config.model)


def run_round(
    state: TrainState, sync: SyncState, config: TrainConfig, *, forced: bool = False
) -> tuple[TrainState, SyncState, Round]:
    """(T4) a round of the method; call it inside ``jax.set_mesh``.

    Raises:
        ValueError: the method has no rounds.
        NonFinite: a replica's norm is not finite and the method leaves nobody out.
    """
    of = units_of(config)
    given = {"lr": config.outer_lr, "momentum": config.outer_momentum}
    outer = {k: v for k, v in given.items() if v is not None}
    if config.method == "post_local_sgd":
        state, sync, done = post_local_sgd_round(state, sync, units=of)
    elif config.method == "diloco":
        state, sync, done = diloco_round(state, sync, units=of, **outer)
    elif config.method == "edit":
        state, sync, done = edit_round(
            state, sync, units=of, penalty=config.penalty, forced=forced, **outer
        )
        if config.penalty.exclude:
            return state, sync, done
    else:
        raise ValueError(f"{config.method} has no rounds")
    is_finite_UR = np.asarray(done.measured.verdict.is_finite_R)
    if not is_finite_UR.all():
        u, n = np.argwhere(~is_finite_UR)[0]
        raise NonFinite(f"replica {n} is not finite in unit {of[u][0]}")
    return state, sync, done


def event_of(done: Round, names: list[str], **counts: Any) -> dict[str, Any]:
    """The fields of the core's RoundEvent; ``counts`` are round, step and forced."""
    measured, verdict = done.measured, done.measured.verdict
    arrays = {
        "norm": measured.norm_UR,
        "finite": verdict.is_finite_R,
        "flagged": verdict.is_flagged_R,
        "rearmed": verdict.is_rearmed_R,
        "anomalous": verdict.is_anomaly_R,
        "weight": measured.weight_UR,
        "effective_replicas": effective_replicas(measured.weight_UR),
        "combined_norm": done.combined_norm_U,
        "clip": done.clip_U,
        "rollback": ~measured.accept_U,
    }
    return {**counts, "units": names, **{k: np.asarray(v).tolist() for k, v in arrays.items()}}


class Run:
    """A run between two steps: the states of chapters `fsdp` and `local_sgd`, and two counters."""

    def __init__(self, config: TrainConfig, params_R: Mapping[str, ArrayLike]) -> None:
        self.config = config
        self.mesh = make_mesh(config.replicas, config.shards)
        known = {name: params_R[name] for name in shapes(config.model)}
        self.state = init_state(place(known, self.mesh, axis=1), self.mesh)
        self.sync: SyncState | None = None
        self.step = self.rounds = 0
        self._join_if_due()

    def inner_step(self, inputs: np.ndarray, targets: np.ndarray, lr: float) -> StepReport:
        """(T2, T3) ``inputs`` and ``targets`` are [R, S, B, T] with all micro-batches in B."""
        is_synchronous = self.config.method == "synchronous" or self.step < self.config.warmup
        advance = warmup_step if is_synchronous else local_step
        seen: StepReport
        batch = [put(x, self.mesh, PER_REPLICA) for x in (inputs, targets)]
        with jax.set_mesh(self.mesh):
            self.state, seen = advance(
                self.state, *batch, lr, config=self.config.model, inner=self.config.inner
            )
        self.step += 1
        self._join_if_due()
        return seen

    def round(self, *, forced: bool, perturb: Perturb | None) -> tuple[dict[str, Any], Host]:
        """(T4, T5) makes a replica sick if asked to, then meets; returns event and D."""
        assert self.sync is not None, "a round before replicas parted"
        if perturb is not None:
            params_R = perturb(self.step, self.host(self.state.params))
            self.state = self.state._replace(params=place(params_R, self.mesh, axis=1))
        with jax.set_mesh(self.mesh):
            self.state, self.sync, done = run_round(
                self.state, self.sync, self.config, forced=forced
            )
            self.rounds += 1
            names = [unit for unit, _ in units_of(self.config)]
            counts = {"round": self.rounds, "step": self.step, "forced": forced}
            return event_of(done, names, **counts), self.host(done.combined, axis=0)

    def host(self, arrays: dict[str, jax.Array], *, axis: int = 1) -> Host:
        """Unpadded copies on the host."""
        return to_host(arrays, self.config.model, axis=axis)

    def _join_if_due(self) -> None:
        if self.config.method == "synchronous" or self.step != self.config.warmup:
            return
        if not replicas_are_equal(self.state.params):
            raise ValueError(f"replicas hold different parameters when they part, step {self.step}")
        with jax.set_mesh(self.mesh):
            self.sync = take_anchor(self.state.params, units=units_of(self.config))


def train(
    config: TrainConfig,
    batches: Batches,
    *,
    params: Mapping[str, ArrayLike] | None = None,
    dtype: str = "float32",
    perturb: Perturb | None = None,
) -> Iterator[Record]:
    """Runs ``config.steps`` inner steps and yields a record of each.

    Args:
        config: the run.
        batches: micro-step from 0 -> inputs and targets [R, S, B, T] of all ranks; called
            ``accumulate`` times per inner step.
        params: one unpadded set by canonical name; None draws one of ``dtype``.
        dtype: see ``params``.
        perturb: called with the step and all parameters [R, ...] right before every round.

    Raises:
        NonFinite: see ``run_round``.
        ValueError: more ranks than devices, or an unknown schedule shape.
    """
    if params is None:
        params = init_params(config.model, seed=0, dtype=dtype)
    run = Run(config, replicate(params, config.replicas))
    k = config.accumulate
    for t in range(1, config.steps + 1):
        parts = [batches(i) for i in range((t - 1) * k, t * k)]
        inputs, targets = (np.concatenate(side, axis=2) for side in zip(*parts, strict=True))
        lr = learning_rate(
            t * inputs.size,
            peak=config.lr,
            shape=config.shape,
            warmup_tokens=config.warmup_tokens,
            total_tokens=config.total_tokens or config.steps * inputs.size,
            final_ratio=config.final_ratio,
            decay_share=config.decay_share,
        )
        seen = run.inner_step(inputs, targets, lr)
        inner_params = run.host(run.state.params)
        event = combined = None
        has_parted = run.sync is not None and t > config.warmup
        due = has_parted and is_due(t, warmup=config.warmup, every=config.every)
        if due or (has_parted and t == config.steps):
            event, combined = run.round(forced=not due, perturb=perturb)
        yield _record(run, seen, t * inputs.size, lr, inner_params, event, combined)


def _record(
    run: Run,
    seen: StepReport,
    tokens: int,
    lr: float,
    inner_params: Host,
    event: dict[str, Any] | None,
    combined: Host | None,
) -> Record:
    state, sync = run.state, run.sync
    return Record(
        step=run.step,
        tokens=tokens,
        lr=lr,
        loss_R=np.array(seen.loss_R),
        grad_norm_R=np.array(seen.grad_norm_R),
        grads=run.host(seen.grads),
        inner_params=inner_params,
        params=inner_params if event is None else run.host(state.params),
        exp_avg=run.host(state.exp_avg),
        exp_avg_sq=run.host(state.exp_avg_sq),
        counts={name: np.array(x) for name, x in state.step.items()},
        anchor=None if sync is None else run.host(sync.anchor, axis=0),
        velocity=None if sync is None else run.host(sync.velocity, axis=0),
        stats=None if sync is None else {k: np.array(v) for k, v in sync.stats._asdict().items()},
        event=event,
        combined=combined,
    )


def main() -> None:
    """EDiT on 2 x 2: synchronous steps, local steps, rounds; replica 1 goes NaN once."""
    pretend_devices(4)
    model = LlamaConfig(vocabulary=257, dim=16, layers=1, heads=2, kv_heads=1, hidden=27)
    config = TrainConfig(
        model=model, method="edit", replicas=2, shards=2, steps=8, every=2, warmup=2, lr=0.02
    )
    tokens = np.arange(4096) % 7 * 11 + 3  # a rhyme of seven

    def batches(step: int) -> tuple[np.ndarray, np.ndarray]:
        return batch_of_all(tokens, step=step, replicas=2, shards=2, batch=2, sequence=16, seed=0)

    def perturb(step: int, params_R: Host) -> Host:
        if step == 6:
            for x_R in params_R.values():
                x_R[1] = np.nan
        return params_R

    for record in train(config, batches, perturb=perturb):
        losses = " ".join(f"{loss:.3f}" for loss in record.loss_R)
        print(f"step {record.step}  lr {record.lr:.4f}  loss {losses}")
        if record.event:
            norms, weights = np.array(record.event["norm"]), np.array(record.event["weight"])
            print(f"    round {record.event['round']}, unit {record.event['units'][1]}:", end=" ")
            print(f"norms {norms[1].round(3)}, weights {weights[1].round(3)}")


if __name__ == "__main__":
    main()
