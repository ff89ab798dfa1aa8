"""Chapter 19. Tensor parallelism: one layer, spread over P devices that compute it together.

You learn why two matrices in a row need one message, and what an axis in the type says about it.

    (x is [B, T, D] and the same on all P devices; W is cut into W_1 .. W_P)
    column-parallel   y_p = x W_p^T              rows of W, which are features of y: no message
    row-parallel      z   = sum_p y_p W_p^T      columns of W: one all-reduce of [B, T, D]
    attention         wq, wk, wv column-parallel: device p has H / P heads and their softmax;
                      wo row-parallel
    feed-forward      w1, w3 column-parallel, silu(..) * .. on F / P features; w2 row-parallel
    head              rows of the vocabulary: device p has the logits of V / P tokens, and
                      log sum_v exp(x_v) = m + log sum_p sum_v exp(x_pv - m): numbers per token

The convention of chapter `mesh` does it all: what differs between the devices has a leading axis
P over ``tp``, ``jax.vmap`` over it means *each by itself*, and what touches axis 0 is a message.
So the forward has one ``sum(axis=0)`` per attention and one per feed-forward. Its mirror image
is ``broadcast``: no message forward, but its transpose is a sum over axis 0, so the backward has
as many. Sequence parallelism would cut T between these points; the bytes stay the same.

Composed with FSDP, {shard, tp}: an array [P@tp, rows@shard, ...] is a device's piece of W, of which
a shard stores some rows; ``read`` gathers them as chapter `fsdp` does. The gather is P times
smaller, since a device needs only its own piece. P divides heads, key/value heads, F and V.

Who communicates: tp axis: 4 all-reduces of [B, T, D] per layer in a step, 1 for the backward of the
head, and three numbers per token for the loss. Shard axis: as in `fsdp`, 1 / P of it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, PartitionSpec, get_abstract_mesh

from reference_jax.fsdp import pad, unpad
from reference_jax.ledger import bytes_per_axis
from reference_jax.mesh import pretend_devices, put, reshard
from reference_jax.model import (
    Arrays,
    LlamaConfig,
    forward,
    init_params,
    product,
    rope_angles,
    rotate,
    shapes,
    token_loss,
    wide,
)

_spec: Callable[..., PartitionSpec] = PartitionSpec
CUT = _spec("tp", "shard")  # pieces [P, rows, ...], activations of one device [P, S, B, T, ...]
WHOLE = _spec("shard")  # parameters that tp does not cut [rows, ...], batches [S, B, T]
COLUMN = ("wq", "wk", "wv", "w1", "w3", "output")
ROW = ("wo", "w2")
Tell = Callable[[str, Array], None]  # hears the name and the type of what is computed


def make_mesh(shards: int, parts: int) -> Mesh:
    """A mesh of ``shards * parts`` devices with the axes shard and tp."""
    devices = jax.devices()[: shards * parts]
    types = (AxisType.Explicit,) * 2
    return jax.make_mesh((shards, parts), ("shard", "tp"), types, devices=devices)


def kind(name: str) -> str:
    """column, row or whole: how tp cuts a parameter."""
    matrix = name.split(".")[-2]
    return "column" if matrix in COLUMN else "row" if matrix in ROW else "whole"


def cut(x: np.ndarray, name: str, parts: int) -> np.ndarray:
    """[out, in] -> [P, out / P, in] or [P, out, in / P]; what tp does not cut stays as it is."""
    if kind(name) == "column":
        return x.reshape(parts, -1, *x.shape[1:])
    if kind(name) == "row":
        return np.stack(np.split(x, parts, axis=1))
    return x


def join(x: np.ndarray, name: str) -> np.ndarray:
    """The inverse of ``cut``."""
    if kind(name) == "column":
        return x.reshape(-1, *x.shape[2:])
    return np.concatenate(list(x), axis=1) if kind(name) == "row" else x


def place(params: dict[str, Any], mesh: Mesh) -> Arrays:
    """Unpadded host parameters -> [P@tp, rows@shard, ...], or [rows@shard, ...]."""
    shards, parts = mesh.devices.shape
    placed = {}
    for name, x in params.items():
        piece = cut(np.asarray(x), name, parts)
        axis, spec = (0, WHOLE) if kind(name) == "whole" else (1, CUT)
        placed[name] = put(pad(piece, shards=shards, axis=axis), mesh, spec)
    return placed


def to_host(params: Arrays, config: LlamaConfig) -> dict[str, np.ndarray]:
    """The inverse of ``place``; also for gradients."""
    host = {}
    for name, shape in shapes(config).items():
        x = np.asarray(params[name])
        parts = len(x) if kind(name) == "column" else 1
        rows, axis = shape[0] // parts, 0 if kind(name) == "whole" else 1
        host[name] = join(x.take(range(rows), axis=axis), name)
    return host


def read(name: str, x: Array, config: LlamaConfig) -> Array:
    """(F2) of one device's piece: [(P@tp,) S@shard, rows, ...], a full copy for each shard."""
    sizes, is_cut = get_abstract_mesh().shape, kind(name) != "whole"
    rows = shapes(config)[name][0] // (sizes["tp"] if kind(name) == "column" else 1)
    axis, gathered, spec = (1, _spec("tp"), CUT) if is_cut else (0, _spec(), WHOLE)
    full = unpad(reshard(x, gathered), rows=rows, axis=axis)
    shape = (*full.shape[:axis], sizes["shard"], *full.shape[axis:])
    return jnp.broadcast_to(jnp.expand_dims(full, axis), shape, out_sharding=spec)


