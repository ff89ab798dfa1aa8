"""Builds a model with its initial weights, equal on every mesh.

Each weight is drawn as a full tensor from a generator seeded by its own name, before
anything is sharded: neither the mesh nor the order of construction can change it.
"""

import hashlib
import math

import torch
from torch import Tensor

from core_torch.config import ModelConfig
from core_torch.models.llama import Llama


def build_model(
    config: ModelConfig, vocabulary: int, *, seed: int, dtype: torch.dtype = torch.float32
) -> Llama:
    """A Llama on the CPU with full tensors of ``dtype``, initialised from ``seed``."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # the rotary tables, too, must be made in this dtype
    try:
        model = Llama(config, vocabulary)
    finally:
        torch.set_default_dtype(previous)
    init_weights(model, config, seed=seed)
    return model


@torch.no_grad()
def init_weights(model: Llama, config: ModelConfig, *, seed: int) -> None:
    """Draws every matrix from a normal distribution; gains become 1.

    The two matrices of a block that write to the residual stream are smaller by
    ``sqrt(2 * layers)``, so that its variance does not grow with depth.
    """
    for name, param in model.named_parameters():
        if param.ndim < 2:
            param.fill_(1.0)
            continue
        writes_residual = name.endswith(("attention.wo.weight", "feed_forward.w2.weight"))
        shrink = math.sqrt(2 * config.layers) if writes_residual else 1.0
        param.copy_(draw(name, param, seed=seed) * (config.init_std / shrink))


def draw(name: str, like: Tensor, *, seed: int) -> Tensor:
    """Standard normal float64 tensor of ``like``'s shape that depends on seed and name only."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64)
