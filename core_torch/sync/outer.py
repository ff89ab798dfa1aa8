"""Outer optimizers: from an anchor and a combined pseudo-gradient to the next anchor.

Pure tensor math; elementwise, so a shard may be updated without its neighbours.
Mirror: reference_jax/sync/outer.py. Equations (O1)..(O3) in docs/algorithms/diloco.md.
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


def heal(moment: Tensor, is_bad: Tensor) -> Tensor:
    """Zeros in place of a moment (or step count) of a replica that went non-finite. (O3)

    Without this a replica whose AdamW moments hold a NaN would stay bad for ever, although
    the round has given it good parameters.
    """
    return torch.where(is_bad, torch.zeros_like(moment), moment)
