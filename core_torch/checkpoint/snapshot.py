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
from core_torch.sync import saved as sync_state
from core_torch.train import TrainState

# What must not change between saving and resuming, because the numbers would mean something else.
FIXED = (
    "sync.method",
    "sync.every",
    "sync.warmup",
    "sync.wire",
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
        "step": state.common_step,
        "tokens": state.tokens,
        "replica_bytes": state.mesh.ledger.bytes_over("replica"),
        "shard_bytes": state.mesh.ledger.bytes_over("shard"),
        "fixed": fixed_settings(state),
        "config_hash": hashlib.sha256(to_toml(state.config).encode()).hexdigest(),
        "sync": None,
    }
    if state.sync is not None:
        scalars["sync"] = sync_state.scalars(state.sync)
    saved = SavedState(dict(_shared(state)), dict(_own(state)), scalars)
    if state.sync is not None:
        sync_state.let_go(state.sync)
    return saved


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
    counted = {k: int(saved.own[f"counter/{k}"].local) for k in _counters(state)}
    state.step, state.tokens = counted["step"], saved.scalars["tokens"]
    ledger = state.mesh.ledger
    ledger.reset()
    ledger.bytes["replica", "before resume"] = saved.scalars["replica_bytes"]
    ledger.bytes["shard", "before resume"] = saved.scalars["shard_bytes"]
    if state.sync is not None:
        sync_state.prepare(state.sync, saved.scalars["sync"], counted)
        state.tokens = state.sync.votes.tokens
    restore_into(dict(_own(state)), saved.own)
    restore_into(dict(_shared(state)), saved.shared)
    if state.sync is not None:
        sync_state.settle(state.sync)


def fixed_settings(state: TrainState) -> dict[str, Any]:
    """The values of ``FIXED`` in the run's configuration."""
    values = {}
    for path in FIXED:
        section, name = path.split(".")
        values[path] = getattr(getattr(state.config, section), name)
    return values


def _counters(state: TrainState) -> dict[str, int]:
    """Whole numbers of this replica. The next batch follows from the step."""
    return {"step": state.step} if state.sync is None else sync_state.counters(state.sync)


def _shared(state: TrainState) -> Iterator[tuple[str, Shard]]:
    """Anchors, velocities and what is in flight, by parameter."""
    if state.sync is not None:
        for name, held in sync_state.shared_tensors(state.sync).items():
            yield name, _shard(held.local, held.param, state.mesh)


def _own(state: TrainState) -> Iterator[tuple[str, Shard]]:
    """Parameters, inner optimizer state and residuals, by parameter; counters."""
    for name, p in state.model.named_parameters():
        yield f"param/{name}", _shard(local_shard(p), p, state.mesh)
        for key, value in state.optimizer.state[p].items():
            yield f"{key}/{name}", _shard(local_shard(value), p, state.mesh)
    if state.sync is not None:
        for name, held in sync_state.own_tensors(state.sync).items():
            yield name, _shard(held.local, held.param, state.mesh)
    for name, count in _counters(state).items():
        yield f"counter/{name}", Shard(torch.tensor(count), (), 0)


def _shard(local: Tensor, param: Tensor, mesh: Mesh) -> Shard:
    """``local`` as rows of a whole tensor of ``param``'s shape; a scalar as it is."""
    if local.ndim == 0:
        return Shard(local, (), 0)
    if not is_sharded(param):
        return Shard(local, tuple(param.shape), 0)
    rows = rows_of_shard(param.shape[0], mesh.shard.size, mesh.shard.index)
    assert rows.rows == local.shape[0], "the rows of a shard are not those of torch.chunk"
    return Shard(local, tuple(param.shape), rows.start)
