"""``parity mine``: models of other people beside the reference, right ones and wrong ones."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

from core_torch.cli import main
from core_torch.cli.commands import run_command
from core_torch.errors import ConfigError
from parity_tests.instrument.divergence import first_divergence
from parity_tests.instrument.mine import Found, Settings, examine
from parity_tests.instrument.names import NameMap, read_map
from parity_tests.instrument.own_module import find, halves_of_pairs, pairs_of_halves, tokens_for
from parity_tests.instrument.widen import Widening

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
LLAMA3 = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0)
LLAMA3 |= dict(high_freq_factor=4.0, original_max_position_embeddings=32)
SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2)
HUGGING_FACE = read_map("huggingface-llama")
Build = Callable[[], nn.Module]


def llama(**other: Any) -> Build:
    """``build`` of a small LlamaForCausalLM with random weights."""
    transformers = pytest.importorskip("transformers", minversion="5.20")

    def build() -> nn.Module:
        torch.manual_seed(0)
        fields = {**SIZES, "rope_parameters": LLAMA3, **other}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))

    return build


def run(build: Build, folder: Path, told: NameMap = HUGGING_FACE, **settings: Any) -> Found:
    """What comes of a model."""
    return examine(build, told, folder, Settings(**settings), name="mine")


def first_of(found: Found) -> tuple[str, str | None]:
    """Phase and unit of the first divergence."""
    first = first_divergence(found.comparison)
    assert first is not None
    return first.found.key.phase, first.found.key.unit


def test_a_llama_of_hugging_face_equals_the_reference_over_three_steps(tmp_path: Path) -> None:
    """Grouped heads, Llama 3's scaling, an untied head; norms and rotary tables widened."""
    found = run(llama(), tmp_path, steps=3)
    assert found.cell.ok, found.cell.divergence
    assert found.comparison.notes == []
    seen = Counter(one.key.phase for one in found.comparison.findings)
    assert seen == {"init": 21, "data": 6, "forward": 15, "backward": 12, "grad": 63, "optim": 192}
    [note] = found.notes
    assert "by name: model.rotary_emb, model.layers.{i}.input_layernorm" in note
    assert "They were given float64" in note


def test_left_as_it_is_it_computes_in_float32_inside_and_the_verdict_says_so(
    tmp_path: Path,
) -> None:
    found = run(llama(), tmp_path, as_is=True)
    assert first_of(found) == ("forward", "layers.0")
    assert found.cell.advice.startswith("This is how far float32 is from float64")


@pytest.mark.only_full
def test_in_float32_it_is_as_near_as_float32_can_be(tmp_path: Path) -> None:
    found = run(llama(), tmp_path, dtype="float32")
    assert found.cell.ok, found.cell.divergence
    assert (found.cell.dtype, found.notes) == ("float32", ())


def test_a_tied_llama_equals_the_reference(tmp_path: Path) -> None:
    found = run(llama(tie_word_embeddings=True, num_hidden_layers=1), tmp_path)
    assert found.cell.ok, found.cell.divergence


