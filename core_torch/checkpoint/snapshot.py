"""Between a run in progress and what a checkpoint holds.

The table of states, each with its owner and its name in the files, is in docs/checkpoints.md;
a state that is missing here is lost at a resume.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from core_torch.checkpoint.state import Layout, SavedState, Shard, restore_into
from core_torch.config_file import to_toml
from core_torch.errors import CheckpointMismatch
from core_torch.mesh import Mesh
from core_torch.parallel.pieces import Cut, cut_of, rows_to_file
from core_torch.shard.access import local_shard
from core_torch.sync import saved as sync_state
from core_torch.train import TrainState

# What must not change between saving and resuming, because the numbers would mean something else.
FIXED = (
    "sync.method",
    "sync.every",
    "sync.warmup",
    "sync.wire",
    "train.dtype",
    "data.sequence",
    "data.packing",
    "data.seed",
)
ToShard = Callable[[Tensor, Tensor, Mesh], Shard]  # a tensor, the parameter it is shaped like
TOLD = ("train.accumulate", "data.batch")  # may change: data go on by rows, see ``counter/rows``


def layout_of(mesh: Mesh) -> Layout:
    """This rank's place, for files: one for each rank of a replica, whatever cuts it."""
    return Layout(mesh.replica.index, mesh.model.index, mesh.replica.size, mesh.model.size)


def cuts_of(state: TrainState) -> dict[str, Cut | None]:
    """This rank's piece of every parameter; None if another stage of a pipeline holds it."""
    absent: dict[str, Cut | None] = dict.fromkeys(state.sharded.elsewhere)
    return absent | {name: cut_of(p, state.mesh) for name, p in state.model.named_parameters()}


def snapshot(state: TrainState) -> SavedState:
    """This rank's part of the run; reads only, copies nothing."""
    scalars: dict[str, Any] = {
        "step": state.common_step,
        "tokens": state.tokens,
        "tokens_per_step": state.config.tokens_per_step,
        "replica_bytes": state.mesh.ledger.bytes_over("replica"),
        "shard_bytes": state.mesh.ledger.bytes_over("shard"),
        "fixed": settings(state, FIXED + TOLD),
        "config_hash": hashlib.sha256(to_toml(state.config).encode()).hexdigest(),
        "sync": None,
    }
    if state.sync is not None:
        scalars["sync"] = sync_state.scalars(state.sync)
    saved = SavedState(dict(_shared(state, _rows)), dict(_own(state, _rows)), scalars)
    if state.sync is not None:
        sync_state.let_go(state.sync)
    return saved


def restore(state: TrainState, saved: SavedState) -> None:
    """Puts a saved run into a freshly built one; the next step continues it bit for bit.

    Raises:
        CheckpointMismatch: the checkpoint belongs to another configuration.
    """
    for path, value in settings(state, FIXED).items():
        before = saved.scalars["fixed"].get(path, value)  # a setting that is newer was the same
        if before != value:
            raise CheckpointMismatch(
                f"{path}: saved {before!r}, now {value!r}",
                likely="the option was changed since the run began",
                next=f"--{path} {before}, or another --run for a new run",
            )
    counted = {k: int(saved.own[f"counter/{k}"].local) for k in _counters(state)}
    state.step, state.tokens = counted["step"], saved.scalars["tokens"]
    state.first_row += counted["rows"] - state.rows
    ledger = state.mesh.ledger
    ledger.reset()
    ledger.bytes["replica", "before resume"] = saved.scalars["replica_bytes"]
    ledger.bytes["shard", "before resume"] = saved.scalars["shard_bytes"]
    if state.sync is not None:
        sync_state.prepare(state.sync, saved.scalars["sync"], counted)
        state.tokens = state.sync.votes.tokens
    restore_into(dict(_own(state, _shard)), saved.own)
    restore_into(dict(_shared(state, _shard)), saved.shared)
    if state.sync is not None:
        sync_state.settle(state.sync)


def settings(state: TrainState, paths: tuple[str, ...]) -> dict[str, Any]:
    """Values in the run's configuration."""
    values = {}
    for path in paths:
        section, name = path.split(".")
        values[path] = getattr(getattr(state.config, section), name)
    return values


def _counters(state: TrainState) -> dict[str, int]:
    """Whole numbers of this replica. The next batch follows from the rows taken."""
    counted = {"step": state.step} if state.sync is None else sync_state.counters(state.sync)
    return counted | {"rows": state.rows}


def _shared(state: TrainState, shard: ToShard) -> Iterator[tuple[str, Shard]]:
    """Anchors, velocities and what is in flight, by parameter."""
    if state.sync is not None:
        for name, held in sync_state.shared_tensors(state.sync).items():
            yield name, shard(held.local, held.param, state.mesh)


def _own(state: TrainState, shard: ToShard) -> Iterator[tuple[str, Shard]]:
    """Parameters, inner optimizer state and residuals, by parameter; counters."""
    for name, p in state.model.named_parameters():
        yield f"param/{name}", shard(local_shard(p), p, state.mesh)
        for key, value in state.optimizer.state[p].items():
            yield f"{key}/{name}", shard(local_shard(value), p, state.mesh)
    if state.sync is not None:
        for name, held in sync_state.own_tensors(state.sync).items():
            yield name, shard(held.local, held.param, state.mesh)
    for name, count in _counters(state).items():
        yield f"counter/{name}", Shard(torch.tensor(count), (), 0)


def _shard(local: Tensor, param: Tensor, mesh: Mesh) -> Shard:
    """``local`` as a piece of a whole tensor of ``param``'s shape; a scalar as it is."""
    if local.ndim == 0:
        return Shard(local, (), 0)
    rows = cut_of(param, mesh).rows
    assert rows.rows == local.shape[0], "the rows of a shard are not those of torch.chunk"
    return Shard(local, tuple(param.shape), rows.start)


def _rows(local: Tensor, param: Tensor, mesh: Mesh) -> Shard:
    """``local`` as this rank files it; all ranks of tp must call this together."""
    if local.ndim == 0:
        return Shard(local, (), 0)
    rows, start = rows_to_file(local, param, mesh)
    return Shard(rows, tuple(param.shape), start)
