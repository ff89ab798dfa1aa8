"""Chapter 15. Methods: which round follows an inner step, and when its exchange is used.

You learn that all methods are rows of one table.

    method            unit       due after           used             outer step
    synchronous       -          never
    post_local_sgd    model      H steps (L3)        at once          mean
    diloco            model      H steps (L3)        at once          Nesterov
    streaming_diloco  fragment   H steps each (L4)   delay steps on   Nesterov, mixed
    co2, co2_star     model      H steps (L3)        next meeting     momentum, gap, clip
    edit              unit       H steps (L3)        at once          penalty, Nesterov
    aedit             unit       T seconds (V2)      at once          penalty, Nesterov

    (T5) after the last step nothing stays in flight, and one *forced* round follows if inner
         steps came after the last one. CO2 holds the forced meeting first and then drains;
         streaming drains first, and its forced round puts every replica on the anchor

Who communicates: the rounds, as their chapters say.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from reference_jax.aedit import Timed
from reference_jax.co2 import Co2, co2_drain, co2_meeting
from reference_jax.diloco import diloco_round
from reference_jax.edit import Penalty, edit_round, measure_all
from reference_jax.exchange import Wire, wire_of
from reference_jax.fsdp import Inner, TrainState, example, local_step
from reference_jax.local_sgd import (
    Measured,
    NonFinite,
    Round,
    SyncState,
    is_due,
    post_local_sgd_round,
    pseudo_gradient,
    pseudo_norms,
    take_anchor,
)
from reference_jax.mesh import EVERYWHERE, pretend_devices, reshard
from reference_jax.model import LlamaConfig, Units, units, whole_model
from reference_jax.record import Done, Moment, Seen, event_of, votes_of
from reference_jax.streaming import Flight, Streaming, fragment_due, fragments, land, start

METHODS = "synchronous post_local_sgd diloco streaming_diloco co2 co2_star edit aedit".split()


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """One run. Unset outer scalars take the method's default."""

    model: LlamaConfig
    method: str  # one of METHODS
    replicas: int
    shards: int
    steps: int  # inner steps; by the clock: as many tokens as this many steps of all replicas
    every: int = 128  # H
    warmup: int = 0  # W
    accumulate: int = 1  # micro-batches per inner step
    inner: Inner = Inner()
    lr: float = 2e-3  # peak
    shape: str = "cosine"
    warmup_tokens: int = 0
    total_tokens: int = 0  # of the schedule; 0: those of the run
    final_ratio: float = 0.1
    decay_share: float = 0.2
    outer_lr: float | None = None
    outer_momentum: float | None = None
    wire: str = "fp32"  # what an exchange sends: fp32 (as stored), bf16 or int8
    penalty: Penalty = Penalty()
    streaming: Streaming = Streaming()
    co2: Co2 = Co2()
    timed: Timed = Timed()

    @property
    def outer(self) -> dict[str, float]:
        """The outer scalars that are set, by the names that rounds give them."""
        given = {"lr": self.outer_lr, "momentum": self.outer_momentum}
        return {k: v for k, v in given.items() if v is not None}

    @property
    def sends(self) -> Wire:
        """What an exchange sends."""
        return wire_of(self.wire, self.model)


class Started(NamedTuple):
    """An exchange in flight."""

    counts: dict[str, Any]
    units: Units
    flight: Flight


def units_of(config: TrainConfig) -> Units:
    """What one exchange of the method covers.

    Raises:
        ValueError: an unknown method.
    """
    if config.method not in METHODS:
        raise ValueError(f"method {config.method!r} is not one of {', '.join(METHODS)}")
    if config.method in ("edit", "aedit"):
        return units(config.model)
    if config.method == "streaming_diloco":
        return fragments(units(config.model), config.streaming.fragments)
    return whole_model(config.model)


def run_round(
    state: TrainState,
    sync: SyncState,
    config: TrainConfig,
    *,
    forced: bool = False,
    steps_R: Array | None = None,
) -> tuple[TrainState, SyncState, Round]:
    """A round that is used at once; call it inside ``jax.set_mesh``.

    Args:
        state: of the replicas.
        sync: what they agree on.
        config: of the run.
        forced: leaves the statistics alone.
        steps_R: inner steps of each replica since its last round, for aedit.

    Raises:
        ValueError: the method has no such rounds.
        NonFinite: a replica's norm is not finite and the method leaves nobody out.
    """
    of, wire = units_of(config), config.sends
    if config.method == "post_local_sgd":
        state, sync, done = post_local_sgd_round(state, sync, units=of, wire=wire)
    elif config.method == "diloco":
        state, sync, done = diloco_round(state, sync, units=of, wire=wire, **config.outer)
    elif config.method in ("edit", "aedit"):
        share = config.timed.step_weight if config.method == "aedit" else 0.0
        given = {"steps_R": steps_R, "share": share, "penalty": config.penalty}
        state, sync, done = edit_round(
            state, sync, units=of, wire=wire, forced=forced, **given, **config.outer
        )
        if config.penalty.exclude:
            return state, sync, done
    else:
        raise ValueError(f"{config.method} has no rounds that are used at once")
    refuse_non_finite(done, of)
    return state, sync, done


