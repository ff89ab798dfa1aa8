"""A damaged or forged step is refused with the file's name, and the one before is taken."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from core_torch.checkpoint.commit import COMMIT, read_commit
from core_torch.checkpoint.load import read
from core_torch.checkpoint.sound import newest_sound, verify
from core_torch.checkpoint.state import Layout
from core_torch.errors import CheckpointCorrupt, CheckpointMismatch
from core_torch.tests.checkpoint_cases import (
    commit_step,
    recommit,
    rewrite_json,
)

FIRST = Layout(0, 0, 2, 2)
OWN, OTHER = "replica-0000/shard-0000.safetensors", "replica-0000/shard-0001.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return commit_step(tmp_path / "run", 5, replicas=2, shards=2)


FILES = [OWN, "tensors/shard-0001.safetensors", "state.json", COMMIT]


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_anywhere_is_found(folder: Path, file: str) -> None:
    path = folder / file
    sound = path.read_bytes()
    for place in range(0, len(sound), max(1, len(sound) // 60)):
        bad = bytearray(sound)
        bad[place] ^= 1 << (place % 8)
        path.write_bytes(bad)
        with pytest.raises((CheckpointCorrupt, CheckpointMismatch)):
            verify(folder)
    path.write_bytes(sound)
    verify(folder)


def test_the_error_names_the_file_and_both_hashes(folder: Path) -> None:
    want = read_commit(folder).files[OWN].sha256
    data = bytearray((folder / OWN).read_bytes())
    data[-1] ^= 1
    (folder / OWN).write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match=f"{OWN}: want sha256 {want}, got sha256 [0-9a-f]+"):
        read(folder, layout=FIRST)


def truncate(folder: Path) -> None:
    os.truncate(folder / OWN, 50)


def lose(folder: Path) -> None:
    (folder / OTHER).unlink()


def swap(folder: Path) -> None:
    first, second = folder / OWN, folder / "replica-0001/shard-0000.safetensors"
    assert first.stat().st_size == second.stat().st_size  # so that only the hash can tell
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b), second.write_bytes(a)


def add(folder: Path) -> None:
    (folder / "tensors/shard-0002.safetensors").write_bytes(b"")


def break_json(folder: Path) -> None:
    (folder / COMMIT).write_text('{"format": 1,')


def nest_json(folder: Path) -> None:
    (folder / COMMIT).write_text("[" * 200_000)


def repeat_key(folder: Path) -> None:
    text = (folder / COMMIT).read_text()
    (folder / COMMIT).write_text(text.replace("{", '{"format": 1,', 1))


def rename_entry(new: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        def change(commit: Any) -> None:
            commit["files"][new] = commit["files"].pop(OWN)

        rewrite_json(folder / COMMIT, change)

    return damage


def link_file(folder: Path) -> None:
    outside = folder.parents[2] / "outside"
    shutil.move(folder / OWN, outside)
    (folder / OWN).symlink_to(outside)


def link_folder(folder: Path) -> None:
    outside = folder.parents[2] / "outside"
    shutil.move(folder / "tensors", outside)
    (folder / "tensors").symlink_to(outside)


def link_step(folder: Path) -> None:
    outside = folder.parents[2] / "outside"
    shutil.move(folder, outside)
    folder.symlink_to(outside)


def make_pipe(folder: Path) -> None:
    (folder / OWN).unlink()
    os.mkfifo(folder / OWN)


DAMAGES = {
    "truncated": (truncate, "bytes, got 50 bytes"),
    "missing": (lose, "got no such file"),
    "swapped": (swap, "want sha256"),
    "unexpected": (add, "want no such file"),
    "broken JSON": (break_json, "want JSON"),
    "deeply nested JSON": (nest_json, "nested too deeply"),
    "repeated key": (repeat_key, "a key appears twice"),
    "name that climbs": (rename_entry("../../secret"), "names of a checkpoint's files"),
    "name that climbs late": (rename_entry("tensors/../../x"), "names of a checkpoint's files"),
    "absolute name": (rename_entry("/etc/passwd"), "names of a checkpoint's files"),
    "name with a line feed": (rename_entry(OWN + "\n"), "names of a checkpoint's files"),
    "linked file": (link_file, "want a regular file, got a link"),
    "linked folder": (link_folder, "want a regular file, got a link"),
    "linked step": (link_step, "want a folder, got a link"),
    "pipe": (make_pipe, "got a special file"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damage_is_refused_and_resume_takes_the_commit_before(tmp_path: Path, case: str) -> None:
    damage, message = DAMAGES[case]
    run = tmp_path / "run"
    before, newest = (commit_step(run, step, replicas=2, shards=2) for step in (4, 5))
    damage(newest)
    with pytest.raises(CheckpointCorrupt, match=message):
        verify(newest)
    with pytest.raises(CheckpointCorrupt, match=message):
        read(run, layout=FIRST, step=5)
    found, [reason] = newest_sound(run)
    assert found == before and message.split(",")[0] in str(reason)


def test_another_format_is_refused_with_both_versions(folder: Path) -> None:
    rewrite_json(folder / COMMIT, lambda commit: commit.update(format=2))
    with pytest.raises(CheckpointMismatch, match="format version: saved 2, now 1"):
        read(folder, layout=FIRST)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", True),
        ("step", -5),
        ("config_hash", 7),
        ("config_hash", "other"),
        ("files", []),
        ("extra", 1),
    ],
)
def test_a_commit_with_a_wrong_field_is_refused(folder: Path, key: str, value: Any) -> None:
    rewrite_json(folder / COMMIT, lambda commit: commit.update({key: value}))
    with pytest.raises(CheckpointCorrupt):
        read(folder, layout=FIRST)


def forge_state(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda folder: rewrite_json(folder / "state.json", change)


def output_weight(state: Any) -> Any:
    return state["tensors"][OWN]["param/output.weight"]


FORGERIES = {
    "many ranks": forge_state(lambda s: s["layout"].update(replicas=10**12)),
    "no shards": forge_state(lambda s: s["layout"].update(shards=0)),
    "huge tensor": forge_state(lambda s: output_weight(s).update(rows=10**15)),
    "other columns": forge_state(lambda s: output_weight(s).update(shape=[7, 4])),
    "negative start": forge_state(lambda s: output_weight(s).update(start=-1)),
    "overlapping rows": forge_state(lambda s: output_weight(s).update(start=1)),
    "unknown dtype": forge_state(lambda s: output_weight(s).update(dtype="os.system")),
    "other dtype": forge_state(
        lambda s: [
            s["tensors"][f]["param/output.weight"].update(dtype="int32") for f in (OWN, OTHER)
        ]
    ),
    "no table": forge_state(lambda s: s.update(tensors={OWN: 3})),
    "tensor less": lambda folder: save_file({}, folder / OWN),
    "pickle": lambda folder: (folder / OWN).write_bytes(pickle.dumps(Bomb())),
}


class Bomb:
    """Leaves a trace if anything ever unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("unpickled",)


@pytest.mark.parametrize("case", FORGERIES)
def test_a_forger_who_renews_the_hashes_is_refused_all_the_same(
    folder: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parents[2])
    forge: Callable[[Path], None] = FORGERIES[case]
    forge(folder)
    recommit(folder)
    with pytest.raises(CheckpointCorrupt):
        verify(folder)
    with pytest.raises(CheckpointCorrupt):
        read(folder, layout=FIRST)
    assert not Path("unpickled").exists()
