"""AdamW, spelled out: one pure function on arrays.

Elementwise, so it runs on a shard without communication. The step count is an array: each
replica has its own, because a replica that is healed after a non-finite round starts its
bias correction anew.

Mirror: core_torch/adamw.py. Equations (A1)..(A5) in docs/algorithms/synchronous.md, after
Loshchilov and Hutter, arXiv:1711.05101.
"""

import jax.numpy as jnp
from jax import Array


def adamw_update(
    param: Array,
    grad: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    step: Array,
    *,
    lr: float | Array,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> tuple[Array, Array, Array, Array]:
    """One AdamW step of one tensor, with decoupled decay and bias correction. (A1..A5)

    Args:
        param: parameters, any shape.
        grad: gradient, same shape.
        exp_avg: running mean of gradients, same shape.
        exp_avg_sq: running mean of squared gradients, same shape.
        step: () number of steps taken before this one, in the dtype of ``param``.
        lr: learning rate of this step.
        beta1: decay of ``exp_avg``.
        beta2: decay of ``exp_avg_sq``.
        eps: added to the root of the corrected second moment.
        weight_decay: the parameter shrinks by ``lr * weight_decay`` of itself first.

    Returns:
        The next param, exp_avg, exp_avg_sq and step.
    """
    step = step + 1
    param = param * (1.0 - lr * weight_decay)
    exp_avg = beta1 * exp_avg + (1.0 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1.0 - beta2) * grad * grad
    mean = exp_avg / (1.0 - beta1**step)
    root = jnp.sqrt(exp_avg_sq / (1.0 - beta2**step))
    return param - lr * mean / (root + eps), exp_avg, exp_avg_sq, step
