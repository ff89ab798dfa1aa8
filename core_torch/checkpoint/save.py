"""Saving a step: every rank writes its files, rank 0 commits, and all ranks learn how it went.

Saving only reads the run: it begins with a copy in host memory.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from core_torch.checkpoint import table as tables
from core_torch.checkpoint.commit import (
    COMMIT,
    FORMAT,
    STATE,
    TOKENIZER,
    AtPoint,
    checkpoint_folder,
    hidden_path,
    no_fault,
    prune,
    publish,
    step_name,
    sweep,
)
from core_torch.checkpoint.files import PRIVATE, Record, encode, flush, record_of, write_json
from core_torch.checkpoint.state import Layout, SavedState, Shard, with_canonical_names
from core_torch.errors import CheckpointError

Gather = Callable[[Any], list[Any]]


def save(
    run_folder: Path,
    state: SavedState,
    *,
    step: int,
    mesh_layout: Layout,
    gather: Gather,
    tokenizer: Path | None,
    keep: int,
    at_point: AtPoint = no_fault,
) -> Path:
    """Commits ``state`` as ``step``; every rank calls it. Replaces an older save of that step.

    May run in a thread.

    Args:
        run_folder: folder of the run, seen by all ranks.
        state: this rank's part, as ``Staging`` has copied it.
        step: completed inner steps, 0..99999999.
        mesh_layout: place of this rank.
        gather: JSON-able objects of all ranks, in rank order, on every rank.
        tokenizer: file to keep beside the tensors.
        keep: commits that stay, at least 2.
        at_point: called with the names of points at which tests interfere.

    Returns:
        The folder of the committed step.

    Raises:
        CheckpointError: any rank could not write; raised on all ranks, and the commits that
            were there before are still there.
    """
    gather(None)  # a lost peer shows before anything is written
    together = _Together(gather, mesh_layout, step, run_folder)
    shared, own = state.shared if mesh_layout.replica == 0 else {}, state.own
    need = sum(s.local.nbytes for s in [*shared.values(), *own.values()])
    begun = together(lambda: {"need": need, **_begin(run_folder, step, keep, mesh_layout)})
    temporary = checkpoint_folder(run_folder) / begun[0]["temporary"]
    try:
        _check_space(temporary.parent, sum(b["need"] for b in begun), begun[0]["free"])
        written = together(lambda: _write_shards(temporary, shared, own, mesh_layout))

        def commit() -> None:
            """Rank 0's part; the others only wait to hear how it went."""
            at_point("ckpt_after_shards")
            if mesh_layout.rank == 0:
                _write_rest(temporary, written, state.scalars, step, mesh_layout, tokenizer)
                at_point("ckpt_before_commit")
                _write_commit(temporary, written, state.scalars, step)
                at_point("ckpt_before_rename")
                target = publish(temporary, step, at_point)
                prune(run_folder, keep, spare=target, at_point=at_point)

        together(commit)
    except CheckpointError:
        if mesh_layout.rank == 0:  # nobody writes any more: all have told how it went
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return checkpoint_folder(run_folder) / step_name(step)


class _Together:
    """Runs a piece of work on every rank; if one fails, all raise, so that none waits for it."""

    def __init__(self, gather: Gather, layout: Layout, step: int, run_folder: Path) -> None:
        self.gather, self.layout, self.step, self.run_folder = gather, layout, step, run_folder

    def __call__(self, work: Callable[[], Any]) -> list[Any]:
        result, failure = None, None
        try:
            result = work()
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure = error
        problem = None if failure is None else f"{type(failure).__name__}: {failure}"
        answers = self.gather({"result": result, "problem": problem})
        for rank, answer in enumerate(answers):
            if answer["problem"] is not None:
                replica, shard = divmod(rank, self.layout.shards)
                raise CheckpointError(
                    f"step {self.step} was not saved: {answer['problem']}",
                    where=f"rank {rank} (replica {replica}, shard {shard}), step {self.step}, "
                    f"save to {self.run_folder}",
                    likely="disk full, quota, permissions, or a state that cannot be saved",
                    next=f"put it right, then twinshard train --resume auto --run "
                    f"{self.run_folder}; earlier commits are kept",
                ) from failure
        return [answer["result"] for answer in answers]


