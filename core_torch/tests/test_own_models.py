"""A module of one's own: named on the command line only, checked as it is built, cut into units."""

import re
import sys
from pathlib import Path

import pytest
import torch

from core_torch.checkpoint.export import empty_model
from core_torch.cli.commands import parse
from core_torch.cli.run_folder import config_of
from core_torch.config import ModelConfig, RunConfig, all_problems
from core_torch.config_file import from_toml, from_values, to_toml
from core_torch.errors import ConfigError
from core_torch.models import build_model
from core_torch.models.loss import summed_loss
from core_torch.models.own import Own
from core_torch.shard.compat import FakeTensorMode
from core_torch.shard.recompute import recompute_activations
from core_torch.shard.wrap import plan_units, unit_parameters
from core_torch.simulate.budget import plan_of

HERE = "core_torch.tests.own_models"
IDS = torch.arange(12).reshape(2, 6)


def own(name: str = "build", *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Own:
    """The module that a function of own_models.py makes."""
    model = build_model(ModelConfig(build=f"{HERE}:{name}", dim=8), 13, seed=seed, dtype=dtype)
    assert isinstance(model, Own)
    return model


# The word that names code.


def test_a_function_on_the_command_line_makes_the_kind_ones_own() -> None:
    (_, config), _ = parse("train", ["--model.build", f"{HERE}:build"])
    assert (config.model.kind, config.model.build) == ("own", f"{HERE}:build")


@pytest.mark.parametrize(
    "text",
    [
        '[model]\nbuild = "os:system"\n',
        'model.build = "os:system"\n',
        'model = {build = "os:system"}\n',
        '[model]\nkind = "own"\nbuild = "os:system"\n',
        "[model]\nbuild = 3\n",
        '[model]\nbuild = ""\n',
    ],
)
def test_a_file_may_name_no_code(tmp_path: Path, text: str) -> None:
    path = tmp_path / "theirs.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"model\.build names code to be run") as caught:
        from_toml(path)
    assert "--model.build" in caught.value.next and str(path) in str(caught.value)
    with pytest.raises(ConfigError, match=r"model\.build names code"):
        parse("train", [str(path)])


def test_a_runs_file_says_that_there_was_a_function_and_needs_it_again(tmp_path: Path) -> None:
    path, config = tmp_path / "config.toml", RunConfig(model=ModelConfig(build=f"{HERE}:build"))
    path.write_text(to_toml(config))
    assert "# build is not read from a file" in path.read_text()
    assert HERE not in path.read_text()
    with pytest.raises(ConfigError, match=r"model\.kind: own needs the function.*--model\.build"):
        parse("train", [str(path), "--resume", "auto"])
    (_, again), _ = parse("train", [str(path), "--model.build", f"{HERE}:build"])
    assert again == config == config_of(tmp_path, build=f"{HERE}:build")


def test_the_processes_of_a_run_tell_each_other_the_function() -> None:
    config = from_values({"model": {"kind": "own", "build": f"{HERE}:build"}}, RunConfig())
    assert config.model.build == f"{HERE}:build"


@pytest.mark.parametrize(
    "build", ["os", "os:", ":build", "a/b.py:build", "a b:c", "a:b.c", "a:b()"]
)
def test_what_cannot_be_the_name_of_a_function_is_refused(build: str) -> None:
    found = all_problems(ModelConfig(build=build))
    assert [p.path for p in found] == ["build"] and repr(build) in found[0].message


# What the function gave.


def test_ids_go_in_and_logits_come_out() -> None:
    model = own()
    logits = model(IDS)
    assert logits.shape == (2, 6, 13)
    torch.testing.assert_close(model(IDS, IDS), summed_loss(logits, IDS))
    documents = torch.ones(2, 6, dtype=torch.int64)
    torch.testing.assert_close(model(IDS, documents_BT=documents), logits + 1)


def test_weights_depend_on_the_seed_alone_and_have_the_dtype_asked_for() -> None:
    torch.manual_seed(5)
    one, state = own(seed=3).state_dict(), torch.get_rng_state()
    torch.manual_seed(6)
    two, other = own(seed=3).state_dict(), own(seed=4).state_dict()
    torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), state), "the generator of others was used"
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["own.table.weight"], other["own.table.weight"])
    assert {x.dtype for x in own(dtype=torch.float64).state_dict().values()} == {torch.float64}


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("build", {"table": 1, "steps.0": 2, "steps.1": 2, "head": 2}),
        ("named", {"ends": 3, "middle": 4}),
    ],
)
def test_units_are_those_that_were_given_or_those_of_the_children(
    name: str, units: dict[str, int]
) -> None:
    model = own(name)
    found = unit_parameters(model, plan_units(model))
    assert {unit: len(names) for unit, names in found.items()} == units
    assert all(name.startswith("own.") for names in found.values() for name in names)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "no function 'missing'"),
        ("NO_FUNCTION", "no function 'NO_FUNCTION'"),
        ("text", "gave str, not a torch.nn.Module"),
        ("nothing", "no parameters"),
        ("forgets", "head.weight is in 0 units"),
        ("wrapped", "head.weight is in 2 units"),
        ("mistypes", "no module is called 'stepz'; did you mean 'steps'"),
        ("shares", "head.weight is shared by the units table and head"),
        ("freezes", "table.weight is frozen"),
        ("counts", "seen is a buffer"),
        ("drops", "steps.2 draws at random"),
    ],
)
def test_what_cannot_be_trained_and_resumed_is_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        own(name)


def test_a_module_that_is_nowhere_is_named() -> None:
    with pytest.raises(ConfigError, match="no module named 'nowhere_at_all'"):
        build_model(ModelConfig(build="nowhere_at_all:build"), 13, seed=0)


def test_the_layers_of_its_lists_are_what_recomputation_computes_again() -> None:
    model, plain = own(), own()
    assert model.blocks == (torch.nn.Linear,)
    recompute_activations(model, model.blocks, "full")
    model(IDS).sum().backward()
    plain(IDS).sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(p.grad, q.grad)


def test_a_plan_says_that_it_runs_no_code() -> None:
    with pytest.raises(ConfigError, match="a plan runs no code"):
        plan_of(RunConfig(model=ModelConfig(build=f"{HERE}:build")), 13)


def test_a_model_for_one_process_is_built_in_the_same_way() -> None:
    config = RunConfig(model=ModelConfig(build=f"{HERE}:build", dim=8))
    assert isinstance(empty_model(config, 13), Own)


def test_the_module_on_the_page_of_models_can_be_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[2] / "docs" / "models.md"
    [text] = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "module_of_the_page.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    model = build_model(ModelConfig(build="module_of_the_page:build", dim=8, layers=2), 13, seed=0)
    assert list(model.units) == ["table", "layers.0", "layers.1", "head"]
    model(IDS).sum().backward()


def test_it_can_be_built_of_pretended_tensors_for_a_graph() -> None:
    with FakeTensorMode():
        assert own()(torch.zeros(2, 6, dtype=torch.int64)).shape == (2, 6, 13)
