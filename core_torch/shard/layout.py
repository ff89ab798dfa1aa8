"""How parameters lie in the flat buffers that collectives send. Pure functions on tensors.

A parameter of d rows over M ranks is cut in chunks of ``ceil(d / M)`` rows; the last ranks may
hold fewer, or none, and send zeros in their place. A bucket's buffer is rank-major, as in
FSDP2: row r holds rank r's chunk of the first parameter, then of the second, and so on. So
both ways add the same numbers in the same places, and results can be compared bit by bit.

Shape suffixes
    M  ranks    C  elements of one rank's chunks of all parameters of a bucket
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from core_torch.shard.access import Rows, rows_of_shard


class Layout(NamedTuple):
    """One parameter: its full shape, and over how many ranks its rows are cut."""

    name: str
    shape: torch.Size
    shards: int  # 1: every rank holds it whole

    @property
    def chunk_rows(self) -> int:
        """Rows of a chunk, padding included."""
        return rows_of_shard(self.shape[0], self.shards, 0).rows if self.shape else 1

    @property
    def chunk_numel(self) -> int:
        """Elements of a chunk, padding included."""
        return self.chunk_rows * (self.shape[1:].numel() if self.shape else 1)

    def rows(self, index: int) -> Rows:
        """The rows that rank ``index`` holds."""
        return rows_of_shard(self.shape[0], self.shards, index)

    def local_shape(self, index: int) -> torch.Size:
        """Shape of what rank ``index`` holds."""
        if self.shards == 1:
            return self.shape
        return torch.Size((self.rows(index).rows, *self.shape[1:]))


def pack_shards(shards: Sequence[Tensor], layouts: Sequence[Layout], dtype: torch.dtype) -> Tensor:
    """C of ``dtype``: this rank's chunks one behind the other, padded with zeros."""
    flat_C = shards[0].new_empty(sum(x.chunk_numel for x in layouts), dtype=dtype)
    places = flat_C.split([x.chunk_numel for x in layouts])
    for shard, place in zip(shards, places, strict=True):
        place[: shard.numel()].copy_(shard.reshape(-1))
        place[shard.numel() :].zero_()
    return flat_C


def unpack_gathered(gathered_MC: Tensor, layouts: Sequence[Layout]) -> list[Tensor]:
    """The full parameters, each contiguous in memory of its own unless M is 1."""
    parts = gathered_MC.split([x.chunk_numel for x in layouts], dim=1)
    full = []
    for part_Mc, layout in zip(parts, layouts, strict=True):
        # Copied even where a view would do: it would keep the whole buffer alive.
        rows = part_Mc.contiguous().view(-1, *layout.shape[1:])
        full.append(rows[: layout.shape[0]])
    return full


def pack_gradients(
    gradients: list[Tensor], layouts: Sequence[Layout], order: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """MC of ``dtype``: row i holds the chunks of rank ``order[i]``, padded with zeros.

    Args:
        gradients: full ones, in order of ``layouts``; **emptied**, so that each can be freed as
            soon as it has been copied.
        layouts: of the bucket's parameters.
        order: ranks in the order in which their rows are wanted.
        dtype: of the result.
    """
    total = sum(x.chunk_numel for x in layouts)
    packed_MC = gradients[0].new_empty((len(order), total), dtype=dtype)
    gradients.reverse()
    at = 0
    for layout in layouts:
        gradient = gradients.pop()
        for row, rank in enumerate(order):
            place = packed_MC[row, at : at + layout.chunk_numel]
            start, count = layout.rows(rank)
            chunk = gradient[start : start + count]
            place[: chunk.numel()].view(chunk.shape).copy_(chunk)
            place[chunk.numel() :].zero_()
        at += layout.chunk_numel
    return packed_MC


def unpack_shards(flat_C: Tensor, layouts: Sequence[Layout], index: int) -> list[Tensor]:
    """This rank's rows of every parameter, as views of ``flat_C``."""
    parts = flat_C.split([x.chunk_numel for x in layouts])
    pairs = zip(parts, layouts, strict=True)
    return [p[: x.local_shape(index).numel()].view(x.local_shape(index)) for p, x in pairs]