def refuse_non_finite(done: Round, of: Units) -> None:
    """For methods that leave nobody out.

    Raises:
        NonFinite: a replica's norm is not finite.
    """
    is_finite_UR = np.asarray(done.measured.verdict.is_finite_R)
    if not is_finite_UR.all():
        u, n = np.argwhere(~is_finite_UR)[0]
        raise NonFinite(f"replica {n} is not finite in unit {of[u][0]}")


class Rounds:
    """What replicas agree on, what is in flight, and whole numbers. Use inside ``jax.set_mesh``.

    Args:
        config: of the run.
        state: of the replicas, which must be equal.
    """

    def __init__(self, config: TrainConfig, state: TrainState) -> None:
        self.config, self.units = config, units_of(config)
        self.sync = take_anchor(state.params, units=self.units, wire=config.sends)
        self.numbered = 0
        self.since = {name: 0 for name, _ in self.units}  # inner steps since the last round
        self.flights: list[Started] = []

    def after(
        self, state: TrainState, step: int, *, is_last: bool
    ) -> tuple[TrainState, list[Seen | Done]]:
        """What follows inner step ``step``, in order; for methods that count steps.

        Raises:
            NonFinite: as ``run_round``; of a late exchange when it is used.
        """
        self.since = {name: count + 1 for name, count in self.since.items()}
        if self.config.method == "streaming_diloco":
            return self._stream(state, step, is_last=is_last)
        due = is_due(step, warmup=self.config.warmup, every=self.config.every)
        if self.config.method in ("co2", "co2_star"):
            return self._meet_late(state, step, due=due, is_last=is_last)
        if not due and not is_last:
            return state, []
        counts = self._counts(self.units, step, forced=not due)
        before = Moment(state, self.sync)
        state, self.sync, done = run_round(*before, self.config, forced=not due)
        seen = self._seen(done.measured, self.units, counts, before)
        return state, [seen, self._done(done, self.units, counts, before, state)]

    def measures(self, step: int, *, is_last: bool) -> bool:
        """Whether ``after`` is going to measure pseudo-gradients."""
        every, warmup = self.config.every, self.config.warmup
        if self.config.method == "streaming_diloco":
            count = len(self.units)
            due = fragment_due(step, warmup=warmup, every=every, count=count)
            return is_last or due is not None
        return is_last or is_due(step, warmup=warmup, every=every)

    def by_the_clock(
        self, state: TrainState, step: int, steps: list[int], *, is_empty: bool, forced: bool
    ) -> tuple[TrainState, list[Seen | Done]]:
        """A round of aedit, of replicas that made ``steps`` since the last one."""
        counts = self._counts(self.units, step, forced=forced, steps=steps, is_empty=is_empty)
        steps_R = reshard(jnp.array(steps), EVERYWHERE)
        before = Moment(state, self.sync)
        if is_empty:
            done = nothing_moves(*before, steps_R, units=self.units, config=self.config)
        else:
            state, self.sync, done = run_round(*before, self.config, forced=forced, steps_R=steps_R)
        seen = self._seen(done.measured, self.units, counts, before)
        return state, [seen, self._done(done, self.units, counts, before, state)]

    def _counts(
        self,
        of: Units,
        step: int,
        *,
        forced: bool,
        steps: list[int] | None = None,
        is_empty: bool = False,
    ) -> dict[str, Any]:
        """Numbers a round that is measured now; the count of steps begins anew."""
        self.numbered += 1
        if steps is None:
            steps = [self.since[of[0][0]]] * self.config.replicas
        self.since |= {name: 0 for name, _ in of}
        counts = {"round": self.numbered, "step": step, "forced": forced, "empty": is_empty}
        return counts | {"steps": steps}

    def _seen(self, measured: Measured, of: Units, counts: dict[str, Any], at: Moment) -> Seen:
        return Seen(votes_of(measured, [name for name, _ in of], **counts), at)

    def _done(
        self, done: Round, of: Units, counts: dict[str, Any], before: Moment, after: TrainState
    ) -> Done:
        event = event_of(done, [name for name, _ in of], **counts)
        return Done(event, done.combined, before, Moment(after, self.sync))

    def _stream(
        self, state: TrainState, step: int, *, is_last: bool
    ) -> tuple[TrainState, list[Seen | Done]]:
        """(L4, O6, T5)"""
        rule, config = self.config.streaming, self.config
        told: list[Seen | Done] = []
        due = fragment_due(step, warmup=config.warmup, every=config.every, count=rule.fragments)
        if due is not None:
            told.append(self._start(state, step, (self.units[due],), forced=False))
        while self.flights and (is_last or self.flights[0].counts["step"] + rule.delay <= step):
            state, done = self._land(state, mix=rule.mix)
            told.append(done)
        if is_last and any(self.since.values()):
            told.append(self._start(state, step, self.units, forced=True))
            state, done = self._land(state, mix=0.0)
            told.append(done)
        return state, told

    def _start(self, state: TrainState, step: int, of: Units, *, forced: bool) -> Seen:
        counts = self._counts(of, step, forced=forced)
        at = Moment(state, self.sync)
        flight, self.sync = start(*at, units=of, wire=self.config.sends)
        self.flights.append(Started(counts, of, flight))
        return self._seen(flight.measured, of, counts, at)

    def _land(self, state: TrainState, *, mix: float) -> tuple[TrainState, Done]:
        counts, of, flight = self.flights.pop(0)
        before = Moment(state, self.sync)
        state, self.sync, done = land(*before, flight, units=of, mix=mix, **self.config.outer)
        refuse_non_finite(done, of)
        return state, self._done(done, of, counts, before, state)

    def _meet_late(
        self, state: TrainState, step: int, *, due: bool, is_last: bool
    ) -> tuple[TrainState, list[Seen | Done]]:
        """(C1..C4, T5)"""
        told: list[Seen | Done] = []
        given: dict[str, Any] = {"units": self.units, "rule": self.config.co2, **self.config.outer}
        if due or is_last:
            last = self.flights.pop() if self.flights else None
            counts, before = (
                self._counts(self.units, step, forced=not due),
                Moment(state, self.sync),
            )
            state, self.sync, flight, done = co2_meeting(
                *before, last.flight if last else None, wire=self.config.sends, **given
            )
            self.flights.append(Started(counts, self.units, flight))
            told.append(self._seen(flight.measured, self.units, counts, before))
            if last:
                refuse_non_finite(done, self.units)
                told.append(self._done(done, self.units, last.counts, before, state))
        if is_last:
            counts, _, flight = self.flights.pop()
            before = Moment(state, self.sync)
            state, self.sync, done = co2_drain(*before, flight, **given)
            refuse_non_finite(done, self.units)
            told.append(self._done(done, self.units, counts, before, state))
        return state, told


