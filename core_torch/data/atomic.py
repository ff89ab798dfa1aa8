"""Write a file, or a folder, so that a reader sees all of it or none of it."""

import contextlib
import fcntl
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Iterator
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


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Gives a hidden folder to write into, which becomes ``path`` if nothing goes wrong.

    What a killed process has left of such a folder is deleted first. The lock ends with the
    process that holds it, so it never outlives a kill.

    Raises:
        DataError: there is something at ``path``, another process writes there, or the place
            cannot be written.
    """
    partial = path.absolute().with_name(f".{path.absolute().name}.partial")
    handle = None
    try:
        partial.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(partial, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.exists():
            raise DataError(
                f"{path} exists already",
                where=str(path.absolute()),
                next=f"another --out, or delete it: rm -r {shlex.quote(str(path))}",
            )
        for file in partial.iterdir():
            file.unlink()
        yield partial
        _sync_folder(partial)
        os.rename(partial, path)
        _sync_folder(path.absolute().parent)
    except BlockingIOError as error:
        raise DataError(
            f"another process is writing {path}",
            where=str(partial),
            next="wait for it, or another --out",
        ) from error
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror or error}",
            where=str(path.absolute()),
            likely="the place is read-only, or the disk is full",
            next="another --out, or make space",
        ) from error
    finally:
        if handle is not None:
            # The rename took it along; if not, nobody wants what is in it.
            if _is_same(handle, partial):
                shutil.rmtree(partial, ignore_errors=True)
            os.close(handle)


def _is_same(handle: int, path: Path) -> bool:
    """Whether an open folder is the one at ``path``, and this process holds its lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except OSError:
        return False


def _sync_folder(folder: Path) -> None:
    """Makes a rename inside ``folder`` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
