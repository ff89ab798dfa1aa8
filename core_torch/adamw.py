"""AdamW: one pure function on tensors, and the optimizer class that applies it to shards.

Elementwise, so it runs on a shard without communication. The step count is a tensor per
parameter (all parameters of a unit share its value): a replica that is healed after a
non-finite round starts its bias correction anew, on its own. State keys are those of
``torch.optim.AdamW``. The class can leave the arithmetic to torch's fused kernel instead, which
reads and writes each element once and rounds a little differently.

Mirror: reference_jax/adamw.py. Equations (A1)..(A5) in docs/algorithms/synchronous.md, after
Loshchilov and Hutter, arXiv:1711.05101.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw


def adamw_update(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
    root = (exp_avg_sq / (1.0 - beta2**step)).sqrt()
    return param - lr * mean / (root + eps), exp_avg, exp_avg_sq, step


class AdamW(Optimizer):
    """AdamW over plain tensors and DTensors; every rank updates its own shard, in place.

    Args:
        params: parameters or groups, as for ``torch.optim.AdamW``.
        lr: learning rate.
        betas: decays of the two running means.
        eps: see ``adamw_update``.
        weight_decay: decoupled decay.
        fused: torch's kernel instead of ``adamw_update``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        fused: bool = False,
    ) -> None:
        self._fused = fused
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Applies one update to every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            scalars = dict(lr=group["lr"], beta1=beta1, beta2=beta2, eps=group["eps"])
            scalars["weight_decay"] = group["weight_decay"]
            params = [p for p in group["params"] if p.grad is not None]
            if self._fused and params:
                self._update_all(params, **scalars)
            else:
                for p in params:
                    self._update(p, **scalars)
        return loss

    def init_state(self) -> None:
        """Allocates zero moments for every parameter now, as a checkpoint at step 0 needs them."""
        for group in self.param_groups:
            for p in group["params"]:
                self._state_of(p)

    def _state_of(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            local = _local(p)
            state["step"] = torch.zeros((), dtype=local.dtype, device=local.device)
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        return state

    def _held(self, p: Tensor) -> list[Tensor]:
        """This rank's shards of a parameter and of its state."""
        state = self._state_of(p)
        return [_local(p), _local(state["exp_avg"]), _local(state["exp_avg_sq"]), state["step"]]

    def _update_all(self, params: list[Tensor], **scalars: float) -> None:
        held = [self._held(p) for p in params]
        grads = [_local(p.grad) for p in params if p.grad is not None]
        shards, means, squares, steps = (list(column) for column in zip(*held, strict=True))
        counts = [step.float() for step in steps]  # the dtype that the kernel takes
        adamw(
            shards,
            grads,
            means,
            squares,
            [],
            counts,
            fused=True,
            amsgrad=False,
            maximize=False,
            **scalars,  # type: ignore[arg-type]
        )
        for step, count in zip(steps, counts, strict=True):
            step.copy_(count)

    def _update(self, p: Tensor, **scalars: float) -> None:
        held = self._held(p)
        assert p.grad is not None
        param, exp_avg, exp_avg_sq, step = held
        new = adamw_update(param, _local(p.grad), exp_avg, exp_avg_sq, step, **scalars)
        for old, value in zip(held, new, strict=True):
            old.copy_(value)


def _local(x: Tensor) -> Tensor:
    """This rank's shard, sharing storage with ``x``."""
    return x.to_local() if isinstance(x, DTensor) else x.detach()
