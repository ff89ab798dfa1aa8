"""Sampling: one token after the other from a model in a single process."""

import torch
from torch import Tensor

from core_torch.models.llama import Llama


@torch.no_grad()
def generate(
    model: Llama, prompt_T: Tensor, *, count: int, temperature: float, seed: int
) -> Tensor:
    """Continues ``prompt_T`` by ``count`` tokens.

    The model sees the last ``config.context`` tokens each time and nothing is cached, so the
    cost grows with the square of the length.

    Args:
        model: an unsharded model.
        prompt_T: (T,) int64 token ids, at least one.
        count: tokens to add.
        temperature: 0 takes the likeliest token, 1 samples from the model's distribution.
        seed: of the sampling.

    Returns:
        (T + count,) ids.

    Raises:
        ValueError: an empty prompt, or a negative temperature.
    """
    if prompt_T.numel() == 0:
        raise ValueError("the prompt has no token; give at least one")
    if temperature < 0:
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    generator = torch.Generator().manual_seed(seed)
    ids = prompt_T
    for _ in range(count):
        logits_V = model(ids[None, -model.config.context :])[0, -1].to(torch.float64)
        if temperature == 0:
            chosen = logits_V.argmax(keepdim=True)
        else:
            chance_V = torch.softmax(logits_V / temperature, dim=-1)
            chosen = torch.multinomial(chance_V, 1, generator=generator)
        ids = torch.cat((ids, chosen))
    return ids
