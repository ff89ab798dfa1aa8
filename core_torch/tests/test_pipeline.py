"""How a model is cut into stages, and which configurations of a pipeline are refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from core_torch.config import (
    MeshConfig,
    ModelConfig,
    RunConfig,
    ShardConfig,
    SyncConfig,
    TrainConfig,
    all_problems,
)
from core_torch.config_pipeline import blocks_of, bubble_share, forwards_ahead
from core_torch.models import build_model
from core_torch.models.decoder import Decoder
from core_torch.parallel.pipeline import Part, Stage
from core_torch.simulate.budget import plan_of
from core_torch.simulate.shapes import numel, units_of_model
from core_torch.simulate.stages import units_at

SIX = ModelConfig(dim=16, layers=6, heads=2, kv_heads=1, hidden=24, context=128)
FOUR = RunConfig(
    model=SIX,
    mesh=MeshConfig(pp=2),
    train=TrainConfig(accumulate=4),
)
INTERLEAVED = ShardConfig(pipeline="interleaved", virtual_stages=3)


def decoder() -> Decoder:
    """A model of six blocks."""
    model = build_model(SIX, 31, seed=0, dtype=torch.float64)
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize(("stages", "layers"), [(1, 3), (2, 5), (4, 4), (3, 8)])
def test_stages_hold_all_blocks_in_order_and_the_first_the_odd_ones(
    stages: int, layers: int
) -> None:
    held = [blocks_of(s, stages=stages, layers=layers) for s in range(stages)]
    assert [i for blocks in held for i in blocks] == list(range(layers))
    sizes = [len(blocks) for blocks in held]
    assert sorted(sizes, reverse=True) == sizes and sizes[0] - sizes[-1] <= 1


def test_a_part_shares_modules_and_keeps_their_names() -> None:
    model = decoder()
    part = Part(model, ["layers.1", "layers.4", "head"])
    whole = dict(model.named_parameters())
    named = dict(part.named_parameters())
    assert {name.split(".")[0] for name in named} == {"layers", "norm", "output"}
    assert len(named) == 2 * 9 + 2 and all(p is whole[name] for name, p in named.items())
    assert list(part.units) == ["layers.1", "layers.4", "head"]


def test_stages_one_after_the_other_are_the_model() -> None:
    model = decoder()
    names = list(model.units)
    tokens = torch.arange(12).view(2, 6)
    documents = torch.tensor([[0, 0, 1, 1, 1, 2]] * 2)
    for known in ({}, {"documents_BT": documents}):
        x = tokens
        for held in (names[:3], names[3:5], names[5:]):
            x = Stage(model, held)(x, **known)
        assert torch.equal(x, model(tokens, **known))


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"train": TrainConfig(accumulate=1)}, "train.accumulate", "needs as many micro-batches"),
    ({"train": TrainConfig(accumulate=5), "shard": INTERLEAVED}, "train.accumulate", "equal"),
    ({"model": replace(SIX, layers=5), "shard": INTERLEAVED}, "model.layers", "6 stages"),
    ({"model": replace(SIX, tied=True)}, "model.tied", "share a weight"),
    ({"shard": ShardConfig(method="simple_fsdp", compile="inductor")}, "shard.compile", "parts"),
    ({"sync": SyncConfig(layerwise=True)}, "sync.layerwise", "unset"),
    ({"mesh": MeshConfig(), "shard": INTERLEAVED}, "shard.pipeline", "mesh.pp above 1"),
]


@pytest.mark.parametrize(("change", "path", "message"), REFUSED, ids=lambda x: str(x)[:30])
def test_what_no_pipeline_can_run_is_named_before_it_starts(
    change: dict[str, Any], path: str, message: str
) -> None:
    assert all_problems(FOUR) == []
    [problem] = all_problems(replace(FOUR, **change))
    assert problem.path == path and message in problem.message


def test_three_rounds_of_interleaved_micro_batches_are_accepted() -> None:
    assert all_problems(replace(FOUR, shard=INTERLEAVED)) == []


def test_the_bubble_shrinks_with_micro_batches_and_stages_of_a_rank() -> None:
    assert bubble_share(1, stages=1, parts=1) == 0
    assert bubble_share(4, stages=4, parts=8) == pytest.approx(3 / 11)
    assert bubble_share(4, stages=8, parts=8) == pytest.approx(3 / 19)


def test_the_first_rank_has_most_forwards_ahead() -> None:
    one = [forwards_ahead(r, ranks=4, stages=4, parts=8) for r in range(4)]
    two = [forwards_ahead(r, ranks=2, stages=4, parts=4) for r in range(2)]
    assert one == [4, 3, 2, 1] and two == [5, 3]
    assert forwards_ahead(0, ranks=4, stages=4, parts=2) == 2


def test_the_plan_shows_the_fullest_stage_and_no_unit_twice() -> None:
    units = units_of_model(SIX, 31)
    config = replace(FOUR, shard=INTERLEAVED)
    held = [units_at(config, units, rank) for rank in range(2)]
    both = [sum(numel(one[name]) for one in held) for name in units]
    assert both == [numel(params) for params in units.values()]
    plan = plan_of(replace(FOUR, model=replace(SIX, hidden=4)), 5000)  # a large head and table
    parts = {part.name: part.bytes for part in plan.memory}
    assert plan.stage == 1 and parts["logits and their gradient"] > parts["parameters"]
    sent = [m for m in plan.traffic.local_step if m.axis == "pp"]
    assert [(m.what, m.times) for m in sent] == [("gradients", 4)]
