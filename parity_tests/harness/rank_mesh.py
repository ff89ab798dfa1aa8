"""Meshes of a rank, kept between requests: process groups cost more than most cases.

Every rank runs the same functions in the same order, so all build the same groups in the
same order, which is what torch.distributed asks for.
"""

from functools import cache

import torch

from core_torch.config import MeshConfig
from core_torch.mesh import Mesh, build_mesh

_built: list[Mesh] = []


@cache
def mesh_for(replicas: int, shards: int, pp: int = 1, tp: int = 1) -> Mesh:
    """The mesh of this shape over all ranks; its ledger starts empty in every request."""
    shape = MeshConfig(replicas=replicas, shards=shards, pp=pp, tp=tp)
    mesh = build_mesh(shape, torch.device("cpu"))
    _built.append(mesh)
    return mesh


def forget_traffic() -> None:
    """Empties the ledgers of all meshes, so that a request counts its own bytes only."""
    for mesh in _built:
        mesh.ledger.bytes.clear()
        mesh.ledger.calls.clear()
        mesh.ledger.trace = None
