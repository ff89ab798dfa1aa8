"""Meshes over the first ranks of the pool, so that a run on one, two or three ranks needs no
processes of its own. The other ranks stand by.
"""

from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from core_torch.collectives import Axis, Ledger
from core_torch.mesh import Mesh
from parity_tests.harness.rank_mesh import mesh_for


@cache
def mesh_over(replicas: int, shards: int, pp: int = 1, tp: int = 1) -> Mesh | None:
    """A mesh of this shape over the first ranks; None on the others. With pp or tp over all.

    Every rank must call this, in the same order: making a process group takes them all.
    """
    count, world, rank = replicas * shards, dist.get_world_size(), dist.get_rank()
    if count * pp * tp == world:
        return mesh_for(replicas, shards, pp, tp)
    assert pp == tp == 1, "a mesh with pp or tp takes all ranks"
    grid = torch.arange(count).view(replicas, shards)
    torch_mesh = DeviceMesh("cpu", grid, mesh_dim_names=("replica", "shard"))
    rounds = [dist.new_group(row) for row in grid.tolist()]
    if rank >= count:
        return None
    ledger = Ledger()
    axes = {
        name: Axis(name, part.get_group(), part.size(), part.get_local_rank(), ledger)
        for name, part in ((name, torch_mesh[name]) for name in ("replica", "shard"))
    }
    shard = axes["shard"]
    own = Axis("shard", rounds[rank // shards], shards, shard.index, ledger)
    return Mesh(torch_mesh, axes, own, torch.device("cpu"), ledger)
