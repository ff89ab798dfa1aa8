"""The loss with a z-loss, with targets left out, and in chunks: one number, less memory."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core_torch.config import ModelConfig
from core_torch.data.batches import IGNORE
from core_torch.errors import ConfigError
from core_torch.models import build_model, token_loss
from core_torch.models.loss import chunked_loss, set_loss, summed_loss

N, D, V = 13, 7, 29
F64 = torch.float64
# One rounding for each of the at most N + D terms of a sum, of values below 16.
BOUND = 16 * (N + D) * torch.finfo(F64).eps


def case(dtype: torch.dtype = F64, tokens: int = N) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weights and targets, two of which do not count."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, D, generator=generator, dtype=F64) for n in (tokens, V))
    targets = torch.randint(0, V, (tokens,), generator=generator)
    targets[[3, 7]] = IGNORE
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def with_gradients(loss: Callable[[Tensor, Tensor], Tensor], *inputs: Tensor) -> list[Tensor]:
    """Value and gradients."""
    value = loss(*inputs)
    return [value.detach(), *torch.autograd.grad(value / 5, inputs)]


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_the_loss_is_what_the_formula_says_of_the_targets_that_count(z_loss: float) -> None:
    x, weight, targets = case()
    logits = (x @ weight.t()).detach()
    total = 0.0
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        if target != IGNORE:
            lse = math.log(sum(math.exp(value) for value in row))
            total += lse - row[target] + z_loss * lse**2
    found = summed_loss(logits[None], targets[None], z_loss=z_loss)
    assert found.item() == pytest.approx(total, rel=1e-14)


def test_without_a_z_loss_and_with_all_targets_it_is_the_mean_that_it_always_was() -> None:
    x, weight, targets = case()
    logits, targets = (x @ weight.t()).detach()[None], targets.clamp(min=0)[None]
    summed, mean = summed_loss(logits, targets), token_loss(logits, targets)
    assert summed.item() / N == pytest.approx(mean.item(), rel=1e-15)


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [1, 4, N, 100])
def test_chunks_give_the_loss_and_the_gradients_of_the_whole(chunk: int, z_loss: float) -> None:
    x, weight, targets = case()

    def whole(x: Tensor, weight: Tensor) -> Tensor:
        return summed_loss((x @ weight.t())[None], targets[None], z_loss=z_loss)

    def in_chunks(x: Tensor, weight: Tensor) -> Tensor:
        return chunked_loss(x, weight, targets, chunk=chunk, z_loss=z_loss)

    truth = with_gradients(whole, x, weight)
    for mine, theirs in zip(with_gradients(in_chunks, x, weight), truth, strict=True):
        assert (mine - theirs).abs().max() <= BOUND
    with torch.no_grad():
        assert abs(in_chunks(x, weight) - truth[0]) <= BOUND


def test_nothing_counts_gives_zero_and_no_gradient() -> None:
    x, weight, targets = case()
    targets = torch.full_like(targets, IGNORE)
    loss = chunked_loss(x, weight, targets, chunk=4, z_loss=0.1)
    value, *grads = with_gradients(lambda x, w: loss, x, weight)
    assert value == 0 and not any(g.any() for g in grads)


def test_chunks_of_bfloat16_are_as_near_the_truth_as_the_whole() -> None:
    x, weight, targets = case(torch.bfloat16, tokens=600)

    def whole(x: Tensor, weight: Tensor) -> Tensor:
        return summed_loss((x @ weight.t())[None], targets[None])

    def in_chunks(x: Tensor, weight: Tensor) -> Tensor:
        return chunked_loss(x, weight, targets, chunk=2)

    exact = [x.detach().to(F64).requires_grad_(), weight.detach().to(F64).requires_grad_()]
    truth = with_gradients(whole, *exact)
    ours, plain = with_gradients(in_chunks, x, weight), with_gradients(whole, x, weight)
    assert ours[0].dtype == torch.float32 and ours[2].dtype == torch.bfloat16
    for mine, theirs, right in zip(ours, plain, truth, strict=True):
        error, usual = ((a.to(F64) - right).abs().max() for a in (mine, theirs))
        assert error <= 2 * usual + torch.finfo(torch.bfloat16).eps * right.abs().max()


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.numel = max([self.numel, *(x.numel() for x in made)])
        return result


def test_no_tensor_holds_the_logits_of_more_than_a_chunk() -> None:
    tokens, width, vocabulary, chunk = 64, 4, 512, 8
    x = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.arange(tokens)
    sizes = {}
    for name, loss in {
        "chunks": lambda: chunked_loss(x, weight, targets, chunk=chunk, z_loss=0.1),
        "whole": lambda: summed_loss((x @ weight.t())[None], targets[None], z_loss=0.1),
    }.items():
        with Largest() as largest:
            torch.autograd.grad(loss(), (x, weight))
        sizes[name] = largest.numel
    assert sizes == {"chunks": chunk * vocabulary, "whole": tokens * vocabulary}


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_with_targets_gives_the_summed_loss_and_trains_as_with_logits(tied: bool) -> None:
    sizes = ModelConfig(dim=8, layers=1, heads=2, kv_heads=1, hidden=12, context=8, tied=tied)
    model = build_model(sizes, V, seed=0, dtype=F64)
    tokens = torch.arange(16).view(2, 8)
    params = tuple(model.parameters())
    z_loss = 0.1
    set_loss(model, chunk=3, z_loss=z_loss)
    plain = summed_loss(model(tokens), tokens, z_loss=z_loss)
    in_chunks = model(tokens, tokens)
    pairs = zip(
        torch.autograd.grad(in_chunks, params), torch.autograd.grad(plain, params), strict=True
    )
    assert all((mine - theirs).abs().max() <= BOUND for mine, theirs in pairs)
    assert abs(in_chunks - plain) <= BOUND * 16
    model.eval()
    assert abs(model(tokens, tokens) - summed_loss(model(tokens), tokens)) <= BOUND * 16


def test_a_model_without_a_head_of_ours_is_refused_in_chunks_only() -> None:
    set_loss(nn.Linear(2, 2), chunk=0, z_loss=0.1)
    with pytest.raises(ConfigError, match="train.loss_chunk: Linear has no Head"):
        set_loss(nn.Linear(2, 2), chunk=8, z_loss=0.0)
