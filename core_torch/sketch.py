"""Sketches: a tensor as a few numbers that add up over its shards and tell distances.

    (K1) sk_k = sum over i of s_k(i) x_i,  k = 1..16, where s_k(i) = +-1 is bit k of a scrambled i
    (K2) i is the place in the whole tensor, so the sketch of a tensor is the sum of the sketches
         of its shards, however they are cut
    (K3) ||x - y||^2 = mean over k of (sk_k(x) - sk_k(y))^2, on average over signs: the products of
         two different elements cancel. From 16 signs it is right up to a factor of two or so

Mirror: reference_jax/sketch.py.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

SIGNS = 16

_CHUNK = 1 << 15  # elements whose signs are held at once: 4 MiB
_FEW = 1 << 12  # so few are kept, because the same small tensors come in every step


class Sketch(NamedTuple):
    """All of a tensor that a trace keeps. Those of shards add up; of ``amax`` take the largest."""

    sum2: float  # sum of squares
    amax: float  # largest absolute value; 0 if there is none
    bad: int  # elements that are not finite; they count as 0 in the others
    sk: list[float]  # (K1), SIGNS of them


def signs(start: int, count: int) -> Tensor:
    """(K1) (SIGNS, count) float64 of +1 and -1, for the places from ``start`` on."""
    z = torch.arange(start + 1, start + count + 1) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ _shifted(z, 31)
    bits = (z >> torch.arange(SIGNS)[:, None]) & 1
    return 1.0 - 2.0 * bits.double()


@torch.no_grad()
def sketch(x: Tensor, start: int) -> Sketch:
    """The sketch of elements of any shape, in order of rows.

    Args:
        x: a whole tensor, or the rows of a shard; any dtype that float64 can hold.
        start: place of the first element in the whole tensor, (K2).
    """
    sum2 = amax = 0.0
    bad, sk = 0, torch.zeros(SIGNS, dtype=torch.float64)
    for offset, part in enumerate(x.detach().reshape(-1).split(_CHUNK)):
        flat, count = part.to("cpu", torch.float64), part.numel()
        if not count:
            continue
        is_finite = flat.isfinite()
        flat = torch.where(is_finite, flat, 0.0)
        sum2 += float(flat @ flat)
        amax = max(amax, float(flat.abs().max()))
        bad += count - int(is_finite.sum())
        of_places = _kept_signs if count <= _FEW else signs
        sk += of_places(start + offset * _CHUNK, count) @ flat
    return Sketch(sum2, amax, bad, sk.tolist())


@lru_cache(maxsize=32)  # 16 MiB at most
def _kept_signs(start: int, count: int) -> Tensor:
    return signs(start, count)


def _signed(word: int) -> int:
    """The int64 with the bits of a 64-bit word; products wrap around as those of words do."""
    return word - (1 << 64) if word >> 63 else word


def _shifted(z: Tensor, count: int) -> Tensor:
    """Logical shift to the right: torch's own repeats the sign."""
    return (z >> count) & ((1 << (64 - count)) - 1)
