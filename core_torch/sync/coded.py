"""An exchange in fewer bits: every replica's coded pseudo-gradient, gathered and summed.

A sum of codes is no code, so codes are gathered instead of reduced, and everybody decodes and
adds them in the order of the replicas. What coding leaves out is sent the next time (error
feedback). Equations (Q1)..(Q5) in docs/algorithms/wire.md.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from core_torch.collectives import Axis, Pending, start_all_gather
from core_torch.sync import wire as codec
from core_torch.sync.penalty import weigh


class PendingCoded(NamedTuple):
    """Codes of all replicas in flight."""

    gathered: Pending  # (R, bytes) uint8
    weight_R: Tensor
    size: int
    dtype: torch.dtype
    wire: str

    def wait(self) -> Tensor:
        """(size,) weighted sum of what the replicas sent, in memory of its own."""
        total = torch.zeros(self.size, dtype=self.dtype, device=self.weight_R.device)
        for row, weight in zip(self.gathered.wait(), self.weight_R, strict=True):
            sent = decode(row, self.size, self.dtype, self.wire)
            total += weigh(sent, weight)
        return total


def code_bytes(size: int, wire: str) -> int:
    """Bytes of the code of ``size`` elements."""
    if wire == "bf16":
        return 2 * size
    blocks = -(-size // codec.BLOCK)
    return blocks * (codec.BLOCK + 4)  # and a float32 scale each


def encode(x: Tensor, wire: str) -> Tensor:
    """(bytes,) uint8 of a flat tensor."""
    if wire == "bf16":
        return codec.encode_bfloat16(x).view(torch.uint8)
    values, scales = codec.quantise(x, block=codec.BLOCK)
    return torch.cat((values.view(-1).view(torch.uint8), scales.view(torch.uint8)))


def decode(data: Tensor, size: int, dtype: torch.dtype, wire: str) -> Tensor:
    """(size,) what ``encode`` has kept."""
    if wire == "bf16":
        return codec.decode_bfloat16(data.view(torch.bfloat16), dtype=dtype)
    blocks = -(-size // codec.BLOCK)
    values = data[: blocks * codec.BLOCK].view(torch.int8).view(blocks, codec.BLOCK)
    scales = data[blocks * codec.BLOCK :].view(torch.float32)
    return codec.dequantise(values, scales, size=size, dtype=dtype)


def start_coded(
    flat: Tensor, residual: Tensor, weight_R: Tensor, axis: Axis, *, wire: str, scope: str
) -> tuple[PendingCoded | Pending, Tensor]:
    """Starts the exchange of ``flat``, and says what coding has left out of it.

    Args:
        flat: (n,) pseudo-gradient of this replica's unit.
        residual: (n,) left out before.
        weight_R: of the replicas.
        axis: the replica axis.
        wire: "bf16" or "int8".
        scope: see ``collectives.Dispatch``.
    """
    if not flat.numel():  # an empty shard is empty on every replica
        return Pending(flat, None), residual
    total = flat + residual
    data = encode(total, wire)
    decoded = decode(data, flat.numel(), flat.dtype, wire)
    left = codec.residual(total, decoded, residual, weight_R[axis.index])
    gathered = start_all_gather(data, axis, scope=scope)
    return PendingCoded(gathered, weight_R, flat.numel(), flat.dtype, wire), left
