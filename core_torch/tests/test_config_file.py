"""TOML and dotted paths: exact round trips, strict types, all problems at once."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_torch.config import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    OuterConfig,
    PenaltyConfig,
    RopeScaling,
    RunConfig,
    SyncConfig,
)
from core_torch.config_file import (
    from_text,
    from_toml,
    from_values,
    kinds,
    replace_at,
    to_toml,
)
from core_torch.errors import ConfigError

UNUSUAL = RunConfig(
    run='runs/"ü" \\ \x7f\t\n😀 #',
    model=ModelConfig(tied=True, rope_scaling=RopeScaling(factor=8.0), norm_eps=1e-12),
    data=DataConfig(path="a = [b]"),
    optim=OptimConfig(lr=1e20, eps=5e-324, max_norm=0.1 + 0.2),
    sync=SyncConfig(
        method="edit", every="600s", outer=OuterConfig(lr=0.1), penalty=PenaltyConfig(clip=False)
    ),
)


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def read(folder: Path, text: str, base: RunConfig | None = None) -> RunConfig:
    return from_toml(write(folder, text), base or RunConfig())


@pytest.mark.parametrize("config", [RunConfig(), dataclasses.replace(UNUSUAL, sync=SyncConfig())])
def test_what_is_written_is_read_back_exactly(tmp_path: Path, config: RunConfig) -> None:
    assert read(tmp_path, to_toml(config)) == config


@settings(deadline=None)  # the machine may be busy
@given(
    run=st.text(st.characters(exclude_categories=["Cs"])),
    lr=st.floats(allow_nan=False),
    every=st.one_of(st.integers(-(2**63), 2**63 - 1), st.text(st.characters(codec="utf-8"))),
    outer=st.none() | st.floats(allow_nan=False),
    clip=st.booleans(),
)
def test_any_value_of_a_field_s_type_survives_toml(
    run: str, lr: float, every: int | str, outer: float | None, clip: bool
) -> None:
    values = {"run": run, "optim.lr": lr, "sync.every": every, "sync.penalty.clip": clip}
    if outer is not None:
        values["sync.outer.lr"] = outer
    config = replace_at(RunConfig(), values)
    assert replace_at(RunConfig(), _flat(tomllib.loads(to_toml(config)))) == config


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inside = isinstance(value, dict)
        flat |= _flat(value, f"{prefix}{name}.") if inside else {prefix + name: value}
    return flat


def test_every_field_that_may_be_none_is_none_by_default() -> None:
    # to_toml leaves None out, so reading it back takes the default.
    default, known = RunConfig(), kinds(RunConfig())
    optional = [path for path, kind in known.items() if "None" in str(kind)]
    assert optional == ["sync.layerwise", "sync.outer.lr", "sync.outer.momentum"]
    assert default.sync.outer == OuterConfig(lr=None, momentum=None)
    assert default.sync.layerwise is None


def test_a_dictionary_of_all_values_gives_the_config_back() -> None:
    config = dataclasses.replace(UNUSUAL, sync=SyncConfig(every=4))
    assert from_values(dataclasses.asdict(config), RunConfig()) == config


def test_what_a_file_leaves_out_is_taken_from_the_base(tmp_path: Path) -> None:
    base = RunConfig(run="mine", model=ModelConfig(layers=2))
    config = read(tmp_path, "[model]\ndim = 64\n", base)
    assert config == RunConfig(run="mine", model=ModelConfig(layers=2, dim=64))


def test_all_problems_of_a_file_come_at_once_with_suggestions(tmp_path: Path) -> None:
    text = (
        "modle.dim = 3\nlr = 1.0\ntrain = 4\n[model]\nheads = 3\ntied = 1\n"
        '[sync]\nmethod = "diloko"\nevery = true\n[optim]\neps = "small"\n'
    )
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    for problem in (
        "9 problems",
        "modle.dim: unknown key; did you mean model.dim?",
        "lr: unknown key; did you mean optim.lr or sync.outer.lr?",
        "train: is a section, not a value; it has keys such as train.steps",
        "model.heads: 3 heads do not divide dim 128",
        "model.kv_heads: 2 key/value heads do not divide 3 heads",
        "model.tied: expected true or false, got 1",
        "sync.method: expected one of synchronous, post_local_sgd, diloco, streaming_diloco, "
        "co2, co2_star, edit, aedit, got 'diloko'; did you mean diloco?",
        "sync.every: expected a whole number or text, got True",
        "optim.eps: expected a number, got 'small'",
        "run.toml",
    ):
        assert problem in message


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.dim", True),
        ("model.dim", 2.0),
        ("optim.lr", False),
        ("optim.lr", 10**400),
        ("model.tied", 0),
        ("run", 3),
        ("data", {}),
        ("sync.method", ["edit"]),
        ("sync.outer.lr", "none"),
        ("train.steps", "3"),
    ],
)
def test_a_value_of_another_type_is_refused(path: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=path):
        replace_at(RunConfig(), {path: value})


def test_whole_numbers_pass_for_numbers_and_become_numbers() -> None:
    config = replace_at(RunConfig(), {"optim.lr": 1, "sync.outer.lr": 2})
    assert (type(config.optim.lr), type(config.sync.outer.lr)) == (float, float)


def test_replace_at_changes_only_what_it_names() -> None:
    config = replace_at(RunConfig(), {"sync.every": 4, "sync.penalty.clip": False, "run": "x"})
    sync = SyncConfig(every=4, penalty=PenaltyConfig(clip=False))
    assert config == RunConfig(run="x", sync=sync)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = ", "not valid TOML"),
        (b"a = 1\na = 2\n", "not valid TOML"),
        (b"\xff\xfe", "not valid TOML"),
    ],
)
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        from_toml(path)
    assert caught.value.where == str(path)


def test_a_byte_order_mark_and_crlf_are_no_problem(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b'\xef\xbb\xbfrun = "x"\r\n[train]\r\nsteps = 3\r\n')
    assert from_toml(path).train.steps == 3


def test_a_missing_file_comes_with_the_name_that_may_be_meant(tmp_path: Path) -> None:
    write(tmp_path, "")
    with pytest.raises(ConfigError, match="No such file") as caught:
        from_toml(tmp_path / "runs.toml")
    assert "run.toml" in caught.value.likely


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        from_toml(tmp_path)


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("sync.every", "128", 128),
        ("sync.every", "600s", "600s"),
        ("sync.outer.lr", "None", None),
        ("sync.outer.lr", "0.5", 0.5),
        ("model.tied", "True", True),
        ("model.tied", "false", False),
        ("optim.lr", "1", 1.0),
        ("sync.method", "edit", "edit"),
    ],
)
def test_text_of_the_command_line_means_what_toml_would(path: str, text: str, value: Any) -> None:
    assert from_text(kinds(RunConfig())[path], text) == value


@pytest.mark.parametrize(
    ("path", "text"), [("train.steps", "3.5"), ("model.tied", "1"), ("sync.method", "x")]
)
def test_text_that_means_no_value_is_refused(path: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        from_text(kinds(RunConfig())[path], text)
