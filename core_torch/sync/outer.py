"""Outer optimizers: from an anchor and a combined pseudo-gradient to the next anchor.

Pure tensor math; elementwise, so a shard may be updated without its neighbours.
Mirror: reference_jax/sync/outer.py. Equations (O1)..(O3) in docs/algorithms/diloco.md, (O4, O5)
in docs/algorithms/co2.md, (O6) in docs/algorithms/streaming.md.
"""

import torch
from torch import Tensor


def nesterov_step(
    anchor: Tensor,
    velocity: Tensor,
    pseudo_grad: Tensor,
    accept: Tensor,
    *,
    lr: float,
    momentum: float,
) -> tuple[Tensor, Tensor]:
    """One Nesterov step, or no step at all where ``accept`` is False. (O1, O2)

    Same rule as ``torch.optim.SGD(nesterov=True, dampening=0)`` and ``optax.sgd``;
    ``lr=1, momentum=0`` is plain averaging.

    Args:
        anchor: parameters agreed in the previous round, any shape.
        velocity: momentum buffer, zeros before the first round, same shape.
        pseudo_grad: combined ``anchor - local``, same shape; a gradient, so the step goes
            against it.
        accept: () bool. False keeps anchor and velocity (rollback).
        lr: outer learning rate.
        momentum: outer momentum.

    Returns:
        The next anchor and velocity.
    """
    new_velocity = momentum * velocity + pseudo_grad
    new_anchor = anchor - lr * (pseudo_grad + momentum * new_velocity)
    return torch.where(accept, new_anchor, anchor), torch.where(accept, new_velocity, velocity)


def momentum_step(
    anchor: Tensor,
    velocity: Tensor,
    pseudo_grad: Tensor,
    accept: Tensor,
    gap: Tensor,
    *,
    lr: float,
    momentum: float,
    clip: float,
) -> tuple[Tensor, Tensor]:
    """One step of clipped heavy-ball momentum, or none where ``accept`` is False. (O4)

    Args:
        anchor: parameters agreed in the previous round, any shape.
        velocity: momentum buffer, zeros before the first round, same shape.
        pseudo_grad: combined ``anchor - local`` of an *earlier* round, same shape.
        accept: () bool. False keeps anchor and velocity.
        gap: () staleness gap, 1 or more; a stale gradient counts that much less. (O5)
        lr: outer learning rate.
        momentum: outer momentum.
        clip: bound on every element of the new velocity.

    Returns:
        The next anchor and velocity.
    """
    new_velocity = torch.clamp(momentum * velocity + pseudo_grad / gap, -clip, clip)
    new_anchor = anchor - lr * new_velocity
    return torch.where(accept, new_anchor, anchor), torch.where(accept, new_velocity, velocity)


def staleness_gap(velocity_norm: Tensor, progress_norm: Tensor, *, eps: float) -> Tensor:
    """() ``1 + velocity_norm / (progress_norm + eps)``. (O5)

    The gap says how far the last outer step moved the anchor under a gradient that was
    measured before it, in units of what a replica moves between two rounds.

    Args:
        velocity_norm: () L2 norm of the velocity before this step, over all shards.
        progress_norm: () mean over the replicas of the norms of ``anchor - local``.
        eps: added to ``progress_norm``.
    """
    return 1.0 + velocity_norm / (progress_norm + eps)


def mix(local: Tensor, anchor: Tensor, *, alpha: float) -> Tensor:
    """``alpha * local + (1 - alpha) * anchor``, exact at both ends. (O6)

    Args:
        local: parameters of one replica, any shape.
        anchor: the agreed parameters, same shape.
        alpha: in [0, 1]. 0 returns ``anchor`` itself, even where ``local`` is NaN; 1 returns
            ``local`` itself.
    """
    if alpha == 0.0:
        return anchor
    if alpha == 1.0:
        return local
    return alpha * local + (1.0 - alpha) * anchor


def heal(moment: Tensor, is_bad: Tensor) -> Tensor:
    """Zeros in place of a moment (or step count) of a replica that went non-finite. (O3)

    Without this a replica whose AdamW moments hold a NaN would stay bad for ever, although
    the round has given it good parameters.
    """
    return torch.where(is_bad, torch.zeros_like(moment), moment)
