"""This rank's part of a parameter, whatever holds it: a DTensor or a plain tensor.

Dimension 0 of size d over M ranks is cut in rows of ``ceil(d / M)``, as ``torch.chunk`` and
FSDP2 do: the last ranks may hold fewer rows, or none.
"""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from core_torch.collectives import Axis, all_gather


class Rows(NamedTuple):
    """Rows ``[start, start + rows)`` of dimension 0."""

    start: int
    rows: int


def rows_of_shard(size: int, shards: int, index: int) -> Rows:
    """The rows of a dimension of ``size`` that shard ``index`` of ``shards`` holds."""
    chunk = -(-size // shards)
    start = min(index * chunk, size)
    return Rows(start, min(chunk, size - start))


@torch.no_grad()
def local_shard(x: Tensor) -> Tensor:
    """This rank's rows of ``x``, sharing its storage: writing to them changes ``x``."""
    return x.to_local() if isinstance(x, DTensor) else x.detach()


def is_sharded(x: Tensor) -> bool:
    """True if ``x`` is cut over ranks, False if every rank holds it whole."""
    return isinstance(x, DTensor) and not all(p.is_replicate() for p in x.placements)


def copies_of(x: Tensor, holders: int) -> int:
    """How many of ``holders`` ranks, which hold ``x`` together, hold the same element of it."""
    if not isinstance(x, DTensor):
        return holders
    cuts = zip(x.device_mesh.shape, x.placements, strict=True)
    return holders // prod(size for size, placement in cuts if not placement.is_replicate())


def gather_rows(local: Tensor, shape: torch.Size, axis: Axis, *, scope: str) -> Tensor:
    """The full tensor of ``shape`` from each rank's rows; an all-gather of padded chunks."""
    if axis.size == 1:
        return local.clone()
    chunk = rows_of_shard(shape[0], axis.size, 0).rows
    padded = local.new_zeros((chunk, *shape[1:]))
    padded[: local.shape[0]] = local
    return all_gather(padded, axis, scope=scope).flatten(0, 1)[: shape[0]]
