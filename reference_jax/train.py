"""Chapter 16. Training: which step, with which learning rate, and what is told of it.

You learn that a method is two decisions a step, taken by a Python ``if``.

    t = 1, 2, ...   inner step t
    (T1) eta_t = schedule(t * tokens per step)
    (T2) synchronous, or t <= W:  warmup_step;  else  local_step
    (T3) t = W (or before step 1 if W = 0): take the anchor
    (T4) whatever chapter `methods` says follows step t
    (T6) if targets are left out: each rank's losses are divided as (F7) says, counted over its
         replica, in a synchronous step over all
    By the clock (aedit) t counts ticks after W, in which some replicas step and others wait, and
    the schedule goes by the estimate (V1), which at equal speeds is (T1).

Why small programs and an ``if`` on the host? One program with ``lax.cond`` inside would hold
the exchange of a round in *every* step, and ``where`` would even run it.

Who communicates: this file nothing; the functions it calls, as their chapters say.

``train`` yields a ``Record`` per inner step with everything a comparison needs, on the host and
without padding. ``perturb`` makes a replica sick right before a round is measured.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from reference_jax.aedit import Pace, only
from reference_jax.data import batch_of_all
from reference_jax.ddp import warmup_step
from reference_jax.fsdp import (
    StepReport,
    TrainState,
    init_state,
    local_step,
    place,
    replicate,
    to_host,
)
from reference_jax.local_sgd import SyncState, replicas_are_equal
from reference_jax.mesh import ONE_EACH, PER_REPLICA, make_mesh, pretend_devices, put
from reference_jax.methods import Rounds, TrainConfig, run_round, units_of
from reference_jax.model import IGNORE, LlamaConfig, init_params, shapes
from reference_jax.record import Done, Host, Record, Seen, Told, Voted, event_of
from reference_jax.schedules import learning_rate

__all__ = ["Host", "Record", "Run", "TrainConfig", "event_of", "run_round", "train", "units_of"]

Batch = tuple[np.ndarray, ...]  # inputs, targets, and documents if rows are packed by (B4)
Batches = Callable[[int], Batch]  # micro-step, from 0 -> arrays [R, S, B, T]
Perturb = Callable[[int, Host], Host]  # (step, params [R, ...]) -> params


class Run:
    """A run between two steps: the states of chapters `fsdp` and `methods`, and counters."""

    def __init__(self, config: TrainConfig, params_R: Mapping[str, ArrayLike]) -> None:
        self.config = config
        self.mesh = make_mesh(config.replicas, config.shards)
        known = {name: params_R[name] for name in shapes(config.model)}
        self.state = init_state(place(known, self.mesh, axis=1), self.mesh)
        self.rounds: Rounds | None = None  # None before replicas part
        self.step = 0
        self.steps_R = np.zeros(config.replicas, int)
        self.pace: Pace | None = None  # by the clock only
        self._join_if_due()

    @property
    def sync(self) -> SyncState | None:
        """What replicas agree on; None before they part."""
        return None if self.rounds is None else self.rounds.sync

    def inner_step(
        self,
        inputs: np.ndarray,
        targets: np.ndarray,
        documents: np.ndarray | None = None,
        *,
        lr: float,
    ) -> StepReport:
        """(T2, T3) a ``Batch``, [R, S, B, T] with all micro-batches in B."""
        is_synchronous = self.config.method == "synchronous" or self.step < self.config.warmup
        advance = warmup_step if is_synchronous else local_step
        seen: StepReport
        batch = [put(x, self.mesh, PER_REPLICA) for x in (inputs, targets)]
        how: dict[str, Any] = {"config": self.config.model, "inner": self.config.inner}
        if documents is not None:
            how["documents_RSBT"] = put(documents, self.mesh, PER_REPLICA)
        counts_RS = (targets != IGNORE).sum(axis=(2, 3))  # (T6)
        own_R = np.maximum(1, counts_RS.sum(axis=1)) / counts_RS.shape[1]
        mean = np.maximum(1, counts_RS.sum()) / counts_RS.size
        over_R = np.full_like(own_R, mean) if is_synchronous else own_R
        leaves_out = counts_RS.min() < targets[0, 0].size
        if leaves_out:
            dtype = next(iter(self.state.params.values())).dtype
            divisor_RS = np.broadcast_to(over_R[:, None], counts_RS.shape).astype(dtype)
            how["divisor_RS"] = put(divisor_RS, self.mesh, PER_REPLICA)
        with jax.set_mesh(self.mesh):
            self.state, seen = advance(self.state, *batch, lr, **how)
        if leaves_out:  # what is told is a replica's own mean
            seen = seen._replace(loss_R=jnp.asarray(np.array(seen.loss_R) * (over_R / own_R)))
        self.step += 1
        self.steps_R = self.steps_R + 1
        self._join_if_due()
        return seen

    def tick(self, batch: Batch, lr: float, is_active_R: np.ndarray) -> StepReport:
        """An inner step of the replicas that are active; the others stay what they were."""
        before = self.state
        seen = self.inner_step(*batch, lr=lr)
        with jax.set_mesh(self.mesh):
            self.state = only(put(is_active_R, self.mesh, ONE_EACH), self.state, before)
        self.steps_R = self.steps_R - ~is_active_R
        return seen

    def after(self, *, is_last: bool, perturb: Perturb | None) -> list[Voted | Told]:
        """(T4) of methods that count steps; makes a replica sick before a round if asked to."""
        if self.rounds is None or self.step <= self.config.warmup:
            return []
        if self.rounds.measures(self.step, is_last=is_last):
            self._perturb(perturb)
        with jax.set_mesh(self.mesh):
            self.state, told = self.rounds.after(self.state, self.step, is_last=is_last)
        return [self._on_host(one) for one in told]

    def by_the_clock(
        self, steps: list[int], *, is_empty: bool, forced: bool, perturb: Perturb | None
    ) -> list[Voted | Told]:
        """(T4) of aedit: a round of replicas that made ``steps`` since the last one."""
        assert self.rounds is not None, "a round before replicas parted"
        self._perturb(perturb)
        with jax.set_mesh(self.mesh):
            self.state, told = self.rounds.by_the_clock(
                self.state, self.step, steps, is_empty=is_empty, forced=forced
            )
        return [self._on_host(one) for one in told]

    def host(self, arrays: dict[str, jax.Array], *, axis: int = 1) -> Host:
        """Unpadded copies on the host."""
        return to_host(arrays, self.config.model, axis=axis)

    def _on_host(self, one: Seen | Done) -> Voted | Told:
        of = dict(units_of(self.config))
        names = [name for unit in one.event["units"] for name in of[unit]]

        def host(arrays: dict[str, jax.Array], *, axis: int = 1) -> Host:
            return self.host({name: arrays[name] for name in names}, axis=axis)

        if isinstance(one, Seen):
            theta, anchor = host(one.at.state.params), host(one.at.sync.anchor, axis=0)
            return Voted(one.event, {k: anchor[k][None] - x for k, x in theta.items()})
        (old, old_sync), (new, new_sync) = one.before, one.after
        anchors = host(old_sync.anchor, axis=0), host(new_sync.anchor, axis=0)
        thetas = host(old.params), host(new.params)
        return Told(
            event=one.event,
            combined=self.host(one.combined, axis=0),
            anchor_moved={k: anchors[1][k] - anchors[0][k] for k in names},
            velocity=host(new_sync.velocity, axis=0),
            params_moved={k: thetas[1][k] - thetas[0][k] for k in names},
            stats={k: np.array(v) for k, v in new_sync.stats._asdict().items()},
        )

    def _perturb(self, perturb: Perturb | None) -> None:
        if perturb is not None:
            params_R = perturb(self.step, self.host(self.state.params))
            self.state = self.state._replace(params=place(params_R, self.mesh, axis=1))

    def _join_if_due(self) -> None:
        if self.config.method == "synchronous" or self.step != self.config.warmup:
            return
        if not replicas_are_equal(self.state.params):
            raise ValueError(f"replicas hold different parameters when they part, step {self.step}")
        with jax.set_mesh(self.mesh):
            self.rounds = Rounds(self.config, self.state)


def train(
    config: TrainConfig,
    batches: Batches,
    *,
    params: Mapping[str, ArrayLike] | None = None,
    dtype: str = "float32",
    perturb: Perturb | None = None,
    run: Run | None = None,
) -> Iterator[Record]:
    """Runs ``config.steps`` inner steps and yields a record of each; by the clock, of each tick.

    Args:
        config: the run.
        batches: micro-step from 0 -> a ``Batch`` of all ranks; called ``accumulate`` times per
            inner step.
        params: one unpadded set by canonical name; None draws one of ``dtype``.
        dtype: see ``params``.
        perturb: called with the step and all parameters [R, ...] right before every round.
        run: goes on from where this one is, for example one of chapter `handover`, to the end of
            ``config``; ``params`` and ``dtype`` are those that it began with.

    Raises:
        NonFinite: see ``methods.run_round``.
        ValueError: more ranks than devices, an unknown method, wire or schedule shape.
    """
    if run is None:
        if params is None:
            params = init_params(config.model, seed=0, dtype=dtype)
        run = Run(config, replicate(params, config.replicas))
    by_steps = config.warmup if config.method == "aedit" else config.steps
    for t in range(run.step + 1, min(by_steps, config.steps) + 1):
        batch = batch_of_step(config, batches, run.steps_R)
        of_step = batch[0].size
        lr = learning_rate_at(t * of_step, config, of_step=of_step)
        seen = run.inner_step(*batch, lr=lr)
        inner = run.state
        told = run.after(is_last=t == config.steps, perturb=perturb)
        yield record_of(run, seen, t * of_step, lr, inner, told)
    if by_steps < config.steps:
        yield from ticks(run, config, batches, perturb)


def ticks(
    run: Run, config: TrainConfig, batches: Batches, perturb: Perturb | None
) -> Iterator[Record]:
    """The part of a run that goes by the clock."""
    of_step = batches(0)[0].size * config.accumulate
    if run.pace is None:
        of_one = of_step // config.replicas
        agreed, total = config.warmup * of_step, config.steps * of_step
        run.pace = Pace(config.timed, tokens=of_one, agreed=agreed, total=total)
    pace = run.pace
    while pace.agreed < pace.total:
        is_active_R = np.array(pace.is_active())
        batch = batch_of_step(config, batches, run.steps_R)
        for n in range(config.replicas):
            if is_active_R[n]:
                pace.stepped(n)
                tokens = pace.estimate(n)  # the same for all that step
        lr = learning_rate_at(tokens, config, of_step=of_step)
        seen = run.tick(batch, lr, is_active_R)
        inner, told = run.state, list[Voted | Told]()
        if not any(pace.is_active()):
            steps, is_empty = pace.meet()
            told += run.by_the_clock(steps, is_empty=is_empty, forced=False, perturb=perturb)
            if pace.agreed >= pace.total and is_empty:
                told += run.by_the_clock(steps, is_empty=False, forced=True, perturb=perturb)
        yield record_of(run, seen, tokens, lr, inner, told, is_active_R)


def batch_of_step(config: TrainConfig, batches: Batches, steps_R: np.ndarray) -> Batch:
    """The ``Batch`` of each replica's own next step, micro-batches in B."""
    k = config.accumulate
    dealt = {s: [batches(i) for i in range(s * k, (s + 1) * k)] for s in set(steps_R.tolist())}
    sides = []
    for side in range(len(dealt[int(steps_R[0])][0])):
        rows = [
            np.concatenate([micro[side][n] for micro in dealt[s]], axis=1)
            for n, s in enumerate(steps_R.tolist())
        ]
        sides.append(np.stack(rows))
    return tuple(sides)


