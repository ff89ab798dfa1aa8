"""Attaching exchanges to a compiled model: who may, what a training forward then calls, and when.

One process that is its own shard and its own replica, so nothing is pretended but the mesh.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch._dynamo.utils import counters

from core_torch.config import MeshConfig
from core_torch.errors import ConfigError
from core_torch.mesh import Mesh
from core_torch.shard.access import local_shard
from core_torch.shard.compile import Compilation, compile_model
from core_torch.shard.exchange import Exchange
from core_torch.shard.preview import pretended
from core_torch.shard.schedule import CompileOptions
from core_torch.shard.simple_fsdp import simple_fsdp

UNITS = {"first": ["first.weight", "first.bias"], "second": ["second.weight", "second.bias"]}


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with pretended(MeshConfig()) as alone:
        yield alone


class Two(nn.Module):
    """Two layers, of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x_BD: Tensor, *, whole: bool = True) -> Tensor:
        h_BD = self.first(x_BD).relu()
        return self.second(h_BD) if whole else h_BD


def compiled(mesh: Mesh) -> tuple[Two, Compilation]:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Two()
    simple_fsdp(model, mesh.torch_mesh["shard"])
    return model, compile_model(model, CompileOptions(backend="aot_eager"))


class Engine:
    """Doubles a unit's parameters; keeps a log, and asks on which side autograd is."""

    def __init__(self, model: Two) -> None:
        self.log: list[str] = []
        self.is_due = False
        self.params = dict(model.named_parameters())

    def exchange(self, **changed: Any) -> Exchange:
        numbers: dict[str, Any] = dict(
            units=UNITS, limit=2, begin=self.begin, start=self.start, finish=self.finish,
            end=lambda: self.log.append("end"), payload_bytes=[48, 32], ranks=1,
        )  # fmt: skip
        return Exchange(**numbers | changed)

    def begin(self) -> bool:
        self.log.append("begin")
        return self.is_due

    def start(self, u: int) -> None:
        self.log.append(f"start {u}")

    def finish(self, u: int) -> None:
        assert not torch.is_grad_enabled()
        self.log.append(f"finish {u}")
        for name in list(UNITS.values())[u]:
            local_shard(self.params[name]).mul_(2.0)


def test_a_round_that_is_due_runs_in_the_next_training_forward_and_in_no_other(mesh: Mesh) -> None:
    model, compilation = compiled(mesh)
    engine, x_BD = Engine(model), torch.randn(4, 3)
    compilation.attach(engine.exchange())
    with torch.no_grad():
        model(x_BD)
    assert engine.log == [], "evaluation does not even ask"
    model(x_BD).sum().backward()
    assert engine.log == ["begin"]
    assert [p.name for p in compilation.programs] == ["inference", "forward", "round", "backward"]
    seen = {name: dict(found) for name, found in counters.items()}
    engine.is_due = True
    with torch.no_grad():
        model(x_BD)
    assert engine.log == ["begin"], "it waits for a training forward"
    before = {name: p.detach().clone() for name, p in engine.params.items()}
    twin = Two()
    twin.load_state_dict({name: 2 * local_shard(p) for name, p in before.items()})
    found, wanted = model(x_BD), twin(x_BD)
    assert torch.equal(found, wanted)
    assert engine.log[1:] == [
        "begin", "start 0", "start 1", "finish 0", "finish 1", "end",
    ]  # fmt: skip
    model.zero_grad()
    found.sum().backward()
    wanted.sum().backward()
    for name, p in twin.named_parameters():
        grad = engine.params[name].grad
        assert grad is not None and p.grad is not None
        assert torch.equal(local_shard(grad), p.grad), "the backward has the new weights"
    assert seen == {name: dict(found) for name, found in counters.items()}, "nothing was compiled"


def test_a_second_graph_of_the_same_model_carries_rounds_too(mesh: Mesh) -> None:
    model, compilation = compiled(mesh)
    engine, x_BD = Engine(model), torch.randn(4, 3)
    compilation.attach(engine.exchange())
    model(x_BD)
    engine.is_due = True
    model(x_BD, whole=False).sum().backward()
    assert engine.log[1:] == ["begin", "start 0", "finish 0", "end"], "the rest is left to the end"
    names = [p.name for p in compilation.programs]
    assert names == ["forward", "round", "forward", "round", "backward"]


def test_a_forward_that_is_compiled_already_takes_no_exchange(mesh: Mesh) -> None:
    model, compilation = compiled(mesh)
    with torch.no_grad():
        model(torch.randn(4, 3))
    assert compilation.exchanging is None, "evaluation compiles nothing that matters"
    model(torch.randn(4, 3))
    with pytest.raises(ConfigError, match="compiled without exchanges"):
        compilation.attach(Engine(model).exchange())


def test_a_model_has_one_engine(mesh: Mesh) -> None:
    model, compilation = compiled(mesh)
    compilation.attach(Engine(model).exchange())
    with pytest.raises(ConfigError, match="another engine"):
        compilation.attach(Engine(model).exchange())


def test_a_part_of_a_model_and_two_models_are_refused(mesh: Mesh) -> None:
    model, _ = compiled(mesh)
    part = compile_model(model.first, CompileOptions(backend="aot_eager"))
    with pytest.raises(ConfigError, match="holds 1 sharded models, 0 of them whole"):
        part.attach(Engine(model).exchange())
    pair = compile_model(nn.ModuleList([compiled(mesh)[0], compiled(mesh)[0]]))
    with pytest.raises(ConfigError, match="holds 2 sharded models"):
        pair.attach(Engine(model).exchange())
    with pytest.raises(ConfigError, match="holds 0 sharded models"):
        compile_model(nn.Linear(2, 2)).attach(Engine(model).exchange())


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"units": {"a": ["first.weight"]}}, "first.bias is in no unit"),
        ({"units": UNITS | {"third": ["first.bias"]}}, "first.bias is in 2 units"),
        ({"units": UNITS | {"third": ["third.bias"]}}, "third.bias is no parameter"),
        ({"limit": 0}, "lets none start"),
        ({"payload_bytes": [48]}, "1 payloads for 2 units"),
    ],
)
def test_units_that_do_not_fit_the_model_are_refused(
    mesh: Mesh, changed: dict[str, Any], problem: str
) -> None:
    model, compilation = compiled(mesh)
    with pytest.raises(ConfigError, match=problem):
        compilation.attach(Engine(model).exchange(**changed))


def test_a_parameter_that_is_not_trained_needs_no_unit(mesh: Mesh) -> None:
    model, compilation = compiled(mesh)
    for p in model.second.parameters():
        p.requires_grad_(False)
    units = {"first": UNITS["first"]}
    compilation.attach(Engine(model).exchange(units=units, payload_bytes=[48]))
    assert compilation.exchanging is not None
