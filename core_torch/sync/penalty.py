"""Pseudo-gradient penalty: how much each replica's progress counts in a sync round.

Pure tensor math. Nothing here knows a process group, a module, a clock or a step
counter, and nothing reads a tensor back to the host. The engine, the simulator and
the parity tests all call these same functions.

Mirror      reference_jax/sync/penalty.py, function by function
Equations   (P1)..(P8) in docs/algorithms/edit.md, which cites Cheng et al., arXiv:2412.07210

Shape suffixes
    R    replicas in the sync round; always the last axis. Any axes before it (the units
         of a model) are independent of each other: (R,) and (U, R) both work
    (no suffix) a scalar, or a parameter / bucket / shard of any shape
"""

from typing import NamedTuple

import torch
from torch import Tensor


class NormStats(NamedTuple):
    """Running statistics of every replica's pseudo-gradient norm; identical on all ranks."""

    mean_R: Tensor
    var_R: Tensor
    count_R: Tensor  # int64, accepted rounds
    flags_R: Tensor  # int64, finite norms flagged in a row


class Verdict(NamedTuple):
    """What a round decided about every replica; all fields are (..., R) bool."""

    is_finite_R: Tensor
    is_flagged_R: Tensor  # finite, but too far above what this replica used to do
    is_rearmed_R: Tensor  # flagged so often in a row that it is accepted after all
    is_anomaly_R: Tensor  # contributes nothing to this round


