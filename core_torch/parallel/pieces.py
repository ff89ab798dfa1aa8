"""Which rows and columns of a whole parameter a rank holds, and the whole from all pieces.

Tensor parallelism cuts first, a matrix along its rows or its columns; what is left to a rank of
tp is cut in rows over the shard axis. Under tp 1 a piece is a run of rows, as files hold them.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from core_torch.collectives import all_gather, gather_json
from core_torch.mesh import Mesh
from core_torch.shard.access import Rows, gather_rows, is_sharded, rows_of_shard


class Cut(NamedTuple):
    """This rank's piece of a whole tensor."""

    rows: Rows
    columns: slice | None = None  # None: all

    def of(self, rows: Tensor) -> Tensor:
        """The piece, from the whole rows that it is part of."""
        return rows if self.columns is None else rows[:, self.columns].contiguous()


def cut_of(param: Tensor, mesh: Mesh) -> Cut:
    """This rank's piece of ``param``, which has at least one dimension."""
    dim, size = dim_over_tp(param), param.shape[0]
    if not is_sharded(param):
        return Cut(Rows(0, size))
    if dim == 0:
        outer = rows_of_shard(size, mesh.tp.size, mesh.tp.index)
        inner = rows_of_shard(outer.rows, mesh.shard.size, mesh.shard.index)
        return Cut(Rows(outer.start + inner.start, inner.rows))
    rows = rows_of_shard(size, mesh.shard.size, mesh.shard.index)
    if dim is None:
        return Cut(rows)
    columns = rows_of_shard(param.shape[1], mesh.tp.size, mesh.tp.index)
    return Cut(rows, slice(columns.start, columns.start + columns.rows))


def dim_over_tp(param: Tensor) -> int | None:
    """The dimension that tp has cut; None if every rank of tp holds the same."""
    if not isinstance(param, DTensor) or "tp" not in (param.device_mesh.mesh_dim_names or ()):
        return None
    placement = param.placements[-1]
    return None if placement.is_replicate() else int(placement.dim)  # type: ignore[attr-defined]


@torch.no_grad()
def rows_to_file(local: Tensor, param: Tensor, mesh: Mesh) -> tuple[Tensor, int]:
    """Rows of a whole tensor of which no other rank of this replica files any, and the first.

    All ranks of tp must call this together: where columns are cut, they exchange them.

    Args:
        local: this rank's piece of something shaped like ``param``.
        param: the parameter.
        mesh: of the run.
    """
    dim, rows = dim_over_tp(param), cut_of(param, mesh).rows
    if mesh.tp.size == 1 or dim == 0:
        return local, rows.start
    part = rows_of_shard(rows.rows, mesh.tp.size, mesh.tp.index)
    if dim == 1 and rows.rows:
        local = torch.cat(list(all_gather(local, mesh.tp, scope="checkpoint")), dim=1)
    return local[part.start : part.start + part.rows], rows.start + part.start


@torch.no_grad()
def gather_whole(local: Tensor, param: Tensor, mesh: Mesh, *, scope: str) -> Tensor:
    """The whole tensor on every rank of this replica, all of which must call this together.

    Args:
        local: this rank's piece of something shaped like ``param``.
        param: the parameter.
        mesh: of the run.
        scope: see ``collectives.Dispatch``.
    """
    if not is_sharded(param):
        return local
    dim, shape, tp = dim_over_tp(param), param.shape, mesh.tp
    if dim is None:
        return gather_rows(local, shape, mesh.shard, scope=scope)
    held = list(shape)
    held[dim] = rows_of_shard(shape[dim], tp.size, tp.index).rows
    mine = gather_rows(local, torch.Size(held), mesh.shard, scope=scope)
    if dim == 0:
        return gather_rows(mine, shape, tp, scope=scope)
    turned = gather_rows(mine.t().contiguous(), torch.Size((shape[1], shape[0])), tp, scope=scope)
    return turned.t().contiguous()


@torch.no_grad()
def gather_stages(held: dict[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """The tensors of all stages of a pipeline, on the lead; what is there already elsewhere.

    All ranks of the world must call this together.

    Args:
        held: whole tensors of this rank's stages, on the CPU.
        mesh: of the run.
    """
    if mesh.pp.size == 1:
        return held
    told = gather_json({k: list(x.shape) for k, x in held.items()}, device=mesh.device)
    place = (mesh.replica.index, mesh.shard.index, mesh.tp.index)
    if place != (0, 0, 0):
        return held
    dtype, group = next(iter(held.values())).dtype, mesh.pp.group
    assert group is not None
    if mesh.pp.index > 0:
        for x in held.values():
            dist.send(x.to(mesh.device), group=group, group_dst=0)
        return held
    found = dict(held)
    for stage in range(1, mesh.pp.size):
        for name, shape in told[dist.get_global_rank(group, stage)].items():
            x = torch.empty(shape, dtype=dtype, device=mesh.device)
            dist.recv(x, group=group, group_src=stage)
            found[name] = x.cpu()
    return found
