"""A sync round: measure all units, then start and finish each unit's exchange.

The only file of core_torch/sync that communicates. A round of U units sends, per rank: one
sum of U scalars over the shard axis, one gather of U norms over the replica axis, and per
unit one sum of this rank's shard over the replica axis and one scalar over the shard axis.
Nothing is read back to the host.

Equations (R1)..(R4) in docs/algorithms/edit.md.

Shape suffixes
    U  units    R  replicas
"""

from typing import NamedTuple

import torch
from torch import Tensor

from core_torch.collectives import Axis, Pending, all_gather, psum, start_psum
from core_torch.sync.methods import Rules
from core_torch.sync.outer import nesterov_step
from core_torch.sync.penalty import (
    NormStats,
    Verdict,
    clip_coefficient,
    finite_norms,
    judge,
    mixing_weights,
    uniform_weights,
    weigh,
)
from core_torch.sync.state import UnitState
from core_torch.sync.units import SyncUnit


class Axes(NamedTuple):
    """The axes of a round; both have process groups that parameter gathers do not use."""

    replica: Axis
    shard: Axis


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


def sum_of_squares(tensors: list[Tensor], factors: tuple[int, ...]) -> Tensor:
    """() sum of squares of this rank's elements, each element of the replica counted once."""
    parts = [x.square().sum() / f for x, f in zip(tensors, factors, strict=True)]
    return torch.stack(parts).sum()


def pseudo_gradient(unit: SyncUnit, state: UnitState) -> list[Tensor]:
    """``anchor - local`` for every tensor of the unit. (R1)"""
    return [a - x for a, x in zip(state.anchor, unit.shards(), strict=True)]


def measure_all(
    units: list[SyncUnit], states: list[UnitState], stats: NormStats, rules: Rules, axes: Axes
) -> Measured:
    """Norms of all units on all replicas in two small messages, and what follows. (R2)

    Without a penalty all replicas weigh the same, and one non-finite norm rejects the round.
    """
    squares = [
        sum_of_squares(pseudo_gradient(unit, state), unit.factors)
        for unit, state in zip(units, states, strict=True)
    ]
    norm_U = psum(torch.stack(squares), axes.shard, scope="norms").sqrt()
    norm_UR = all_gather(norm_U, axes.replica, scope="norms").T.contiguous()
    verdict = _judge(norm_UR, stats, rules)
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
    if rules.excludes:
        accept_U = ~anomaly_UR.all(dim=-1)
    else:
        accept_U = verdict.is_finite_R.all(dim=-1)
    return Measured(norm_UR, verdict, weight_UR, accept_U)


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


def start(unit: SyncUnit, state: UnitState, weight: Tensor, axes: Axes) -> Pending:
    """Starts the weighted sum of a unit's pseudo-gradients over the replicas. (R3)

    Args:
        unit: the unit.
        state: its state from the last round.
        weight: () this replica's weight.
        axes: of the round.
    """
    flat = torch.cat([weigh(d, weight).reshape(-1) for d in pseudo_gradient(unit, state)])
    return start_psum(flat, axes.replica, scope=unit.name)


def finish(
    unit: SyncUnit, state: UnitState, pending: Pending, accept: Tensor, rules: Rules, axes: Axes
) -> Finished:
    """Waits for a unit's sum, clips it, takes the outer step, writes the parameters. (R4)

    The parameters are overwritten in place (same storage) with the new anchor, also in a
    rollback.
    """
    sizes = [a.numel() for a in state.anchor]
    flat = pending.wait().split(sizes)
    combined = [x.view(a.shape) for x, a in zip(flat, state.anchor, strict=True)]
    norm = psum(sum_of_squares(combined, unit.factors), axes.shard, scope=unit.name).sqrt()
    beta = torch.ones_like(norm)
    if rules.penalty is not None and rules.penalty.clip:
        beta = clip_coefficient(norm, max_norm=rules.penalty.max_norm, eps=rules.penalty.eps)
    anchors, velocities = [], []
    for x, a, b, d in zip(unit.shards(), state.anchor, state.velocity, combined, strict=True):
        anchor, velocity = nesterov_step(
            a, b, beta * d, accept, lr=rules.outer_lr, momentum=rules.outer_momentum
        )
        x.copy_(anchor)
        anchors.append(anchor)
        velocities.append(velocity)
    return Finished(UnitState(anchors, velocities), norm, beta)
