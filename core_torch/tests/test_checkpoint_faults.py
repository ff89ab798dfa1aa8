"""No failure while saving costs an earlier commit; one run at a time writes to a folder."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core_torch.checkpoint.commit import COMMIT, commits, latest, sweep
from core_torch.checkpoint.load import read
from core_torch.checkpoint.run_lock import run_lock
from core_torch.checkpoint.save import Gather
from core_torch.checkpoint.sound import verify
from core_torch.checkpoint.state import Layout, SavedState, Shard
from core_torch.errors import CheckpointError, ConfigError
from core_torch.tests.checkpoint_cases import (
    commit_step,
    run_ranks,
    save_as,
    state_of,
)


def save_with(run: Path, change: Callable[[Layout, SavedState], SavedState]) -> list[Any]:
    """What each of 2 x 2 ranks gets when their states were changed before saving."""

    def work(layout: Layout, barrier: Callable[[], None], gather: Gather) -> Path:
        state = change(layout, state_of(layout))
        return save_as(layout, barrier, gather, run, state)

    return run_ranks(2, 2, work)


def with_own(name: str, make: Callable[[Layout], Shard], *ranks: int) -> Callable[..., SavedState]:
    def change(layout: Layout, state: SavedState) -> SavedState:
        if layout.rank in ranks:
            state.own[name] = make(layout)
        return state

    return change


COMPLEX = Shard(torch.zeros(1, dtype=torch.complex64), (1,), 0)
TWO = Shard(torch.zeros(2, 3), (2, 3), 0)
HALF = Shard(torch.zeros(2, 3), (4, 3), 0)
UNSAVABLE = {
    "a dtype": (with_own("param/c", lambda _: COMPLEX, 3), "rank 3 (replica 1, shard 1)"),
    "rows twice": (with_own("param/d", lambda _: TWO, 0, 1, 2, 3), "row 2 is followed by row 0"),
    "a name on one shard": (with_own("param/e", lambda _: HALF, 2), "param/e: 2 of 4 rows"),
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
    outside.mkdir()
    run.mkdir()
    (run / "ckpt").symlink_to(outside)
    uses: list[Callable[[], Any]] = [
        lambda: commit_step(run, 5),
        lambda: latest(run),
        lambda: sweep(run),
    ]
    for use in uses:
        with pytest.raises(CheckpointError, match="ckpt is a link to"):
            use()
    assert list(outside.iterdir()) == []


def test_replacing_a_linked_step_leaves_what_it_points_to(tmp_path: Path) -> None:
    folder = commit_step(tmp_path / "run", 5)
    shutil.move(folder, tmp_path / "outside")
    folder.symlink_to(tmp_path / "outside")
    commit_step(tmp_path / "run", 5)
    verify(folder)
    assert (tmp_path / "outside" / COMMIT).exists()


FATES = """
import os, resource, signal, sys
from pathlib import Path
from core_torch.checkpoint.background import Saver
from core_torch.checkpoint.run_lock import run_lock
from core_torch.checkpoint.state import Layout
from core_torch.tests.checkpoint_cases import commit_step, state_of

def meet(run, fate):
    def die(point):
        if point == fate.removeprefix("behind, "):
            os.kill(os.getpid(), signal.SIGKILL)
    if fate == "disk full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
    if fate == "in the run":
        with run_lock(run):
            die(fate)
    if fate.startswith("behind, "):
        one, told = Layout(0, 0, 1, 1), dict(asynchronous=True, tokenizer=None, keep=2)
        saver = Saver(run, one, gather=lambda value: [value], at_point=die, **told)
        saver.save(state_of(one, mark=2.0), 9)
        saver.wait()
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
    "behind, ckpt_after_shards": ([7, 8, 9], 1.0),  # in the thread, training goes on
    "behind, ckpt_before_commit": ([7, 8, 9], 1.0),
    "behind, ckpt_after_rename": ([7, 8, 9], 2.0),
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
    assert [path.name for path in commits(run)] == ["step-00000008", "step-00000009"]
    assert not [name for name in os.listdir(run / "ckpt") if name.startswith(".")]


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
