"""Files of a checkpoint: strict JSON, hashes, writes that survive a power cut, links refused."""

import hashlib
import json
import math
import os
import shutil
import stat
from pathlib import Path
from typing import Any, NamedTuple

from core_torch.errors import CheckpointCorrupt

NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
PRIVATE = 0o700  # folders are their owner's only


class Record(NamedTuple):
    """What a commit promises about one file."""

    bytes: int
    sha256: str  # 64 lower-case hexadecimal digits


def corrupt(folder: Path, file: str, want: str, got: str) -> CheckpointCorrupt:
    """The error for a file of ``folder`` that is not what it has to be."""
    return CheckpointCorrupt(
        f"{file}: want {want}, got {got}",
        where=str(folder / file),
        likely="damaged on disk or in a copy, or edited",
        next=f"twinshard train --resume auto --run {folder.parent.parent}",
    )


def encode(value: Any) -> Any:
    """``value`` as JSON holds it: non-finite floats become strings, tuples lists.

    Raises:
        TypeError: a leaf that JSON cannot hold, for example a tensor, or a key that is no text.
        ValueError: a text that would come back as a non-finite float.
    """
    if isinstance(value, str) and value in NON_FINITE:
        raise ValueError(f"the text {value!r} would come back as a number")
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [encode(v) for v in value]
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {k: encode(v) for k, v in value.items()}
    raise TypeError(f"a checkpoint's scalars cannot hold {type(value).__name__}: {value!r}")


def decode(value: Any) -> Any:
    """Inverse of ``encode`` on what JSON can hold."""
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    if isinstance(value, list):
        return [decode(v) for v in value]
    if isinstance(value, dict):
        return {k: decode(v) for k, v in value.items()}
    return value


def parse_json(data: bytes) -> Any:
    """Strict JSON: UTF-8, no NaN literal, no key twice.

    Raises:
        ValueError: anything else, nesting beyond the interpreter's depth included.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """The object, unless one key would hide another."""
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key appears twice")
        return dict(pairs)

    def refuse(literal: str) -> None:
        raise ValueError(f"{literal} is not JSON")

    try:
        return json.loads(data.decode(), parse_constant=refuse, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def listing(folder: Path) -> dict[str, int]:
    """Bytes of every file below ``folder``, by its path with ``/``.

    Raises:
        CheckpointCorrupt: a link, a device or a pipe among them, or ``folder`` is a link.
    """
    if folder.is_symlink() or not folder.is_dir():
        raise corrupt(folder, ".", "a folder", "a link" if folder.is_symlink() else "none")
    sizes = {}
    for root, folders, files in os.walk(folder):
        for entry in folders + files:
            path = Path(root) / entry
            info, name = path.lstat(), path.relative_to(folder).as_posix()
            if stat.S_ISREG(info.st_mode):
                sizes[name] = info.st_size
            elif not stat.S_ISDIR(info.st_mode):
                kind = "a link" if stat.S_ISLNK(info.st_mode) else "a special file"
                raise corrupt(folder, name, "a regular file", kind)
    return sizes


def record_of(path: Path) -> Record:
    """Size and hash of a file, read in pieces."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Record(file.tell(), digest)


def check_record(folder: Path, file: str, want: Record) -> None:
    """Returns if ``file`` of ``folder`` has the promised size and hash.

    Raises:
        CheckpointCorrupt: it has not; size is looked at before the content.
    """
    try:
        size = (folder / file).lstat().st_size
        if size != want.bytes:
            raise corrupt(folder, file, f"{want.bytes} bytes", f"{size} bytes")
        got = record_of(folder / file)
    except OSError as error:
        raise corrupt(folder, file, "a readable file", str(error)) from error
    if got.sha256 != want.sha256:
        raise corrupt(folder, file, f"sha256 {want.sha256}", f"sha256 {got.sha256}")


def flush(path: Path) -> None:
    """Returns once a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Writes ``value``, already encoded, and flushes it."""
    path.write_text(json.dumps(value, allow_nan=False, indent=1) + "\n", encoding="utf-8")
    flush(path)


def discard(path: Path) -> None:
    """Deletes a folder, or a link without what it points to."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)
