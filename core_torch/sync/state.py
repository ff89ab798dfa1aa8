"""What local SGD remembers between rounds: anchors, velocities, norm statistics, counts."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from core_torch.sync.meeting import Meeting
from core_torch.sync.penalty import NormStats, init_stats
from core_torch.sync.store import Store
from core_torch.sync.unit_state import UnitState
from core_torch.sync.units import SyncUnit


@dataclass(slots=True)
class SyncState:
    """Outer state of the whole model. What a replica has for itself is marked as own."""

    store: Store  # anchors and velocities
    stats: NormStats  # (U, R)
    rounds: int = 0  # numbered so far
    steps_since: list[int] = field(default_factory=list)  # own; of each unit since its last round
    is_due: bool = False  # own; a round waits for the next forward
    flights: list[Meeting] = field(default_factory=list)  # exchanges that are used later
    residuals: list[Tensor | None] = field(default_factory=list)  # own; what coding has left out


@torch.no_grad()
def take_anchor(units: list[SyncUnit], store: Store, *, replicas: int) -> SyncState:
    """The state right after the warm-up: anchors are the parameters, nothing moves yet."""
    for u, unit in enumerate(units):
        anchor = [x.clone() for x in unit.shards()]
        store.put(u, UnitState(anchor, [torch.zeros_like(a) for a in anchor]))
    like = units[0].like
    stats = init_stats((len(units), replicas), dtype=like.dtype, device=like.device)
    return SyncState(store, stats, steps_since=[0] * len(units), residuals=[None] * len(units))


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
