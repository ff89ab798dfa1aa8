"""Chapter 7. The exchange: one weighted sum over the replicas, in full or in fewer bits.

You learn what the one large message of every later chapter is, and how to shrink it without
losing anything for good.

    (R3) D = sum_n w_n d_n               in full: one all-reduce of a shard

    In fewer bits (``wire`` bf16 or int8), per unit and rank, on its shard as one vector:
    (Q5) t_n = d_n + e_n                 e_n is what replica n still owes, 0 at first
         c_n = encode(t_n)               (Q1) bfloat16, or (Q2) int8 with a scale per block
         D   = sum_n w_n decode(c_n)     added in the order of the replicas
    (Q4) e_n <- t_n - decode(c_n)        where w_n > 0; else e_n stays as it is

Codes are gathered, not reduced: a sum of two int8 numbers with different scales is no int8
number. So everybody receives N codes and adds them up himself; with many replicas the gather
costs more than the all-reduce that it replaces. A rounding error is not lost but sent the next
time (*error feedback*): what was sent so far plus what is owed is the sum of all d.

A vector is cut into blocks as the core cuts it, by the rows that FSDP2 gives to a rank. The
padding of chapter `fsdp` is therefore moved to the end of the vector first.

Who communicates: replica axis: an all-reduce of the shard, or an all-gather of codes. Shard
axis: nobody.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import get_abstract_mesh

from reference_jax.fsdp import Inner, example, local_rows, local_step, norm_of
from reference_jax.ledger import bytes_per_axis
from reference_jax.mesh import (
    AGREED,
    EVERYWHERE,
    ONE_EACH,
    PER_REPLICA,
    pretend_devices,
    put,
    reshard,
)
from reference_jax.model import Arrays, LlamaConfig, Units, shapes, whole_model
from reference_jax.sync.penalty import weigh
from reference_jax.sync.wire import (
    BLOCK,
    decode_bfloat16,
    dequantise,
    encode_bfloat16,
    quantise,
    residual,
)

FORMATS = ("fp32", "bf16", "int8")  # fp32 sends what is stored


class Wire(NamedTuple):
    """What is sent, and the unpadded rows of every tensor, which coded vectors need."""

    format: str = "fp32"
    rows: tuple[tuple[str, int], ...] = ()


IN_FULL = Wire()


def wire_of(name: str, config: LlamaConfig) -> Wire:
    """The format ``name`` for a model.

    Raises:
        ValueError: an unknown format.
    """
    if name not in FORMATS:
        raise ValueError(f"wire {name!r} is not one of {', '.join(FORMATS)}")
    return Wire(name, tuple((k, shape[0]) for k, shape in shapes(config).items()))


def combine(pseudo: Arrays, weight_UR: Array, *, units: Units) -> Arrays:
    """(R3) weighted sum over the replicas: [rows@shard, ...]."""
    combined = {}
    for u, (_, names) in enumerate(units):
        weight_R = reshard(weight_UR[u], ONE_EACH)
        for name in names:
            weighed_R = jax.vmap(weigh)(pseudo[name], weight_R)
            combined[name] = weighed_R.sum(axis=0)
    return combined


def nothing_owed(params: Arrays, wire: Wire) -> Arrays:
    """e before the first exchange; empty if nothing is ever coded."""
    return {} if wire.format == "fp32" else {k: jnp.zeros_like(x) for k, x in params.items()}


def encode(x: Array, format: str) -> tuple[Array, ...]:
    """(Q1, Q2) the arrays that are sent instead of a vector."""
    if format == "int8":
        return quantise(x, block=BLOCK)
    # As bits, or XLA would find that it may as well gather the float32 behind them.
    return (jax.lax.bitcast_convert_type(encode_bfloat16(x), jnp.uint16),)


def decode(code: tuple[Array, ...], like: Array, format: str) -> Array:
    """(Q1, Q3) the vector that everybody reads; of the size and dtype of ``like``."""
    if format == "int8":
        return dequantise(*code, size=like.size, dtype=like.dtype)
    return decode_bfloat16(jax.lax.bitcast_convert_type(code[0], jnp.bfloat16), dtype=like.dtype)


def real_first(d: Arrays, wire: Wire, *, shards: int) -> np.ndarray:
    """(S, size) order that moves the padding of a rank's flat unit to its end.

    Args:
        d: tensors of the unit [R, rows, ...], padded.
        wire: knows how many of the rows are real.
        shards: ranks that hold a replica.
    """
    rows, is_padding = dict(wire.rows), []
    for name, x in d.items():
        stored = np.ones((shards, x.shape[1] // shards, *x.shape[2:]), bool)
        for m in range(shards):
            mine = local_rows(rows[name], shards=shards, shard=m)
            stored[m, : mine.stop - mine.start] = False
        is_padding.append(stored.reshape(shards, -1))
    return np.argsort(np.concatenate(is_padding, axis=1), axis=1, kind="stable")


def exchange_coded(d: Arrays, e: Arrays, weight_R: Array, wire: Wire) -> tuple[Arrays, Arrays]:
    """(Q5, Q4) the exchange of one unit, written for one device; D and the next e.

    Args:
        d: pseudo-gradients of the unit, [R@replica, rows@shard, ...].
        e: what is owed, the same.
        weight_R: on every device.
        wire: bf16 or int8.
    """

    names = tuple(d)  # in the order of the unit; inside, JAX has sorted them

    def of_one_device(
        d: Arrays, e: Arrays, weight_R: Array, order_SX: Array
    ) -> tuple[Arrays, Arrays]:
        order = order_SX[0]
        old = flatten(e, names)[order]
        total = flatten(d, names)[order] + old
        code = encode(total, wire.format)
        codes_R = [jax.lax.all_gather(part, "replica") for part in code]  # the message
        combined = jnp.zeros_like(total)
        for n in range(len(weight_R)):
            sent = decode(tuple(part[n] for part in codes_R), total, wire.format)
            combined += weigh(sent, weight_R[n])
        mine = weight_R[jax.lax.axis_index("replica")]
        left = residual(total, decode(code, total, wire.format), old, mine)
        back = jnp.argsort(order)
        combined, left = combined[back], left[back]
        return {k: x[0] for k, x in cut(combined, d, names).items()}, cut(left, d, names)

    # check_vma=False: all replicas add the same codes in the same order, so D is one and the same.
    together = jax.shard_map(
        of_one_device,
        in_specs=(PER_REPLICA, PER_REPLICA, EVERYWHERE, AGREED),
        out_specs=(AGREED, PER_REPLICA),
        check_vma=False,
    )
    order_SX = real_first(d, wire, shards=get_abstract_mesh().shape["shard"])
    return together(d, e, weight_R, reshard(jnp.asarray(order_SX), AGREED))


def flatten(arrays: Arrays, names: tuple[str, ...]) -> Array:
    """All elements as one vector."""
    return jnp.concatenate([arrays[name].reshape(-1) for name in names])


def cut(vector: Array, like: Arrays, names: tuple[str, ...]) -> Arrays:
    """The inverse of ``flatten``."""
    parts = jnp.split(vector, np.cumsum([like[name].size for name in names])[:-1])
    return {k: x.reshape(like[k].shape) for k, x in zip(names, parts, strict=True)}


def exchange(
    pseudo: Arrays, owed: Arrays, weight_UR: Array, *, units: Units, wire: Wire = IN_FULL
) -> tuple[Arrays, Arrays]:
    """(R3), or (Q5, Q4), unit by unit: D and what is owed after it.

    Args:
        pseudo: d of all replicas.
        owed: e of all replicas.
        weight_UR: on every device.
        units: what one exchange covers.
        wire: what is sent; a single replica sends nothing, so nothing is coded.
    """
    if wire.format == "fp32" or weight_UR.shape[1] == 1:
        return combine(pseudo, weight_UR, units=units), owed
    combined: Arrays = {}
    next_owed = dict(owed)
    for u, (_, names) in enumerate(units):
        d, e = ({k: of[k] for k in names} for of in (pseudo, owed))
        sums, left = exchange_coded(d, e, weight_UR[u], wire)
        combined |= sums
        next_owed |= left
    return combined, next_owed


def main() -> None:
    """One progress sent three times in each format: what it costs, and what has arrived."""
    pretend_devices(4)
    mesh, config, state, tokens = example(2, 2)
    units = whole_model(config)
    start = state.params
    with jax.set_mesh(mesh):
        state, _ = local_step(state, tokens, tokens, 0.01, config=config, inner=Inner())
        d = {k: start[k] - x for k, x in state.params.items()}
        half_UR = put(np.full((1, 2), 0.5, np.float32), mesh, EVERYWHERE)
        exact = combine(d, half_UR, units=units)
        for name in FORMATS:
            wire = wire_of(name, config)
            send = jax.jit(functools.partial(exchange, units=units, wire=wire))
            owed = nothing_owed(d, wire)
            compiled = send.lower(d, owed, half_UR).compile()
            print(f"{name}: {bytes_per_axis(compiled, mesh)['replica']} bytes a device")
            sent = {k: jnp.zeros_like(x) for k, x in exact.items()}
            for turn in range(1, 4):
                combined, owed = compiled(d, owed, half_UR)
                sent = {k: x + combined[k] for k, x in sent.items()}
                off = norm_of([x - turn * exact[k] for k, x in sent.items()])
                share = off / (turn * norm_of(list(exact.values())))
                print(f"    after {turn} exchanges what has arrived is off by {share:.6f} of it")


if __name__ == "__main__":
    main()
