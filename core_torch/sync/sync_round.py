"""A sync round: measure all units, then start and finish each unit's exchange.

The only file of core_torch/sync that communicates in a round. A round of U units sends, per
rank: one sum of U scalars over the shard axis, one gather of U norms over the replica axis, and
per unit one sum of this rank's shard over the replica axis and one or two scalars over the shard
axis. Nothing is read back to the host.

Equations (R1)..(R4) in docs/algorithms/edit.md.

Shape suffixes
    U  units    R  replicas    C  counters
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from core_torch.collectives import Axis, Pending, all_gather, psum, start_psum
from core_torch.sync.coded import PendingCoded, start_coded
from core_torch.sync.methods import Rules
from core_torch.sync.outer import mix, momentum_step, nesterov_step, staleness_gap
from core_torch.sync.penalty import (
    NormStats,
    Verdict,
    clip_coefficient,
    finite_norms,
    judge,
    mixing_weights,
    step_weights,
    uniform_weights,
    weigh,
)
from core_torch.sync.unit_state import UnitState
from core_torch.sync.units import SyncUnit

Flight = Pending | PendingCoded


class Axes(NamedTuple):
    """The axes of a round; both have process groups that parameter gathers do not use."""

    replica: Axis
    model: Axis  # all ranks of this replica


class Measured(NamedTuple):
    """What a round decided before any parameter moved; identical on all ranks."""

    norm_UR: Tensor
    verdict: Verdict  # fields (U, R)
    weight_UR: Tensor
    accept_U: Tensor  # False: nobody may contribute, the anchor stays (rollback)


class Finished(NamedTuple):
    """A unit after its round."""

    state: UnitState
    combined_norm: Tensor  # () before clipping
    clip: Tensor  # () in (0, 1]
    gap: Tensor  # () staleness gap, 1 where there is none


def sum_of_squares(tensors: list[Tensor], factors: tuple[int, ...]) -> Tensor:
    """() sum of squares of this rank's elements, each element of the replica counted once."""
    parts = [x.square().sum() / f for x, f in zip(tensors, factors, strict=True)]
    return torch.stack(parts).sum()


def _square(unit: SyncUnit, tensors: list[Tensor]) -> Tensor:
    """The same of a unit's tensors: 0 where another stage of the pipeline holds them."""
    return sum_of_squares(tensors, unit.factors) if tensors else unit.like.sum()


def pseudo_gradient(unit: SyncUnit, state: UnitState) -> list[Tensor]:
    """``anchor - local`` for every tensor of the unit. (R1)"""
    return [a - x for a, x in zip(state.anchor, unit.shards(), strict=True)]


