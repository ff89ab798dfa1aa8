"""Committed steps of a run: which count, how one appears at once, how old ones go.

A step counts if its folder is called ``step-XXXXXXXX`` and holds a COMMIT.json that fits the
files beside it. COMMIT.json is written last, before the one rename that makes the folder
appear, and deleted first, so no crash leaves a half step that counts.
"""

import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from core_torch.checkpoint.files import (
    Record,
    check_record,
    corrupt,
    discard,
    flush,
    listing,
    parse_json,
)
from core_torch.errors import CheckpointError, CheckpointMismatch

FORMAT = 1
COMMIT, STATE, TOKENIZER = "COMMIT.json", "state.json", "tokenizer.json"
LAST_STEP = 99_999_999  # eight digits
COMMIT_LIMIT_BYTES = 64 << 20  # read whole, so refused before anything is allocated
STEP = re.compile(r"step-([0-9]{8})")
LEFT_OVER = re.compile(r"\.(tmp|old)-([0-9]{8})-[0-9a-f]{16}")
FILE = re.compile(r"(tensors|replica-[0-9]{4,6})/shard-[0-9]{4,6}\.safetensors")
SHA256 = re.compile(r"[0-9a-f]{64}")

AtPoint = Callable[[str], None]


def no_fault(point: str) -> None:
    """Does nothing at a named point; tests pass something that kills the process there."""


class Commit(NamedTuple):
    """A COMMIT.json."""

    step: int
    config_hash: str | None
    files: dict[str, Record]


def checkpoint_folder(run_folder: Path) -> Path:
    """Where a run's steps lie.

    Raises:
        CheckpointError: it is a link; a run reads and writes inside its own folder only.
    """
    folder = run_folder / "ckpt"
    if folder.is_symlink():
        raise CheckpointError(
            f"{folder} is a link to {folder.readlink()}",
            where=str(folder),
            likely="the checkpoints were moved to another disk",
            next="name a run folder on that disk with --run",
        )
    return folder


def step_name(step: int) -> str:
    """Name of a committed step's folder.

    Raises:
        ValueError: not in 0..99999999.
    """
    if not 0 <= step <= LAST_STEP:
        raise ValueError(f"step {step} does not fit in eight digits")
    return f"step-{step:08d}"


def hidden_path(folder: Path, kind: str, step: int) -> Path:
    """A new name in ``folder`` that never counts; ``kind`` is "tmp" or "old"."""
    return folder / f".{kind}-{step:08d}-{secrets.token_hex(8)}"


def read_commit(step_folder: Path) -> Commit:
    """The commit of a step, after checking names, kinds and sizes of all its files; no hashes.

    Raises:
        CheckpointCorrupt: bad JSON, a name that leads out of the folder, a link, or a file
            that is missing, unexpected or of another size.
        CheckpointMismatch: another format version.
    """
    found = STEP.fullmatch(step_folder.name)
    if found is None:
        raise corrupt(step_folder, ".", "a folder called step-XXXXXXXX", step_folder.name)
    sizes = listing(step_folder)
    size = sizes.pop(COMMIT, None)
    if size is None or size > COMMIT_LIMIT_BYTES:
        got = "no file" if size is None else f"{size} bytes"
        raise corrupt(step_folder, COMMIT, f"a file of at most {COMMIT_LIMIT_BYTES} bytes", got)
    try:
        raw = parse_json((step_folder / COMMIT).read_bytes())
    except (ValueError, OSError) as error:
        raise corrupt(step_folder, COMMIT, "JSON", str(error)) from error
    commit = _checked(step_folder, raw)
    if commit.step != int(found[1]):
        raise corrupt(step_folder, COMMIT, f"step {int(found[1])}", f"step {commit.step}")
    for name in sorted(commit.files.keys() | sizes.keys()):
        want = f"{commit.files[name].bytes} bytes" if name in commit.files else "no such file"
        got = f"{sizes[name]} bytes" if name in sizes else "no such file"
        if want != got:
            raise corrupt(step_folder, name, want, got)
    return commit


def _checked(folder: Path, raw: Any) -> Commit:
    """The commit in ``raw`` if all of it is of the right type and every name is harmless."""
    if not isinstance(raw, dict) or not _is_count(raw.get("format")):
        raise corrupt(folder, COMMIT, "an object with a format version", repr(raw)[:80])
    if raw["format"] != FORMAT:
        raise CheckpointMismatch(
            f"format version: saved {raw['format']}, now {FORMAT}",
            where=str(folder),
            likely="another version of Twinshard wrote it",
            next="load it with the version named in run.json",
        )
    want = {"format", "step", "config_hash", "files"}
    if raw.keys() != want or not isinstance(raw["files"], dict):
        raise corrupt(folder, COMMIT, f"the keys {sorted(want)}", str(sorted(raw))[:200])
    if not _is_count(raw["step"]) or not isinstance(raw["config_hash"], str | None):
        raise corrupt(folder, COMMIT, "a step and a config hash", repr(raw)[:200])
    return Commit(raw["step"], raw["config_hash"], _checked_files(folder, raw["files"]))


