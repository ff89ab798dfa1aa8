"""Chapter 17. SimpleFSDP: sharding as a parametrisation. (Zhang et al., arXiv:2411.00284)

You learn that FSDP is one linear map put in front of a model that knows nothing of it.

    (G1) store       w_m, the rows of rank m out of ceil(d / M) * M, zero rows appended
    (G2) read        W = cut(all_gather(cast(w_m)));  cast first: the wire carries compute dtype
    (G3) transpose   dw_m = cast(reduce_scatter(cast(dW_m)) / M);  hybrid: then the mean over N
    (G4) wrap        loss'(w) = loss(read(w));  autodiff puts (G3) into the backward by itself
    (G5) reshard     save every value except what ``read`` returned; the backward reads again
    (G6) bucket      one gather of [w1_m | w2_m | ...]; rank m of the result holds the m-th rows
                     of each, so a strided split gives W1, W2, ...; transposed: one scatter
    (G7) plan        one bucket each: embedding; every block; norm and head (tied: one with
                     the embedding)

``read`` is linear, so it has a transpose, and (G3) is it but for the factor: autodiff of
``all_gather`` alone is ``psum_scatter``, a *sum* over ranks. The loss of a replica is the mean of
its ranks' losses, so its gradient is the mean of theirs: divide. (G2) never shows the padding
to the model and (G3) appends zeros, so it never enters a gradient.

Three placements. ``fully_shard``: rows over the shard axis; replicas are strangers, as in
chapter `fsdp`. ``hybrid_shard``: the same rows on every replica. ``replicate``: all rows on every
rank, nothing to gather; (G3) is an all-reduce.

Unlike chapter `fsdp`, each rank's program is written out under ``jax.shard_map``, where every
message is a visible line. The core reads a parameter where a module touches it; here all are
read at the top, since in a functional program only data dependencies say when. A tied parameter
is one entry of the dict, read once and scattered once.

(G5) in JAX. A value named by ``checkpoint_name`` behind the gather would not do: the policy would
save the gather's result in front of the name instead. ``linear_call`` makes all of ``read`` (cast,
gather, cut) one operation, so a policy can refuse exactly its results. It refuses broadcasts as
well, because that of a gain to [B, T, D] is the gathered gain again, many times over. The
backward repeats only what it needs: not the untied embedding, whose lookup has a gradient
without its table.

Who communicates: ``gather``, ``scatter`` and their bucketed twins, counted by ``traffic``.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_derivatives import linear_call
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from reference_jax import fsdp
from reference_jax.fsdp import example, pad, place, rank_loss, to_host, unpad
from reference_jax.ledger import WRITTEN, written
from reference_jax.mesh import AXES, ONE_EACH, PER_REPLICA, pretend_devices, put
from reference_jax.model import Arrays, LlamaConfig, shapes, units

Buckets = tuple[tuple[str, ...], ...]  # names of parameters that travel together
Rows = Mapping[str, int]  # name -> d, rows without padding, in order of the forward
Mode = Literal["fully_shard", "replicate", "hybrid_shard"]
Loss = Callable[..., Array]  # (full parameters, *batch) -> () loss of one rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Wrapping:
    """How a model is sharded; ``buckets=None`` reads every parameter by itself."""

    mode: Mode = "fully_shard"
    compute: str | None = None  # dtype of gather, forward and backward; None: as stored
    reduce: str | None = None  # dtype in which gradients are averaged; None: as stored
    buckets: Buckets | None = None
    reshard_after_forward: bool = True

    @property
    def spec(self) -> PartitionSpec:
        """(G1) where the stored arrays [R, rows, ...] lie."""
        return ONE_EACH if self.mode == "replicate" else PER_REPLICA


def manual_buckets(config: LlamaConfig) -> Buckets:
    """(G7) the units of the model, each of one dtype."""
    return tuple(names for _, names in units(config))


def store(params_R: Mapping[str, ArrayLike], mesh: Mesh, how: Wrapping) -> Arrays:
    """(G1) places unpadded host arrays [R, rows, ...]."""
    if how.mode == "replicate":
        return {k: put(x, mesh, how.spec) for k, x in params_R.items()}
    return place(params_R, mesh, axis=1)


def pieces(how: Wrapping) -> int:
    """Ranks that hold one parameter together; inside ``shard_map``."""
    return 1 if how.mode == "replicate" else jax.lax.axis_size("shard")


def gather(shard: Array, *, rows: int, how: Wrapping) -> Array:
    """(G2) this rank's rows [piece, ...] -> all rows [rows, ...] of one parameter."""
    x = shard if how.compute is None else shard.astype(how.compute)
    if how.mode == "replicate":
        return x
    return unpad(jax.lax.all_gather(x, "shard", tiled=True), rows=rows, axis=0)


