"""Command lines: every spelling, every mistake, all at once."""

from pathlib import Path
from typing import Any

import pytest

from core_torch.cli.arguments import scan, show_help
from core_torch.cli.commands import parse
from core_torch.cli.options import DemoOptions, SampleOptions, TrainOptions
from core_torch.config import RunConfig
from core_torch.config_file import kinds, replace_at
from core_torch.errors import ConfigError

KNOWN = kinds(RunConfig())


def config_of(line: str) -> RunConfig:
    """The run configuration that ``twinshard train LINE`` trains."""
    config: RunConfig
    (_, config), _ = parse("train", line.split())
    return config


@pytest.mark.parametrize(
    ("line", "path", "value"),
    [
        ("--sync.every 4", "sync.every", 4),
        ("--sync.every=600s", "sync.every", "600s"),
        ("--optim.lr -1", "optim.lr", -1.0),
        ("--model.rope-scaling.factor 8", "model.rope_scaling.factor", 8.0),
        ("--model.kv_heads 1", "model.kv_heads", 1),
        ("--sync.penalty.clip false", "sync.penalty.clip", False),
        ("--sync.penalty.clip False", "sync.penalty.clip", False),
        ("--sync.penalty.clip=true", "sync.penalty.clip", True),
        ("--sync.penalty.clip", "sync.penalty.clip", True),
        ("--sync.penalty.no-clip", "sync.penalty.clip", False),
        ("--no-sync.penalty.clip", "sync.penalty.clip", False),
        ("--sync.outer.lr none", "sync.outer.lr", None),
        ("--run=a=b", "run", "a=b"),
        ("--run=", "run", ""),
        ("--run --run.x", None, None),
    ],
)
def test_every_spelling_of_an_option_is_read(line: str, path: str | None, value: Any) -> None:
    found = scan(line.split(), KNOWN)
    assert found.values == ({} if path is None else {path: value})
    assert bool(found.problems) == (path is None)


def test_of_two_values_for_one_option_the_later_counts() -> None:
    assert config_of("--train.steps 3 --train.steps 4").train.steps == 4


def test_options_override_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('run = "mine"\n[sync]\nevery = 4\nmethod = "diloco"\n')
    want = {"run": "mine", "sync.every": 8, "sync.method": "diloco"}
    assert config_of(f"{path} --sync.every 8") == replace_at(RunConfig(), want)


def test_an_option_repairs_what_is_wrong_in_the_file_only_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[model]\nheads = 3\nlayerz = 2\n")
    with pytest.raises(ConfigError, match="1 problem") as caught:
        config_of(f"{path} --model.heads 2 --model.kv-heads 1")
    assert "model.layerz: unknown key; did you mean model.layers?" in str(caught.value)


def test_all_problems_of_a_command_come_at_once() -> None:
    line = (
        "--sync.mthod edit --sync.every -4 --model.heads 3 --train.steps x --interval 3 "
        "--sync.penalty.clip maybe --sync.penalty.no-weigh=1 --lr 3 --model.dim"
    )
    with pytest.raises(ConfigError) as caught:
        config_of(line)
    message = str(caught.value)
    for problem in (
        "10 problems",
        "--sync.mthod: unknown key; did you mean sync.method?",
        "sync.every: must be at least 1, got -4",
        "model.heads: 3 heads do not divide dim 128; 2 would",
        "model.kv_heads: 2 key/value heads do not divide 3 heads",
        "train.steps: expected a whole number, got 'x'",
        "--interval: unknown key",
        "sync.penalty.clip: expected true or false, got 'maybe'",
        "sync.penalty.weigh: takes no value after 'no'",
        "--lr: unknown key; did you mean optim.lr or sync.outer.lr?",
        "model.dim: needs a value",
    ):
        assert problem in message


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(ConfigError, match="run: expected text"):
        parse("train", ["--run", "\udcff"])


def test_a_word_too_many_and_a_missing_word_are_named() -> None:
    with pytest.raises(ConfigError, match=r"b\.toml: is one word too many"):
        parse("train", ["--run", "x", "a.toml", "b.toml"])
    with pytest.raises(ConfigError, match="RUN: is missing"):
        parse("sample", ["--prompt", "x"])


def test_options_of_the_other_commands_are_read_the_same_way() -> None:
    assert parse("demo", ["--quick", "--methods", "edit, diloco"]) == (
        (DemoOptions(quick=True, methods="edit, diloco"),),
        [],
    )
    (demo,), _ = parse("demo", ["--methods", "edit, diloco"])
    assert demo.chosen == ["edit", "diloco"]
    line = ["runs/a", "--prompt", "To be", "--tokens=3", "--temperature", "0", "--seed", "1"]
    options = SampleOptions(prompt="To be", tokens=3, temperature=0.0, seed=1)
    assert parse("sample", line) == ((options,), ["runs/a"])
    assert parse("report", ["a", "b"])[1] == ["a", "b"]
    (own, _), _ = parse("train", ["--resume", "auto", "--force"])
    assert own == TrainOptions(resume="auto", force=True)


@pytest.mark.parametrize(
    "line",
    [
        "demo --methods edit,x",
        "demo --methods ,",
        "sample runs/a --temperature nan",
        "sample runs/a --tokens 0",
        "doctor --ranks 0",
        "demo extra",
    ],
)
def test_values_that_no_command_can_use_are_refused(line: str) -> None:
    name, *args = line.split()
    with pytest.raises(ConfigError, match="1 problem"):
        parse(name, args)


def test_help_explains_every_field_with_its_comment(capsys: pytest.CaptureFixture[str]) -> None:
    show_help("twinshard train [CONFIG.toml]", "Trains.", TrainOptions(), RunConfig())
    text = capsys.readouterr().out
    assert "usage: twinshard train [CONFIG.toml]" in text
    assert all(f"--{path} " in text for path in KNOWN)
    assert "cap the combined pseudo-gradient" in text
    assert "go on from the last commit" in text
