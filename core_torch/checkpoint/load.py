"""Loading a step: verified before use, on the layout that saved it or with other shards."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from core_torch.checkpoint import table as tables
from core_torch.checkpoint.commit import (
    STATE,
    STEP,
    TOKENIZER,
    Commit,
    checkpoint_folder,
    commits,
    inspect,
    latest,
    read_commit,
    step_name,
    verify_hashes,
)
from core_torch.checkpoint.files import check_record, corrupt, decode, parse_json
from core_torch.checkpoint.state import Layout, SavedState, Shard
from core_torch.checkpoint.table import Piece, Table
from core_torch.errors import CheckpointError, CheckpointMismatch
from core_torch.shard.access import rows_of_shard


class _Saved(NamedTuple):
    """A state.json."""

    replicas: int
    shards: int
    scalars: dict[str, Any]
    table: Table


def read(folder: Path, *, layout: Layout, step: int | None = None) -> SavedState:
    """This rank's part of a committed step, on the CPU, in memory of its own.

    Any number of shards may read what any other number saved; each then gets the rows that
    ``rows_of_shard`` gives it. Verifies the files that it reads, and the kind, name and size of
    all others.

    Args:
        folder: folder of a run, or of one step in it.
        layout: place of this rank now.
        step: which step of the run; the newest commit without it.

    Raises:
        CheckpointError: no such commit.
        CheckpointCorrupt: a file is not what the commit says.
        CheckpointMismatch: another format, or another number of replicas.
    """
    step_folder = find(folder, step)
    commit = read_commit(step_folder)
    saved = _read_state(step_folder, commit)
    if saved.replicas != layout.replicas:
        raise CheckpointMismatch(
            f"replicas: saved {saved.replicas}, now {layout.replicas}",
            where=str(step_folder),
            likely="mesh.replicas was changed; only mesh.shards may change in a run",
            next=f"twinshard train --resume auto --mesh.replicas {saved.replicas}",
        )
    shared_files, *own_files = tables.folders(saved.replicas, saved.shards)
    shared = _load_files(step_folder, commit, saved, shared_files, layout)
    own = _load_files(step_folder, commit, saved, own_files[layout.replica], layout)
    return SavedState(shared, own, saved.scalars)


def find(folder: Path, step: int | None = None) -> Path:
    """The folder of a committed step, from a run's folder or the step's own.

    Raises:
        CheckpointError: nothing is committed there, or not that step.
    """
    folder = Path(os.path.abspath(folder))
    if STEP.fullmatch(folder.name):
        return folder
    wanted = latest(folder) if step is None else checkpoint_folder(folder) / step_name(step)
    if wanted is None or not os.path.lexists(wanted):
        there = ", ".join(path.name for path in commits(folder)) or "none"
        which = "committed step" if step is None else f"commit of step {step}"
        raise CheckpointError(
            f"no {which} in {checkpoint_folder(folder)}; commits there: {there}",
            next="start anew without --resume, or name a run with a commit",
        )
    return wanted


def newest_sound(run_folder: Path) -> tuple[Path | None, list[CheckpointError]]:
    """The newest step that passes ``verify``, and why each newer one was passed over."""
    refused: list[CheckpointError] = []
    for path, problem in reversed(inspect(run_folder)):
        try:
            if problem is not None:
                raise problem
            verify(path)
        except CheckpointError as error:
            refused.append(error)
        else:
            return path, refused
    return None, refused


def verify(step_folder: Path) -> None:
    """Returns if every file of a step is what its commit says, and all of it can be loaded.

    Raises:
        CheckpointCorrupt: a file is not.
        CheckpointMismatch: another format version.
    """
    commit = verify_hashes(step_folder)
    saved = _read_state(step_folder, commit)
    for name, pieces in saved.table.items():
        with _opened(step_folder, name, pieces):
            pass


def _read_state(folder: Path, commit: Commit) -> _Saved:
    """state.json, verified and checked against the commit."""
    check_record(folder, STATE, commit.files[STATE])
    try:
        raw = parse_json((folder / STATE).read_bytes())
        match raw:
            case {
                "step": commit.step,
                "layout": {"replicas": int(replicas), "shards": int(shards)},
                "scalars": dict(scalars),
                "tensors": dict(tensors),
            }:
                table = tables.from_json(tensors)
                tables.check_table(table, replicas, shards)
            case _:
                raise ValueError("step, layout, scalars or tensors are missing or wrong")
    except ValueError as error:
        raise corrupt(folder, STATE, "the state of a step", str(error)) from error
    differ = sorted(table.keys() ^ (commit.files.keys() - {STATE, TOKENIZER}))
    if differ:
        raise corrupt(folder, differ[0], "an entry in COMMIT.json and in state.json", "only one")
    if scalars.get("config_hash") != commit.config_hash:
        raise corrupt(
            folder, STATE, f"config {commit.config_hash}", str(scalars.get("config_hash"))
        )
    return _Saved(replicas, shards, decode(scalars), table)


@contextmanager
def _opened(folder: Path, name: str, pieces: dict[str, Piece]) -> Iterator[Any]:
    """A file of tensors whose header agrees with the table; nothing is allocated before."""
    try:
        with safe_open(folder / name, framework="pt", device="cpu") as file:
            want = {key: (p.code, list(p.local_shape)) for key, p in pieces.items()}
            got = {key: (s.get_dtype(), s.get_shape()) for key, s in _slices(file)}
            for key in sorted(got.keys() | want.keys()):
                if got.get(key) != want.get(key):
                    raise corrupt(folder, name, f"{key} {want.get(key)}", str(got.get(key)))
            yield file
    except SafetensorError as error:
        raise corrupt(folder, name, "a safetensors file", str(error)) from error


def _slices(file: Any) -> Iterator[tuple[str, Any]]:
    for key in file.keys():
        yield key, file.get_slice(key)


def _load_files(
    step_folder: Path, commit: Commit, saved: _Saved, files: list[str], layout: Layout
) -> dict[str, Shard]:
    """The rows of every tensor of one folder's files that belong to ``layout``'s rank.

    With the number of shards that saved them these are the rows that this rank saved, however
    they were cut, and only its own file is read.
    """
    same = layout.shards == saved.shards
    pattern = saved.table[files[layout.shard if same else 0]]
    spans = {}
    for name, piece in pattern.items():
        cut = (piece.start, piece.rows) if same or not piece.shape else None
        spans[name] = cut or rows_of_shard(piece.shape[0], layout.shards, layout.shard)
    parts: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in spans}
    for file in files:
        pieces = saved.table[file]
        needed = [n for n, span in spans.items() if _overlap(span, pieces[n])]
        if pieces is pattern:
            needed += [n for n, piece in pattern.items() if not piece.shape]
        if not needed:
            continue
        check_record(step_folder, file, commit.files[file])
        with _opened(step_folder, file, pieces) as source:
            for name in needed:
                piece, inside = pieces[name], _overlap(spans[name], pieces[name])
                rows = source.get_slice(name)[inside] if inside else source.get_tensor(name)
                parts[name].append((piece.start, rows))
    return {
        name: Shard(_joined(parts[name], piece), piece.shape, spans[name][0])
        for name, piece in pattern.items()
    }


def _overlap(span: tuple[int, int], piece: Piece) -> slice | None:
    """Which of the file's rows lie in the span (start, rows), or None."""
    low = max(span[0], piece.start) - piece.start
    high = min(span[0] + span[1], piece.start + piece.rows) - piece.start
    return slice(low, high) if low < high else None


def _joined(parts: list[tuple[int, Tensor]], piece: Piece) -> Tensor:
    """The parts in the order of their rows, in new memory: the files may go."""
    in_order = [x for _, x in sorted(parts, key=lambda part: part[0])]
    if not piece.shape:
        return in_order[0].clone()
    if not in_order:
        return torch.empty((0, *piece.shape[1:]), dtype=piece.torch_dtype)
    return torch.cat(in_order)