@pytest.mark.parametrize(
    ("other", "told", "advice"),
    [
        ({}, replace(HUGGING_FACE, rotary="pairs"), '[layout] rotary = "halves"'),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, {"rope_theta": 1e4}, "rope_theta = 5"),
        ({"rms_norm_eps": 1e-5}, {"norm_eps": 1e-6}, "norm_eps = 1e-05"),
    ],
    ids=["layout", "theta", "eps"],
)
def test_a_wrong_llama_is_named_where_it_is_wrong_and_by_what(
    other: dict[str, Any], told: NameMap | dict[str, Any], advice: str, tmp_path: Path
) -> None:
    if isinstance(told, dict):
        told = replace(HUGGING_FACE, model={**HUGGING_FACE.model, **told})
    found = run(llama(**other), tmp_path, told)
    assert first_of(found) == ("forward", "layers.0")
    assert found.cell.advice.startswith(f"With {advice}")
    assert found.cell.advice.endswith(" they agree: correct the map, or your module.")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module docs/examples/my_model.py, found as the command finds it."""
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    yield sys.modules[find("my_model:build").__module__]
    del sys.modules["my_model"]


def test_the_example_of_the_pages_agrees_from_the_command_line(
    example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["parity", "mine", "--model", "my_model:build", "--map", "names.toml"]
    files = [tmp_path / "page.html", tmp_path / "cells.json", tmp_path / "traces"]
    outputs = [
        f"--{name}={path}" for name, path in zip(("page", "json", "out"), files, strict=True)
    ]
    assert main([*words, *outputs]) == 0
    assert "1 of 1 agree" in capsys.readouterr().out
    [cell] = json.loads(files[1].read_text(encoding="utf-8"))["cells"]
    assert (cell["model"], cell["ok"]) == ("my_model:build", True)
    assert "They agree." in files[0].read_text(encoding="utf-8")
    assert main([*words, f"--out={files[2]}"]) == 2, "traces are not written over"
    assert "holds traces already" in capsys.readouterr().err


def test_a_wrong_example_ends_with_1_and_what_cannot_be_seen_is_said(
    example: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The scores of the first block lack their scale; the second block adds no attention."""

    def build() -> nn.Module:
        module = example.Model()
        module.blocks[0].q.register_forward_hook(lambda m, args, q: q * 1.000001)
        module.blocks[1].o.weight.data.zero_()
        return module

    monkeypatch.setattr(example, "build", build)
    words = ["--model", "my_model:build", "--map", "names.toml", "--keep_gains"]
    assert main(["parity", "mine", *words]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "first divergence: step 1, forward, layers.0: output.0" in told
    assert "Read your layers.0 beside reference_jax/model.py" in told
    assert "All gains of norms are 1" in told
    assert "0 throughout, so the use of these is not tested: layers.1.attention_norm" in told


def test_what_is_no_model_is_refused_with_the_line_of_the_users_code(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = read_map("names.toml")
    for build, message in (
        (lambda: 3, r"build\(\) gave int, not a torch.nn.Module"),
        (lambda: 1 // 0, r"build\(\) raised ZeroDivisionError.*\n  at .*test_mine.py line"),
        (lambda: example.build().requires_grad_(False), r"embedding.weight is frozen"),
    ):
        with pytest.raises(ConfigError, match=message):
            examine(build, told, tmp_path, Settings(), name="mine")
    monkeypatch.setattr(example.Model, "forward", lambda self, x: self.embedding(x))
    with pytest.raises(ConfigError, match=r"logits must be \[2, 64, 97\], got \[2, 64, 32\]"):
        examine(example.build, told, tmp_path / "shape", Settings(), name="mine")


def test_a_function_that_is_not_there_is_refused_with_how_it_is_named() -> None:
    for spec, message in (
        ("models/my_model.py:build", r"is a file.*\n  next:   --model models.my_model:build"),
        ("my_model", "must be module:function"),
        ("json:buld", "json has no function 'buld'"),
        ("no_such_module_here:build", "raised ModuleNotFoundError: No module named 'no_such"),
    ):
        with pytest.raises(ConfigError, match=message):
            find(spec)


def test_the_command_names_all_options_that_are_missing_or_wrong() -> None:
    words = ["parity", "mine", "--steps", "0", "--as_is", "--dtype", "float32"]
    with pytest.raises(ConfigError) as caught:
        run_command(words)
    for path in ("model: must name", "map: must name", "steps: must be", "as_is: is about"):
        assert path in str(caught.value)


class Narrow(nn.Module):
    """Asks for narrow dtypes in every way that is in use, after a part of it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Identity()

    def forward(self, x: Tensor) -> list[Tensor]:
        return [
            self.part(x).float(),
            x.to(torch.float32),
            x.to(dtype=torch.bfloat16),
            x.softmax(-1, dtype=torch.float32),
            torch.arange(3, dtype=torch.float),
            x.type(torch.float16),
        ]


@pytest.mark.parametrize("is_active", [True, False])
def test_every_way_to_ask_for_a_narrow_dtype_is_widened_and_told(is_active: bool) -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([Narrow(), Narrow()]), "fine": nn.Identity()})
    widening = Widening(is_active=is_active)
    x = torch.ones(2, 3, dtype=torch.float64)
    with widening.over(model):
        for part in (*model["blocks"], model["fine"]):  # type: ignore[misc]
            dtypes = {y.dtype for y in part(x)}
            assert (dtypes == {torch.float64}) == (is_active or part is model["fine"])
    assert list(widening.where) == ["blocks.{i}"]


def test_rows_of_halves_and_pairs_are_each_others_inverse_and_turn_the_same_features() -> None:
    rows = torch.arange(16).view(16, 1)
    pairs = pairs_of_halves(rows, 2)
    assert pairs[:8, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert torch.equal(halves_of_pairs(pairs, 2), rows)


def test_tokens_repeat_and_leave_out_what_an_embedding_pads_with() -> None:
    module = nn.Embedding(5, 4, padding_idx=2)
    first, again = (tokens_for(module, 5, (3, 40), steps=2, seed=1) for _ in range(2))
    assert all((x[0] == y[0]).all() for x, y in zip(first, again, strict=True))
    assert {int(i) for x in first for i in x[0].ravel()} == {0, 1, 3, 4}
    inputs, targets = first[0]
    assert (inputs[:, 1:] == targets[:, :-1]).all()
