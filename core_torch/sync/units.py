"""Sync units: the pieces of a model that replicas exchange as one.

A unit is a list of tensors. Each has a replication factor, the number of ranks of a
replica (over tp or pp) that hold the same elements; norms divide it out.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from core_torch.shard.access import local_shard


@dataclass(frozen=True, slots=True)
class SyncUnit:
    """Parameters that one exchange covers."""

    name: str
    names: tuple[str, ...]
    params: tuple[Tensor, ...]
    factors: tuple[int, ...]  # replication over tp and pp

    def shards(self) -> list[Tensor]:
        """This rank's rows of each parameter, sharing their storage."""
        return [local_shard(p) for p in self.params]


def sync_units(
    module: nn.Module, groups: dict[str, list[str]], *, whole_model: bool
) -> list[SyncUnit]:
    """The units of ``groups`` (name -> parameter names), or one unit "model" of them all.

    Raises:
        ValueError: parameters stored in less than float32. The difference between an
            anchor and a rounded copy of it would be a false pseudo-gradient.
    """
    params = dict(module.named_parameters())
    for name, p in params.items():
        if torch.promote_types(p.dtype, torch.float32) != p.dtype:
            raise ValueError(f"{name} is stored in {p.dtype}; local SGD needs float32 or wider")
    if whole_model:
        groups = {"model": [name for names in groups.values() for name in names]}
    return [
        SyncUnit(unit, tuple(names), tuple(params[n] for n in names), (1,) * len(names))
        for unit, names in groups.items()
    ]