def init_stats(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> NormStats:
    """Returns statistics of ``shape`` (..., R) that have seen no round."""
    zeros_R = torch.zeros(shape, dtype=dtype, device=device)
    counts_R = torch.zeros(shape, dtype=torch.int64, device=device)
    return NormStats(zeros_R, zeros_R.clone(), counts_R, counts_R.clone())


def finite_norms(norm_R: Tensor) -> Tensor:
    """Marks the norms whose square is finite in float32. (P1)

    Always float32, whatever the dtype of the run, so that a value of 1e30 is treated alike
    in float32 and float64.
    """
    return torch.isfinite(norm_R.to(torch.float32).square())


def median_over_replicas(norm_R: Tensor, keep_R: Tensor) -> Tensor:
    """(..., 1) median of the kept norms; the mean of the two middle ones for an even number.

    Infinite where nothing is kept.
    """
    last = norm_R.shape[-1] - 1
    sorted_R = torch.where(keep_R, norm_R, torch.inf).sort(dim=-1).values
    kept = keep_R.sum(dim=-1, keepdim=True)
    low = ((kept - 1) // 2).clamp(0, last)
    high = (kept // 2).clamp(0, last)
    middle_low, middle_high = sorted_R.gather(-1, low), sorted_R.gather(-1, high)
    return torch.where(kept > 0, (middle_low + middle_high) / 2, torch.inf)


def judge(
    norm_R: Tensor,
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
    ``z_threshold`` standard deviations *above* its own mean (a small step is never
    suspicious), or, before that and with three replicas or more, when its norm exceeds
    ``spike_ratio`` times the median of the finite norms. The ``rearm_after``-th flag in a
    row is accepted: a lasting change of regime must not be refused for ever.

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
        raise ValueError(
            f"norms of shape {tuple(norm_R.shape)} for statistics of {tuple(stats.mean_R.shape)}"
        )
    is_finite_R = finite_norms(norm_R)
    is_warm_R = stats.count_R >= warmup_rounds
    z_R = (norm_R - stats.mean_R) / (stats.var_R.sqrt() + eps)
    is_flagged_R = is_warm_R & (z_R > z_threshold)
    if norm_R.shape[-1] >= 3:
        limit = spike_ratio * median_over_replicas(norm_R, is_finite_R)
        is_flagged_R = is_flagged_R | (~is_warm_R & (norm_R > limit))
    is_flagged_R = is_flagged_R & is_finite_R
    is_rearmed_R = is_flagged_R & (stats.flags_R + 1 >= rearm_after)
    is_anomaly_R = ~is_finite_R | (is_flagged_R & ~is_rearmed_R)
    return Verdict(is_finite_R, is_flagged_R, is_rearmed_R, is_anomaly_R)


def update_stats(
    norm_R: Tensor, verdict: Verdict, stats: NormStats, *, ema_alpha: float
) -> NormStats:
    """Folds this round's norms into the statistics. (P4)

    Accepted norms enter with weight ``max(ema_alpha, 1 / (count + 1))``: exact mean and
    variance first, a moving average later. A re-armed replica starts anew from its norm. An
    anomaly changes nothing but the number of flags in a row, and a non-finite one not even
    that. Flags count in a rollback too, or a change of regime that all replicas share would
    be refused for ever.
    """
    accepted_R = ~verdict.is_anomaly_R
    alpha_R = (1.0 / (stats.count_R.to(norm_R.dtype) + 1.0)).clamp(min=ema_alpha)
    step_R = norm_R - stats.mean_R
    mean_R = stats.mean_R + alpha_R * step_R
    var_R = (1.0 - alpha_R) * (stats.var_R + alpha_R * step_R.square())
    rearmed_R = verdict.is_rearmed_R
    return NormStats(
        mean_R=torch.where(rearmed_R, norm_R, torch.where(accepted_R, mean_R, stats.mean_R)),
        var_R=torch.where(rearmed_R, 0.0, torch.where(accepted_R, var_R, stats.var_R)),
        count_R=torch.where(rearmed_R, 1, stats.count_R + accepted_R.to(torch.int64)),
        flags_R=torch.where(accepted_R, 0, stats.flags_R + verdict.is_flagged_R.to(torch.int64)),
    )


def mixing_weights(
    norm_R: Tensor, is_anomaly_R: Tensor, *, temperature: float, relative: bool
) -> Tensor:
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
    scale = torch.full_like(norm_R, temperature)
    if relative:
        scale = temperature * median_over_replicas(norm_R, ~is_anomaly_R)
        scale = torch.where(scale > 0, scale, 1.0)
    logits_R = torch.where(is_anomaly_R, -torch.inf, -norm_R / scale)
    return torch.where(is_anomaly_R, 0.0, torch.softmax(logits_R, dim=-1))


def uniform_weights(is_anomaly_R: Tensor, *, dtype: torch.dtype) -> Tensor:
    """(..., R) equal weights over the replicas that are not anomalies; zeros if all are. (P5)"""
    kept_R = (~is_anomaly_R).to(dtype)
    return kept_R / kept_R.sum(dim=-1, keepdim=True).clamp(min=1.0)


def step_weights(
    weight_R: Tensor, steps_R: Tensor, is_anomaly_R: Tensor, *, share: float
) -> Tensor:
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
    taken_R = torch.where(is_anomaly_R, 0, steps_R).to(weight_R.dtype)
    total = taken_R.sum(dim=-1, keepdim=True)
    mixed_R = (1.0 - share) * weight_R + share * (taken_R / total.clamp(min=1.0))
    return torch.where(is_anomaly_R, 0.0, torch.where(total > 0, mixed_R, weight_R))


def effective_replicas(weight_R: Tensor) -> Tensor:
    """(...) ``1 / sum(w^2)``: R for equal weights, 1 if one replica decides alone, 0 for none."""
    total = weight_R.square().sum(dim=-1)
    return torch.where(total > 0, 1.0 / total, 0.0)


def weigh(pseudo_grad: Tensor, weight: Tensor) -> Tensor:
    """Scales one replica's pseudo-gradient; weight 0 gives 0 even where it is NaN. (P6)"""
    return torch.where(weight > 0, weight * pseudo_grad, 0.0)


def clip_coefficient(norm: Tensor, *, max_norm: float, eps: float) -> Tensor:
    """Factor in (0, 1] that caps a vector of this L2 ``norm`` at ``max_norm``. (P7)"""
    return torch.clamp(max_norm / (norm + eps), max=1.0)