@functools.partial(jax.jit, static_argnames=("units", "config"))
def nothing_moves(
    state: TrainState, sync: SyncState, steps_R: Array, *, units: Units, config: TrainConfig
) -> Round:
    """(V5) what an empty round would have decided; it combines nothing."""
    pseudo = pseudo_gradient(sync.anchor, state.params)
    measured = measure_all(
        pseudo_norms(pseudo, units=units),
        sync.stats,
        config.penalty,
        steps_R=steps_R,
        share=config.timed.step_weight,
    )
    ones_U = jnp.ones(len(units))
    return Round(measured, {}, jnp.nan * ones_U, ones_U, ones_U)


def main() -> None:
    """When late exchanges are used, in nine steps with H = 4."""
    pretend_devices(2)
    mesh, model, first, tokens = example(2, 1)
    with jax.set_mesh(mesh):
        for method in ("streaming_diloco", "co2"):
            config = TrainConfig(model=model, method=method, replicas=2, shards=1, steps=9, every=4)
            state, rounds = first, Rounds(config, first)
            print(method)
            for t in range(1, 10):
                state, _ = local_step(state, tokens, tokens, 0.01, config=model, inner=Inner())
                state, told = rounds.after(state, t, is_last=t == 9)
                for event in (one.event for one in told if isinstance(one, Done)):
                    kind = "forced" if event["forced"] else "due"
                    print(f"    after step {t}: {event['units']}, {kind}, sent at {event['step']}")


if __name__ == "__main__":
    main()
