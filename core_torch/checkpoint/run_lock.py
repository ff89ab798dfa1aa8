"""One run, one process: run.json says who writes to the folder and is locked while it does."""

import contextlib
import fcntl
import json
import os
import platform
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core_torch import __version__
from core_torch.checkpoint.commit import sweep
from core_torch.checkpoint.files import PRIVATE, parse_json
from core_torch.errors import ConfigError

RUN_FILE = "run.json"
RUN_LIMIT_BYTES = 1 << 20


@contextlib.contextmanager
def run_lock(run_folder: Path, *, force: bool = False) -> Iterator[None]:
    """Holds the run folder for this process; makes it, and ends what a crash left half done.

    The lock is the operating system's, so it goes with the process that held it, however that
    ended. Of a holder on another machine only run.json can tell.

    Raises:
        ConfigError: another live process holds the folder, or run.json cannot be written.
    """
    path = run_folder / RUN_FILE
    try:
        run_folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        if not force:
            _take(descriptor, run_folder)
        _write(descriptor, {**_identity(), "running": True})
        try:
            sweep(run_folder)
            yield
        finally:
            _write(descriptor, {**_identity(), "running": False})
    finally:
        os.close(descriptor)  # also unlocks


@contextlib.contextmanager
def folder_lock(run_folder: Path, *, force: bool = False) -> Iterator[None]:
    """Holds the folder of a run that does not train now, and leaves run.json as it is.

    Raises:
        ConfigError: another live process holds the folder, or run.json cannot be opened.
    """
    path = run_folder / RUN_FILE
    if force or not os.path.lexists(path):  # saved by a loop of one's own, which takes no lock
        yield
        return
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        _take(descriptor, run_folder)
        yield
    finally:
        os.close(descriptor)  # also unlocks


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path} cannot be written: {error.strerror}",
        likely="a read-only folder, or a link where a file belongs",
        next="name another folder with --run",
    )


def _take(descriptor: int, run_folder: Path) -> None:
    """Locks run.json, or raises and names the holder."""
    holder = _read(descriptor)
    here = holder.get("host") == socket.gethostname()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        likely = "another process trains in this folder now"
    else:
        if here or not holder.get("running"):
            return
        likely = "it trains there, or that machine went down; this one cannot tell"
    raise ConfigError(
        f"{run_folder} is in use by process {holder.get('pid')} on {holder.get('host')}",
        where=str(run_folder / RUN_FILE),
        likely=likely,
        next="name another folder with --run, or add --force if that process is gone",
    )


def _read(descriptor: int) -> dict[str, Any]:
    """What run.json says; nothing if it is new or half written."""
    try:
        found = parse_json(os.pread(descriptor, RUN_LIMIT_BYTES, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _write(descriptor: int, value: dict[str, Any]) -> None:
    # In place: a new file under the same name would not be the one that is locked.
    data = (json.dumps(value, indent=1) + "\n").encode()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, data, 0)
    os.fsync(descriptor)


def _identity() -> dict[str, Any]:
    import safetensors  # here, because who only takes the lock needs neither
    import torch

    versions = {
        "twinshard": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
    }
    host = socket.gethostname()
    return {"pid": os.getpid(), "host": host, "versions": versions, "argv": sys.argv}
