"""``twinshard plan``: without torch and without processes, the same figures shown and written."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core_torch.cli import main
from core_torch.config import METHODS, MeshConfig, RunConfig, SyncConfig
from core_torch.simulate.budget import plan_of

ROOT = Path(__file__).parents[2]
# Any import of these, or a process that is started, ends the interpreter.
REFUSING = """
import subprocess, sys
for name in ("torch", "jax", "numpy"):
    sys.modules[name] = None
def refuse(*args, **kwargs):
    raise AssertionError("a process was started")
subprocess.Popen.__init__ = refuse
from core_torch.cli import main
sys.exit(main({words!r}))
"""


def written(tmp_path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of the command, run in this process."""
    path = tmp_path / "plan.json"
    code = main(["plan", *words, "--json", str(path)])
    return code, json.loads(path.read_text())


def test_a_plan_needs_neither_torch_nor_a_process(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[mesh]\nreplicas = 4\nshards = 8\n[model]\ndim = 4096\nlayers = 32\n")
    words = ["plan", str(config), "--model.hidden", "14336", "--memory", "80GB", "--tflops", "400"]
    words += ["--model.vocabulary", "128256", "--bandwidth", "25", "--json", str(tmp_path / "p")]
    done = subprocess.run(
        [sys.executable, "-c", REFUSING.format(words=words)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "It fits" in done.stdout and "days" in done.stdout
    assert json.loads((tmp_path / "p").read_text())["parameters"] > 7e9


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_planned_and_written_as_it_is_computed(method: str, tmp_path: Path) -> None:
    every = "600s" if method == "aedit" else "128"
    words = ["--mesh.replicas", "2", "--sync.method", method, "--sync.every", every]
    code, told = written(tmp_path, *words)
    interval = every if method == "aedit" else int(every)
    sync = SyncConfig(method=method, every=interval)  # type: ignore[arg-type]
    plan = plan_of(RunConfig(mesh=MeshConfig(replicas=2), sync=sync), 257)
    assert code == 0
    assert told["peak_bytes"] == plan.peak_bytes
    assert told["memory"] == [part._asdict() for part in plan.memory]
    assert told["traffic"]["round"] == [m._asdict() for m in plan.traffic.round]
    assert bool(told["traffic"]["round"]) == (method != "synchronous")
    assert told["fits"] is None and told["seconds_per_step"] is None


def test_a_run_that_does_not_fit_ends_with_code_1_and_names_the_smallest_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = written(tmp_path, "--memory", "60MB")
    assert code == 1 and told["fits"] is False
    change = told["smallest_change"]
    assert change and change[0].startswith("--")
    assert f"Smallest change that does: {' '.join(change)}" in capsys.readouterr().out
    words = [word for option in change for word in option.split()]
    assert main(["plan", "--memory", "60MB", *words]) == 0
    code, told = written(tmp_path, "--memory", "1KB")
    assert code == 1 and told["smallest_change"] is None
    assert "try a smaller batch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--memory 80XB", "memory: must be like 80GB or 80GiB, got '80XB'"),
        ("--memory 0GB", "memory: must be like"),
        ("--tflops 300", "tflops and bandwidth: durations need both, got 300 and 0"),
        ("--replica-bandwidth 1", "replica_bandwidth: says nothing without bandwidth"),
        ("--data.tokenizer t.json", "model.vocabulary: is that of t.json"),
        ("--model.heads 3", "model.heads: 3 heads do not divide dim 128"),
        ("--json /nowhere/plan.json", "json: cannot write '/nowhere/plan.json'"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *line.split()]) == 2
    assert message in capsys.readouterr().err


def test_sizes_of_memory_are_decimal_or_binary(tmp_path: Path) -> None:
    plan = plan_of(RunConfig(), 257)
    edge = plan.peak_bytes / 0.9 / 1e6
    assert written(tmp_path, "--memory", f"{edge + 0.01:.3f}MB")[0] == 0
    assert written(tmp_path, "--memory", f"{edge - 0.01:.3f}MB")[0] == 1
    assert written(tmp_path, "--memory", f"{edge - 0.01:.3f}MiB")[0] == 0
