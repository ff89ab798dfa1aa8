"""NumPy to JAX and back, always by copy, and ranks' shards against JAX's, device by device.

Rank ``n * shards + m`` of the core corresponds to device ``[n, m]`` of the reference's mesh.
JAX wants dimensions that divide, FSDP2 does not: the reference pads dimension 0 with zeros to
a multiple of the number of shards, and then both give shard m the same rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from parity_tests.harness.torch_bridge import Shard

Shards = Mapping[str, Shard]


def to_jax(x: np.ndarray, sharding: Any = None) -> jax.Array:
    """An array with a copy of ``x``, placed as ``sharding`` says.

    Raises:
        AssertionError: the dtype did not survive, as float64 does not without x64.
    """
    y: jax.Array = jax.device_put(jnp.array(x, copy=True), sharding)
    assert y.dtype == x.dtype, f"{x.dtype} arrived as {y.dtype}: is jax_enable_x64 on?"
    return y


def to_numpy(x: jax.Array) -> np.ndarray:
    """A writable copy of the whole array."""
    return np.array(x, copy=True)


def pad_rows(x: np.ndarray, shards: int) -> np.ndarray:
    """Zero rows appended until the number of rows is a multiple of ``shards``."""
    rows = -(-x.shape[0] // shards) * shards
    return np.concatenate([x, np.zeros((rows - x.shape[0], *x.shape[1:]), x.dtype)])


def assemble(ranks: Sequence[Shards], *, replicas: int) -> list[dict[str, np.ndarray]]:
    """Whole arrays of every replica, from the shards of all ranks in rank order.

    Raises:
        AssertionError: rows are missing or held twice.
    """
    shards = len(ranks) // replicas
    assert replicas * shards == len(ranks), (replicas, len(ranks))
    whole = []
    for n in range(replicas):
        group = ranks[n * shards : (n + 1) * shards]
        whole.append({name: _join(name, [rank[name] for rank in group]) for name in group[0]})
    return whole


def stack(replicas: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """One array per name with a leading replica axis."""
    return {name: np.stack([r[name] for r in replicas]) for name in replicas[0]}


class Pair(NamedTuple):
    """The same rows as one rank of the core and one device of the reference hold them."""

    where: str
    core: np.ndarray
    reference: np.ndarray


def paired(
    ranks: Sequence[Shards], reference: Mapping[str, jax.Array], *, replicas: int, stacked: bool
) -> Iterator[Pair]:
    """Each rank's shard of each name beside the data of the device in the same place.

    Args:
        ranks: what all ranks hold, in rank order.
        reference: by the same names, on a (replicas, shards) mesh, rows padded.
        replicas: N.
        stacked: True if arrays have a leading replica axis (parameters, moments), False if
            every replica has a copy of the same (anchor, velocity).

    Raises:
        AssertionError: names, shapes or dtypes differ, a device holds other rows than its
            rank, or the padding is not 0.
    """
    for name, array in reference.items():
        places = _rows_by_device(array, replicas, len(ranks) // replicas, stacked)
        for rank, (rows, data) in enumerate(places):
            part, where = ranks[rank][name], f"{name} on rank {rank}"
            held = part["rows"]
            count = held.shape[0]
            assert held.dtype == data.dtype, (where, held.dtype, data.dtype)
            assert data.shape[0] >= count and data.shape[1:] == part["shape"][1:], where
            assert count == 0 or rows.start == part["start"], (where, rows, part["start"])
            assert not data[count:].any(), f"{where}: padding of the reference is not 0"
            yield Pair(where, held, data[:count])
    assert all(rank.keys() == reference.keys() for rank in ranks), "names differ"


def _rows_by_device(
    array: jax.Array, replicas: int, shards: int, stacked: bool
) -> list[tuple[range, np.ndarray]]:
    """Rows and data per rank, read from ``addressable_shards`` in the order of the mesh."""
    devices = array.sharding.mesh.devices  # type: ignore[attr-defined]
    assert devices.shape == (replicas, shards), devices.shape
    held = {shard.device: shard for shard in array.addressable_shards}
    places = []
    for rank, device in enumerate(devices.flat):
        index, data = list(held[device].index), np.array(held[device].data, copy=True)
        sizes = list(array.shape)
        if stacked:
            lead = range(*index.pop(0).indices(sizes.pop(0)))
            assert lead == range(rank // shards, rank // shards + 1), (rank, lead)
            data = data[0]
        places.append((range(*index[0].indices(sizes[0])), data))
    return places


def _join(name: str, parts: Sequence[Shard]) -> np.ndarray:
    shape, dtype = parts[0]["shape"], parts[0]["rows"].dtype
    if len(parts) > 1 and all(part["rows"].shape == shape for part in parts):
        for part in parts:  # replicated over the shard axis
            assert part["rows"].tobytes() == parts[0]["rows"].tobytes(), f"{name}: copies differ"
        return parts[0]["rows"].copy()
    end = 0
    for part in parts:
        assert len(part["rows"]) == 0 or part["start"] == end, f"{name}: rows {end} on are not next"
        end += len(part["rows"])
    assert end == shape[0], f"{name}: {end} of {shape[0]} rows"
    return np.concatenate([part["rows"] for part in parts]).astype(dtype, copy=False)
