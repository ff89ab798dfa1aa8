"""A small Llama as somebody may have written it, to be examined by ``twinshard parity mine``.

cd docs/examples
twinshard parity mine --model my_model:build --map names.toml
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

VOCABULARY, DIM, LAYERS, HEADS, KV_HEADS, HIDDEN = 97, 32, 2, 4, 2, 56
EPS, THETA = 1e-5, 10_000.0


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.gain


def rotate(x: Tensor) -> Tensor:
    """Turns features j and j + E/2 of (B, H, T, E) by an angle that grows with the position."""
    width = x.shape[-1]
    frequency = THETA ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.outer(torch.arange(x.shape[2], dtype=torch.float64), frequency)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Block(nn.Module):
    """Attention and a SwiGLU, each behind a norm and beside the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        width = DIM // HEADS
        self.norm1, self.norm2 = Norm(), Norm()
        self.q = nn.Linear(DIM, DIM, bias=False)
        self.k = nn.Linear(DIM, KV_HEADS * width, bias=False)
        self.v = nn.Linear(DIM, KV_HEADS * width, bias=False)
        self.o = nn.Linear(DIM, DIM, bias=False)
        self.gate = nn.Linear(DIM, HIDDEN, bias=False)
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(self.attend(self.norm1(x)))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def attend(self, h: Tensor) -> Tensor:
        """(B, T, D) of all heads."""
        width = DIM // HEADS
        q, k, v = (
            f(h).unflatten(-1, (-1, width)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        q, k = rotate(q), rotate(k)
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return seen.transpose(1, 2).flatten(-2)


class Model(nn.Module):
    """Token ids (B, T) in, logits (B, T, V) out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.last_norm = Norm()
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last_norm(x))


def build() -> nn.Module:
    """What the command calls."""
    torch.manual_seed(0)
    return Model()
