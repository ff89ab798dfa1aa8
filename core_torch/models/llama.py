"""Llama 3: a decoder-only transformer as plain ``nn.Module``; knows nothing of sharding.

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


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums, norms and non-linear functions of ``dtype`` are computed."""
    return torch.promote_types(dtype, torch.float32)


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
        width = config.dim // config.heads
        frequency = rope_frequencies(width, config.rope_theta, config.rope_scaling)
        angle = torch.outer(torch.arange(config.context, dtype=torch.float64), frequency)
        dtype = at_least_float32(torch.get_default_dtype())
        self.register_buffer("cos", angle.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angle.sin().to(dtype), persistent=False)

    def forward(self, x_BTHE: Tensor) -> Tensor:
        length = x_BTHE.shape[1]
        cos, sin = self.cos[:length, None, :], self.sin[:length, None, :]
        even, odd = x_BTHE.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(dim=-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return turned.flatten(-2).to(x_BTHE.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: ModelConfig, rotary: Rotary) -> None:
        super().__init__()
        self.width = config.dim // config.heads
        kv_dim = config.kv_heads * self.width
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)
        self.rotary = rotary

    def forward(self, x_BTD: Tensor) -> Tensor:
        heads = (-1, self.width)
        q_BTHE = self.rotary(self.wq(x_BTD).unflatten(-1, heads))
        k_BTKE = self.rotary(self.wk(x_BTD).unflatten(-1, heads))
        v_BTKE = self.wv(x_BTD).unflatten(-1, heads)
        mixed_BHTE = F.scaled_dot_product_attention(
            q_BTHE.transpose(1, 2),
            k_BTKE.transpose(1, 2),
            v_BTKE.transpose(1, 2),
            is_causal=True,
            enable_gqa=q_BTHE.shape[2] != k_BTKE.shape[2],
        )
        return self.wo(mixed_BHTE.transpose(1, 2).flatten(-2))


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


class Block(nn.Module):
    """One layer: attention, then feed-forward, each on a normed residual stream."""

    def __init__(self, config: ModelConfig, rotary: Rotary) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, rotary)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.feed_forward(self.ffn_norm(x_BTD))


class Llama(nn.Module):
    """Token ids in, logits out."""

    def __init__(self, config: ModelConfig, vocabulary: int) -> None:
        super().__init__()
        self.config = config
        self.vocabulary = vocabulary
        rotary = Rotary(config)
        self.tok_embeddings = nn.Embedding(vocabulary, config.dim)
        self.layers = nn.ModuleList(Block(config, rotary) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, vocabulary, bias=False)
        if config.tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """(B, T, V) logits of the next token at each position."""
        x_BTD = self.tok_embeddings(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.output(self.norm(x_BTD))


def token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """() mean cross entropy over all positions, in at least float32; natural logarithm."""
    wide = logits_BTV.to(at_least_float32(logits_BTV.dtype))
    return F.cross_entropy(wide.flatten(0, 1), targets_BT.flatten())
