"""Which commits are sound: state.json, hashes and headers, without torch and without loading."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from safetensors import SafetensorError, safe_open

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
    step_name,
    verify_hashes,
)
from core_torch.checkpoint.files import check_record, corrupt, decode, parse_json
from core_torch.checkpoint.table import Piece, Table
from core_torch.errors import CheckpointError


class Saved(NamedTuple):
    """A state.json."""

    replicas: int
    shards: int
    scalars: dict[str, Any]
    table: Table


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
    saved = read_state(step_folder, commit)
    for name, pieces in saved.table.items():
        with opened(step_folder, name, pieces):
            pass


def read_state(folder: Path, commit: Commit) -> Saved:
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
    return Saved(replicas, shards, decode(scalars), table)


@contextmanager
def opened(
    folder: Path, name: str, pieces: dict[str, Piece], *, framework: Literal["pt", "np"] = "np"
) -> Iterator[Any]:
    """A file of tensors whose header agrees with the table; nothing is allocated before."""
    try:
        with safe_open(folder / name, framework=framework) as file:
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
