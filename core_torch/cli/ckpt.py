"""``twinshard ckpt``: lists, verifies, shows and deletes the commits of a run, without torch."""

import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from core_torch.checkpoint.commit import (
    STEP,
    checkpoint_folder,
    commits,
    inspect,
    prune,
    read_commit,
    sweep,
)
from core_torch.checkpoint.run_lock import folder_lock
from core_torch.checkpoint.sound import Saved, find, read_state, verify
from core_torch.checkpoint.table import Piece
from core_torch.cli.ckpt_options import (
    CkptLsOptions,
    CkptPruneOptions,
    CkptShowOptions,
    CkptVerifyOptions,
)
from core_torch.errors import EXIT_OK, CheckpointCorrupt, CheckpointError
from core_torch.report.text import counted, human_bytes, human_count, one_line

_WIDE = 400  # characters of an error in a line of a list


def run(options: Any, words: list[str]) -> int:
    """Runs the command whose options these are.

    Args:
        options: of one of the four commands.
        words: the folder of a run, or for ``verify`` and ``show`` also that of one step.

    Returns:
        0; from ``verify`` 4 where a commit is damaged.

    Raises:
        CheckpointError: nothing is committed there, or what is to be shown is damaged.
        ConfigError: another process holds the folder that is to be pruned.
    """
    command: dict[type, Callable[[Any, Path], int]] = {
        CkptLsOptions: list_commits,
        CkptVerifyOptions: verify_commits,
        CkptShowOptions: show_commit,
        CkptPruneOptions: prune_commits,
    }
    return command[type(options)](options, Path(words[0]))


def list_commits(options: CkptLsOptions, folder: Path) -> int:
    """One line for each step: layout, size, or why it does not count. Reads no tensors."""
    found = _steps(folder)
    for path, problem in found:
        try:
            if problem is not None:
                raise problem
            print(f"{path.name}  {_described(path)}")
        except CheckpointError as error:
            print(_damaged(path, error))
    whole = sum(problem is None for _, problem in found)
    print(f"{counted(whole, 'commit')} in {one_line(checkpoint_folder(folder))}")
    return EXIT_OK


def verify_commits(options: CkptVerifyOptions, folder: Path) -> int:
    """Reads every file of one step, or of all steps of a run, and says which are damaged."""
    one = STEP.fullmatch(folder.absolute().name)
    paths = [find(folder)] if one else [path for path, _ in _steps(folder)]
    damaged = 0
    for path in paths:
        try:
            verify(path)
        except CheckpointError as error:
            damaged += 1
            print(_damaged(path, error))
        else:
            print(f"{path.name}  sound: {_size(path)}")
    if not damaged:
        return EXIT_OK
    if not one:
        config = shlex.quote(str(folder / "config.toml"))
        print(f"next: twinshard train {config} --resume auto     (takes the newest sound one)")
    return CheckpointCorrupt.exit_code


def show_commit(options: CkptShowOptions, folder: Path) -> int:
    """What one commit holds: counters, settings that must not change, tensors by kind."""
    path = find(folder, options.step)
    commit = read_commit(path)
    saved = read_state(path, commit)
    scalars = saved.scalars
    print(f"{one_line(path, _WIDE)}")
    print(f"  {_described(path)}")
    for name in ("tokens", "replica_bytes", "shard_bytes", "config_hash"):
        if name in scalars:
            print(f"  {name:<16}{one_line(scalars[name], _WIDE)}")
    for name, value in (scalars.get("fixed") or {}).items():
        print(f"  {one_line(name):<16}{one_line(value)}")
    if sync := scalars.get("sync"):
        print(f"  {'rounds':<16}{one_line(sync.get('rounds'))}")
    print("tensors")
    for line in _kinds(saved):
        print(f"  {line}")
    print("files")
    for name, record in sorted(commit.files.items()):
        print(f"  {name:<40}{human_bytes(record.bytes):>10}  sha256 {record.sha256[:16]}...")
    return EXIT_OK


def prune_commits(options: CkptPruneOptions, folder: Path) -> int:
    """Deletes all but the newest commits, and what a crash left half done."""
    found = _steps(folder)
    with folder_lock(folder, force=options.force):
        before = commits(folder)
        sweep(folder)
        prune(folder, options.keep)
        after = commits(folder)
    for path in before:
        print(f"{path.name}  {'kept' if path in after else 'deleted'}")
    for path, problem in found:
        if problem is not None:
            print(f"{_damaged(path, problem)}; left as it is")
    return EXIT_OK


def _steps(folder: Path) -> list[tuple[Path, CheckpointError | None]]:
    """All steps of a run.

    Raises:
        CheckpointError: there are none.
    """
    found = inspect(folder)
    if not found:
        find(folder)
    return found


def _described(path: Path) -> str:
    saved = read_state(path, read_commit(path))
    layout = f"{counted(saved.replicas, 'replica')} x {counted(saved.shards, 'shard')}"
    return f"{layout}, {_size(path)}"


def _size(path: Path) -> str:
    files = read_commit(path).files
    return f"{counted(len(files), 'file')}, {human_bytes(sum(r.bytes for r in files.values()))}"


def _damaged(path: Path, error: CheckpointError) -> str:
    return f"{path.name}  damaged: {one_line(error.what, _WIDE)}"


def _kinds(saved: Saved) -> Iterator[str]:
    """A line for each kind of tensor in each folder of files."""
    held: dict[tuple[str, str, str], dict[str, Piece]] = defaultdict(dict)
    for file, pieces in saved.table.items():
        for name, piece in pieces.items():
            kind = name.partition("/")[0]
            held[file.partition("/")[0], kind, piece.dtype][name] = piece
    for (folder, kind, dtype), pieces in sorted(held.items()):
        numbers = human_count(sum(piece.numbers for piece in pieces.values()))
        names = counted(len(pieces), "tensor")
        yield f"{folder:<14}{one_line(kind):<16}{names:<14}{numbers:>8} {dtype}"
