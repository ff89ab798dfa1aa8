"""Pseudo-gradient penalty: how much each replica's progress counts in a sync round.

Pure array math on norms that every device holds in full; no communication.

Mirror      core_torch/sync/penalty.py, function by function
Equations   (P1)..(P8) in docs/algorithms/edit.md, which cites Cheng et al., arXiv:2412.07210

Shape suffixes
    R    replicas in the sync round; always the last axis. Any axes before it (the units
         of a model) are independent of each other: (R,) and (U, R) both work
    (no suffix) a scalar, or a parameter / bucket / shard of any shape
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike


class NormStats(NamedTuple):
    """Running statistics of every replica's pseudo-gradient norm; identical on all ranks."""

    mean_R: Array
    var_R: Array
    count_R: Array  # integer, accepted rounds
    flags_R: Array  # integer, finite norms flagged in a row


class Verdict(NamedTuple):
    """What a round decided about every replica; all fields are (..., R) bool."""

    is_finite_R: Array
    is_flagged_R: Array  # finite, but too far above what this replica used to do
    is_rearmed_R: Array  # flagged so often in a row that it is accepted after all
    is_anomaly_R: Array  # contributes nothing to this round


def init_stats(shape: tuple[int, ...], *, dtype: DTypeLike) -> NormStats:
    """Returns statistics of ``shape`` (..., R) that have seen no round."""
    zeros_R, counts_R = jnp.zeros(shape, dtype), jnp.zeros(shape, int)
    return NormStats(zeros_R, zeros_R, counts_R, counts_R)


def finite_norms(norm_R: Array) -> Array:
    """Marks the norms whose square is finite in float32. (P1)

    Always float32, whatever the dtype of the run, so that a value of 1e30 is treated alike
    in float32 and float64.
    """
    return jnp.isfinite(jnp.square(norm_R.astype(jnp.float32)))


