"""Chapter 2. The model: Llama 3 and Qwen 3, for one rank that holds all weights.

You learn what the forward pass computes; nothing here knows of replicas or shards.

    (M1) x <- x + Attention(RMSNorm(x)),   x <- x + W2 (silu(W1 h) * W3 h),  h = RMSNorm(x)
    (M2) RMSNorm(x) = x / sqrt(mean(x^2) + eps) * gain
    (M3) rotary: features (2i, 2i+1) at position p turn by p * theta^(-2i/E)
    (M4) attention: softmax(q k / sqrt(E)) v over earlier positions, of the same document if
         rows hold several; H / K query heads share one key/value head. Qwen 3 puts the queries
         of each head, and the keys, through (M2) before (M3)
    (M5) loss: mean over all positions of -log softmax(logits)[target]
    (M6) z-loss: Z (log sum exp(logits))^2 of a position is added to it; targets of IGNORE count
         nowhere, and the mean is over those that do

The model is written in Flax NNX and split once into its structure (``graphdef``) and its
parameters. The algorithms of later chapters see only a flat dict from canonical names
(``layers.0.attention.wq.weight``) to arrays. Weights are [out, in] as in torch, so one name
map and no transposes connect both cores. Sums, norms and non-linear functions run in at least
float32 and are cast back; nothing ever names float32 as *the* dtype.

Who communicates: nobody.

Shape suffixes
    B  sequences    T  positions    D  width    H  query heads    K  key/value heads
    E  width of a head    V  vocabulary
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from numpy.random import Generator, default_rng

from reference_jax.mesh import pretend_devices

Arrays = dict[str, Array]
Units = tuple[tuple[str, tuple[str, ...]], ...]  # (unit, names of its parameters), in forward order
IGNORE = -100  # a target that does not count
Tap = Callable[[str, Array], Array]  # (unit, its output) -> what the next unit is given


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig:
    """Sizes of the model; ``rope_factor=1`` leaves the rotary frequencies alone.

    Another architecture derives its own, as gpt2.py does, and says how it differs.
    """

    kind: str = "llama"  # or "qwen3"
    vocabulary: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 0  # width of a head; 0: dim / heads
    hidden: int
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_context: int = 8192
    tied: bool = False
    init_std: float = 0.02

    @property
    def width(self) -> int:
        """E"""
        return self.head_dim or self.dim // self.heads

    @property
    def inside(self) -> tuple[str, ...]:
        """Parameters of a block, in order of the forward."""
        norms = ("q_norm", "k_norm") if self.kind == "qwen3" else ()
        names = ["attention_norm", *(f"attention.{w}" for w in ("wq", "wk", "wv", "wo", *norms))]
        names += ["ffn_norm", *(f"feed_forward.{w}" for w in ("w1", "w2", "w3"))]
        return tuple(f"{name}.weight" for name in names)

    @property
    def ends(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Parameters before the blocks and, but for the head, behind them."""
        return ("tok_embeddings.weight",), ("norm.weight",)

    def build(self, dtype: DTypeLike, rng: Generator) -> nnx.Module:
        """The model with weights drawn by ``rng``."""
        return Llama(self, dtype, rng)