def gather_norms(
    units: list[SyncUnit], states: Iterable[UnitState], axes: Axes, counters: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(U, R) norms of all units on all replicas in two small messages. (R2)

    Args:
        units: of the round.
        states: theirs, taken one after the other.
        axes: of the round.
        counters: (C,) int64 of this replica, which travel with the norms; None: nothing does.

    Returns:
        The norms, and (R, C) counters of all replicas or None.
    """
    squares = [
        _square(unit, pseudo_gradient(unit, state))
        for unit, state in zip(units, states, strict=True)
    ]
    norm_U = psum(torch.stack(squares), axes.model, scope="norms").sqrt()
    if counters is None:
        return all_gather(norm_U, axes.replica, scope="norms").T.contiguous(), None
    # One message of whole numbers: a norm as its bits, because no float holds every counter.
    bits_U = norm_U.to(torch.float64).view(torch.int64)
    rows = all_gather(torch.cat((bits_U, counters)), axes.replica, scope="norms")
    bits_RU, counters_RC = rows.split([len(units), len(counters)], dim=1)
    norm_RU = bits_RU.contiguous().view(torch.float64).to(norm_U.dtype)
    return norm_RU.T.contiguous(), counters_RC


def measure_all(
    units: list[SyncUnit],
    states: Iterable[UnitState],
    stats: NormStats,
    rules: Rules,
    axes: Axes,
    counters: Tensor | None = None,
) -> tuple[Measured, Tensor | None]:
    """Norms of all units on all replicas, and what follows from them. (R2)

    Without a penalty all replicas weigh the same, and one non-finite norm rejects the round. A
    replica whose first counter, its inner steps, is 0 is left out like an anomaly.
    """
    norm_UR, counters_RC = gather_norms(units, states, axes, counters)
    steps_R = None if counters_RC is None else counters_RC[:, 0]
    return decide(norm_UR, stats, rules, steps_R), counters_RC


def decide(norm_UR: Tensor, stats: NormStats, rules: Rules, steps_R: Tensor | None) -> Measured:
    """What follows from norms, and from inner steps where replicas may differ in them."""
    if steps_R is None:
        verdict = _judge(norm_UR, stats, rules)
    else:
        is_absent_R = steps_R == 0  # its norm is 0 and must not enter a median
        verdict = _judge(torch.where(is_absent_R, torch.inf, norm_UR), stats, rules)
        anomaly_UR = verdict.is_anomaly_R | is_absent_R
        verdict = verdict._replace(is_finite_R=finite_norms(norm_UR), is_anomaly_R=anomaly_UR)
    return Measured(norm_UR, verdict, *_weights(norm_UR, verdict, rules, steps_R))


def _judge(norm_UR: Tensor, stats: NormStats, rules: Rules) -> Verdict:
    """The verdict of the penalty, or one that lets everybody in."""
    if rules.penalty is None or not rules.penalty.exclude:
        nobody = torch.zeros_like(norm_UR, dtype=torch.bool)
        return Verdict(finite_norms(norm_UR), nobody, nobody, nobody)
    return judge(
        norm_UR,
        stats,
        z_threshold=rules.penalty.z_threshold,
        warmup_rounds=rules.penalty.warmup_rounds,
        spike_ratio=rules.penalty.spike_ratio,
        rearm_after=rules.penalty.rearm_after,
        eps=rules.penalty.eps,
    )


def _weights(
    norm_UR: Tensor, verdict: Verdict, rules: Rules, steps_R: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(U, R) weights, and (U,) whether the round of a unit counts."""
    anomaly_UR = verdict.is_anomaly_R
    if rules.penalty is not None and rules.penalty.weigh:
        weight_UR = mixing_weights(
            norm_UR,
            anomaly_UR,
            temperature=rules.penalty.temperature,
            relative=rules.penalty.temperature_unit == "median",
        )
    else:
        weight_UR = uniform_weights(anomaly_UR, dtype=norm_UR.dtype)
    if steps_R is not None and rules.step_weight > 0:
        weight_UR = step_weights(weight_UR, steps_R, anomaly_UR, share=rules.step_weight)
    accept_U = ~anomaly_UR.all(dim=-1)
    if not rules.excludes:
        accept_U = accept_U & verdict.is_finite_R.all(dim=-1)
    return weight_UR, accept_U


def progress_norms(measured: Measured) -> Tensor:
    """(U,) mean over the replicas of the finite norms: how far a round has moved them."""
    is_finite_UR = measured.verdict.is_finite_R
    total_U = torch.where(is_finite_UR, measured.norm_UR, 0.0).sum(dim=-1)
    return total_U / is_finite_UR.sum(dim=-1).clamp(min=1)


def start(
    unit: SyncUnit,
    state: UnitState,
    weight_R: Tensor,
    rules: Rules,
    axes: Axes,
    residual: Tensor | None = None,
) -> tuple[Flight, Tensor | None]:
    """Starts the weighted sum of a unit's pseudo-gradients over the replicas. (R3)

    Args:
        unit: the unit.
        state: its state from the last round.
        weight_R: of the replicas.
        rules: say what is sent.
        axes: of the round.
        residual: (numel,) what coding has left out so far; None before the first time.

    Returns:
        The sum in flight and the next residual.
    """
    pseudo, me = pseudo_gradient(unit, state), axes.replica.index
    if rules.wire == "fp32" or axes.replica.size == 1:
        flat = unit.flat(weigh(d, weight_R[me]) for d in pseudo)
        return start_psum(flat, axes.replica, scope=unit.name), residual
    flat = unit.flat(pseudo)
    old = torch.zeros_like(flat) if residual is None else residual
    return start_coded(flat, old, weight_R, axes.replica, wire=rules.wire, scope=unit.name)


def finish(
    unit: SyncUnit,
    state: UnitState,
    pending: Flight,
    accept: Tensor,
    rules: Rules,
    axes: Axes,
    *,
    progress: Tensor | None = None,
    keep: float = 0.0,
) -> Finished:
    """Waits for a unit's sum, takes the outer step, writes the parameters. (R4)

    The parameters are overwritten in place (same storage), also in a rollback.

    Args:
        unit: the unit.
        state: its state.
        pending: the sum, see ``start``.
        accept: () bool; False leaves the state as it is.
        rules: of the method.
        axes: of the round.
        progress: () norm of the replicas' movement in the newest round, for a staleness gap.
        keep: share of its own value that a parameter keeps.
    """
    sizes = [a.numel() for a in state.anchor]
    flat = pending.wait().split(sizes)
    combined = [x.view(a.shape) for x, a in zip(flat, state.anchor, strict=True)]
    squares = [_square(unit, combined)]
    if progress is not None:
        squares.append(_square(unit, state.velocity))
    norms = psum(torch.stack(squares), axes.model, scope=unit.name).sqrt()
    beta = gap = torch.ones_like(norms[0])
    if rules.penalty is not None and rules.penalty.clip:
        beta = clip_coefficient(norms[0], max_norm=rules.penalty.max_norm, eps=rules.penalty.eps)
    if progress is not None:
        gap = staleness_gap(norms[1], progress, eps=1e-6)
    anchors, velocities = [], []
    for x, a, b, d in zip(unit.shards(), state.anchor, state.velocity, combined, strict=True):
        anchor, velocity = _outer_step(a, b, beta * d, accept, gap, rules)
        x.copy_(mix(x, anchor, alpha=keep))
        anchors.append(anchor)
        velocities.append(velocity)
    return Finished(UnitState(anchors, velocities), norms[0], beta, gap)


def _outer_step(
    anchor: Tensor, velocity: Tensor, combined: Tensor, accept: Tensor, gap: Tensor, rules: Rules
) -> tuple[Tensor, Tensor]:
    outer = dict(lr=rules.outer_lr, momentum=rules.outer_momentum)
    if rules.method.outer == "nesterov":
        return nesterov_step(anchor, velocity, combined, accept, **outer)
    clip = rules.co2.clip
    return momentum_step(anchor, velocity, combined, accept, gap, clip=clip, **outer)
