"""Loading a step: verified before use, on the layout that saved it or with other shards."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from core_torch.checkpoint import table as tables
from core_torch.checkpoint.commit import read_commit
from core_torch.checkpoint.files import check_record
from core_torch.checkpoint.sound import Saved, find, opened, read_state
from core_torch.checkpoint.state import Layout, SavedState, Shard
from core_torch.checkpoint.table import Piece
from core_torch.errors import CheckpointMismatch
from core_torch.parallel.pieces import Cut
from core_torch.shard.access import Rows, rows_of_shard

Cuts = Mapping[str, Cut | None]
_UNKNOWN = Cut(Rows(0, 0))  # of a tensor that the run may or may not have: it is loaded, then told


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
    reader = Reader(find(folder, step), layout)
    if reader.saved.replicas != layout.replicas:
        raise CheckpointMismatch(
            f"replicas: saved {reader.saved.replicas}, now {layout.replicas}",
            where=str(reader.folder),
            likely="mesh.replicas was changed; what replicas did apart has to be merged",
            next="checkpoint.resume.resume, as twinshard train --resume does",
        )
    return SavedState(reader.shared(), reader.own(layout.replica), reader.saved.scalars)


class Reader:
    """A committed step, from which a rank takes its rows of any saved replica.

    Args:
        folder: of the step.
        layout: place of this rank now; how many replicas there are now does not matter.
        cuts: this rank's piece of every parameter, None for those of other stages of a
            pipeline; without cuts: as ``read`` says.

    Raises:
        CheckpointError: as ``read``, but for the number of replicas.
    """

    def __init__(self, folder: Path, layout: Layout, cuts: Cuts | None = None) -> None:
        self.folder, self.layout, self.cuts = folder, layout, cuts or {}
        self.commit = read_commit(folder)
        self.saved = read_state(folder, self.commit)
        self._shared, *self._own = tables.folders(self.saved.replicas, self.saved.shards)
        self._checked: set[str] = set()

    def shared(self) -> dict[str, Shard]:
        """What all replicas share."""
        return self._load(self._shared, _everything)

    def own(self, replica: int, wanted: Callable[[str], bool] | None = None) -> dict[str, Shard]:
        """What a replica had for itself; of it what ``wanted`` says of a name."""
        return self._load(self._own[replica], wanted or _everything)

    def _load(self, files: list[str], wanted: Callable[[str], bool]) -> dict[str, Shard]:
        return _load_files(
            self.folder, self._check, self.saved, files, self.layout, self.cuts, wanted
        )

    def _check(self, file: str) -> None:
        if file not in self._checked:
            check_record(self.folder, file, self.commit.files[file])
            self._checked.add(file)


def _everything(name: str) -> bool:
    return True


def _load_files(
    step_folder: Path,
    check: Callable[[str], None],
    saved: Saved,
    files: list[str],
    layout: Layout,
    cuts: Cuts,
    wanted: Callable[[str], bool],
) -> dict[str, Shard]:
    """The pieces of the wanted tensors of one folder's files that belong to ``layout``'s rank.

    Without cuts, and with the number of shards that saved them, these are the rows that this
    rank saved, however they were cut, and only its own file is read. What has no rows comes from
    the first file that names it.
    """
    same = layout.shards == saved.shards
    mine = [files[layout.shard]] if same and not cuts else files
    pattern: dict[str, Piece] = {}
    source_of: dict[str, str] = {}
    for file in mine:
        for name, piece in saved.table[file].items():
            is_here = cuts.get(name.partition("/")[2], _UNKNOWN) is not None
            if is_here and wanted(name) and name not in pattern:
                pattern[name], source_of[name] = piece, file
    held: dict[str, Cut] = {}
    for name, piece in pattern.items():
        cut = cuts.get(name.partition("/")[2]) if piece.shape else None
        if cut is None and (same or not piece.shape):
            cut = Cut(Rows(piece.start, piece.rows))
        held[name] = cut or Cut(rows_of_shard(piece.shape[0], layout.shards, layout.shard))
    spans = {name: cut.rows for name, cut in held.items()}
    parts: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in spans}
    for file in files:
        pieces = saved.table[file]
        needed = [n for n, span in spans.items() if n in pieces and _overlap(span, pieces[n])]
        needed += [n for n, p in pattern.items() if not p.shape and source_of[n] == file]
        if not needed:
            continue
        check(file)
        with opened(step_folder, file, pieces, framework="pt") as source:
            for name in needed:
                piece, inside = pieces[name], _overlap(spans[name], pieces[name])
                rows = source.get_slice(name)[inside] if inside else source.get_tensor(name)
                parts[name].append((piece.start, rows))
    return {
        name: Shard(held[name].of(_joined(parts[name], piece)), piece.shape, spans[name].start)
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
