"""Nothing that was not committed is loaded, and no failure costs an earlier commit."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from core_torch.checkpoint.commit import COMMIT, commits, latest, read_commit, sweep
from core_torch.checkpoint.load import newest_sound, read, verify
from core_torch.checkpoint.run_lock import run_lock
from core_torch.checkpoint.save import Gather, save
from core_torch.checkpoint.state import Layout, SavedState, Shard
from core_torch.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch, ConfigError
from core_torch.tests.checkpoint_cases import (
    commit_step,
    recommit,
    rewrite_json,
    run_ranks,
    state_of,
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
    for use in (lambda: verify(newest), lambda: read(run, layout=FIRST, step=5)):
        with pytest.raises(CheckpointCorrupt, match=message):
            use()
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


def forge_state(change: Callable[[Any], None]) -> Callable[[Path], None]:
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
    FORGERIES[case](folder)
    recommit(folder)
    for use in (lambda: verify(folder), lambda: read(folder, layout=FIRST)):
        with pytest.raises(CheckpointCorrupt):
            use()
    assert not Path("unpickled").exists()


def save_with(run: Path, change: Callable[[Layout, SavedState], SavedState]) -> list[Any]:
    """What each of 2 x 2 ranks gets when their states were changed before saving."""

    def work(layout: Layout, barrier: Callable[[], None], gather: Gather) -> Path:
        state = change(layout, state_of(layout))
        ways = {"mesh_layout": layout, "barrier": barrier, "gather": gather}
        return save(run, state, step=5, tokenizer=None, keep=2, **ways)

    return run_ranks(2, 2, work)


def with_own(name: str, make: Callable[[Layout], Shard], *ranks: int) -> Callable[..., SavedState]:
    def change(layout: Layout, state: SavedState) -> SavedState:
        if layout.rank in ranks:
            state.own[name] = make(layout)
        return state

    return change


COMPLEX = Shard(torch.zeros(1, dtype=torch.complex64), (1,), 0)
TWO = Shard(torch.zeros(2, 3), (2, 3), 0)
UNSAVABLE = {
    "a dtype": (with_own("param/c", lambda _: COMPLEX, 3), "rank 3 (replica 1, shard 1)"),
    "rows twice": (with_own("param/d", lambda _: TWO, 0, 1, 2, 3), "row 2 is followed by row 0"),
    "a name on one shard": (with_own("param/e", lambda _: TWO, 2), "param/e is missing in"),
    "shards that disagree": (
        with_own("step/f", lambda at: Shard(torch.tensor(float(at.shard)), (), 0), 0, 1, 2, 3),
        "step/f is 1.0 on one shard",
    ),
}


@pytest.mark.parametrize("case", UNSAVABLE)
def test_one_rank_that_cannot_save_stops_all_and_costs_no_commit(tmp_path: Path, case: str) -> None:
    before = commit_step(tmp_path, 4, replicas=2, shards=2)
    change, message = UNSAVABLE[case]
    errors = save_with(tmp_path, change)
    assert all(type(error) is CheckpointError and message in str(error) for error in errors)
    assert [before] == list((tmp_path / "ckpt").iterdir())


def test_a_disk_without_room_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    errors = save_with(tmp_path, lambda layout, state: state)
    assert all("needs 452 bytes" in str(e) and "ckpt has 100" in str(e) for e in errors)
    assert list((tmp_path / "ckpt").iterdir()) == []


def test_a_linked_checkpoint_folder_is_refused_and_nothing_is_written_there(tmp_path: Path) -> None:
    outside, run = tmp_path / "outside", tmp_path / "run"
    outside.mkdir(), run.mkdir()
    (run / "ckpt").symlink_to(outside)
    for use in (lambda: commit_step(run, 5), lambda: latest(run), lambda: sweep(run)):
        with pytest.raises(CheckpointError, match="ckpt is a link to"):
            use()
    assert list(outside.iterdir()) == []


def test_replacing_a_linked_step_leaves_what_it_points_to(tmp_path: Path) -> None:
    folder = commit_step(tmp_path / "run", 5)
    link_step(folder)
    commit_step(tmp_path / "run", 5)
    verify(folder)
    assert (tmp_path / "outside" / COMMIT).exists()


FATES = """
import os, resource, signal, sys
from pathlib import Path
from core_torch.checkpoint.run_lock import run_lock
from core_torch.tests.checkpoint_cases import commit_step