def scatter(grad: Array, *, dtype: DTypeLike, how: Wrapping) -> Array:
    """(G3) one rank's gradient [rows, ...] -> its piece of the mean, in the stored dtype."""
    x = pad(grad.astype(how.reduce or dtype), shards=pieces(how), axis=0)
    return mean_over_ranks(x, how).astype(dtype)


def mean_over_ranks(x: Array, how: Wrapping) -> Array:
    """(G3) [M * n, ...] on every rank -> this rank's [n, ...] of the mean."""
    shards, replicas = jax.lax.axis_size("shard"), jax.lax.axis_size("replica")
    if how.mode == "replicate":
        return jax.lax.psum(x, AXES) / (replicas * shards)
    mine = jax.lax.psum_scatter(x, "shard", tiled=True) / shards
    if how.mode == "fully_shard":
        return mine
    return jax.lax.psum(mine, "replica") / replicas


def gather_bucket(shards: Arrays, *, rows: Rows, how: Wrapping) -> Arrays:
    """(G6) ``gather`` of several parameters with one message; they keep the order of ``rows``."""
    names = [name for name in rows if name in shards]
    cast = {k: shards[k].astype(how.compute or shards[k].dtype) for k in names}
    if how.mode == "replicate":
        return cast
    flat = jnp.concatenate([cast[k].ravel() for k in names])
    flat_S = jax.lax.all_gather(flat, "shard")  # [M, elements of a rank]
    full = {}
    for name, part_S in zip(names, split([shards[k].size for k in names], flat_S), strict=True):
        padded = part_S.reshape(-1, *shards[name].shape[1:])
        full[name] = unpad(padded, rows=rows[name], axis=0)
    return full


def scatter_bucket(grads: Arrays, *, like: Arrays, rows: Rows, how: Wrapping) -> Arrays:
    """(G6) ``scatter`` of several parameters with one message; ``like`` are their pieces."""
    names, m = [name for name in rows if name in grads], pieces(how)
    cast = {k: pad(grads[k].astype(how.reduce or like[k].dtype), shards=m, axis=0) for k in names}
    flat_S = jnp.concatenate([cast[k].reshape(m, -1) for k in names], axis=1)
    parts = split([like[k].size for k in names], mean_over_ranks(flat_S.ravel(), how))
    return {
        k: part.reshape(like[k].shape).astype(like[k].dtype)
        for k, part in zip(names, parts, strict=True)
    }


def split(sizes: list[int], flat: Array) -> list[Array]:
    """The last axis cut into pieces of these sizes: the strided split of (G6)."""
    return jnp.split(flat, np.cumsum(sizes)[:-1].tolist(), axis=-1)


def read(shard: Array, *, rows: int, how: Wrapping) -> Array:
    """(G2, G3) the full parameter; a linear map that brings its own transpose."""
    forward = functools.partial(gather, rows=rows, how=how)
    backward = functools.partial(scatter, dtype=shard.dtype, how=how)
    full: Array = linear_call(lambda _, x: forward(x), lambda _, dx: backward(dx), (), shard)
    return full


def read_bucket(shards: Arrays, *, rows: Rows, how: Wrapping) -> Arrays:
    """(G6) ``read`` of several parameters; not a bit differs."""
    forward = functools.partial(gather_bucket, rows=rows, how=how)
    like = {k: jax.typeof(x) for k, x in shards.items()}
    backward = functools.partial(scatter_bucket, like=like, rows=rows, how=how)
    full: Arrays = linear_call(lambda _, x: forward(x), lambda _, dx: backward(dx), (), shards)
    return full


def save_all_but_reads(primitive: Any, *_: Any, **__: Any) -> bool:
    """(G5) policy of ``jax.checkpoint``: False for what the backward computes again."""
    return primitive.name not in ("linear_call", "broadcast_in_dim")


def simple_fsdp(loss: Loss, *, rows: Rows, how: Wrapping) -> Loss:
    """(G4, G5) the same loss, but of this rank's shards; for use inside ``jax.shard_map``.

    Raises:
        ValueError: a parameter is in no bucket or in more than one.
    """
    buckets = how.buckets
    if buckets is not None and sorted(sum(buckets, ())) != sorted(rows):
        raise ValueError("every parameter must be in exactly one bucket")

    def loss_of_shards(shards: Arrays, *batch: Array) -> Array:
        if buckets is None:
            full = {k: read(x, rows=rows[k], how=how) for k, x in shards.items()}
        else:
            parts = [{k: shards[k] for k in names} for names in buckets]
            full = {k: x for p in parts for k, x in read_bucket(p, rows=rows, how=how).items()}
        return loss(full, *batch)

    keep = jax.checkpoint_policies.everything_saveable
    policy = save_all_but_reads if how.reshard_after_forward else keep
    return jax.checkpoint(loss_of_shards, policy=policy)


