"""What training minimises: cross entropy over the targets that count, and the z-loss.

    loss of a token    lse - logit[target] + z_loss * lse^2,    lse = log sum exp(logits)

A target equal to ``IGNORE`` does not count. Sums, not means, leave this file where tokens may
be left out: only the trainer knows how many count on all ranks. The z-loss (PaLM,
arXiv:2204.02311) keeps lse near 0. ``Head`` can compute loss and gradient some tokens at a time,
so that no (tokens, V) logits are ever held.

Shape suffixes
    B  sequences    T  positions    D  width    V  vocabulary
    N  tokens of a micro-batch    C  tokens of a chunk
"""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from core_torch.data.batches import IGNORE
from core_torch.errors import ConfigError


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums, norms and non-linear functions of ``dtype`` are computed."""
    return torch.promote_types(dtype, torch.float32)


def token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """() mean cross entropy over all positions, in at least float32; natural logarithm."""
    wide = logits_BTV.to(at_least_float32(logits_BTV.dtype))
    return F.cross_entropy(wide.flatten(0, 1), targets_BT.flatten())


def summed_loss(logits_BTV: Tensor, targets_BT: Tensor, *, z_loss: float = 0.0) -> Tensor:
    """() sum of the losses of the targets that count; 0 if none does."""
    wide = logits_BTV.to(at_least_float32(logits_BTV.dtype)).flatten(0, 1)
    targets_N = targets_BT.flatten()
    total = F.cross_entropy(wide, targets_N, reduction="sum", ignore_index=IGNORE)
    if z_loss:
        square_N = wide.logsumexp(dim=-1).square()
        total = total + z_loss * square_N.where(targets_N != IGNORE, 0.0).sum()
    return total


class Head(nn.Linear):
    """The last matrix: hidden states to logits, or with targets straight to the summed loss.

    Attributes:
        chunk: tokens whose logits are held at a time when there are targets.
        z_loss: coefficient; only a module in training mode adds it.
    """

    chunk = 0
    z_loss = 0.0

    def forward(self, x_BTD: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """(B, T, V) logits; or () ``summed_loss`` of them, computed ``chunk`` tokens at a time."""
        if targets_BT is None:
            return super().forward(x_BTD)
        z_loss = self.z_loss if self.training else 0.0
        return chunked_loss(
            x_BTD.flatten(0, 1), self.weight, targets_BT.flatten(), chunk=self.chunk, z_loss=z_loss
        )


def set_loss(model: nn.Module, *, chunk: int, z_loss: float) -> None:
    """Tells a model's ``Head`` which loss is wanted of it.

    Raises:
        ConfigError: ``chunk`` needs a head, and the model has none.
    """
    head = getattr(model, "output", None)
    if isinstance(head, Head):
        head.chunk, head.z_loss = chunk, z_loss
    elif chunk:
        raise ConfigError(
            f"train.loss_chunk: {type(model).__name__} has no Head whose loss can be cut",
            next="--train.loss_chunk 0",
        )


def chunked_loss(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, *, chunk: int, z_loss: float = 0.0
) -> Tensor:
    """() ``summed_loss`` of ``x @ weight.T``, holding the logits of ``chunk`` tokens at a time.

    Where gradients are on, they are made in the forward, chunk by chunk, and kept until the
    backward multiplies them: no logits are computed twice. It can be differentiated once.
    """
    if not torch.is_grad_enabled():
        parts = zip(x_ND.split(chunk), targets_N.split(chunk), strict=True)
        losses = [_of_chunk(x @ weight_VD.t(), y, z_loss)[0] for x, y in parts]
        return torch.stack(losses).sum()
    total: Tensor = _ChunkedLoss.apply(x_ND, weight_VD, targets_N, chunk, z_loss)
    return total


def _of_chunk(logits_CV: Tensor, targets_C: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """() summed loss, and the (C, V) logits in at least float32."""
    wide = logits_CV.to(at_least_float32(logits_CV.dtype))
    return summed_loss(wide[None], targets_C[None], z_loss=z_loss), wide


class _ChunkedLoss(torch.autograd.Function):
    """The loss of all chunks and its gradients, for a backward that only scales them."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, chunk: int, z_loss: float
    ) -> Tensor:
        wide = at_least_float32(weight_VD.dtype)
        losses, rows = [], []
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide)
        for x_CD, targets_C in zip(x_ND.split(chunk), targets_N.split(chunk), strict=True):
            loss, logits_CV = _of_chunk(x_CD @ weight_VD.t(), targets_C, z_loss)
            grad_CV = _gradient(logits_CV, targets_C, z_loss).to(x_CD.dtype)
            losses.append(loss)
            rows.append(grad_CV @ weight_VD)
            grad_weight_VD += grad_CV.t() @ x_CD
        ctx.save_for_backward(torch.cat(rows), grad_weight_VD.to(weight_VD.dtype))
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_ND, grad_weight_VD = ctx.saved_tensors
        by = upstream.to(grad_x_ND.dtype)
        return grad_x_ND * by, grad_weight_VD * by, None, None, None


def _gradient(logits_CV: Tensor, targets_C: Tensor, z_loss: float) -> Tensor:
    """(C, V) derivative of ``summed_loss`` by logits that are at least float32.

    softmax * (1 + 2 z_loss lse) - 1 at the target; 0 where the target does not count.
    """
    counts_C1 = (targets_C != IGNORE)[:, None]
    lse_C1 = logits_CV.logsumexp(dim=-1, keepdim=True)
    grad_CV = (logits_CV - lse_C1).exp_()
    if z_loss:
        grad_CV *= 1.0 + 2.0 * z_loss * lse_C1
    at_C1 = targets_C[:, None].where(counts_C1, 0)
    grad_CV.scatter_add_(1, at_C1, torch.full_like(lse_C1, -1.0))
    return grad_CV.masked_fill_(~counts_C1, 0.0)
