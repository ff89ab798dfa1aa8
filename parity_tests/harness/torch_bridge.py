"""torch to NumPy and back, always by copy; the ranks' half of the bridge (imports no JAX).

Copies, because a view would let one core see the other's in-place update and agree with it
by accident. A rank sends ``Shard`` dicts: its rows of a parameter and where they belong.
"""

from collections.abc import Iterable, Mapping
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardedOn

from parity_tests.harness.codec import BFLOAT16

TORCH_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


class Shard(TypedDict):
    """Rows ``start`` to ``start + len(rows)`` of a tensor of this ``shape``; plain data."""

    shape: tuple[int, ...]
    start: int
    rows: np.ndarray


def to_numpy(x: Tensor) -> np.ndarray:
    """A copy of a plain tensor, or of this rank's shard of a DTensor, in its own dtype."""
    local = (x.to_local() if isinstance(x, DTensor) else x).detach().cpu().contiguous()
    if local.dtype == torch.bfloat16:
        return local.view(torch.int16).numpy().copy().view(BFLOAT16)
    return np.array(local.numpy(), copy=True)


def to_torch(x: np.ndarray) -> Tensor:
    """A tensor with a copy of ``x``, in its dtype."""
    if x.dtype == BFLOAT16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(x, copy=True))


def rows_of(dim: int, shards: int, index: int) -> range:
    """Rows of a dimension that shard ``index`` holds under FSDP2: ceil(dim / shards) each.

    The last shards may hold fewer, or none.
    """
    size = -(-dim // shards)
    return range(min(dim, index * size), min(dim, (index + 1) * size))


def shard_of(x: Tensor) -> Shard:
    """This rank's part of ``x``; all of it if it is no DTensor, or replicated.

    Raises:
        AssertionError: a layout other than rows over the last axis, or not FSDP2's division.
    """
    if not isinstance(x, DTensor):
        return Shard(shape=tuple(x.shape), start=0, rows=to_numpy(x))
    *others, placement = x.placements
    assert all(other == Replicate() for other in others), x.placements
    rows, last = to_numpy(x), x.device_mesh.ndim - 1
    if placement == Replicate():
        return Shard(shape=tuple(x.shape), start=0, rows=rows)
    assert placement == ShardedOn(0), placement
    held = rows_of(x.shape[0], x.device_mesh.size(last), x.device_mesh.get_local_rank(last))
    assert rows.shape == (len(held), *x.shape[1:]), (rows.shape, held, x.shape)
    return Shard(shape=tuple(x.shape), start=held.start, rows=rows)


def shards_of(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, Shard]:
    """This rank's part of every named tensor, in order; for example of ``named_parameters()``."""
    return {name: shard_of(x) for name, x in dict(tensors).items()}


@torch.no_grad()
def load_parameters(module: nn.Module, values: Mapping[str, np.ndarray]) -> None:
    """Copies whole arrays into the module's parameters; each rank takes its rows.

    Raises:
        AssertionError: names, shapes or dtypes differ.
    """
    own = dict(module.named_parameters())
    assert own.keys() == values.keys(), own.keys() ^ values.keys()
    for name, p in own.items():
        assert tuple(p.shape) == values[name].shape, (name, p.shape, values[name].shape)
        whole = to_torch(values[name])
        assert whole.dtype == p.dtype, (name, whole.dtype, p.dtype)
        if isinstance(p, DTensor):
            part = shard_of(p)
            local = p.to_local()
            local.copy_(whole[part["start"] : part["start"] + local.shape[0]])
        else:
            p.copy_(whole)
