"""The class of GPT-2 in the frame of chapter `model`. No chapter: the same, with other parts.

    (M7) LayerNorm(x) = (x - mean(x)) / sqrt(variance(x) + eps) * gain + bias
    (M8) x <- x + W2 gelu(W1 h + b1) + b2,
         gelu(z) = z (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))) / 2
    (M9) what enters the first block: row of the token + row of its position

Positions count from the start of a row. Keys have no bias: it would add q b to all scores of a
query, and softmax does not see what is added to all.

Who communicates: nobody. Shape suffixes as in chapter `model`.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from numpy.random import Generator

from reference_jax.model import Linear, LlamaConfig, Tap, Weight, attend, is_seen, untouched, wide


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpt2Config(LlamaConfig):
    """Sizes; nothing of a rotary embedding has a part."""

    kind: str = "gpt2"
    context: int  # rows of the table of positions

    @property
    def inside(self) -> tuple[str, ...]:
        """Parameters of a block, in order of the forward."""
        with_bias = ["attention_norm", *(f"attention.{w}" for w in ("wq", "wv", "wo"))]
        with_bias += ["ffn_norm", "feed_forward.w1", "feed_forward.w2"]
        both = [f"{name}.{kind}" for name in with_bias for kind in ("weight", "bias")]
        return (*both[:4], "attention.wk.weight", *both[4:])

    @property
    def ends(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Parameters before the blocks and, but for the head, behind them."""
        return ("tok_embeddings.weight", "pos_embeddings.weight"), ("norm.weight", "norm.bias")

    def build(self, dtype: DTypeLike, rng: Generator) -> nnx.Module:
        """The model with weights drawn by ``rng``."""
        return Gpt2(self, dtype, rng)


class Affine(Linear):
    """``x W^T + b``."""

    def __init__(
        self, shape: tuple[int, ...], std: float, dtype: DTypeLike, rng: Generator
    ) -> None:
        super().__init__(shape, std, dtype, rng)
        self.bias = nnx.Param(jnp.asarray(np.zeros(shape[0]), dtype))

    def __call__(self, x: Array) -> Array:
        return super().__call__(x) + self.bias[...]


class LayerNorm(Weight):
    """(M7) over the last axis."""

    def __init__(self, dim: int, dtype: DTypeLike, rng: Generator) -> None:
        super().__init__((dim,), 0.0, dtype, rng)
        self.bias = nnx.Param(jnp.asarray(np.zeros(dim), dtype))

    def __call__(self, x: Array, eps: float) -> Array:
        w = wide(x)
        centred = w - w.mean(axis=-1, keepdims=True)
        root = jax.lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + eps)
        return (centred * root).astype(x.dtype) * self.weight[...] + self.bias[...]


class Attention(nnx.Module):
    """(M4) without (M3)"""

    def __init__(self, config: Gpt2Config, dtype: DTypeLike, rng: Generator) -> None:
        self.config = config
        dim, std, width = config.dim, config.init_std, config.width
        q_dim, kv_dim = width * config.heads, width * config.kv_heads
        self.wq = Affine((q_dim, dim), std, dtype, rng)
        self.wk = Linear((kv_dim, dim), std, dtype, rng)
        self.wv = Affine((kv_dim, dim), std, dtype, rng)
        self.wo = Affine((dim, q_dim), std / math.sqrt(2 * config.layers), dtype, rng)

    def __call__(self, x_BTD: Array, mask: Array) -> Array:
        c, (b, t, _) = self.config, x_BTD.shape
        q_BTHE = self.wq(x_BTD).reshape(b, t, c.heads, c.width)
        k_BTKE = self.wk(x_BTD).reshape(b, t, c.kv_heads, c.width)
        v_BTKE = self.wv(x_BTD).reshape(b, t, c.kv_heads, c.width)
        return self.wo(attend(q_BTHE, k_BTKE, v_BTKE, mask))


class FeedForward(nnx.Module):
    """(M8)"""

    def __init__(self, config: Gpt2Config, dtype: DTypeLike, rng: Generator) -> None:
        dim, hidden, std = config.dim, config.hidden, config.init_std
        self.w1 = Affine((hidden, dim), std, dtype, rng)
        self.w2 = Affine((dim, hidden), std / math.sqrt(2 * config.layers), dtype, rng)

    def __call__(self, x: Array) -> Array:
        z = wide(self.w1(x))
        inner = math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)
        return self.w2((0.5 * z * (1 + jnp.tanh(inner))).astype(x.dtype))


class Block(nnx.Module):
    """(M1) with (M7) and (M8)"""

    def __init__(self, config: Gpt2Config, dtype: DTypeLike, rng: Generator) -> None:
        self.eps = config.norm_eps
        self.attention_norm = LayerNorm(config.dim, dtype, rng)
        self.attention = Attention(config, dtype, rng)
        self.ffn_norm = LayerNorm(config.dim, dtype, rng)
        self.feed_forward = FeedForward(config, dtype, rng)

    def __call__(self, x: Array, mask: Array) -> Array:
        x = x + self.attention(self.attention_norm(x, self.eps), mask)
        return x + self.feed_forward(self.ffn_norm(x, self.eps))


class Gpt2(nnx.Module):
    """Token ids in, logits out."""

    def __init__(self, config: Gpt2Config, dtype: DTypeLike, rng: Generator) -> None:
        self.eps, self.tied, std = config.norm_eps, config.tied, config.init_std
        self.tok_embeddings = Linear((config.vocabulary, config.dim), std, dtype, rng)
        self.pos_embeddings = Linear((config.context, config.dim), std, dtype, rng)
        self.layers = nnx.List([Block(config, dtype, rng) for _ in range(config.layers)])
        self.norm = LayerNorm(config.dim, dtype, rng)
        if not config.tied:
            self.output = Linear((config.vocabulary, config.dim), std, dtype, rng)

    def __call__(
        self, tokens_BT: Array, tap: Tap = untouched, documents_BT: Array | None = None
    ) -> Array:
        """(M9) and the frame of ``model.Llama``."""
        mask = is_seen(tokens_BT.shape[1], documents_BT)
        places_TD = self.pos_embeddings.weight[...][: tokens_BT.shape[1]]
        x = tap("embedding", self.tok_embeddings.weight[...][tokens_BT] + places_TD)
        for i, block in enumerate(self.layers):
            x = tap(f"layers.{i}", block(x, mask))
        head = self.tok_embeddings if self.tied else self.output
        return tap("head", head(self.norm(x, self.eps)))
