"""The command as a process: answers at once, needs no torch, and never shows a traceback."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from core_torch.cli import main
from core_torch.cli.commands import COMMANDS

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "jax", "flax", "matplotlib"}


def twinshard(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "core_torch", *words],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def modules_after(code: str) -> set[str]:
    """Top-level modules that a process has imported after ``code``."""
    code += "\nimport sys; print(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}


def test_help_is_there_within_a_second() -> None:
    seconds = []
    for _ in range(3):  # the quickest of three, because other processes may keep the machine busy
        begin = time.perf_counter()
        done = twinshard("--help")
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 1.0
    assert all(f"  {command.usage}" in done.stdout for command in COMMANDS.values())


@pytest.mark.parametrize("line", ["--help", "train --help", "doctor --help", "nonsense"])
def test_help_and_mistakes_need_neither_torch_nor_jax(line: str) -> None:
    loaded = modules_after(f"from core_torch.cli import main; main({line.split()!r})")
    assert not loaded & HEAVY


@pytest.mark.parametrize("name", ["train", "doctor"])
def test_the_process_that_starts_ranks_imports_neither_torch_nor_jax(name: str) -> None:
    assert not modules_after(f"import {COMMANDS[name].file}") & HEAVY


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    output = capsys.readouterr().out
    assert f"usage: twinshard {COMMANDS[name].usage}" in output
    assert COMMANDS[name].summary.split(",")[0] in " ".join(output.split())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trian", "no command 'trian'; did you mean train?"),
        ("train --sync.mthod edit", "--sync.mthod: unknown key; did you mean sync.method?"),
        ("train --sync.every -4", "sync.every: must be at least 1, got -4"),
        ("train --model.heads 3", "model.heads: 3 heads do not divide dim 128; 2 would"),
        ("train nowhere.toml", "cannot read the configuration 'nowhere.toml'"),
        ("train --mesh.replicas 0", "mesh.replicas: must be at least 1, got 0"),
        ("sample", "RUN: is missing"),
        ("doctor --ranks many", "ranks: expected a whole number, got 'many'"),
    ],
)
def test_a_mistake_ends_with_code_2_and_says_what_to_change(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ConfigError: ")
    assert message in captured.err
    assert "next:   twinshard " in captured.err


def test_a_process_returns_the_error_s_code_without_a_traceback(tmp_path: Path) -> None:
    done = twinshard("train", "--data.path", "nowhere.txt", cwd=tmp_path)
    assert done.returncode == 3
    assert done.stderr.startswith("DataError: ")
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    code = f"{sys.executable} -m core_torch train --help | head -1"
    done = subprocess.run(code, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "usage:" in done.stdout
    assert done.stderr == ""


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("twinshard 0.")