def _begin(run_folder: Path, step: int, keep: int, layout: Layout) -> dict[str, Any]:
    """Rank 0 makes the temporary folder; returns its name and the free bytes."""
    if layout.rank != 0:
        return {}
    step_name(step)
    if keep < 2:
        raise ValueError(f"keep must be at least 2, got {keep}")
    folder = checkpoint_folder(run_folder)
    run_folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    folder.mkdir(mode=PRIVATE, exist_ok=True)
    sweep(run_folder)
    temporary = hidden_path(folder, "tmp", step)
    temporary.mkdir(mode=PRIVATE)
    for files in tables.folders(layout.replicas, layout.shards):
        (temporary / files[0]).parent.mkdir(mode=PRIVATE)
    return {"temporary": temporary.name, "free": shutil.disk_usage(folder).free}


def _check_space(folder: Path, need: int, free: int) -> None:
    """The same answer on all ranks, before gigabytes are written in vain."""
    if need > free:
        raise CheckpointError(
            f"the checkpoint needs {need:,} bytes, {folder} has {free:,}",
            where=str(folder),
            likely="disk full",
            next="free space there, or lower --checkpoint.keep; earlier commits are kept",
        )


def _write_shards(
    temporary: Path, shared: dict[str, Shard], own: dict[str, Shard], layout: Layout
) -> dict[str, Any]:
    """Writes this rank's files; returns their records and table, as JSON holds them."""
    todo = {tables.own_file(layout.replica, layout.shard): own}
    if layout.replica == 0:
        todo[tables.shared_file(layout.shard)] = shared
    records, table, whole = {}, {}, {}
    for name, shards in todo.items():
        renamed = with_canonical_names(shards)
        table[name] = tables.pieces_of(renamed)
        copies = {k: s.local for k, s in renamed.items()}  # contiguous, and no two share storage
        save_file(copies, temporary / name)
        flush(temporary / name)
        records[name] = record_of(temporary / name)._asdict()
        whole[str(Path(name).parent)] = {k: repr(x.item()) for k, x in copies.items() if not x.ndim}
    return {"records": records, "table": tables.to_json(table), "whole": whole}


def _write_rest(
    temporary: Path,
    written: list[Any],
    scalars: dict[str, Any],
    step: int,
    layout: Layout,
    tokenizer: Path | None,
) -> None:
    """state.json and tokenizer.json, once the ranks' files together make a whole."""
    table = {name: pieces for w in written for name, pieces in w["table"].items()}
    tables.check_table(tables.from_json(table), layout.replicas, layout.shards)
    _check_whole(written)
    if not isinstance(scalars.get("config_hash"), str | None):
        raise TypeError(f"config_hash must be text, got {scalars['config_hash']!r}")
    state = {
        "step": step,
        "layout": {"replicas": layout.replicas, "shards": layout.shards},
        "scalars": encode(scalars),
        "tensors": table,
    }
    write_json(temporary / STATE, state)
    if tokenizer is not None:
        shutil.copyfile(tokenizer, temporary / TOKENIZER)
        flush(temporary / TOKENIZER)


def _check_whole(written: list[Any]) -> None:
    """What every rank of a replica holds whole must be equal, or other shards could not load."""
    seen: dict[str, dict[str, str]] = {}
    for folder, values in (item for w in written for item in w["whole"].items()):
        for name, value in values.items():
            first = seen.setdefault(folder, {}).setdefault(name, value)
            if value != first:
                raise ValueError(f"{name} is {value} on one shard of {folder}, {first} on another")


def _write_commit(temporary: Path, written: list[Any], scalars: dict[str, Any], step: int) -> None:
    """COMMIT.json, after everything that it promises is on the disk."""
    records = {name: Record(**r) for w in written for name, r in w["records"].items()}
    for name in (STATE, TOKENIZER):
        if (temporary / name).exists():
            records[name] = record_of(temporary / name)
    for folder in {(temporary / name).parent for name in records}:
        flush(folder)
    commit = {
        "format": FORMAT,
        "step": step,
        "config_hash": scalars.get("config_hash"),
        "files": {name: records[name]._asdict() for name in sorted(records)},
    }
    write_json(temporary / COMMIT, commit)
    flush(temporary)
