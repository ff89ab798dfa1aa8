"""What is told of a run: of a round when it is measured and when it is complete, and of a step.

No chapter: the shapes of answers, which chapters `methods` and `train` fill in and `trace` reads.
"""

from typing import Any, NamedTuple

import numpy as np
from jax import Array

from reference_jax.fsdp import TrainState
from reference_jax.local_sgd import Measured, Round, SyncState
from reference_jax.sync.penalty import effective_replicas

Host = dict[str, np.ndarray]


class Moment(NamedTuple):
    """A run before or after something. Arrays are values, so to keep one costs nothing."""

    state: TrainState
    sync: SyncState


class Seen(NamedTuple):
    """A round that was measured."""

    event: dict[str, Any]  # those fields of the core's RoundEvent that are known by then
    at: Moment


class Done(NamedTuple):
    """A round that is complete."""

    event: dict[str, Any]  # fields of the core's RoundEvent
    combined: dict[str, Array]  # D before clipping; empty if nothing was exchanged
    before: Moment  # when the exchange was used
    after: Moment


class Voted(NamedTuple):
    """A round that was measured; on the host, unpadded, of the units that take part."""

    event: dict[str, Any]  # what is known of the core's RoundEvent by then
    pseudo: Host  # [R, ...] d = a - theta


class Told(NamedTuple):
    """A round that is complete; on the host, unpadded, of the units that took part."""

    event: dict[str, Any]  # fields of the core's RoundEvent; its step is when it was measured
    combined: Host  # D before clipping; empty if nothing was exchanged
    anchor_moved: Host  # [...] what the round added
    velocity: Host  # [...]
    params_moved: Host  # [R, ...] what the round added
    stats: Host  # fields of NormStats, (U, R), of all units


class Record(NamedTuple):
    """One inner step, and what rounds did after it; unpadded host arrays."""

    step: int  # by the clock: the tick
    tokens: int  # over all replicas, this step included; by the clock the estimate (V1)
    lr: float
    loss_R: np.ndarray  # NaN where a replica waited
    grad_norm_R: np.ndarray  # before clipping; NaN where a replica waited
    grads: Host  # [R, ...] before clipping; without meaning where a replica waited
    inner_params: Host  # [R, ...] right after the inner step
    inner_moments: tuple[Host, Host]  # the same of exp_avg and exp_avg_sq
    params: Host  # [R, ...] after what follows the step; mostly the same
    exp_avg: Host  # [R, ...]
    exp_avg_sq: Host  # [R, ...]
    counts: Host  # [R] AdamW steps of every parameter
    anchor: Host | None  # [...]; None before replicas part
    velocity: Host | None
    stats: Host | None  # fields of NormStats, (U, R)
    owed: Host | None  # [R, ...] what coding has left out; empty if nothing is coded
    told: list[Voted | Told]  # after this step, in order
    steps_R: np.ndarray  # inner steps that each replica has made in all
    is_active_R: np.ndarray  # which replicas made this one

    @property
    def rounds(self) -> list[Told]:
        """Those that were completed after this step, in order."""
        return [one for one in self.told if isinstance(one, Told)]

    @property
    def event(self) -> dict[str, Any] | None:
        """Of the last round, if there was any."""
        return self.rounds[-1].event if self.rounds else None

    @property
    def combined(self) -> Host | None:
        """D of the last round, if there was any."""
        return self.rounds[-1].combined if self.rounds else None


def event_of(done: Round, names: list[str], **counts: Any) -> dict[str, Any]:
    """The fields of the core's RoundEvent.

    Args:
        done: the round.
        names: of its units.
        **counts: round, step, forced, empty and steps of the event.
    """
    arrays = {
        "effective_replicas": effective_replicas(done.measured.weight_UR),
        "combined_norm": done.combined_norm_U,
        "clip": done.clip_U,
        "gap": done.gap_U,
        "rollback": ~done.measured.accept_U,
    }
    known = votes_of(done.measured, names, **counts)
    return known | {k: np.asarray(v).tolist() for k, v in arrays.items()}


def votes_of(measured: Measured, names: list[str], **counts: Any) -> dict[str, Any]:
    """The fields that are known as soon as a round is measured; see ``event_of``."""
    verdict = measured.verdict
    arrays = {
        "norm": measured.norm_UR,
        "finite": verdict.is_finite_R,
        "flagged": verdict.is_flagged_R,
        "rearmed": verdict.is_rearmed_R,
        "anomalous": verdict.is_anomaly_R,
        "weight": measured.weight_UR,
    }
    return {**counts, "units": names, **{k: np.asarray(v).tolist() for k, v in arrays.items()}}
