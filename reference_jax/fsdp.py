"""Chapter 4. FSDP: one replica, spread over its shards; and the local inner step.

You learn how M devices train one copy of the model while each stores 1 / M of it.

    (F1) store    theta [R@replica, rows@shard, ...]
    (F2) gather   every rank gets its own full copy  [R@replica, S@shard, rows, ...]
    (F3) compute  vmap(vmap(gradient)): every rank by itself, on its own tokens
    (F4) scatter  mean over S, back to               [R@replica, rows@shard, ...]
    (F5) clip     g <- g * min(1, max_norm / (||g|| + 1e-6)), ||g|| over the replica's shards
    (F6) AdamW on the shard; elementwise, so no communication

Divide by M, never by N * M: the replicas are strangers here.

If data leave targets out, ranks differ in how many count. Then each divides the sum of its
losses by what they count on average, and the mean (F4) over ranks is one over targets:

    (F7) mean over ranks of (sum of a rank / mean count of the ranks) = sum / count of all

Padding. FSDP2 cuts rows into pieces of ceil(rows / M); the last ranks may hold fewer, or none.
JAX wants equal pieces, so arrays are stored with zero rows appended up to a multiple of M. The
model never sees them: they are added in (F4) and cut off in (F2). Zeros do not change a norm,
and AdamW maps 0 to 0, so they stay zero by themselves, except where a NaN would be multiplied
into them; that can happen only in (F5), which therefore writes them anew.

Who communicates: shard axis: all-gather of parameters (F2), reduction of gradients (F4), one
number per tensor for the norm, and the loss. Replica axis: 0 bytes; chapter `ledger` proves it.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, get_abstract_mesh
from jax.typing import ArrayLike, DTypeLike

from reference_jax.adamw import adamw_update
from reference_jax.mesh import (
    AGREED,
    ONE_EACH,
    PER_REPLICA,
    make_mesh,
    pretend_devices,
    put,
    reshard,
)
from reference_jax.model import (
    Arrays,
    LlamaConfig,
    Tap,
    forward,
    init_params,
    shapes,
    summed_loss,
    token_loss,
    untouched,
    wide,
)
from reference_jax.sync.penalty import clip_coefficient


class TrainState(NamedTuple):
    """What the inner optimizer owns; each dict is keyed by parameter name."""

    params: Arrays  # [R@replica, rows@shard, ...], padded
    exp_avg: Arrays  # same
    exp_avg_sq: Arrays  # same
    step: Arrays  # [R@replica] steps since the start or since the replica was healed


class Inner(NamedTuple):
    """Scalars of the inner step.

    ``max_norm=0`` does not clip, ``compute=None`` keeps the dtype, ``z_loss=0`` adds nothing.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0
    compute: str | None = None
    z_loss: float = 0.0


class StepReport(NamedTuple):
    """What an inner step reports."""

    loss_R: Array  # mean over the replica's shards
    grad_norm_R: Array  # before clipping
    grads: Arrays  # like params; averaged over shards, before clipping


