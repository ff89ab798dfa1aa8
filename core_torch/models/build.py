"""Builds a model with its initial weights, equal on every mesh.

Each weight is drawn as a full tensor from a generator seeded by its own name, before
anything is sharded: neither the mesh nor the order of construction can change it. The weights of
a module of one's own are what its function gives.
"""

import hashlib
import math

import torch
from torch import Tensor

from core_torch.config import ModelConfig
from core_torch.models.decoder import Model
from core_torch.models.own import build_own
from core_torch.models.registry import ARCHITECTURES


def build_model(
    config: ModelConfig, vocabulary: int, *, seed: int, dtype: torch.dtype = torch.float32
) -> Model:
    """A model on the CPU with full tensors of ``dtype``, initialised from ``seed``.

    Raises:
        ConfigError: the function of ``config.build`` is missing or made no such module.
    """
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # the rotary tables, too, must be made in this dtype
    try:
        if config.kind == "own":
            return _of_dtype(build_own(config, vocabulary, seed=seed), dtype)
        model = ARCHITECTURES[config.kind].build(config, vocabulary)
    finally:
        torch.set_default_dtype(previous)
    init_weights(model, config, seed=seed)
    return model


def _of_dtype(model: Model, dtype: torch.dtype) -> Model:
    """The model in ``dtype``; if it is already, untouched, for pretended tensors cannot move."""
    held = [x for x in (*model.parameters(), *model.buffers()) if x.is_floating_point()]
    return model if all(x.dtype == dtype for x in held) else model.to(dtype)


@torch.no_grad()
def init_weights(model: Model, config: ModelConfig, *, seed: int) -> None:
    """Draws every matrix from a normal distribution; gains become 1 and biases 0.

    The two matrices of a block that write to the residual stream are smaller by
    ``sqrt(2 * layers)``, so that its variance does not grow with depth.
    """
    to_residual = ARCHITECTURES[config.kind].to_residual
    for name, param in model.named_parameters():
        if param.ndim < 2:
            param.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        shrink = math.sqrt(2 * config.layers) if name.endswith(to_residual) else 1.0
        param.copy_(draw(name, param, seed=seed) * (config.init_std / shrink))


def draw(name: str, like: Tensor, *, seed: int) -> Tensor:
    """Standard normal float64 tensor of ``like``'s shape that depends on seed and name only."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64)
