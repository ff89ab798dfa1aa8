"""Sync units: the pieces of a model that replicas exchange as one.

A unit is a list of tensors, empty on ranks of which another pipeline stage holds it: all ranks
know all units, in the same order. Each tensor has a replication factor, the number of ranks of a
replica that hold the same elements (gains under tensor parallelism); norms divide it out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn as nn
from torch import Tensor

from core_torch.errors import ConfigError
from core_torch.shard.access import copies_of, local_shard

Kind = Literal["none", "model", "fragments", "units"]


@dataclass(frozen=True, slots=True)
class SyncUnit:
    """Parameters that one exchange covers."""

    name: str
    names: tuple[str, ...]
    params: tuple[Tensor, ...]
    factors: tuple[int, ...]  # ranks of the replica that hold the same elements
    like: Tensor = field(default_factory=lambda: torch.empty(0))  # dtype and device of the model

    def shards(self) -> list[Tensor]:
        """This rank's rows of each parameter, sharing their storage."""
        return [local_shard(p) for p in self.params]

    def flat(self, parts: Iterable[Tensor]) -> Tensor:
        """(numel,) the elements of something shaped like this rank's rows, in one vector."""
        return torch.cat([self.like, *(x.reshape(-1) for x in parts)])

    @torch.no_grad()
    def write(self, values: Sequence[Tensor]) -> None:
        """Overwrites this rank's rows, in place."""
        for x, value in zip(self.shards(), values, strict=True):
            x.copy_(value)


def sync_units(
    module: nn.Module,
    groups: dict[str, list[str]],
    *,
    kind: Kind,
    fragments: int = 1,
    holders: int = 1,
) -> list[SyncUnit]:
    """What the exchanges of a method cover.

    Args:
        module: sharded.
        groups: units of the model, name -> parameter names, in order of the forward.
        kind: "units" takes them as they are; "model" makes one unit "model" of them all;
            "fragments" makes unit i part of "fragment.p", p = i modulo ``fragments``, so that
            each fragment holds layers from all depths.
        fragments: P.
        holders: ranks that hold the module together, each element one of them or more.

    Raises:
        ConfigError: more fragments than units; or parameters stored in less than float32, for
            the difference between an anchor and a rounded copy of it would be a false
            pseudo-gradient; or in several dtypes.
    """
    params = dict(module.named_parameters())
    for name, p in params.items():
        if torch.promote_types(p.dtype, torch.float32) != p.dtype:
            raise ConfigError(
                f"{name} is stored in {p.dtype}; local SGD needs float32 or wider",
                next="store float32 parameters and compute in bfloat16 (mixed precision)",
            )
    dtypes = {p.dtype for p in params.values()}
    if len(dtypes) > 1:
        raise ConfigError(f"parameters are stored in {sorted(map(str, dtypes))}; one is needed")
    if kind == "model":
        groups = {"model": [name for names in groups.values() for name in names]}
    if kind == "fragments":
        if fragments > len(groups):
            raise ConfigError(
                f"sync.streaming.fragments: {fragments} for {len(groups)} units of the model",
                next=f"at most --sync.streaming.fragments {len(groups)}",
            )
        held = list(groups.values())
        groups = {
            f"fragment.{p}": [name for names in held[p::fragments] for name in names]
            for p in range(fragments)
        }
    like = local_shard(next(iter(params.values()))).detach().new_empty(0)
    found = []
    for unit, names in groups.items():
        mine = tuple(params[name] for name in names)
        factors = tuple(copies_of(p, holders) for p in mine)
        found.append(SyncUnit(unit, tuple(names), mine, factors, like))
    return found


def check_copies(units: Sequence[SyncUnit], wire: str) -> None:
    """Checks that copies of a parameter on several ranks of a replica stay equal.

    A block of int8 has one scale for a copy and for slices that differ from rank to rank.

    Raises:
        ConfigError: they would not.
    """
    if wire == "int8" and any(len(set(unit.factors)) > 1 for unit in units):
        raise ConfigError(
            "sync.wire: int8 would round copies of one parameter on several ranks apart",
            next="--sync.wire bf16, or a mesh without tp",
        )
