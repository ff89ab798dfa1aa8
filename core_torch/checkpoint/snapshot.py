"""Between a run in progress and what a checkpoint holds.

The table of states, each with its owner and its name in the files, is in docs/checkpoints.md;
a state that is missing here is lost at a resume.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from core_torch.checkpoint.state import Layout, SavedState, Shard, restore_into
from core_torch.config_file import to_toml
from core_torch.errors import CheckpointMismatch
from core_torch.mesh import Mesh
from core_torch.shard.access import is_sharded, local_shard, rows_of_shard
from core_torch.sync.engine import LocalSGD
from core_torch.sync.penalty import NormStats
from core_torch.sync.state import take_anchor
from core_torch.train import TrainState

# What must not change between saving and resuming, because the numbers would mean something else.
FIXED = (
    "sync.method",
    "sync.every",
    "sync.warmup",
    "train.dtype",
    "train.accumulate",
    "data.batch",
    "data.sequence",
    "data.seed",
)


def layout_of(mesh: Mesh) -> Layout:
    """This rank's place, for files."""
    return Layout(mesh.replica.index, mesh.shard.index, mesh.replica.size, mesh.shard.size)


def snapshot(state: TrainState) -> SavedState:
    """This rank's part of the run; reads only, copies nothing."""
    scalars: dict[str, Any] = {
        "step": state.step,
        "tokens": state.tokens,
        "micro_batches": [state.step * state.config.train.accumulate] * state.mesh.replica.size,
        "replica_bytes": state.mesh.ledger.bytes_over("replica"),
        "shard_bytes": state.mesh.ledger.bytes_over("shard"),
        "fixed": fixed_settings(state),
        "config_hash": hashlib.sha256(to_toml(state.config).encode()).hexdigest(),
        "sync": None,
    }
    sync = state.sync
    if sync is not None and sync.state is not None:
        scalars["sync"] = {
            "rounds": sync.state.rounds,
            "steps_since": sync.state.steps_since,
            "units": [unit.name for unit in sync.units],
            "stats": {name: x.tolist() for name, x in sync.state.stats._asdict().items()},
        }
    return SavedState(dict(_shared(state)), dict(_own(state)), scalars)


def restore(state: TrainState, saved: SavedState) -> None:
    """Puts a saved run into a freshly built one; the next step continues it bit for bit.

    Raises:
        CheckpointMismatch: the checkpoint belongs to another configuration.
    """
    now = fixed_settings(state)
    for path, value in saved.scalars["fixed"].items():
        if now[path] != value:
            raise CheckpointMismatch(
                f"{path}: saved {value!r}, now {now[path]!r}",
                likely="the option was changed since the run began",
                next=f"--{path} {value}, or another --run for a new run",
            )
    state.step, state.tokens = saved.scalars["step"], saved.scalars["tokens"]
    ledger = state.mesh.ledger
    ledger.reset()
    ledger.bytes["replica", "before resume"] = saved.scalars["replica_bytes"]
    ledger.bytes["shard", "before resume"] = saved.scalars["shard_bytes"]
    if state.sync is not None:
        _restore_sync(state.sync, state.step, saved.scalars["sync"])
    restore_into(dict(_own(state)), saved.own)
    restore_into(dict(_shared(state)), saved.shared)


def fixed_settings(state: TrainState) -> dict[str, Any]:
    """The values of ``FIXED`` in the run's configuration."""
    values = {}
    for path in FIXED:
        section, name = path.split(".")
        values[path] = getattr(getattr(state.config, section), name)
    return values


def _restore_sync(sync: LocalSGD, step: int, saved: dict[str, Any] | None) -> None:
    """Counts and statistics; anchors and velocities are tensors and come after."""
    sync.step = step
    if saved is None:  # replicas had not parted
        sync.state = None
        return
    sync.state = take_anchor(sync.units, replicas=sync.axes.replica.size)
    sync.state.rounds, sync.state.steps_since = saved["rounds"], saved["steps_since"]
    current = sync.state.stats._asdict()
    sync.state.stats = NormStats(
        **{
            name: torch.tensor(saved["stats"][name], dtype=x.dtype, device=x.device)
            for name, x in current.items()
        }
    )


def _shared(state: TrainState) -> Iterator[tuple[str, Shard]]:
    """Anchors and velocities, by parameter."""
    if state.sync is None or state.sync.state is None:
        return
    for unit, held in zip(state.sync.units, state.sync.state.units, strict=True):
        for name, p, a, b in zip(unit.names, unit.params, held.anchor, held.velocity, strict=True):
            yield f"anchor/{name}", _shard(a, p, state.mesh)
            yield f"velocity/{name}", _shard(b, p, state.mesh)


def _own(state: TrainState) -> Iterator[tuple[str, Shard]]:
    """Parameters and inner optimizer state, by parameter."""
    for name, p in state.model.named_parameters():
        yield f"param/{name}", _shard(local_shard(p), p, state.mesh)
        for key, value in state.optimizer.state[p].items():
            yield f"{key}/{name}", _shard(local_shard(value), p, state.mesh)


def _shard(local: Tensor, param: Tensor, mesh: Mesh) -> Shard:
    """``local`` as rows of a whole tensor of ``param``'s shape; a scalar as it is."""
    if local.ndim == 0:
        return Shard(local, (), 0)
    if not is_sharded(param):
        return Shard(local, tuple(param.shape), 0)
    rows = rows_of_shard(param.shape[0], mesh.shard.size, mesh.shard.index)
    assert rows.rows == local.shape[0], "the rows of a shard are not those of torch.chunk"
    return Shard(local, tuple(param.shape), rows.start)
