"""What the tests of the harness itself let ranks do: answer, compute, fail, hang, end."""

import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from core_torch.collectives import psum
from core_torch.sync.outer import nesterov_step
from parity_tests.harness.rank_mesh import mesh_for
from parity_tests.harness.torch_bridge import Shard, load_parameters, shards_of, to_numpy


def echo(value: object) -> object:
    """Sends ``value`` back."""
    return value


def who_am_i() -> dict[str, object]:
    """Rank, world size, process id, threads, and whether JAX is here."""
    return {
        "rank": dist.get_rank(),
        "world": dist.get_world_size(),
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "jax": any(name.partition(".")[0] == "jax" for name in sys.modules),
    }


def import_jax() -> None:
    """Does what a case must not."""
    import jax  # noqa: F401


def random_numbers() -> np.ndarray:
    """Draws that depend on the seed; leaves generator and default dtype changed."""
    torch.set_default_dtype(torch.float64)
    return to_numpy(torch.randn(3, dtype=torch.float32))


def sums_over_axes(replicas: int, shards: int) -> tuple[float, float, int]:
    """Sum of the rank numbers over the replica and the shard axis, and the bytes of both."""
    mesh = mesh_for(replicas, shards)
    x = torch.tensor([float(dist.get_rank())], dtype=torch.float64)
    over_replicas = psum(x, mesh.replica, scope="probe").item()
    over_shards = psum(x, mesh.shard, scope="probe").item()
    return over_replicas, over_shards, sum(mesh.ledger.bytes.values())


def mesh_identity(replicas: int, shards: int) -> int:
    """Changes if the mesh was built again."""
    return id(mesh_for(replicas, shards))


def fail_on(rank: int) -> float:
    """Raises on one rank while the others wait for it in a collective."""
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} was told to fail")
    x = torch.zeros(1)
    dist.all_reduce(x)
    return x.item()


def end_on(rank: int) -> None:
    """Ends the process of one rank without a word."""
    if dist.get_rank() == rank:
        os._exit(7)


def hang() -> None:
    """Never returns in time."""
    time.sleep(3600)


def outer_step(lr: float, momentum: float) -> np.ndarray:
    """A shipped function under this module's own name for it."""
    one = torch.ones(2, dtype=torch.float64)
    anchor, _ = nesterov_step(one, one, one, torch.tensor(True), lr=lr, momentum=momentum)
    return to_numpy(anchor)


def uneven_shards(replicas: int, shards: int, whole: dict[str, np.ndarray]) -> dict[str, Shard]:
    """Loads ``whole`` into a module under FSDP2 and returns this rank's rows."""
    module = torch.nn.Module()
    for name, value in whole.items():
        empty = torch.zeros(value.shape, dtype=torch.float64)
        module.register_parameter(name, torch.nn.Parameter(empty))
    fully_shard(module, mesh=mesh_for(replicas, shards).torch_mesh["shard"])
    load_parameters(module, whole)
    return shards_of(module.named_parameters())
