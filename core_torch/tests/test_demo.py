"""The demo's settings: every method can be shown, on the same number of tokens, with seeds."""

from dataclasses import asdict
from pathlib import Path

import pytest

from core_torch.cli.commands import parse
from core_torch.cli.demo import demo_config
from core_torch.cli.options import DemoOptions
from core_torch.config import METHODS, all_problems
from core_torch.errors import ConfigError
from core_torch.report.repeats import SEEDS, flatten


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_can_be_shown_on_the_same_tokens(method: str, quick: bool) -> None:
    config = demo_config(method, Path("runs/demo"), quick=quick)
    usual = demo_config("synchronous", Path("runs/demo"), quick=quick)
    assert all_problems(config) == []
    assert config.sync.method == method and config.run == f"runs/demo/{method}"
    assert config.total_tokens == usual.total_tokens
    for part in ("model", "data", "mesh", "optim", "schedule", "train", "shard"):
        assert getattr(config, part) == getattr(usual, part)


def test_a_seed_changes_weights_order_and_folder_and_nothing_else() -> None:
    configs = [demo_config("edit", Path("out"), quick=True, seed=seed) for seed in (0, 2)]
    first, second = (flatten(asdict(config)) for config in configs)
    differing = {name for name in first if first[name] != second[name]}
    assert differing == set(SEEDS)
    assert (first["run"], second["run"]) == ('"out/edit"', '"out/edit-seed-2"')


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--methods edit,edti", "'edti' is unknown; methods are synchronous"),
        ("--methods edit,diloco,edit", "methods: names one twice"),
        ("--methods ,", "methods: names none"),
        ("--seeds 0", "seeds: must lie in [1, 100], got 0"),
    ],
)
def test_what_cannot_be_shown_is_said(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match="problem") as caught:
        parse("demo", line.split())
    assert message in str(caught.value)


def test_by_default_three_methods_are_shown_once() -> None:
    assert DemoOptions().chosen == ["synchronous", "diloco", "edit"]
    assert DemoOptions().seeds == 1