def wide(x: Array) -> Array:
    """``x`` in the dtype for sums, norms and non-linear functions: at least float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def product(spec: str, x: Array, y: Array, dtype: DTypeLike | None = None) -> Array:
    """An einsum that no accelerator may compute in fewer bits than the inputs have."""
    return jnp.einsum(spec, x, y, precision=jax.lax.Precision.HIGHEST, preferred_element_type=dtype)


class Weight(nnx.Module):
    """One weight, so that its name ends in ``.weight``; ``std=0`` makes a gain of ones."""

    def __init__(
        self, shape: tuple[int, ...], std: float, dtype: DTypeLike, rng: Generator
    ) -> None:
        value = std * rng.normal(size=shape) if std else np.ones(shape)
        self.weight = nnx.Param(jnp.asarray(value, dtype))


class Linear(Weight):
    """``x W^T``."""

    def __call__(self, x: Array) -> Array:
        return product("...i,oi->...o", x, self.weight[...])


class RMSNorm(Weight):
    """(M2) over the last axis."""

    def __call__(self, x: Array, eps: float) -> Array:
        w = wide(x)
        root = jax.lax.rsqrt(jnp.square(w).mean(axis=-1, keepdims=True) + eps)
        return (w * root).astype(x.dtype) * self.weight[...]


def rope_angles(config: LlamaConfig, length: int) -> np.ndarray:
    """(T, E / 2) float64 angles in radians; (M3), stretched for longer contexts."""
    width, frequencies = config.width, []
    for i in range(0, width, 2):
        f = config.rope_theta ** (-i / width)
        wavelength, context = 2 * math.pi / f, config.rope_original_context
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        if config.rope_factor == 1 or wavelength < context / high:
            frequencies.append(f)
        elif wavelength > context / low:
            frequencies.append(f / config.rope_factor)
        else:
            s = (context / wavelength - low) / (high - low)
            frequencies.append((1 - s) * f / config.rope_factor + s * f)
    return np.outer(np.arange(length), np.array(frequencies, np.float64))


def rotate(x_BTHE: Array, angles: np.ndarray) -> Array:
    """(M3) on pairs of neighbouring features, as complex numbers."""
    w = wide(x_BTHE)
    cos, sin = (jnp.asarray(f(angles)[:, None, :], w.dtype) for f in (np.cos, np.sin))
    even, odd = w[..., 0::2], w[..., 1::2]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x_BTHE.shape).astype(x_BTHE.dtype)


def is_seen(length: int, documents_BT: Array | None = None) -> Array:
    """(T, T), or (B, 1, T, T) of several documents a row, bool: query sees key. (M4)"""
    is_past = jnp.tril(jnp.ones((length, length), bool))
    if documents_BT is None:
        return is_past
    return is_past & (documents_BT[:, None, :, None] == documents_BT[:, None, None, :])


def attend(q_BTHE: Array, k_BTKE: Array, v_BTKE: Array, mask: Array) -> Array:
    """(M4) (B, T, H * E) values, weighed; ``mask`` is of ``is_seen``."""
    b, t, heads, width = q_BTHE.shape
    shared = heads // k_BTKE.shape[2]
    k_BTHE, v_BTHE = (jnp.repeat(x, shared, axis=2) for x in (k_BTKE, v_BTKE))
    dtype = jnp.promote_types(q_BTHE.dtype, jnp.float32)
    scores = product("bqhe,bkhe->bhqk", q_BTHE, k_BTHE, dtype) / math.sqrt(width)
    share = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1).astype(q_BTHE.dtype)
    return product("bhqk,bkhe->bqhe", share, v_BTHE).reshape(b, t, heads * width)


class Attention(nnx.Module):
    """(M4)"""

    def __init__(self, config: LlamaConfig, dtype: DTypeLike, rng: Generator) -> None:
        self.config = config
        dim, std, width = config.dim, config.init_std, config.width
        q_dim, kv_dim = width * config.heads, width * config.kv_heads
        self.wq = Linear((q_dim, dim), std, dtype, rng)
        self.wk = Linear((kv_dim, dim), std, dtype, rng)
        self.wv = Linear((kv_dim, dim), std, dtype, rng)
        self.wo = Linear((dim, q_dim), std / math.sqrt(2 * config.layers), dtype, rng)
        if config.kind == "qwen3":
            self.q_norm = RMSNorm((width,), 0.0, dtype, rng)
            self.k_norm = RMSNorm((width,), 0.0, dtype, rng)

    def __call__(self, x_BTD: Array, mask: Array) -> Array:
        c, (b, t, _) = self.config, x_BTD.shape
        q_BTHE = self.wq(x_BTD).reshape(b, t, c.heads, c.width)
        k_BTKE = self.wk(x_BTD).reshape(b, t, c.kv_heads, c.width)
        v_BTKE = self.wv(x_BTD).reshape(b, t, c.kv_heads, c.width)
        if c.kind == "qwen3":
            q_BTHE = self.q_norm(q_BTHE, c.norm_eps)
            k_BTKE = self.k_norm(k_BTKE, c.norm_eps)
        angles = rope_angles(c, t)
        return self.wo(attend(rotate(q_BTHE, angles), rotate(k_BTKE, angles), v_BTKE, mask))


class FeedForward(nnx.Module):
    """SwiGLU, the second half of (M1)."""

    def __init__(self, config: LlamaConfig, dtype: DTypeLike, rng: Generator) -> None:
        dim, hidden, std = config.dim, config.hidden, config.init_std
        self.w1 = Linear((hidden, dim), std, dtype, rng)
        self.w2 = Linear((dim, hidden), std / math.sqrt(2 * config.layers), dtype, rng)
        self.w3 = Linear((hidden, dim), std, dtype, rng)

    def __call__(self, x: Array) -> Array:
        return self.w2(jax.nn.silu(wide(self.w1(x))).astype(x.dtype) * self.w3(x))


class Block(nnx.Module):
    """(M1)"""

    def __init__(self, config: LlamaConfig, dtype: DTypeLike, rng: Generator) -> None:
        self.eps = config.norm_eps
        self.attention_norm = RMSNorm((config.dim,), 0.0, dtype, rng)
        self.attention = Attention(config, dtype, rng)
        self.ffn_norm = RMSNorm((config.dim,), 0.0, dtype, rng)
        self.feed_forward = FeedForward(config, dtype, rng)

    def __call__(self, x: Array, mask: Array) -> Array:
        x = x + self.attention(self.attention_norm(x, self.eps), mask)
        return x + self.feed_forward(self.ffn_norm(x, self.eps))


def untouched(unit: str, output: Array) -> Array:
    """The tap that only lets through."""
    return output


class Llama(nnx.Module):
    """Token ids in, logits out."""

    def __init__(self, config: LlamaConfig, dtype: DTypeLike, rng: Generator) -> None:
        self.eps, self.tied = config.norm_eps, config.tied
        table = (config.vocabulary, config.dim)
        self.tok_embeddings = Linear(table, config.init_std, dtype, rng)
        self.layers = nnx.List([Block(config, dtype, rng) for _ in range(config.layers)])
        self.norm = RMSNorm((config.dim,), 0.0, dtype, rng)
        if not config.tied:
            self.output = Linear(table, config.init_std, dtype, rng)

    def __call__(
        self, tokens_BT: Array, tap: Tap = untouched, documents_BT: Array | None = None
    ) -> Array:
        mask = is_seen(tokens_BT.shape[1], documents_BT)
        x = tap("embedding", self.tok_embeddings.weight[...][tokens_BT])
        for i, block in enumerate(self.layers):
            x = tap(f"layers.{i}", block(x, mask))
        head = self.tok_embeddings if self.tied else self.output
        return tap("head", head(self.norm(x, self.eps)))


def to_flat(tree: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested parameters of NNX as a flat dict with canonical names."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        inner = isinstance(value, dict)
        flat |= to_flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return flat


def to_nested(flat: dict[str, Any]) -> dict[Any, Any]:
    """The inverse of ``to_flat``; numbers in names are positions in lists."""
    tree: dict[Any, Any] = {}
    for name, value in flat.items():
        *path, last = (int(key) if key.isdigit() else key for key in name.split("."))
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def init_params(config: LlamaConfig, *, seed: int, dtype: DTypeLike) -> Arrays:
    """Flat dict of one complete set of initial parameters."""
    _, params = nnx.split(config.build(dtype, default_rng(seed)))
    return to_flat(nnx.to_pure_dict(params))


@functools.cache
def structure(config: LlamaConfig) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """NNX's graphdef and the shape of every parameter by name; allocates nothing."""
    abstract = nnx.eval_shape(lambda: config.build(jnp.float32, default_rng(0)))
    graphdef, params = nnx.split(abstract)
    return graphdef, {k: v.shape for k, v in to_flat(nnx.to_pure_dict(params)).items()}


def shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name -> unpadded shape, in the order of the forward pass."""
    known = structure(config)[1]
    return {name: known[name] for _, names in units(config) for name in names}


def units(config: LlamaConfig) -> Units:
    """The pieces that are unsharded and synchronised as one: embedding, blocks, head."""
    blocks = tuple(
        (f"layers.{i}", tuple(f"layers.{i}.{name}" for name in config.inside))
        for i in range(config.layers)
    )
    first, last = config.ends
    if config.tied:
        return (("embedding", (*first, *last)), *blocks)
    return (("embedding", first), *blocks, ("head", (*last, "output.weight")))


def whole_model(config: LlamaConfig) -> Units:
    """One unit "model" of all parameters."""
    return (("model", tuple(name for _, names in units(config) for name in names)),)


def forward(
    params: Arrays,
    tokens_BT: Array,
    *,
    config: LlamaConfig,
    tap: Tap = untouched,
    documents_BT: Array | None = None,
) -> Array:
    """(B, T, V) logits, in the dtype of the parameters.

    Args:
        params: by canonical name.
        tokens_BT: ids.
        config: of the model.
        tap: sees what leaves each unit.
        documents_BT: number of each token's document in its row; None: a row is one document.
    """
    model = nnx.merge(structure(config)[0], to_nested(params))
    logits_BTV: Array = model(tokens_BT, tap, documents_BT)
    return logits_BTV


def token_loss(logits_BTV: Array, targets_BT: Array) -> Array:
    """(M5) () mean cross entropy; natural logarithm."""
    log_share = jax.nn.log_softmax(wide(logits_BTV), axis=-1)
    return -jnp.take_along_axis(log_share, targets_BT[..., None], axis=-1).mean()


def summed_loss(logits_BTV: Array, targets_BT: Array, *, z_loss: float) -> Array:
    """(M6) () sum over the targets that count of cross entropy and z-loss."""
    w, counts_BT = wide(logits_BTV), targets_BT != IGNORE
    at_BT1 = jnp.where(counts_BT, targets_BT, 0)[..., None]
    lse_BT = jax.nn.logsumexp(w, axis=-1)
    loss_BT = lse_BT - jnp.take_along_axis(w, at_BT1, axis=-1)[..., 0]
    return jnp.where(counts_BT, loss_BT + z_loss * jnp.square(lse_BT), 0).sum()


def main() -> None:
    """A tiny model, its units, and the loss of a model that knows nothing: log V."""
    pretend_devices(1)
    config = LlamaConfig(vocabulary=257, dim=32, layers=2, heads=4, kv_heads=2, hidden=64)
    params = init_params(config, seed=0, dtype=jnp.float32)
    for unit, names in units(config):
        size = sum(params[name].size for name in names)
        print(f"{unit:10} {size:6} parameters in {len(names)} tensors")
    tokens = jnp.arange(24).reshape(2, 12)
    logits = jax.jit(forward, static_argnames="config")(params, tokens, config=config)
    loss = token_loss(logits, tokens)
    print("logits", jax.typeof(logits), f" loss {loss:.4f}, log 257 = {math.log(257):.4f}")


if __name__ == "__main__":
    main()
