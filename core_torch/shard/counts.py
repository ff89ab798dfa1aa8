"""How many targets count on all ranks of an inner step, so that its loss is their mean.

    loss = sum of the losses of all targets that count / their number C              (L1)

over the micro-batches and shards of a replica, and over all replicas while training is
synchronous. Gradients are averaged over those R ranks, so each divides its own sums by C / R:

    mean over ranks of (sum of rank r / (C / R)) = sum of all / C                     (L2)

Counts are known before the forward. They need a message only if data can leave targets out.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from core_torch.collectives import psum
from core_torch.data.batches import IGNORE
from core_torch.mesh import Mesh


class Counts(NamedTuple):
    """Targets of an inner step that count, as means over ranks, at least 1 in all. (L2)"""

    averaged: float  # over the ranks whose gradients are averaged
    replica: float  # over the shards of this replica


def count_targets(targets: Sequence[Tensor], mesh: Mesh, *, synchronous: bool) -> Counts:
    """Counts the step's targets on all ranks: a message per axis, of one number.

    Args:
        targets: (B, T) of each micro-batch of this rank.
        mesh: a replica's pipeline stages and slices see the same targets, and do not add up.
        synchronous: gradients are averaged over the replicas as well.
    """
    mine = torch.stack([(y != IGNORE).sum() for y in targets]).sum()
    of_replica = psum(mine, mesh.shard, scope="tokens")
    of_all = psum(of_replica, mesh.replica, scope="tokens") if synchronous else of_replica
    ranks = mesh.shard.size * (mesh.replica.size if synchronous else 1)
    return Counts(
        averaged=max(1, int(of_all)) / ranks,
        replica=max(1, int(of_replica)) / mesh.shard.size,
    )
