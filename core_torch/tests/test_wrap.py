"""Every parameter belongs to exactly one unit, and units come in the order of the forward."""

import pytest
import torch.nn as nn

from core_torch.config import ModelConfig
from core_torch.models import Llama
from core_torch.shard.wrap import UnitPlan, plan_units, unit_parameters


def model(*, layers: int = 2, tied: bool = False) -> Llama:
    config = ModelConfig(dim=8, layers=layers, heads=2, kv_heads=1, hidden=8, context=4, tied=tied)
    return Llama(config, vocabulary=11)


def units(module: Llama) -> dict[str, list[str]]:
    return unit_parameters(module, plan_units(module))


def test_units_are_the_embedding_each_block_and_the_head_with_the_final_norm() -> None:
    found = units(model())
    assert list(found) == ["embedding", "layers.0", "layers.1", "head"]
    assert plan_units(model())[-1].modules == ("norm", "output"), "in order of their use"
    assert found["embedding"] == ["tok_embeddings.weight"]
    assert found["head"] == ["norm.weight", "output.weight"]
    assert found["layers.1"] == [
        f"layers.1.{name}.weight"
        for name in (
            "attention_norm attention.wq attention.wk attention.wv attention.wo "
            "ffn_norm feed_forward.w1 feed_forward.w2 feed_forward.w3"
        ).split()
    ]


def test_a_tied_head_belongs_to_the_embedding_and_its_weight_counts_once() -> None:
    tied = model(tied=True)
    assert list(units(tied)) == ["embedding", "layers.0", "layers.1"]
    assert units(tied)["embedding"] == ["tok_embeddings.weight", "norm.weight"]
    assert plan_units(tied)[0].modules == ("tok_embeddings", "norm", "output")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layers", [1, 11])
def test_every_parameter_belongs_to_exactly_one_unit(layers: int, tied: bool) -> None:
    module = model(layers=layers, tied=tied)
    held = [name for names in units(module).values() for name in names]
    assert sorted(held) == sorted(name for name, _ in module.named_parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_each_unit_keeps_the_order_of_named_parameters(tied: bool) -> None:
    module = model(layers=3, tied=tied)
    order = [name for name, _ in module.named_parameters()]
    for names in units(module).values():
        assert names == sorted(names, key=order.index)


def test_a_parameter_without_a_unit_is_named() -> None:
    module = model()
    module.extra = nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match=r"extra\.weight belongs to 0 units: \[\]"):
        units(module)


def test_a_parameter_of_two_units_is_named_with_both() -> None:
    module = model()
    plan = [*plan_units(module), UnitPlan("again", ("output",))]
    with pytest.raises(ValueError, match=r"output\.weight belongs to 2 units: .*head.*again"):
        unit_parameters(module, plan)
