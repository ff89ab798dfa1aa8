"""The device mesh: which ranks form a replica, which hold the same shard.

The only reader of RANK, WORLD_SIZE and LOCAL_RANK. Ranks are replica-major: rank
``((n * pp + p) * shards + m) * tp + t`` holds slice t of shard m of stage p of replica n. Replica
traffic, and the small messages that a replica's ranks exchange in a step or a sync round, have
process groups of their own, so that they never queue behind a parameter gather.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from core_torch.collectives import Axis, Ledger, gather_json
from core_torch.config import MeshConfig
from core_torch.errors import ConfigError

AXES = ("replica", "pp", "shard", "tp")


class RankInfo(NamedTuple):
    """Place of this process among the ranks."""

    rank: int
    world: int
    local_rank: int  # on this machine; picks the GPU


def rank_from_environment() -> RankInfo | None:
    """This process's place if a launcher (ours or torchrun) started it, else None."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return RankInfo(rank, world, int(os.environ.get("LOCAL_RANK", rank)))


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axes by name, from one rank's point of view."""

    torch_mesh: DeviceMesh
    axes: dict[str, Axis]
    model: Axis  # all ranks of this replica, with a group of its own for small messages
    device: torch.device
    ledger: Ledger

    def axis(self, name: str) -> Axis:
        """The axis called ``name``; one that this mesh lacks has size 1.

        Raises:
            KeyError: not one of the four names that Twinshard knows.
        """
        if name not in AXES:
            raise KeyError(f"axis {name!r} is not one of {', '.join(AXES)}")
        return self.axes.get(name) or Axis(name, None, 1, 0, self.ledger)

    @property
    def replica(self) -> Axis:
        return self.axis("replica")

    @property
    def pp(self) -> Axis:
        return self.axis("pp")

    @property
    def shard(self) -> Axis:
        return self.axis("shard")

    @property
    def tp(self) -> Axis:
        return self.axis("tp")

    @property
    def holders(self) -> int:
        """Ranks that hold a stage of the model together, cut or copied."""
        return self.shard.size * self.tp.size

    @property
    def is_lead(self) -> bool:
        """True on the one rank that writes what all ranks agree on."""
        return self.replica.index == 0 and self.model.index == 0


def pick_device(wanted: str, local_rank: int, local_ranks: int) -> torch.device:
    """The device of this rank.

    Raises:
        ConfigError: ``cuda`` is wanted but there is no GPU for each local rank.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and gpus < local_ranks:
        raise ConfigError(
            f"mesh.device: cuda needs {local_ranks} GPUs on this machine, {gpus} found",
            next="--mesh.device cpu",
        )
    if wanted == "cpu" or gpus < local_ranks:
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def build_mesh(config: MeshConfig, device: torch.device) -> Mesh:
    """Builds the mesh over an initialised default process group.

    Raises:
        ConfigError: the world has another size than replicas x pp x shards x tp.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if world != config.ranks:
        raise ConfigError(
            f"{config.product} needs {config.ranks} ranks, {world} were started",
            next=f"start {config.ranks} ranks, or change --mesh.replicas / --mesh.shards",
        )
    sizes = dict(zip(AXES, (config.replicas, config.pp, config.shards, config.tp), strict=True))
    names = tuple(n for n in AXES if sizes[n] > 1 or n in ("replica", "shard"))
    shape = tuple(sizes[n] for n in names)
    torch_mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    ledger = Ledger()
    axes = {
        name: Axis(
            name,
            torch_mesh[name].get_group(),
            torch_mesh[name].size(),
            torch_mesh.get_local_rank(name),
            ledger,
        )
        for name in names
    }
    deadline = timedelta(seconds=config.deadline_seconds)
    size = world // config.replicas  # ranks of a replica
    rows = [list(range(first, first + size)) for first in range(0, world, size)]
    groups = [dist.new_group(row, timeout=deadline) for row in rows]  # every rank makes all
    kind = "shard" if size == config.shards else "model"
    model = Axis(kind, groups[rank // size], size, rank % size, ledger)
    return Mesh(torch_mesh, axes, model, device, ledger)


def mesh_of(torch_mesh: DeviceMesh, *, deadline_seconds: float = 600.0) -> Mesh:
    """The mesh of somebody's own training loop, with groups of its own for sync rounds.

    All ranks of the world must call this together.

    Args:
        torch_mesh: with a dimension "replica". The ranks of "shard" and "tp", if there are such
            dimensions, hold a replica together; others are left alone.
        deadline_seconds: longest wait for another rank in a sync round.

    Raises:
        ConfigError: there is no dimension "replica".
    """
    names = torch_mesh.mesh_dim_names or ()
    if "replica" not in names:
        raise ConfigError(
            f"the mesh has the dimensions {names or 'without names'}; sync rounds need 'replica'",
            next='mesh_dim_names=("replica", "shard") in init_device_mesh',
        )
    kind = torch_mesh.device_type
    is_cuda, ledger = kind == "cuda", Ledger()
    device = torch.device(kind, torch.cuda.current_device()) if is_cuda else torch.device(kind)

    def axis(kind: str, dims: list[str]) -> Axis:
        if not dims:
            return Axis(kind, None, 1, 0, ledger)
        ranks = torch_mesh[tuple(dims)].mesh.flatten().tolist()
        # Every rank makes every group: torch pairs groups by the order in which they are made.
        rows = sorted(set(map(tuple, gather_json(ranks, device=device))))
        made = {
            row: dist.new_group(row, timeout=timedelta(seconds=deadline_seconds)) for row in rows
        }
        return Axis(kind, made[tuple(ranks)], len(ranks), ranks.index(dist.get_rank()), ledger)

    def as_given(name: str) -> Axis:
        part = torch_mesh[name]
        return Axis(name, part.get_group(), part.size(), part.get_local_rank(), ledger)

    held = [name for name in names if name in ("shard", "tp")]
    axes = {"replica": axis("replica", ["replica"])} | {name: as_given(name) for name in held}
    model = axis("model" if "tp" in held else "shard", held)
    return Mesh(torch_mesh, axes, model, device, ledger)


@contextmanager
def joined(config: MeshConfig, info: RankInfo, init_method: str | None) -> Iterator[Mesh]:
    """Joins the other ranks, yields the mesh, leaves on exit.

    Args:
        config: shape, device and deadline.
        info: place of this process.
        init_method: ``file://...`` of a FileStore, or None for the ``env://`` of torchrun.
    """
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", info.world))
    device = pick_device(config.device, info.local_rank, local_ranks)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=init_method or "env://",
        rank=info.rank,
        world_size=info.world,
        timeout=timedelta(seconds=config.deadline_seconds),
    )
    try:
        yield build_mesh(config, device)
    finally:
        dist.destroy_process_group()