def by_itself(f: Callable[..., Array]) -> Callable[..., Array]:
    """``f`` on every device: over tp, and there over shard."""
    return jax.vmap(jax.vmap(f))


def to_all(x_SBTD: Array) -> Array:
    """[P@tp, S, B, T, D] the same for each of P. No message; its transpose is ``together``."""
    shape = (get_abstract_mesh().shape["tp"], *x_SBTD.shape)
    return jnp.broadcast_to(x_SBTD[None], shape, out_sharding=CUT)


def together(partial_PSBTD: Array) -> Array:
    """[S, B, T, D] the sum over P: the message. Its transpose is ``to_all``."""
    return partial_PSBTD.sum(axis=0)


def heads(w: Arrays, x_BTD: Array, config: LlamaConfig) -> Array:
    """(M4) [B, T, H / P * E] by the heads of one device; as many as its ``wq`` has."""
    width, (b, t, _) = config.width, x_BTD.shape
    angles, shared = rope_angles(config, t), config.heads // config.kv_heads
    q, k, v = (product("btd,od->bto", x_BTD, w[n]).reshape(b, t, -1, width) for n in COLUMN[:3])
    q, k = rotate(q, angles), rotate(k, angles)
    k, v = (jnp.repeat(x, shared, axis=2) for x in (k, v))
    dtype = jnp.promote_types(x_BTD.dtype, jnp.float32)
    scores = product("bqhe,bkhe->bhqk", q, k, dtype) / np.sqrt(width)
    is_past = jnp.tril(jnp.ones((t, t), bool))
    share = jax.nn.softmax(jnp.where(is_past, scores, -jnp.inf), axis=-1).astype(x_BTD.dtype)
    return product("bhqk,bkhe->bqhe", share, v).reshape(b, t, -1)


def features(w: Arrays, x_BTD: Array) -> Array:
    """[B, T, F / P] the SwiGLU features of one device."""
    gate, up = (product("btd,fd->btf", x_BTD, w[n]) for n in ("w1", "w3"))
    return jax.nn.silu(wide(gate)).astype(x_BTD.dtype) * up


def norm(gain_D: Array, x_BTD: Array, *, eps: float) -> Array:
    """(M2), the same on all of P."""
    w = wide(x_BTD)
    root = jax.lax.rsqrt(jnp.square(w).mean(axis=-1, keepdims=True) + eps)
    return (w * root).astype(x_BTD.dtype) * gain_D


def by_weight(matrix: Array, x_BTI: Array) -> Array:
    """[B, T, O] ``x W^T``."""
    return product("bti,oi->bto", x_BTI, matrix)


def silent(name: str, x: Array) -> None:
    """Tells nobody."""


def layer(of: Arrays, x: Array, config: LlamaConfig, tell: Tell) -> Array:
    """(M1) of activations [S@shard, B, T, D]; ``of`` are the layer's weights by short name."""
    normed = jax.vmap(functools.partial(norm, eps=config.norm_eps))
    qkv, gates = ({n: of[n] for n in names} for names in (COLUMN[:3], COLUMN[3:5]))
    y = to_all(normed(of["attention_norm"], x))
    mixed = by_itself(functools.partial(heads, config=config))(qkv, y)
    partial = by_itself(by_weight)(of["wo"], mixed)
    x = x + together(partial)
    h = to_all(normed(of["ffn_norm"], x))
    hidden = by_itself(features)(gates, h)
    tell("x, the same on both", x)
    tell("x for each of them", y)
    tell("wq, column-parallel", of["wq"])
    tell("half of the heads", mixed)
    tell("wo, row-parallel", of["wo"])
    tell("half of the sum", partial)
    tell("half of the features", hidden)
    return x + together(by_itself(by_weight)(of["w2"], hidden))