def meet(run, fate):
    def die(point):
        if point == fate:
            os.kill(os.getpid(), signal.SIGKILL)
    if fate == "disk full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
    if fate == "in the run":
        run_lock(run).__enter__()
        die(fate)
    commit_step(run, 9, mark=2.0, at_point=die)

for run in Path(sys.argv[1]).iterdir():
    child = os.fork()  # so that torch is imported once
    if child == 0:
        try:
            meet(run, run.name)
        except Exception as error:
            (run / "error.txt").write_text(str(error)[:200])
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    (run / "status.txt").write_text(str(os.waitstatus_to_exitcode(status)))
"""

AFTER = {  # killed at this point: steps that then count, and which save of step 9 resumes
    "ckpt_after_shards": ([7, 8, 9], 1.0),
    "ckpt_before_commit": ([7, 8, 9], 1.0),
    "ckpt_before_rename": ([7, 8, 9], 1.0),
    "ckpt_between_renames": ([7, 8], 1.0),
    "ckpt_after_rename": ([7, 8, 9], 2.0),
    "ckpt_after_uncommit": ([8, 9], 2.0),
}


@pytest.fixture(scope="module")
def fates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with commits 7, 8, 9, named for what then befell a process that saved 9 again."""
    runs = tmp_path_factory.mktemp("fates")
    for name in [*AFTER, "disk full", "in the run"]:
        for step in (7, 8, 9):
            commit_step(runs / name, step, mark=1.0, keep=3)
    subprocess.run([sys.executable, "-c", FATES, str(runs)], check=True, timeout=240)
    return runs


@pytest.mark.parametrize("point", AFTER)
def test_a_kill_while_saving_leaves_only_whole_commits_and_the_next_save_works(
    fates: Path, point: str
) -> None:
    run, one = fates / point, Layout(0, 0, 1, 1)
    assert int((run / "status.txt").read_text()) == -signal.SIGKILL
    steps, mark = AFTER[point]
    assert [int(path.name[-8:]) for path in commits(run)] == steps
    with run_lock(run):  # what a resumed run does first
        assert read(run, layout=one, step=9).scalars["mark"] == mark
        verify(run / "ckpt/step-00000008")
        commit_step(run, 9, mark=3.0)
    assert read(run, layout=one).scalars["mark"] == 3.0
    assert sorted(os.listdir(run / "ckpt")) == ["step-00000008", "step-00000009"]


def test_a_full_disk_is_an_error_that_keeps_the_earlier_commits(fates: Path) -> None:
    run = fates / "disk full"
    assert "File too large" in (run / "error.txt").read_text()
    assert sorted(os.listdir(run / "ckpt")) == [f"step-0000000{k}" for k in (7, 8, 9)]
    assert read(run, layout=Layout(0, 0, 1, 1)).scalars["mark"] == 1.0


def test_the_lock_of_a_killed_process_is_taken_over(fates: Path) -> None:
    run = fates / "in the run"
    assert int((run / "status.txt").read_text()) == -signal.SIGKILL
    left = json.loads((run / "run.json").read_text())
    assert left["running"] and left["pid"] != os.getpid()
    with run_lock(run):
        assert json.loads((run / "run.json").read_text())["pid"] == os.getpid()


def test_a_second_run_in_a_folder_is_refused_and_names_the_first(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with run_lock(run):
        record = json.loads((run / "run.json").read_text())
        assert record["pid"] == os.getpid() and record["argv"] == sys.argv
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on"), run_lock(run):
            pass
        with run_lock(run, force=True):
            pass
    with run_lock(run):
        pass
    assert run.stat().st_mode & 0o777 == 0o700


def test_a_run_on_another_machine_is_believed_alive_until_it_says_otherwise(tmp_path: Path) -> None:
    record = {"pid": 1, "host": "elsewhere", "running": True}
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="process 1 on elsewhere"), run_lock(tmp_path):
        pass
    (tmp_path / "run.json").write_text(json.dumps({**record, "running": False}))
    with run_lock(tmp_path):
        pass


def test_an_error_in_the_run_still_frees_the_folder(tmp_path: Path) -> None:
    with pytest.raises(KeyError), run_lock(tmp_path):
        raise KeyError
    assert not json.loads((tmp_path / "run.json").read_text())["running"]


def test_a_linked_run_file_is_refused_and_its_target_left_alone(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    (tmp_path / "run.json").symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="cannot be written"), run_lock(tmp_path):
        pass
    assert (tmp_path / "target").read_text() == "mine"
