"""Sketches: a tensor as a few numbers that add up over its shards and tell distances.

    (K1) sk_k = sum over i of s_k(i) x_i,  k = 1..16, where s_k(i) = +-1 is bit k of a scrambled i
    (K2) i is the place in the whole tensor, so the sketch of a tensor is the sum of the sketches
         of its shards, however they are cut
    (K3) ||x - y||^2 = mean over k of (sk_k(x) - sk_k(y))^2, on average over signs: the products of
         two different elements cancel. From 16 signs it is right up to a factor of two or so

Mirror: core_torch/sketch.py.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

SIGNS = 16


class Sketch(NamedTuple):
    """All of a tensor that a trace keeps. Those of shards add up; of ``amax`` take the largest."""

    sum2: float  # sum of squares
    amax: float  # largest absolute value; 0 if there is none
    bad: int  # elements that are not finite; they count as 0 in the others
    sk: list[float]  # (K1), SIGNS of them


def signs(start: int, count: int) -> np.ndarray:
    """(K1) (SIGNS, count) float64 of +1 and -1, for the places from ``start`` on."""
    z = np.arange(start + 1, start + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    bits = (z >> np.arange(SIGNS, dtype=np.uint64)[:, None]) & np.uint64(1)
    return 1.0 - 2.0 * bits


def sketch(x: ArrayLike, start: int) -> Sketch:
    """The sketch of elements of any shape, in order of rows.

    Args:
        x: a whole tensor, or the rows of a shard; any dtype that float64 can hold.
        start: place of the first element in the whole tensor, (K2).
    """
    flat = np.asarray(x).astype(np.float64).reshape(-1)
    is_finite = np.isfinite(flat)
    flat = np.where(is_finite, flat, 0.0)
    return Sketch(
        sum2=float(flat @ flat),
        amax=float(np.abs(flat).max(initial=0.0)),
        bad=int(flat.size - is_finite.sum()),
        sk=(signs(start, flat.size) @ flat).tolist(),
    )
