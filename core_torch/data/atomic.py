"""Write a file so that a reader sees all of it or none of it."""

import contextlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from core_torch.errors import DataError


def write_atomic(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Writes ``chunks`` one after another to ``path``, replacing what was there.

    The bytes go to a new file of the same folder, reach the disk, and are then renamed. Two
    processes may write one path at the same time: the last rename wins, nothing is mixed.

    Raises:
        DataError: the folder is missing or cannot be written, or the disk is full.
    """
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}-", delete=False
        ) as file:
            temporary = file.name
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise DataError(
            f"cannot write {path.name}: {error.strerror or error}",
            where=str(path),
            likely="the folder is read-only, or the disk is full",
            next="choose another run folder with --run, or make space",
        ) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):  # after the rename there is nothing left
                os.unlink(temporary)


def _sync_folder(folder: Path) -> None:
    """Makes a rename inside ``folder`` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
