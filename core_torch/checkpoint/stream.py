"""The model of a run one tensor at a time, so that it need not fit into memory."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from core_torch.checkpoint import table as tables
from core_torch.checkpoint.commit import read_commit
from core_torch.checkpoint.export import FILE
from core_torch.checkpoint.files import check_record
from core_torch.checkpoint.sound import find, opened, read_state
from core_torch.checkpoint.table import Table
from core_torch.errors import CheckpointCorrupt, CheckpointMismatch

Shapes = dict[str, tuple[int, ...]]
Read = Callable[[str], Tensor]


@contextmanager
def saved_model(run_folder: Path, step: int | None, expected: Shapes) -> Iterator[Read]:
    """What a run agreed on last, or at a commit, as a function from names to whole tensors.

    Args:
        run_folder: folder of the run.
        step: of a commit, whose anchor is meant, or before the first round its weights. Without
            it the model that the run ended with; of an unfinished run its newest commit.
        expected: shape of each tensor of the model.

    Raises:
        CheckpointError: no such commit.
        CheckpointCorrupt: a file is not what its commit says.
        CheckpointMismatch: tensors are not the expected ones.
    """
    with ExitStack() as files:
        if step is None and (run_folder / FILE).exists():
            read, shapes = _final(run_folder / FILE, files)
        else:
            read, shapes = _committed(find(run_folder, step), files)
        wrong = sorted(
            n for n in shapes.keys() | expected.keys() if shapes.get(n) != expected.get(n)
        )
        if wrong:
            raise CheckpointMismatch(
                f"{wrong[0]} does not fit the configuration ({len(wrong)} such tensors)",
                where=str(run_folder),
                likely="config.toml was changed, or files come from another run",
            )
        yield read


def _final(path: Path, files: ExitStack) -> tuple[Read, Shapes]:
    try:
        source = files.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error}") from error
    return source.get_tensor, {n: tuple(source.get_slice(n).get_shape()) for n in source.keys()}


def _committed(step_folder: Path, files: ExitStack) -> tuple[Read, Shapes]:
    """The anchor of a commit, all of whose files are verified before the first is read."""
    commit = read_commit(step_folder)
    saved = read_state(step_folder, commit)
    shared, own, *_ = tables.folders(saved.replicas, saved.shards)
    kind, names = ("anchor/", shared) if saved.table[shared[0]] else ("param/", own)
    sources: dict[str, Any] = {}
    for name in names:
        check_record(step_folder, name, commit.files[name])
        opening = opened(step_folder, name, saved.table[name], framework="pt")
        sources[name] = files.enter_context(opening)

    def read(name: str) -> Tensor:
        """The rows of all files, put together."""
        key = kind + name
        parts = [(saved.table[f][key].start, f) for f in names if saved.table[f][key].rows]
        return torch.cat([sources[f].get_tensor(key) for _, f in sorted(parts)])

    return read, _shapes(saved.table, names[0], kind)


def _shapes(table: Table, file: str, kind: str) -> Shapes:
    held = {name: piece.shape for name, piece in table[file].items()}
    return {n.removeprefix(kind): shape for n, shape in held.items() if n.startswith(kind)}