def learning_rate_at(tokens: int, config: TrainConfig, *, of_step: int) -> float:
    """(T1) of the step after which all replicas have seen ``tokens``, by (V1)."""
    return learning_rate(
        tokens,
        peak=config.lr,
        shape=config.shape,
        warmup_tokens=config.warmup_tokens,
        total_tokens=config.total_tokens or config.steps * of_step,
        final_ratio=config.final_ratio,
        decay_share=config.decay_share,
    )


def record_of(
    run: Run,
    seen: StepReport,
    tokens: int,
    lr: float,
    inner: TrainState,
    told: list[Voted | Told],
    is_active_R: np.ndarray | None = None,
) -> Record:
    """Everything on the host.

    Args:
        run: after the step and what followed it.
        seen: of the step.
        tokens: see ``Record``.
        lr: of the step.
        inner: the state between the step and what followed it.
        told: of what followed.
        is_active_R: None: all replicas made the step.
    """
    state, sync = run.state, run.sync
    active_R = np.ones(run.config.replicas, bool) if is_active_R is None else is_active_R
    loss_R, norm_R = np.array(seen.loss_R), np.array(seen.grad_norm_R)
    return Record(
        step=run.step,
        tokens=tokens,
        lr=lr,
        loss_R=np.where(active_R, loss_R, loss_R.dtype.type(np.nan)),
        grad_norm_R=np.where(active_R, norm_R, norm_R.dtype.type(np.nan)),
        grads=run.host(seen.grads),
        inner_params=run.host(inner.params),
        inner_moments=(run.host(inner.exp_avg), run.host(inner.exp_avg_sq)),
        params=run.host(state.params),
        exp_avg=run.host(state.exp_avg),
        exp_avg_sq=run.host(state.exp_avg_sq),
        counts={name: np.array(x) for name, x in state.step.items()},
        anchor=None if sync is None else run.host(sync.anchor, axis=0),
        velocity=None if sync is None else run.host(sync.velocity, axis=0),
        stats=None if sync is None else {k: np.array(v) for k, v in sync.stats._asdict().items()},
        owed=None if sync is None else run.host(sync.owed),
        told=told,
        steps_R=run.steps_R,
        is_active_R=active_R,
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
