"""Loading a step: verified before use, on the layout that saved it or with other shards."""

from pathlib import Path

import torch
from torch import Tensor

from core_torch.checkpoint import table as tables
from core_torch.checkpoint.commit import Commit, read_commit
from core_torch.checkpoint.files import check_record
from core_torch.checkpoint.sound import Saved, find, opened, read_state
from core_torch.checkpoint.state import Layout, SavedState, Shard
from core_torch.checkpoint.table import Piece
from core_torch.errors import CheckpointMismatch
from core_torch.shard.access import rows_of_shard


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
    saved = read_state(step_folder, commit)
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


def _load_files(
    step_folder: Path, commit: Commit, saved: Saved, files: list[str], layout: Layout
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
        with opened(step_folder, file, pieces, framework="pt") as source:
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
        return torch.empty((0, *piece.shape[1:]), dtype=getattr(torch, piece.dtype))
    return torch.cat(in_order)
