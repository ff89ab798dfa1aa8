"""Real processes: what launch returns, raises and leaves behind (nothing)."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from core_torch.cli import launch as launch_module
from core_torch.cli.events import EventLines, RankFailed, error_event, error_from
from core_torch.cli.launch import launch
from core_torch.errors import ConfigError, NonFinite, PeerLost
from core_torch.tests.rank_jobs import MODULE

ROOT = Path(__file__).parents[2]


def run(kind: str, ranks: int = 2, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Result and events of a job of rank_jobs.py."""
    events: list[dict[str, Any]] = []
    result = launch({"kind": kind, "value": "ü"}, ranks, events.append, module=MODULE, **options)
    return result, events


def is_alive(pid: int) -> bool:
    """Whether a process exists and is more than an entry that waits to be reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


def assert_all_end(pids: list[int], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert [pid for pid in pids if is_alive(pid)] == []


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "GRACE_SECONDS", 2.0)  # the machine may be busy


def start_parent(
    kind: str, reports: int, grace: float = 3.0
) -> tuple[subprocess.Popen[str], list[int]]:
    """A process that launches two ranks, and the process ids that these reported."""
    parent = subprocess.Popen(
        [sys.executable, "-m", MODULE, "parent", kind, str(grace)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    return parent, [int(parent.stdout.readline()) for _ in range(reports)]


def test_launch_returns_what_rank_0_returned_and_passes_events_on() -> None:
    result, events = run("echo", ranks=3)
    assert result == [0, 3, "ü"]
    assert sorted(event["rank"] for event in events) == [0, 1, 2]
    assert events[0] == {"event": "hello", "value": "ü", "rank": events[0]["rank"]}


def test_the_error_that_explains_the_others_is_raised_with_all_its_lines() -> None:
    with pytest.raises(NonFinite) as caught:
        run("fail")
    error = caught.value
    assert (error.what, error.where) == ("nan loss", "step 3")
    assert (error.likely, error.next) == ("a large lr", "--optim.lr 1e-4")


def test_a_killed_rank_is_named_with_signal_and_step() -> None:
    events: list[dict[str, Any]] = []
    with pytest.raises(PeerLost, match="rank 1 of 2 was killed by SIGKILL") as caught:
        launch({"kind": "killed"}, 2, events.append, module=MODULE)
    assert caught.value.where == "step 7"
    assert_all_end([event["pid"] for event in events if event["event"] == "asleep"], 0)


def test_a_fault_of_ours_shows_the_end_of_the_rank_s_log() -> None:
    with pytest.raises(RankFailed, match="rank 1 raised IndexError") as caught:
        run("bug")
    assert "rank_jobs.py" in caught.value.likely
    assert caught.value.exit_code == 1


def test_silence_beyond_the_deadline_ends_all_ranks_and_shows_where_they_hang() -> None:
    events: list[dict[str, Any]] = []
    with pytest.raises(PeerLost, match="no word from rank 0, 1 for 15 s") as caught:
        launch({"kind": "sleep"}, 2, events.append, module=MODULE, silence_seconds=15.0)
    assert "in sleep" in caught.value.likely
    assert_all_end([event["pid"] for event in events], 0)


def test_an_error_in_the_listener_leaves_no_rank_behind() -> None:
    pids = []

    def stumble(event: dict[str, Any]) -> None:
        pids.append(event["pid"])
        if len(pids) == 4:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        launch({"kind": "stubborn"}, 2, stumble, module=MODULE)
    assert_all_end(pids, 2)  # with the ranks' own children


def test_the_temporary_folder_is_private_and_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    modes: list[int] = []
    launch(
        {"kind": "echo", "value": 0},
        1,
        lambda event: modes.extend(p.stat().st_mode & 0o777 for p in tmp_path.iterdir()),
        module=MODULE,
    )
    assert modes == [0o700]
    assert list(tmp_path.iterdir()) == []


def test_logs_stay_where_the_caller_wants_them(tmp_path: Path) -> None:
    run("echo", logs=tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank-0.log", "rank-1.log"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_parent_ends_all_and_says_one_line(number: signal.Signals) -> None:
    parent, pids = start_parent("sleep", 2)
    parent.send_signal(number)
    _, stderr = parent.communicate(timeout=20)
    assert (parent.returncode, stderr) == (130, f"Interrupted: {number.name}\n")
    assert_all_end(pids, 0)


def test_a_second_signal_does_not_wait_for_ranks_that_ignore_the_first() -> None:
    parent, pids = start_parent("stubborn", 4, grace=60.0)
    begin = time.monotonic()
    parent.send_signal(signal.SIGINT)
    time.sleep(0.3)
    parent.send_signal(signal.SIGINT)
    parent.communicate(timeout=20)
    assert parent.returncode == 130
    assert time.monotonic() - begin < 20
    assert_all_end(pids, 2)


def test_ranks_end_by_themselves_when_the_parent_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    parent, pids = start_parent("stubborn", 4)
    parent.kill()
    parent.communicate(timeout=20)
    assert_all_end(pids)
    assert list(tmp_path.iterdir()) == []  # they also remove the folder that the parent made


def test_every_typed_error_survives_the_way_to_the_parent() -> None:
    sent = ConfigError("a", where="b", likely="c", next="d")
    assert str(error_from(error_event(sent), 0)) == str(sent)
    unknown = {"event": "error", "class": "os", "what": "x", "where": "", "likely": "", "next": ""}
    assert isinstance(error_from(unknown, 0), RankFailed)


def test_events_are_cut_at_lines_however_the_bytes_arrive() -> None:
    lines = EventLines()
    assert lines.feed(b'{"event": "a"}\n{"ev') == [{"event": "a"}]
    assert lines.feed(b'ent": "b"}\n') == [{"event": "b"}]
