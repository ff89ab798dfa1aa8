"""Wire formats: a flat vector of floats in fewer bits, and what that leaves for the next round.

Pure tensor math; nothing here sends anything. What a format cannot express is not lost: it
stays with its replica as a residual and is added before the next encoding (error feedback),
so that what was sent plus the residual is what was meant.

Mirror: reference_jax/sync/wire.py, to the last bit. Equations (Q1)..(Q4) in
docs/algorithms/wire.md.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # elements that share a scale
LEVELS = 127  # int8 without -128, so that the range is symmetric


def encode_bfloat16(x: Tensor) -> Tensor:
    """``x`` rounded to the nearest bfloat16, ties to even. (Q1)

    By way of float32, so that float64 takes the same road in both cores. What is too small for
    a normal float32 becomes 0.
    """
    x = torch.where(x.abs() < torch.finfo(torch.float32).tiny, 0.0, x)
    return x.to(torch.float32).to(torch.bfloat16)


def decode_bfloat16(values: Tensor, *, dtype: torch.dtype) -> Tensor:
    """The exact value of every bfloat16 in a wider ``dtype``. (Q1)"""
    return values.to(dtype)


def quantise(x: Tensor, *, block: int) -> tuple[Tensor, Tensor]:
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
    rows = F.pad(x, (0, -x.shape[0] % block)).reshape(-1, block)
    largest = rows.abs().amax(dim=1).to(torch.float32)
    # Times a rounded constant, because a compiler may turn a division by one into that.
    scales = largest * (1.0 / LEVELS)
    smallest = torch.finfo(torch.float32).tiny
    scales = torch.where(scales < smallest, 1.0, scales)
    values = torch.round(rows / scales[:, None].to(x.dtype))
    return torch.clamp(values, -LEVELS, LEVELS).to(torch.int8), scales


def dequantise(values: Tensor, scales: Tensor, *, size: int, dtype: torch.dtype) -> Tensor:
    """(size,) the floats that ``quantise`` expressed; the padding is cut off. (Q3)

    Args:
        values: (blocks, block) int8.
        scales: (blocks,) float32.
        size: of the vector before padding.
        dtype: of the result; products are taken in it.
    """
    return (values.to(dtype) * scales[:, None].to(dtype)).reshape(-1)[:size]


def residual(total: Tensor, decoded: Tensor, old: Tensor, weight: Tensor) -> Tensor:
    """What a replica still owes after a round: ``total - decoded`` if it counted. (Q4)

    Args:
        total: what it wanted to send, pseudo-gradient plus ``old``.
        decoded: what the others read.
        old: residual before the round. Kept as it is where ``weight`` is 0: nobody used
            what was sent, and it may be NaN.
        weight: () of this replica in this round.
    """
    return torch.where(weight > 0, total - decoded, old)
