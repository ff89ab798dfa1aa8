"""Sampling: one token after the other from a model in a single process."""

from collections.abc import Callable

import torch
from torch import Tensor

from core_torch.models.attention import Past
from core_torch.models.decoder import Decoder, Model


@torch.no_grad()
def generate(
    model: Model,
    prompt_T: Tensor,
    *,
    count: int,
    temperature: float,
    seed: int,
    top_k: int = 0,
    top_p: float = 1.0,
    cached: bool = True,
) -> Tensor:
    """Continues ``prompt_T`` by ``count`` tokens.

    The model sees the last ``config.context`` tokens each time. Until there are so many, keys and
    values of earlier tokens are kept, and each token costs one position. From then on the window
    moves: every token gets another position, nothing kept is true any more, and each token costs
    the whole window.

    Args:
        model: an unsharded model.
        prompt_T: (T,) int64 token ids, at least one.
        count: tokens to add.
        temperature: 0 takes the likeliest token, 1 samples from the model's distribution.
        seed: of the sampling.
        top_k: sample from this many likeliest tokens only; 0: from all.
        top_p: sample from the likeliest tokens that have this share together, at least one.
        cached: False computes the whole window for each token, which gives the same up to
            rounding.

    Returns:
        (T + count,) ids.

    Raises:
        ValueError: an empty prompt, a negative temperature or top_k, or top_p outside (0, 1].
    """
    if prompt_T.numel() == 0:
        raise ValueError("the prompt has no token; give at least one")
    if temperature < 0:
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    if top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(f"top_k must be at least 0 and top_p in (0, 1], got {top_k} and {top_p}")
    generator = torch.Generator().manual_seed(seed)
    ids, next_logits = prompt_T, next_logits_of(model, cached=cached)
    for _ in range(count):
        logits_V = next_logits(ids).to(torch.float64)
        if temperature == 0:
            chosen = logits_V.argmax(keepdim=True)
        else:
            chance_V = torch.softmax(logits_V / temperature, dim=-1)
            if top_k or top_p < 1:
                chance_V = likeliest(chance_V, top_k=top_k, top_p=top_p)
            chosen = torch.multinomial(chance_V, 1, generator=generator)
        ids = torch.cat((ids, chosen))
    return ids


def next_logits_of(model: Model, *, cached: bool) -> Callable[[Tensor], Tensor]:
    """A function from ids that only ever grow to the (V,) logits of the token after them."""
    context = model.config.context
    if not cached or not isinstance(model, Decoder):
        return lambda ids_T: model(ids_T[None, -context:])[0, -1]
    past = [Past(context) for _ in model.layers]

    def next_logits(ids_T: Tensor) -> Tensor:
        if len(ids_T) > context:
            logits_BTV: Tensor = model(ids_T[None, -context:])
        else:
            logits_BTV = model(ids_T[None, past[0].length :], past=past)
        return logits_BTV[0, -1]

    return next_logits


def likeliest(chance_V: Tensor, *, top_k: int, top_p: float) -> Tensor:
    """Chances with 0 for all but the likeliest tokens; they need not sum to 1.

    First the ``top_k`` likeliest (0: all), then of these as few as have ``top_p`` of their sum.
    """
    sorted_V, place_V = chance_V.sort(descending=True, stable=True)
    if top_k:
        sorted_V[top_k:] = 0.0
    before_V = sorted_V.cumsum(0) - sorted_V
    sorted_V[before_V >= top_p * sorted_V.sum()] = 0.0
    return torch.zeros_like(chance_V).scatter_(0, place_V, sorted_V)
