"""Llama 3 and Qwen 3: decoder-only transformers as plain ``nn.Module``; nothing of sharding.

Qwen 3 is Llama with two more norms in a block: of each head's queries and of its keys.

Weights are [out, in] and named as in Meta's code, with its pairing of neighbours in the
rotary embedding. Non-linear functions compute in at least float32 and cast back, so that a
bfloat16 run differs from the reference only where matrices are multiplied.

Shape suffixes
    B  sequences    T  positions    D  width    H  query heads    K  key/value heads
    E  width of a head    V  vocabulary
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from core_torch.config import ModelConfig, RopeScaling
from core_torch.models.attention import Past, attend
from core_torch.models.decoder import Decoder, Layer
from core_torch.models.loss import at_least_float32


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x_BTD: Tensor) -> Tensor:
        wide = x_BTD.to(at_least_float32(x_BTD.dtype))
        root = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * root).to(x_BTD.dtype) * self.weight


def rope_frequencies(width: int, theta: float, scaling: RopeScaling) -> Tensor:
    """(E / 2,) float64 radians per position, stretched for long contexts as Llama 3 does.

    Wavelengths shorter than ``original_context / high_freq_factor`` keep their frequency,
    those longer than ``original_context / low_freq_factor`` are divided by ``factor``, the
    ones between are interpolated.
    """
    frequency = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    if scaling.factor == 1.0:
        return frequency
    turns = scaling.original_context * frequency / (2 * math.pi)  # in the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - smooth) * frequency / scaling.factor + smooth * frequency


class Rotary(nn.Module):
    """Rotates pairs of neighbouring features by an angle that grows with the position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.head_width
        frequency = rope_frequencies(width, config.rope_theta, config.rope_scaling)
        angle = torch.outer(torch.arange(config.context, dtype=torch.float64), frequency)
        dtype = at_least_float32(torch.get_default_dtype())
        self.register_buffer("cos", angle.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angle.sin().to(dtype), persistent=False)

    def forward(self, x_BTHE: Tensor, first: int = 0) -> Tensor:
        """Turns positions ``first``, ``first + 1``, ..."""
        until = first + x_BTHE.shape[1]
        cos, sin = self.cos[first:until, None, :], self.sin[first:until, None, :]
        even, odd = x_BTHE.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(dim=-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return turned.flatten(-2).to(x_BTHE.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: ModelConfig, rotary: Rotary) -> None:
        super().__init__()
        self.width = config.head_width
        q_dim, kv_dim = config.heads * self.width, config.kv_heads * self.width
        self.wq = nn.Linear(config.dim, q_dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(q_dim, config.dim, bias=False)
        has_norms = config.kind == "qwen3"
        self.q_norm = RMSNorm(self.width, config.norm_eps) if has_norms else nn.Identity()
        self.k_norm = RMSNorm(self.width, config.norm_eps) if has_norms else nn.Identity()
        self.rotary = rotary

    def forward(
        self, x_BTD: Tensor, mask: Tensor | None = None, past: Past | None = None
    ) -> Tensor:
        heads, first = (-1, self.width), 0 if past is None else past.length
        q_BTHE = self.rotary(self.q_norm(self.wq(x_BTD).unflatten(-1, heads)), first)
        k_BTKE = self.rotary(self.k_norm(self.wk(x_BTD).unflatten(-1, heads)), first)
        v_BTKE = self.wv(x_BTD).unflatten(-1, heads)
        if past is not None:
            k_BTKE, v_BTKE, mask = past.extend(k_BTKE, v_BTKE)
        return self.wo(attend(q_BTHE, k_BTKE, v_BTKE, mask))


def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)`` in at least float32."""
    return F.silu(x.to(at_least_float32(x.dtype))).to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU: ``w2(silu(w1 x) * w3 x)``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.w2(silu(self.w1(x_BTD)) * self.w3(x_BTD))


class Block(Layer):
    """One layer."""

    def __init__(self, config: ModelConfig, rotary: Rotary) -> None:
        norms = (RMSNorm(config.dim, config.norm_eps) for _ in range(2))
        super().__init__(Attention(config, rotary), FeedForward(config), *norms)


class Llama(Decoder):
    """Llama 3 or, by ``config.kind``, Qwen 3."""

    def __init__(self, config: ModelConfig, vocabulary: int) -> None:
        rotary = Rotary(config)
        blocks = (Block(config, rotary) for _ in range(config.layers))
        super().__init__(config, vocabulary, blocks, RMSNorm(config.dim, config.norm_eps))
