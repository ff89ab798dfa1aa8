"""``twinshard ckpt``: what it says of sound and damaged commits, exit codes, what it deletes."""

import fcntl
import json
from pathlib import Path

import pytest

from core_torch.checkpoint.commit import COMMIT, commits
from core_torch.cli import main
from core_torch.tests.checkpoint_cases import commit_step
from core_torch.tests.test_cli import HEAVY, modules_after

FILE = "replica-0000/shard-0000.safetensors"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with four commits; that of step 3 misses a file, that of step 2 has a flipped bit."""
    for step in (1, 2, 3, 4):
        commit_step(tmp_path, step, keep=9)
    data = bytearray((tmp_path / "ckpt/step-00000002" / FILE).read_bytes())
    data[-1] ^= 1
    (tmp_path / "ckpt/step-00000002" / FILE).write_bytes(data)
    (tmp_path / "ckpt/step-00000003" / FILE).unlink()
    return tmp_path


def test_ls_names_every_step_and_what_does_not_count(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", "ls", str(run)]) == 0
    *steps, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in steps] == [f"step-0000000{n}" for n in (1, 2, 3, 4)]
    assert steps[0].startswith("step-00000001  1 replica x 1 shard, 3 files, ")
    assert f"damaged: {FILE}: want" in steps[2] and "got no such file" in steps[2]
    assert last.startswith("3 commits in ")  # a flipped bit shows only to those who read all


def test_verify_reads_everything_names_the_damaged_and_ends_with_code_4(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", "verify", str(run)]) == 4
    lines = capsys.readouterr().out.splitlines()
    assert [" sound: " in line for line in lines[:4]] == [True, False, False, True]
    assert f"step-00000002  damaged: {FILE}: want sha256 " in lines[1]
    assert "--resume auto" in lines[4]
    assert main(["ckpt", "verify", str(run / "ckpt" / "step-00000004")]) == 0
    assert main(["ckpt", "verify", str(run / "ckpt" / "step-00000002")]) == 4


def test_show_says_what_the_newest_or_a_named_commit_holds(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", "show", str(run)]) == 0
    text = capsys.readouterr().out
    assert "step-00000004" in text and "c0ffee" in text and FILE in text
    rows = [line.split() for line in text.splitlines()]
    assert ["tensors", "anchor", "1", "tensor", "21", "float32"] in rows
    assert ["replica-0000", "param", "2", "tensors", "23", "float32"] in rows
    assert main(["ckpt", "show", str(run), "--step", "1"]) == 0
    assert "step-00000001" in capsys.readouterr().out
    assert main(["ckpt", "show", str(run), "--step", "3"]) == 4
    assert main(["ckpt", "show", str(run), "--step", "7"]) == 4
    assert "commits there: step-00000001, step-00000002" in capsys.readouterr().err


def test_prune_keeps_the_newest_and_leaves_what_does_not_count(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "ckpt" / ".tmp-00000009-0123456789abcdef").mkdir()
    assert main(["ckpt", "prune", str(run), "--keep", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["step-00000001  deleted", "step-00000002  kept", "step-00000004  kept"]
    assert lines[3].startswith("step-00000003  damaged: ") and lines[3].endswith("left as it is")
    assert [path.name for path in commits(run)] == ["step-00000002", "step-00000004"]
    names = sorted(path.name for path in (run / "ckpt").iterdir())
    assert names == ["step-00000002", "step-00000003", "step-00000004"]


def test_prune_keeps_off_a_run_that_trains_and_never_keeps_less_than_two(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = json.dumps({"pid": 17, "host": "elsewhere", "running": False})
    (run / "run.json").write_text(said)
    with (run / "run.json").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(["ckpt", "prune", str(run)]) == 2
        assert "in use by process 17 on elsewhere" in capsys.readouterr().err
    assert main(["ckpt", "prune", str(run), "--keep", "1"]) == 2
    assert len(commits(run)) == 3
    assert main(["ckpt", "prune", str(run)]) == 0
    assert (run / "run.json").read_text() == said


@pytest.mark.parametrize("command", ["ls", "verify", "show", "prune"])
def test_a_folder_without_commits_ends_with_code_4(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", command, str(tmp_path)]) == 4
    assert "commits there: none" in capsys.readouterr().err


def test_text_from_files_reaches_the_terminal_without_control_codes(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "ckpt" / "step-00000004" / COMMIT
    path.write_text(json.dumps({"format": "\x1b[31mred"}))
    assert main(["ckpt", "ls", str(run)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_no_command_needs_torch(run: Path) -> None:
    for command in ("ls", "verify", "show", "prune"):
        words = ["ckpt", command, str(run)]
        code = f"from core_torch.cli import main; main({words!r})"
        assert not modules_after(code) & HEAVY, command
