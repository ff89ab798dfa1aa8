"""``twinshard train`` from the command line to the files of a run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from core_torch.cli import main
from core_torch.cli.progress import ProgressView
from core_torch.config_file import from_toml
from core_torch.report.records import load_run

ROOT = Path(__file__).parents[2]
SMALL = (
    "--model.dim 16 --model.hidden 32 --model.layers 1 --model.heads 2 --model.kv-heads 1 "
    "--data.sequence 16 --data.batch 2 --train.evaluate-sequences 4 --mesh.device cpu"
).split()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text, in which the command runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question.\n" * 200)
    return tmp_path


def words(run: str, *more: str) -> list[str]:
    """A small training command."""
    return ["train", *SMALL, "--data.path", "text.txt", "--run", run, *more]


def test_a_run_from_its_first_step_to_text_and_report(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = words("a b", "--mesh.replicas", "2", "--train.steps", "10", "--sync.every", "4")
    assert main(line) == 0
    captured = capsys.readouterr()
    assert "a b: EDiT, 10 steps on 2 replicas x 1 shard" in captured.out
    assert "twinshard report 'a b'" in captured.out
    assert captured.err.count("EDiT: step") == 10  # a line for each tenth
    records = load_run(folder / "a b")
    assert {n: len(steps) for n, steps in records.metrics.items()} == {0: 10, 1: 10}
    assert [(e.step, e.forced) for e in records.events] == [(4, False), (8, False), (10, True)]
    assert records.summary["rounds"] == 3
    assert records.outcome["exit_code"] == 0
    assert from_toml(folder / "a b" / "config.toml").mesh.replicas == 2

    assert main(line) == 2  # its records are not to be mixed with those of another run
    assert "a b holds a run already" in capsys.readouterr().err
    assert load_run(folder / "a b").outcome["exit_code"] == 0

    more = ["--resume", "auto", "--train.steps", "12", "--profile.steps", "12:12"]
    assert main([*line, *more]) == 0  # the later option counts
    profiles = sorted(path.name for path in (folder / "a b" / "profile").iterdir())
    assert profiles == ["rank-0000.json", "rank-0001.json"]
    assert [step.step for step in load_run(folder / "a b").metrics[1]] == list(range(1, 13))

    capsys.readouterr()
    sample = ["sample", "a b", "--prompt", "To be", "--tokens", "3", "--seed", "1"]
    assert main(sample) == 0
    first = capsys.readouterr().out
    assert first.startswith("To be")
    assert main(sample) == 0
    assert capsys.readouterr().out == first
    assert main(["report", "a b", "--out", "page"]) == 0
    assert "page/report.html" in capsys.readouterr().out
    assert (folder / "page" / "report.html").is_file()


@pytest.mark.parametrize("name", ["sample", "report"])
def test_a_folder_that_is_no_run_is_named(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, str(folder)]) == 3
    assert "is no run: it has no config.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--data.sequence", "1024"], 3, "DataError"),
        (["--model.vocabulary", "100"], 2, "model.vocabulary: 100 is less than the tokenizer's"),
    ],
)
def test_what_cannot_train_is_refused_before_any_rank_starts(
    folder: Path,
    more: list[str],
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)  # nobody may start a process
    assert main(words("a", "--mesh.replicas", "2", *more)) == code
    assert message in capsys.readouterr().err


def test_ctrl_c_ends_the_run_with_the_command_that_goes_on(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "core_torch", *words("a", "--train.steps", "1000000")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = folder / "a" / "metrics.jsonl"
    end = time.monotonic() + 90
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Interrupted: SIGINT" in stderr
    assert "twinshard train a/config.toml --resume auto" in stderr
    assert "Traceback" not in stderr
    assert not (folder / "a" / "ckpt").exists()
    outcome = json.loads((folder / "a" / "outcome.json").read_text())
    assert (outcome["exit_code"], outcome["state"]) == (130, "Interrupted")


def test_torchrun_starts_the_same_training(folder: Path) -> None:
    more = ["--mesh.shards", "2", "--train.steps", "2"]
    options = ["--standalone", "--nproc-per-node", "2", "-m", "--", "core_torch"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, *words("a", *more)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("a: EDiT, 2 steps on 1 replica x 2 shards") == 1
    assert load_run(folder / "a").summary["steps"] == 2


def test_the_bar_stands_only_in_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    step = {"event": "step", "loss": 1.0, "replica_bytes": 2_000, "committed": None}
    with ProgressView() as view:
        view({"event": "begin", "method": "edit", "step": 0, "steps": 100})
        for number in range(1, 101):
            view(step | {"step": number, "tokens": number * 10})
        view({"event": "something else"})
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 10
    assert "step 100/100, loss 1.0000" in captured.err
    assert "2.00 kB between replicas" in captured.err
