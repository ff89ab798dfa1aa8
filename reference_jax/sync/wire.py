"""Wire formats: a flat vector of floats in fewer bits, and what that leaves for the next round.

Pure array math; nothing here sends anything. What a format cannot express is not lost: it
stays with its replica as a residual and is added before the next encoding (error feedback),
so that what was sent plus the residual is what was meant.

Mirror: core_torch/sync/wire.py, to the last bit. Equations (Q1)..(Q4) in
docs/algorithms/wire.md.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

BLOCK = 256  # elements that share a scale
LEVELS = 127  # int8 without -128, so that the range is symmetric


def encode_bfloat16(x: Array) -> Array:
    """``x`` rounded to the nearest bfloat16, ties to even. (Q1)

    By way of float32, so that float64 takes the same road in both cores. What is too small for
    a normal float32 becomes 0. XLA is allowed to drop a cast to bfloat16 and back (it does not on
    a CPU); ``reduce_precision`` it must keep.
    """
    x = jnp.where(jnp.abs(x) < jnp.finfo(jnp.float32).tiny, 0.0, x)
    rounded = jax.lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
    return rounded.astype(jnp.bfloat16)


def decode_bfloat16(values: Array, *, dtype: DTypeLike) -> Array:
    """The exact value of every bfloat16 in a wider ``dtype``. (Q1)"""
    return values.astype(dtype)


def quantise(x: Array, *, block: int) -> tuple[Array, Array]:
    """Cuts a vector into blocks and writes each as multiples of a scale of its own. (Q2)

    Args:
        x: (size,) floats. A block with a value that is not finite, or beyond float32, gives
            values without meaning; the receiver must weigh it by 0.
        block: elements of a block; the last one is filled up with zeros.

    Returns:
        (blocks, block) int8 multiples in [-127, 127], rounded to the nearest, ties to even,
        and (blocks,) float32 scales, ``max|x| / 127``; 1 where the block is zero or so small
        that its scale is not a normal float32.
    """
    rows = jnp.pad(x, (0, -x.shape[0] % block)).reshape(-1, block)
    largest = jnp.abs(rows).max(axis=1).astype(jnp.float32)
    # Times a rounded constant, because a compiler may turn a division by one into that.
    scales = largest * (1.0 / LEVELS)
    smallest = jnp.finfo(jnp.float32).tiny
    scales = jnp.where(scales < smallest, 1.0, scales)
    values = jnp.round(rows / scales[:, None].astype(x.dtype))
    return jnp.clip(values, -LEVELS, LEVELS).astype(jnp.int8), scales


def dequantise(values: Array, scales: Array, *, size: int, dtype: DTypeLike) -> Array:
    """(size,) the floats that ``quantise`` expressed; the padding is cut off. (Q3)

    Args:
        values: (blocks, block) int8.
        scales: (blocks,) float32.
        size: of the vector before padding.
        dtype: of the result; products are taken in it.
    """
    return (values.astype(dtype) * scales[:, None].astype(dtype)).reshape(-1)[:size]


def residual(total: Array, decoded: Array, old: Array, weight: Array) -> Array:
    """What a replica still owes after a round: ``total - decoded`` if it counted. (Q4)

    Args:
        total: what it wanted to send, pseudo-gradient plus ``old``.
        decoded: what the others read.
        old: residual before the round. Kept as it is where ``weight`` is 0: nobody used
            what was sent, and it may be NaN.
        weight: () of this replica in this round.
    """
    return jnp.where(weight > 0, total - decoded, old)