def logits_and_loss(
    params: Arrays,
    inputs_SBT: Array,
    targets_SBT: Array,
    *,
    config: LlamaConfig,
    tell: Tell = silent,
) -> tuple[Array, Array]:
    """[P@tp, S, B, T, V / P] logits and the () mean loss over all tokens.

    Raises:
        ValueError: an architecture that this chapter does not cut.
    """
    if config.kind != "llama":
        raise ValueError(f"this chapter cuts a llama, not a {config.kind}")
    w = {k: read(k, x, config) for k, x in params.items()}
    x = jax.vmap(lambda table, ids: table[ids])(w["tok_embeddings.weight"], inputs_SBT)
    for i in range(config.layers):
        own = {k.split(".")[-2]: v for k, v in w.items() if k.startswith(f"layers.{i}.")}
        x = layer(own, x, config, tell if i == 0 else silent)
    x = jax.vmap(functools.partial(norm, eps=config.norm_eps))(w["norm.weight"], x)
    logits = by_itself(by_weight)(w["output.weight"], to_all(x))
    tell("half of the logits", logits)
    return logits, loss_of(logits, targets_SBT)


def loss_of(logits_PSBTV: Array, targets_SBT: Array) -> Array:
    """(M5) () without anybody holding all logits of a token."""
    x = wide(logits_PSBTV)  # what is summed over P below are the three numbers per token
    top_SBT = jax.lax.stop_gradient(x).max(axis=(0, -1))
    total_SBT = jnp.exp(x - top_SBT[None, ..., None]).sum(axis=(0, -1))
    ids = jnp.arange(x.shape[0] * x.shape[-1]).reshape(x.shape[0], 1, 1, 1, -1)
    ids = reshard(ids, _spec("tp"))
    is_target = ids == targets_SBT[None, ..., None]
    own_SBT = jnp.where(is_target, x, 0).sum(axis=(0, -1))
    return (jnp.log(total_SBT) + top_SBT - own_SBT).mean()


def loss_and_gradients(
    params: Arrays, inputs_SBT: Array, targets_SBT: Array, *, config: LlamaConfig
) -> tuple[Array, Arrays]:
    """() loss, and gradients that lie where the parameters lie."""

    def loss(params: Arrays) -> Array:
        return logits_and_loss(params, inputs_SBT, targets_SBT, config=config)[1]

    found: tuple[Array, Arrays] = jax.value_and_grad(loss)(params)
    return found


def main() -> None:
    """Types of a layer on 2 x 2, what it sends, and the distance from the plain model."""

    def show(name: str, x: Array) -> None:
        print(f"    {name:21} {jax.typeof(x)}")

    pretend_devices(4)
    mesh = make_mesh(shards=2, parts=2)
    tokens = np.random.default_rng(0).integers(0, 32, (2, 2, 8))
    size = 2 * 8 * 16 * 4
    for layers in (1, 2):
        config = LlamaConfig(
            vocabulary=32, dim=16, layers=layers, heads=4, kv_heads=2, hidden=24, init_std=0.3
        )
        params = init_params(config, seed=0, dtype=jnp.float32)
        with jax.set_mesh(mesh):
            placed, batch = place(params, mesh), put(tokens, mesh, WHOLE)
            if layers == 1:
                for name in ("layers.0.attention.wq.weight", "layers.0.attention.wo.weight"):
                    print(f"{name} is stored as", jax.typeof(placed[name]))
                told = functools.partial(logits_and_loss, config=config, tell=show)
                jax.eval_shape(told, placed, batch, batch)
            step = jax.jit(functools.partial(loss_and_gradients, config=config))
            compiled = step.lower(placed, batch, batch).compile()
            loss, grads = compiled(placed, batch, batch)
        rows = tokens.reshape(4, 8)
        plain, truth = jax.jit(jax.value_and_grad(plain_loss), static_argnames="config")(
            params, rows, rows, config=config
        )
        off = max(np.abs(x - truth[k]).max() for k, x in to_host(grads, config).items())
        print(f"{layers} layers: loss {loss:.6f}, of the plain model {plain:.6f};", end=" ")
        print(f"largest difference of a gradient {off:.0e}")
        print(f"    {bytes_per_axis(compiled, mesh)}")
    print(f"A layer more: 4 x [B, T, D] = 4 x {size} = {4 * size} bytes over tp.")


def plain_loss(params: Arrays, inputs_BT: Array, targets_BT: Array, config: LlamaConfig) -> Array:
    """() the loss of chapter `model`."""
    return token_loss(forward(params, inputs_BT, config=config), targets_BT)


if __name__ == "__main__":
    main()