def on_ranks(
    program: Callable[..., Any], params: Arrays, *batch: Array, how: Wrapping, out: Any
) -> Any:
    """``program`` on what each rank holds. No replication types: we send, JAX shall not."""

    def one_rank(params: Arrays, *batch: Array) -> Any:
        return program({k: x[0] for k, x in params.items()}, *(x[0, 0] for x in batch))

    specs = (how.spec, *[PER_REPLICA] * len(batch))
    mapped = jax.shard_map(one_rank, in_specs=specs, out_specs=out, check_vma=False)
    return mapped(params, *batch)


def losses(loss: Loss, params: Arrays, *batch: Array, rows: Rows, how: Wrapping) -> Array:
    """[R, S] loss of every rank: the forward by itself. Arguments as for ``gradients``."""
    wrapped = simple_fsdp(loss, rows=rows, how=how)
    whole: Array = on_ranks(
        lambda *held: wrapped(*held)[None, None], params, *batch, how=how, out=PER_REPLICA
    )
    return whole


def gradients(
    loss: Loss, params: Arrays, *batch: Array, rows: Rows, how: Wrapping
) -> tuple[Array, Arrays]:
    """(G1..G7) [R, S] losses, and gradients placed like the parameters.

    Args:
        loss: of one rank, a function of full parameters.
        params: [R, rows, ...], placed by ``store``.
        batch: arrays [R, S, ...].
        rows: of every parameter, without padding.
        how: see ``Wrapping``.
    """
    with_grad = jax.value_and_grad(simple_fsdp(loss, rows=rows, how=how))

    def program(shards: Arrays, *batch: Array) -> tuple[Array, Arrays]:
        value, grads = with_grad(shards, *batch)
        return value[None, None], {k: g[None] for k, g in grads.items()}

    out = (PER_REPLICA, how.spec)
    whole: tuple[Array, Arrays] = on_ranks(program, params, *batch, how=how, out=out)
    return whole


def traffic(program: Callable[..., Any], *args: Any) -> Counter[tuple[str, int]]:
    """(operation, payload bytes) -> calls per rank, by ``ledger.written``.

    Not off compiled code, in which XLA on CPU spells a reduce-scatter as an all-reduce.
    """
    return Counter((operation, size) for _, operation, size in written(program, *args))


def total(sent: Counter[tuple[str, int]], operation: str) -> tuple[int, int]:
    """Calls and bytes of one operation."""
    chosen = {size: calls for (name, size), calls in sent.items() if name == operation}
    return sum(chosen.values()), sum(size * calls for size, calls in chosen.items())


HEAD = """\
2 x 2 ranks: calls, kB   all-gather       all-gather   reduce-scatter       all-reduce   largest
placement   reads reshard  forward         backward         backward         backward     error"""


def main() -> None:
    """What forward and backward send in each placement, and the error against chapter `fsdp`."""
    pretend_devices(4)
    mesh, config, state, tokens = example(2, 2)
    rows = {name: shape[0] for name, shape in shapes(config).items()}
    loss = functools.partial(rank_loss, config=config, compute=None)
    params_R = to_host(state.params, config, axis=1)
    by_unit = manual_buckets(config)
    print(HEAD)
    with jax.set_mesh(mesh):
        reference = jax.jit(fsdp.gradients, static_argnames="config")
        _, mine = reference(state.params, tokens, tokens, config=config)
        for how in (
            Wrapping(),
            Wrapping(buckets=by_unit),
            Wrapping(buckets=by_unit, reshard_after_forward=False),
            Wrapping(mode="hybrid_shard", buckets=by_unit),
            Wrapping(mode="replicate"),
            Wrapping(mode="replicate", buckets=by_unit),
        ):
            held = (store(params_R, mesh, how), tokens, tokens)
            forward = jax.jit(functools.partial(losses, loss, rows=rows, how=how))
            both = jax.jit(functools.partial(gradients, loss, rows=rows, how=how))
            sent = traffic(forward, *held)
            back = traffic(both, *held) - sent
            ours, theirs = (to_host(x, config, axis=1) for x in (both(*held)[1], mine))
            if how.mode != "fully_shard":
                theirs = {k: x.mean(axis=0, keepdims=True) for k, x in theirs.items()}
            error = max(float(np.abs(ours[k] - theirs[k]).max()) for k in rows)
            counts = [total(sent, "all-gather"), *(total(back, op) for op in WRITTEN.values())]
            cells = "  ".join(f"{calls:6} {size / 1000:8.2f}" for calls, size in counts)
            words = ("unit" if how.buckets else "one", "yes" if how.reshard_after_forward else "no")
            print(f"{how.mode:12} {words[0]:4} {words[1]:3} {cells}   {error:.0e}")


if __name__ == "__main__":
    main()
