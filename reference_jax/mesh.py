"""Chapter 1. The mesh: two axes, and one convention that everything else rests on.

You learn how a computation over K = N x M devices is written without a single message.

Devices form a grid with the axes ``replica`` (N copies of the model, which drift apart
between rounds) and ``shard`` (M devices that hold one copy together). Arrays are global; their
*type* says where they lie: ``float32[2@replica,8@shard,6]`` is one array of shape (2, 8, 6)
whose first axis is spread over the replicas and whose second over the shards. This is
*explicit sharding*: ``jax.jit`` infers the placement of every result from its inputs, refuses
what is ambiguous, and XLA inserts the communication. It used to be called pjit; today
``jax.experimental.pjit`` exports nothing any more, and ``jax.jit`` with shardings in the types
*is* pjit.

The convention: whatever differs between replicas has a leading axis R over ``replica``.
Then ``jax.vmap`` over it means *each replica by itself*, and any operation that touches
axis 0 is communication between replicas. With R = S = 1 the same code runs on one device.
The ``main`` of a chapter cuts your one CPU into four pretended devices to show a real 2 x 2.

Who communicates: nobody yet.

Shape suffixes in all chapters
    R  replicas    S  shards    U  units    B  sequences    T  positions
"""

import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

AXES = ("replica", "shard")

_spec: Callable[..., PartitionSpec] = PartitionSpec
PER_REPLICA = _spec("replica", "shard")  # parameters [R, rows, ...] and batches [R, S, ...]
AGREED = _spec("shard")  # anchors [rows, ...]: the same on all replicas
ONE_EACH = _spec("replica")  # one number per replica [R]
EVERYWHERE = _spec()  # small decisions, in full on every device


def make_mesh(replicas: int, shards: int) -> Mesh:
    """A mesh over the first ``replicas * shards`` devices.

    Raises:
        ValueError: there are fewer devices.
    """
    devices = jax.devices()
    if replicas * shards > len(devices):
        raise ValueError(f"{replicas} x {shards} ranks need more than {len(devices)} devices")
    mine = devices[: replicas * shards]
    return jax.make_mesh((replicas, shards), AXES, (AxisType.Explicit,) * 2, devices=mine)


def reshard(x: Array, spec: PartitionSpec) -> Array:
    """Moves an array to another placement: to fewer axes it gathers, to more it cuts."""
    return jax.sharding.reshard(x, spec)


def put(x: ArrayLike, mesh: Mesh, spec: PartitionSpec) -> Array:
    """Places a host array on the mesh. Copies: ``x`` may be reused afterwards."""
    placed: Array = jax.device_put(x, NamedSharding(mesh, spec), may_alias=False)
    return placed


def pretend_devices(count: int) -> None:
    """Cuts the one CPU into ``count`` devices, for the ``main`` of a chapter.

    Call before the first computation. The flags make compiling, which is all that takes time
    here, about three times faster.
    """
    fast = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    os.environ.setdefault("XLA_FLAGS", fast)
    jax.config.update("jax_num_cpu_devices", count)


def main() -> None:
    """Shows types that carry their placement."""
    pretend_devices(4)
    mesh = make_mesh(2, 2)
    with jax.set_mesh(mesh):
        params_R = put(jnp.ones((2, 8, 6)), mesh, PER_REPLICA)
        alone_R = jax.vmap(lambda x: x.sum())(params_R)
        together = params_R.mean(axis=0)
        print("parameters      ", jax.typeof(params_R))
        print("by themselves   ", jax.typeof(alone_R), "  vmap keeps the replica axis")
        print("averaged        ", jax.typeof(together), "  axis 0 is gone: that was communication")
        print("gathered        ", jax.typeof(reshard(params_R, ONE_EACH)), "  over the shards")
        print("everywhere      ", jax.typeof(reshard(alone_R, EVERYWHERE)))
    print("Which replicas and rows of the parameters each device stores:")
    for part in params_R.addressable_shards:
        replica, rows = part.index[0].start, part.index[1]
        print(f"    {part.device}: replica {replica}, rows {rows.start}..{rows.stop - 1}")


if __name__ == "__main__":
    main()