def local_rows(rows: int, *, shards: int, shard: int) -> slice:
    """The rows of an unpadded tensor that FSDP2 gives to ``shard``; may be empty."""
    piece = -(-rows // shards)
    return slice(min(rows, shard * piece), min(rows, (shard + 1) * piece))


def pad(x: Any, *, shards: int, axis: int) -> Any:
    """Appends zero rows until ``shards`` divides the length of ``axis``; host or device array."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % shards)
    return (np if isinstance(x, np.ndarray) else jnp).pad(x, widths)


def unpad(x: Array, *, rows: int, axis: int) -> Array:
    """Cuts the appended rows off again; ``axis`` must not be sharded."""
    return jax.lax.slice_in_dim(x, 0, rows, axis=axis)


def zero_padding(x_R: Array, *, rows: int) -> Array:
    """Writes 0 into the rows from ``rows`` on of axis 1, whatever is there."""
    is_real = (jnp.arange(x_R.shape[1]) < rows).reshape(1, -1, *[1] * (x_R.ndim - 2))
    return jnp.where(is_real, x_R, 0)


def place(arrays: Mapping[str, ArrayLike], mesh: Mesh, *, axis: int) -> Arrays:
    """(F1) pads host arrays and puts them on the mesh.

    Args:
        arrays: unpadded.
        mesh: of the run.
        axis: where the rows are: 1 in [R, rows, ...], 0 in anchors [rows, ...].
    """
    shards, spec = mesh.devices.shape[1], PER_REPLICA if axis == 1 else AGREED
    hosts = {k: np.asarray(v) for k, v in arrays.items()}
    return {k: put(pad(v, shards=shards, axis=axis), mesh, spec) for k, v in hosts.items()}


def replicate(params: Mapping[str, ArrayLike], replicas: int) -> dict[str, np.ndarray]:
    """One set of parameters [rows, ...] as [R, rows, ...] host arrays."""
    return {k: np.repeat(np.asarray(v)[None], replicas, axis=0) for k, v in params.items()}


def init_state(params: Arrays, mesh: Mesh) -> TrainState:
    """Zero moments and step counts for parameters that are already in place."""
    zeros = {k: put(np.zeros(v.shape, v.dtype), mesh, PER_REPLICA) for k, v in params.items()}
    steps = {k: put(np.zeros(v.shape[0], v.dtype), mesh, ONE_EACH) for k, v in params.items()}
    return TrainState(params, zeros, dict(zeros), steps)


def to_host(arrays: Arrays, config: LlamaConfig, *, axis: int) -> dict[str, np.ndarray]:
    """Unpadded copies; ``axis`` holds the rows: 1 after a replica axis, 0 for anchors."""
    known = shapes(config)
    return {k: np.array(v).take(range(known[k][0]), axis=axis) for k, v in arrays.items()}


def gather(x_R: Array, *, rows: int) -> Array:
    """(F2) shard -> [R@replica, S@shard, rows, ...], a full copy for each rank."""
    shards = get_abstract_mesh().shape["shard"]
    full_R = unpad(reshard(x_R, ONE_EACH), rows=rows, axis=1)
    shape = (full_R.shape[0], shards, *full_R.shape[1:])
    return jnp.broadcast_to(full_R[:, None], shape, out_sharding=PER_REPLICA)


def scatter(grad_RS: Array) -> Array:
    """(F4) mean over the ranks of each replica, of which each keeps its rows."""
    shards = get_abstract_mesh().shape["shard"]
    return reshard(pad(grad_RS, shards=shards, axis=2).mean(axis=1), PER_REPLICA)


def rank_loss(
    params: Arrays,
    inputs_BT: Array,
    targets_BT: Array,
    *,
    config: LlamaConfig,
    compute: str | None,
    z_loss: float = 0.0,
    divisor: Array | None = None,
    documents_BT: Array | None = None,
    tap: Tap = untouched,
) -> Array:
    """() loss of one rank on its own tokens; B holds all its micro-batches. (F7)

    Args:
        params: full ones.
        inputs_BT: tokens.
        targets_BT: the tokens that follow.
        config: of the model.
        compute: dtype of the forward; None: that of the parameters.
        z_loss: see (M6).
        divisor: () by which the losses' sum is divided; None: all targets count, by their number.
        documents_BT: see ``forward``.
        tap: see ``forward``.
    """
    if compute is not None:
        params = {k: v.astype(compute) for k, v in params.items()}
    logits_BTV = forward(params, inputs_BT, config=config, tap=tap, documents_BT=documents_BT)
    if divisor is None and not z_loss:
        return token_loss(logits_BTV, targets_BT)
    summed = summed_loss(logits_BTV, targets_BT, z_loss=z_loss)
    return summed / (targets_BT.size if divisor is None else divisor)


def gradients(
    params: Arrays,
    inputs_RSBT: Array,
    targets_RSBT: Array,
    *,
    config: LlamaConfig,
    compute: str | None = None,
    z_loss: float = 0.0,
    divisor_RS: Array | None = None,
    documents_RSBT: Array | None = None,
) -> tuple[Array, Arrays]:
    """(F2..F4) [R] loss and gradients of every replica by itself."""
    full = {k: gather(x, rows=shapes(config)[k][0]) for k, x in params.items()}

    def loss(
        full: Arrays, inputs: Array, targets: Array, divisor: Array | None, documents: Array | None
    ) -> Array:
        how: dict[str, Any] = {"config": config, "compute": compute, "z_loss": z_loss}
        return rank_loss(full, inputs, targets, divisor=divisor, documents_BT=documents, **how)

    of_all = jax.vmap(jax.vmap(jax.value_and_grad(loss)))
    loss_RS, grads_RS = of_all(full, inputs_RSBT, targets_RSBT, divisor_RS, documents_RSBT)
    return loss_RS.mean(axis=1), {k: scatter(g) for k, g in grads_RS.items()}


def norm_of(arrays: list[Array]) -> Array:
    """() L2 norm of several arrays together, accumulated in at least float32."""
    return jnp.sqrt(jnp.stack([jnp.square(wide(x)).sum() for x in arrays]).sum())


def update(
    state: TrainState, grads: Arrays, lr: float | Array, *, config: LlamaConfig, inner: Inner
) -> tuple[TrainState, Array]:
    """(F5, F6) clips and steps; also returns the [R] gradient norms."""
    names = list(shapes(config))
    norm_R = jax.vmap(lambda g: norm_of([g[n] for n in names]))(grads)
    new: dict[str, tuple[Array, ...]] = {}
    for name, shape in shapes(config).items():
        grad_R = grads[name]
        if inner.max_norm > 0:
            factor_R = clip_coefficient(norm_R, max_norm=inner.max_norm, eps=1e-6)
            scaled_R = jax.vmap(jnp.multiply)(grad_R, factor_R.astype(grad_R.dtype))
            grad_R = zero_padding(scaled_R, rows=shape[0])
        step = functools.partial(
            adamw_update,
            lr=lr,
            beta1=inner.beta1,
            beta2=inner.beta2,
            eps=inner.eps,
            weight_decay=inner.weight_decay if len(shape) >= 2 else 0.0,
        )
        held = (state.params, grads | {name: grad_R}, state.exp_avg, state.exp_avg_sq, state.step)
        new[name] = jax.vmap(step)(*(each[name] for each in held))
    return TrainState(*({k: v[i] for k, v in new.items()} for i in range(4))), norm_R


@functools.partial(jax.jit, static_argnames=("config", "inner"))
def local_step(
    state: TrainState,
    inputs_RSBT: Array,
    targets_RSBT: Array,
    lr: float,
    *,
    config: LlamaConfig,
    inner: Inner,
    divisor_RS: Array | None = None,
    documents_RSBT: Array | None = None,
) -> tuple[TrainState, StepReport]:
    """One inner step of every replica by itself. (F2..F6)"""
    how: dict[str, Any] = {"config": config, "compute": inner.compute, "z_loss": inner.z_loss}
    how |= {"divisor_RS": divisor_RS, "documents_RSBT": documents_RSBT}
    loss_R, grads = gradients(state.params, inputs_RSBT, targets_RSBT, **how)
    state, norm_R = update(state, grads, lr, config=config, inner=inner)
    return state, StepReport(loss_R, norm_R, grads)


def example(
    replicas: int, shards: int, dtype: DTypeLike = np.float32
) -> tuple[Mesh, LlamaConfig, TrainState, Array]:
    """A tiny model on a mesh and one batch of tokens; the chapters below show themselves on it."""
    config = LlamaConfig(vocabulary=257, dim=16, layers=1, heads=2, kv_heads=1, hidden=27)
    mesh = make_mesh(replicas, shards)
    params_R = replicate(init_params(config, seed=0, dtype=dtype), replicas)
    state = init_state(place(params_R, mesh, axis=1), mesh)
    tokens = np.random.default_rng(0).integers(0, 256, (replicas, shards, 2, 8))
    return mesh, config, state, put(tokens, mesh, PER_REPLICA)


def main() -> None:
    """A parameter on its way through a step; three steps; a tensor of 257 rows on 4 shards."""
    pretend_devices(4)
    mesh, config, state, tokens = example(2, 2)
    with jax.set_mesh(mesh):
        stored = state.params["tok_embeddings.weight"]
        full = gather(stored, rows=257)
        print("(F1) stored:     ", jax.typeof(stored), "  257 rows and one of padding")
        print("(F2) gathered:   ", jax.typeof(full), "  and so are the gradients of the ranks (F3)")
        print("(F4) scattered:  ", jax.typeof(scatter(full)))
        for t in range(3):
            state, seen = local_step(state, tokens, tokens, 0.01, config=config, inner=Inner())
            print(f"step {t + 1}: loss {seen.loss_R}, gradient norm {seen.grad_norm_R}")
    for m in range(4):
        mine = local_rows(257, shards=4, shard=m)
        print(f"shard {m} of 257 rows: {mine.start}..{mine.stop - 1}")


if __name__ == "__main__":
    main()