def _checked_files(folder: Path, raw: dict[str, Any]) -> dict[str, Record]:
    files = {}
    for name, record in raw.items():
        if not (FILE.fullmatch(name) or name in (STATE, TOKENIZER)):
            raise corrupt(folder, COMMIT, "names of a checkpoint's files only", repr(name)[:200])
        match record:
            case {"bytes": int(size), "sha256": str(digest), **rest} if not rest:
                if _is_count(size) and SHA256.fullmatch(digest):
                    files[name] = Record(size, digest)
        if name not in files:
            raise corrupt(folder, COMMIT, f"bytes and sha256 of {name}", repr(record)[:200])
    if STATE not in files:
        raise corrupt(folder, COMMIT, f"an entry for {STATE}", "none")
    return files


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def inspect(run_folder: Path) -> list[tuple[Path, CheckpointError | None]]:
    """Every step folder, oldest first, with the reason why it does not count, if any.

    Looks at names and sizes, not at hashes. Changes nothing.
    """
    folder = checkpoint_folder(run_folder)
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    seen: list[tuple[Path, CheckpointError | None]] = []
    for path in (folder / name for name in names if STEP.fullmatch(name)):
        try:
            read_commit(path)
        except CheckpointError as error:
            seen.append((path, error))
        except FileNotFoundError:
            continue  # the run that owns it is deleting it just now
        else:
            seen.append((path, None))
    return seen


def commits(run_folder: Path) -> list[Path]:
    """Folders of the committed steps, oldest first."""
    return [path for path, problem in inspect(run_folder) if problem is None]


def latest(run_folder: Path) -> Path | None:
    """Folder of the newest committed step, or None."""
    return next(reversed(commits(run_folder)), None)


def verify_hashes(step_folder: Path) -> Commit:
    """The commit of a step, all of whose files have the promised content.

    Raises:
        CheckpointError: as ``read_commit``, and where a hash differs.
    """
    commit = read_commit(step_folder)
    for name, record in commit.files.items():
        check_record(step_folder, name, record)
    return commit


def publish(temporary: Path, step: int, at_point: AtPoint = no_fault) -> Path:
    """Makes a complete temporary folder the committed ``step``, in place of an older one.

    An older folder of that step steps aside first. If the process dies between the two
    renames, ``sweep`` brings it back.
    """
    target = temporary.parent / step_name(step)
    aside = hidden_path(temporary.parent, "old", step) if os.path.lexists(target) else None
    if aside:
        target.rename(aside)
        at_point("ckpt_between_renames")
    try:
        temporary.rename(target)
    except OSError:
        if aside:
            aside.rename(target)
        raise
    flush(target.parent)
    at_point("ckpt_after_rename")
    if aside:
        remove(aside)
    return target


def remove(folder: Path, at_point: AtPoint = no_fault) -> None:
    """Deletes a step so that from the first moment on it does not count."""
    if folder.is_symlink():
        folder.unlink()
        return
    (folder / COMMIT).unlink(missing_ok=True)
    flush(folder)
    at_point("ckpt_after_uncommit")
    # Hidden before it is emptied, so that sweep may finish what a crash interrupts.
    found = re.search(r"[0-9]{8}", folder.name)
    gone = hidden_path(folder.parent, "tmp", int(found[0]) if found else 0)
    discard(folder.rename(gone))


def prune(
    run_folder: Path, keep: int, *, spare: Path | None = None, at_point: AtPoint = no_fault
) -> None:
    """Deletes all commits but the newest ``keep``; folders that do not count stay as they are.

    Args:
        run_folder: folder of the run.
        keep: at least 2.
        spare: stays although newer steps exist: the one just saved, in a run that went back.
        at_point: called at named points.

    Raises:
        ValueError: ``keep`` is below 2.
    """
    if keep < 2:
        raise ValueError(f"keep must be at least 2, got {keep}")
    for path in commits(run_folder)[:-keep]:
        if path != spare:
            remove(path, at_point)


def sweep(run_folder: Path) -> None:
    """Ends what a crash interrupted: deletes temporaries, brings back a step put aside.

    Only for the one process that holds the run's lock.
    """
    folder = checkpoint_folder(run_folder)
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    for path in (folder / name for name in names):
        found = LEFT_OVER.fullmatch(path.name)
        if found is None:
            continue
        step_folder = folder / step_name(int(found[2]))
        if found[1] == "old" and not os.path.lexists(step_folder):
            path.rename(step_folder)
        else:
            discard(path)