def median_over_replicas(norm_R: Array, keep_R: Array) -> Array:
    """(..., 1) median of the kept norms; the mean of the two middle ones for an even number.

    Infinite where nothing is kept.
    """
    last = norm_R.shape[-1] - 1
    sorted_R = jnp.sort(jnp.where(keep_R, norm_R, jnp.inf), axis=-1)
    kept = keep_R.sum(axis=-1, keepdims=True)
    low = jnp.clip((kept - 1) // 2, 0, last)
    high = jnp.clip(kept // 2, 0, last)
    middle_low = jnp.take_along_axis(sorted_R, low, axis=-1)
    middle_high = jnp.take_along_axis(sorted_R, high, axis=-1)
    return jnp.where(kept > 0, (middle_low + middle_high) / 2, jnp.inf)


def judge(
    norm_R: Array,
    stats: NormStats,
    *,
    z_threshold: float,
    warmup_rounds: int,
    spike_ratio: float,
    rearm_after: int,
    eps: float,
) -> Verdict:
    """Decides which replicas' progress must not reach the others. (P1, P2, P3)

    A replica is flagged when its statistics are warm and its norm lies more than
    ``z_threshold`` standard deviations *above* its own mean, or, before that and with three
    replicas or more, when its norm exceeds ``spike_ratio`` times the median of the finite
    norms. The ``rearm_after``-th flag in a row is accepted.

    Args:
        norm_R: (..., R) L2 norm of each replica's whole pseudo-gradient, not of one
            shard; in parameter units.
        stats: statistics of the earlier rounds, same shape.
        z_threshold: standard deviations.
        warmup_rounds: accepted rounds after which the statistics are warm.
        spike_ratio: multiple of the median.
        rearm_after: flags in a row.
        eps: added to the standard deviation.

    Returns:
        A ``Verdict``.

    Raises:
        ValueError: the shape of the norms is not the shape of the statistics.
    """
    if norm_R.shape != stats.mean_R.shape:
        raise ValueError(f"norms of shape {norm_R.shape} for statistics of {stats.mean_R.shape}")
    is_finite_R = finite_norms(norm_R)
    is_warm_R = stats.count_R >= warmup_rounds
    z_R = (norm_R - stats.mean_R) / (jnp.sqrt(stats.var_R) + eps)
    is_flagged_R = is_warm_R & (z_R > z_threshold)
    if norm_R.shape[-1] >= 3:
        limit = spike_ratio * median_over_replicas(norm_R, is_finite_R)
        is_flagged_R = is_flagged_R | (~is_warm_R & (norm_R > limit))
    is_flagged_R = is_flagged_R & is_finite_R
    is_rearmed_R = is_flagged_R & (stats.flags_R + 1 >= rearm_after)
    is_anomaly_R = ~is_finite_R | (is_flagged_R & ~is_rearmed_R)
    return Verdict(is_finite_R, is_flagged_R, is_rearmed_R, is_anomaly_R)


def update_stats(
    norm_R: Array, verdict: Verdict, stats: NormStats, *, ema_alpha: float
) -> NormStats:
    """Folds this round's norms into the statistics. (P4)

    Accepted norms enter with weight ``max(ema_alpha, 1 / (count + 1))``: exact mean and
    variance first, a moving average later. A re-armed replica starts anew from its norm. An
    anomaly changes nothing but the number of flags in a row, and a non-finite one not even
    that. Flags count in a rollback too, or a change of regime that all replicas share would
    be refused for ever.
    """
    accepted_R = ~verdict.is_anomaly_R
    alpha_R = jnp.maximum(1.0 / (stats.count_R.astype(norm_R.dtype) + 1.0), ema_alpha)
    step_R = norm_R - stats.mean_R
    mean_R = stats.mean_R + alpha_R * step_R
    var_R = (1.0 - alpha_R) * (stats.var_R + alpha_R * jnp.square(step_R))
    rearmed_R = verdict.is_rearmed_R
    return NormStats(
        mean_R=jnp.where(rearmed_R, norm_R, jnp.where(accepted_R, mean_R, stats.mean_R)),
        var_R=jnp.where(rearmed_R, 0.0, jnp.where(accepted_R, var_R, stats.var_R)),
        count_R=jnp.where(rearmed_R, 1, stats.count_R + accepted_R.astype(int)),
        flags_R=jnp.where(accepted_R, 0, stats.flags_R + verdict.is_flagged_R.astype(int)),
    )


def mixing_weights(
    norm_R: Array, is_anomaly_R: Array, *, temperature: float, relative: bool
) -> Array:
    """Weighs replicas by ``softmax(-norm / T)``, so a smaller step counts more. (P5)

    Args:
        norm_R: (..., R) norms.
        is_anomaly_R: (..., R) bool, replicas to leave out.
        temperature: T in parameter units, or, if ``relative``, in multiples of the
            median of the norms that are not left out (then weights do not depend on scale).
        relative: see ``temperature``.

    Returns:
        (..., R) weights that sum to 1; exact zeros for anomalies. When every replica is
        an anomaly all weights are 0, and the caller must keep the anchor (a rollback).
    """
    scale: float | Array = temperature
    if relative:
        scale = temperature * median_over_replicas(norm_R, ~is_anomaly_R)
        scale = jnp.where(scale > 0, scale, 1.0)
    logits_R = jnp.where(is_anomaly_R, -jnp.inf, -norm_R / scale)
    return jnp.where(is_anomaly_R, 0.0, jax.nn.softmax(logits_R, axis=-1))


def uniform_weights(is_anomaly_R: Array, *, dtype: DTypeLike) -> Array:
    """(..., R) equal weights over the replicas that are not anomalies; zeros if all are. (P5)"""
    kept_R = (~is_anomaly_R).astype(dtype)
    return kept_R / jnp.maximum(kept_R.sum(axis=-1, keepdims=True), 1.0)


def step_weights(weight_R: Array, steps_R: Array, is_anomaly_R: Array, *, share: float) -> Array:
    """Lets replicas that made more inner steps count for more. (P8)

    Args:
        weight_R: (..., R) weights of (P5).
        steps_R: (..., R) integer, inner steps since the last round.
        is_anomaly_R: (..., R) bool, replicas to leave out.
        share: part of the weight in [0, 1] that goes by steps; 0 keeps ``weight_R``.

    Returns:
        (..., R) ``(1 - share) * weight + share * steps / sum(steps)`` over the replicas that
        are not left out. Exact zeros for the others; zeros everywhere if all are left out.
    """
    taken_R = jnp.where(is_anomaly_R, 0, steps_R).astype(weight_R.dtype)
    total = taken_R.sum(axis=-1, keepdims=True)
    mixed_R = (1.0 - share) * weight_R + share * (taken_R / jnp.maximum(total, 1.0))
    return jnp.where(is_anomaly_R, 0.0, jnp.where(total > 0, mixed_R, weight_R))


def effective_replicas(weight_R: Array) -> Array:
    """(...) ``1 / sum(w^2)``: R for equal weights, 1 if one replica decides alone, 0 for none."""
    total = jnp.square(weight_R).sum(axis=-1)
    return jnp.where(total > 0, 1.0 / total, 0.0)


def weigh(pseudo_grad: Array, weight: Array) -> Array:
    """Scales one replica's pseudo-gradient; weight 0 gives 0 even where it is NaN. (P6)"""
    return jnp.where(weight > 0, weight * pseudo_grad, 0.0)


def clip_coefficient(norm: Array, *, max_norm: float, eps: float) -> Array:
    """Factor in (0, 1] that caps a vector of this L2 ``norm`` at ``max_norm``. (P7)"""
    return jnp.minimum(max_norm / (norm + eps), 1.0)
