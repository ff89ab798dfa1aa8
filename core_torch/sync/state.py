"""What local SGD remembers between rounds: anchors, velocities, norm statistics, counts."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from core_torch.sync.penalty import NormStats, init_stats
from core_torch.sync.units import SyncUnit


class UnitState(NamedTuple):
    """A unit's outer state. Every tensor is this rank's rows, in the order of the unit."""

    anchor: list[Tensor]
    velocity: list[Tensor]


@dataclass(slots=True)
class SyncState:
    """Outer state of the whole model; equal on all replicas."""

    units: list[UnitState]
    stats: NormStats  # (U, R)
    rounds: int = 0  # performed
    steps_since: int = 0  # inner steps since the last round, or since the anchor was taken


@torch.no_grad()
def take_anchor(units: list[SyncUnit], *, replicas: int) -> SyncState:
    """The state right after the warm-up: anchors are the parameters, nothing moves yet."""
    states = []
    for unit in units:
        anchor = [x.clone() for x in unit.shards()]
        states.append(UnitState(anchor, [torch.zeros_like(a) for a in anchor]))
    like = states[0].anchor[0]
    stats = init_stats((len(units), replicas), dtype=like.dtype, device=like.device)
    return SyncState(states, stats)


def checksum(tensors: list[Tensor]) -> Tensor:
    """() int64 fingerprint of the exact bits and their places.

    Each word is scrambled with its place before the sum, because in a plain sum of products
    the high bits, signs above all, cancel.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for k, x in enumerate(tensors):
        word = torch.int64 if x.element_size() == 8 else torch.int32
        bits = x.contiguous().view(word).reshape(-1).to(torch.int64)
        place = torch.arange(bits.numel(), device=x.device) + (k << 32)
        mixed = (bits ^ (bits >> 32)) * 0x2545F4914F6CDD1D  # odd factors lose no bit
        mixed = (mixed ^ (mixed >> 29)) + place * 0x1E3779B97F4A7C15
        mixed = (mixed ^ (mixed >> 32)) * 0x2545F4914F6CDD1D
        total += (mixed ^ (mixed >> 32)).sum()
    return total
