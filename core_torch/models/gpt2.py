"""The class of GPT-2: learned positions, LayerNorm and biases, a feed-forward with GELU.

Modules have the names of llama.py, so all that goes by names holds here. Two choices of the
configuration make GPT-2 itself: as many key/value heads as heads, and a tied head. Keys have no
bias: it would add the same to all scores of a query, which softmax takes away again.

Shape suffixes
    B  sequences    T  positions    D  width    H  query heads    K  key/value heads
    E  width of a head
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from core_torch.config import ModelConfig
from core_torch.models.attention import Past, attend
from core_torch.models.decoder import Decoder, Layer
from core_torch.models.loss import at_least_float32


class LayerNorm(nn.Module):
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last axis."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x_BTD: Tensor) -> Tensor:
        wide = x_BTD.to(at_least_float32(x_BTD.dtype))
        normed = F.layer_norm(wide, wide.shape[-1:], eps=self.eps)
        return normed.to(x_BTD.dtype) * self.weight + self.bias


class Attention(nn.Module):
    """Causal attention without a rotary embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width = config.head_width
        q_dim, kv_dim = config.heads * self.width, config.kv_heads * self.width
        self.wq = nn.Linear(config.dim, q_dim)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim)
        self.wo = nn.Linear(q_dim, config.dim)

    def forward(
        self, x_BTD: Tensor, mask: Tensor | None = None, past: Past | None = None
    ) -> Tensor:
        heads = (-1, self.width)
        q_BTHE = self.wq(x_BTD).unflatten(-1, heads)
        k_BTKE = self.wk(x_BTD).unflatten(-1, heads)
        v_BTKE = self.wv(x_BTD).unflatten(-1, heads)
        if past is not None:
            k_BTKE, v_BTKE, mask = past.extend(k_BTKE, v_BTKE)
        return self.wo(attend(q_BTHE, k_BTKE, v_BTKE, mask))


def gelu(x: Tensor) -> Tensor:
    """``x`` times the normal distribution function, by tanh as GPT-2 does, in at least float32."""
    return F.gelu(x.to(at_least_float32(x.dtype)), approximate="tanh").to(x.dtype)


class FeedForward(nn.Module):
    """``w2(gelu(w1 x))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden)
        self.w2 = nn.Linear(config.hidden, config.dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.w2(gelu(self.w1(x_BTD)))


class Block(Layer):
    """One layer."""

    def __init__(self, config: ModelConfig) -> None:
        norms = (LayerNorm(config.dim, config.norm_eps) for _ in range(2))
        super().__init__(Attention(config), FeedForward(config), *norms)


class Gpt2(Decoder):
    """The frame with a table of positions, which count from the start of a row."""

    def __init__(self, config: ModelConfig, vocabulary: int) -> None:
        blocks = (Block(config) for _ in range(config.layers))
        super().__init__(config, vocabulary, blocks, LayerNorm(config.dim, config.norm_eps))
        self.pos_embeddings = nn.Embedding(config.context, config.dim)

    @property
    def tables(self) -> tuple[str, ...]:
        """Modules that ``embed`` uses."""
        return ("tok_embeddings", "pos_embeddings")

    def embed(self, tokens_BT: Tensor, first: int = 0) -> Tensor:
        """(B, T, D) what enters the first block."""
        until = first + tokens_BT.shape[1]
        places_1T = torch.arange(first, until, device=tokens_BT.device)[None]
        x_BTD: Tensor = self.tok_embeddings(tokens_BT) + self.pos_embeddings(places_1T)
        return x_BTD
