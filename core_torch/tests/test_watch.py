"""Loggers are told what metrics.jsonl gets and cannot stop a run; profiles cover their steps."""

import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core_torch.cli import watch_options
from core_torch.cli.loggers import SCALARS, Loggers, makers_of
from core_torch.cli.profiler import StepProfiler
from core_torch.cli.watch_options import LogOptions, ProfileOptions, check_installed
from core_torch.config import all_problems
from core_torch.errors import ConfigError
from core_torch.report.records import Step

RECORD = dict.fromkeys(SCALARS, 1.5) | {"step": 4, "tokens": 96, "validation_loss": None}


class Memory:
    """A logger that remembers, and raises at a step."""

    def __init__(self, bad_step: int = 0) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []
        self.bad_step, self.is_closed = bad_step, False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.bad_step:
            raise OSError("disk full")
        self.told.append((step, dict(values)))

    def close(self) -> None:
        self.is_closed = True


def test_a_logger_gets_every_number_of_the_record_that_there_is() -> None:
    memory = Memory()
    notes: list[Any] = []
    with Loggers({"memory": lambda: memory}, notes.append) as loggers:
        loggers.log(RECORD)
    [(step, values)] = memory.told
    assert step == 4 and memory.is_closed and not notes
    assert values == {k: v for k, v in RECORD.items() if k not in ("step", "validation_loss")}
    assert set(SCALARS) == set(Step._fields) - {"step"}


def test_loggers_that_fail_are_left_out_with_a_note_and_the_others_go_on() -> None:
    good, bad = Memory(), Memory(bad_step=4)
    notes: list[Any] = []

    def absent() -> Memory:
        raise ModuleNotFoundError("No module named 'absent'")

    makers = {"bad": lambda: bad, "absent": absent, "good": lambda: good}
    with Loggers(makers, notes.append) as loggers:
        for step in (3, 4, 5):
            loggers.log(RECORD | {"step": step})
    assert [step for step, _ in good.told] == [3, 4, 5] and [s for s, _ in bad.told] == [3]
    assert [note["text"] for note in notes] == [
        "absent is left out from here on: ModuleNotFoundError No module named 'absent'",
        "bad is left out from here on: OSError disk full",
    ]


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of somebody else's package
        reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        notes: list[Any] = []
        makers = makers_of(LogOptions(tensorboard=True), tmp_path, {}, 4)
        with Loggers(makers, notes.append) as loggers:
            loggers.log(RECORD)
            loggers.log(RECORD | {"step": 5, "validation_loss": 2.0})
        assert not notes
        found = reading.EventAccumulator(str(tmp_path / "tensorboard"))
        found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [(4, 1.5), (5, 1.5)]
    assert [(e.step, e.value) for e in found.Scalars("validation_loss")] == [(5, 2.0)]


def test_weights_and_biases_gets_the_project_the_folder_and_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    run = SimpleNamespace(
        log=lambda values, step: told.append((step, values["loss"])),
        finish=lambda: told.append("finished"),
    )

    def init(**how: Any) -> Any:
        told.append(how)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    makers = makers_of(LogOptions(wandb="mine"), tmp_path / "run", {"a": 1}, 4)
    with Loggers(makers, told.append) as loggers:
        loggers.log(RECORD)
    how = {"project": "mine", "name": "run", "dir": str(tmp_path / "run"), "config": {"a": 1}}
    assert told == [how, (4, 1.5), "finished"]


def test_a_missing_package_is_told_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch_options, "find_spec", lambda name: None)
    check_installed(LogOptions())
    with pytest.raises(ConfigError, match="log.wandb needs a package that is not") as caught:
        check_installed(LogOptions(wandb="project"))
    assert caught.value.next == "pip install wandb"


@pytest.mark.parametrize("steps", ["3", "0:2", "5:4", "a:b", "3:"])
def test_steps_that_are_no_range_are_refused(steps: str) -> None:
    [problem] = all_problems(ProfileOptions(steps=steps))
    assert problem.message == f"takes FIRST:LAST, for example 3:6, got {steps!r}"
    [problem] = all_problems(ProfileOptions(memory=True))
    assert problem.path == "memory"


@pytest.mark.parametrize("steps", ["2:3", "4:9"], ids=["inside", "cut by the end"])
def test_the_trace_holds_the_wanted_steps_and_no_other(tmp_path: Path, steps: str) -> None:
    notes: list[Any] = []
    options = ProfileOptions(steps=steps, memory=True)
    cpu = torch.device("cpu")
    with StepProfiler(options, tmp_path, rank=3, device=cpu, emit=notes.append) as profiler:
        for step in range(1, 6):
            profiler.before(step)
            with torch.profiler.record_function(f"inner step {step}"):
                torch.ones(8, 8) @ torch.ones(8, 8)
    trace = json.loads((tmp_path / "profile" / "rank-0003.json").read_text())
    names = [event["name"] for event in trace["traceEvents"] if "name" in event]
    first, last = options.range or (0, 0)
    wanted = [f"inner step {step}" for step in range(first, min(last, 5) + 1)]
    assert [name for name in names if name.startswith("inner step")] == wanted
    assert "aten::mm" in names and "[memory]" in names
    assert [note["text"] for note in notes] == [
        f"{tmp_path / 'profile'}: a trace of each rank, with its allocations; "
        "a snapshot needs a GPU"
    ]
