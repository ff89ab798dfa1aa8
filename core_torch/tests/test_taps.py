"""The public taps: a module and an optimizer of torch's own, traced by name."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from core_torch.errors import ConfigError
from core_torch.sketch import sketch
from core_torch.taps import trace
from core_torch.trace import TraceError

NAMES = {"embed.weight": "tok_embeddings.weight", "lm_head.weight": "output.weight"}
MODULES = {"embed": "embedding", "layers.0": "layers.0", "layers.1": "layers.1", "": "head"}
IDS = torch.arange(12).view(3, 4) % 7


@dataclass
class Output:
    """As transformers returns it."""

    loss: Tensor | None
    logits: Tensor


class Layer(nn.Module):
    """Returns a tuple, as some blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x + torch.tanh(self.w(x)), None


class Model(nn.Module):
    """A small language model with foreign names."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 5)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.lm_head = nn.Linear(5, 7, bias=False)
        self.recompute = recompute

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = (checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))[0]
        logits = self.lm_head(x)
        if labels is None:
            return Output(None, logits)
        return Output(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, micro: int = 1) -> float:
    """Steps of ``micro`` micro-batches each; the last loss."""
    loss = torch.zeros(())
    for step in range(steps):
        for k in range(micro):
            ids = (IDS + step + k) % 7
            loss = model(input_ids=ids, labels=ids.flip(1)).loss
            (loss / micro).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(input_ids=IDS)  # an evaluation is no micro-batch
    return float(loss.detach())


def lines_of(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "events.0.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def keys_of(lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(x["step"], x["phase"], x["unit"], x["name"]) for x in lines]


def test_a_trace_tells_a_step_from_data_to_update(tmp_path: Path) -> None:
    model = Model()
    begun = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = adamw(model)
    with trace(model, optimizer, tmp_path, names=NAMES, modules=MODULES):
        loss = train(model, optimizer, 1)
    lines = lines_of(tmp_path)
    params = [
        ("embedding", "tok_embeddings.weight"),
        *[(f"layers.{i}", f"layers.{i}.w.{x}") for i in (0, 1) for x in ("weight", "bias")],
        ("lm_head", "output.weight"),
    ]
    units = ["embedding", "layers.0", "layers.1", "head"]
    state = ["update", "exp_avg", "exp_avg_sq"]
    assert keys_of(lines) == [
        *[(0, "init", unit, name) for unit, name in params],
        (1, "data", None, "inputs.0"),
        (1, "data", None, "targets.0"),
        *[(1, "forward", unit, "output.0") for unit in units],
        *[(1, "backward", unit, "gradient.0") for unit in reversed(units)],
        (1, "forward", None, "loss"),
        *[(1, "grad", unit, name) for unit, name in params],
        *[(1, "optim", unit, f"{name}/{key}") for unit, name in params for key in state],
        (1, "optim", None, "rate"),
    ]
    assert [line["seq"] for line in lines] == list(range(len(lines)))
    by_key = dict(zip(keys_of(lines), lines, strict=True))
    assert by_key[1, "forward", None, "loss"]["value"] == {"loss": pytest.approx(loss, rel=1e-6)}
    assert by_key[1, "optim", None, "rate"]["value"] == {"lr": 1e-2, "tokens": 12}
    weight = dict(model.named_parameters())["layers.0.w.weight"]
    update = sketch(weight - begun["layers.0.w.weight"], 0)
    assert by_key[1, "optim", "layers.0", "layers.0.w.weight/update"]["sk"] == update.sk
    moment = sketch(optimizer.state[weight]["exp_avg"], 0)
    assert by_key[1, "optim", "layers.0", "layers.0.w.weight/exp_avg"]["sk"] == moment.sk
    assert by_key[1, "data", None, "inputs.0"]["sum2"] == float((IDS * IDS).sum())
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert meta["core"] == "torch module" and meta["dtype"] == "float32"
    assert meta["model"] == {"layers": 2, "width": 7} and len(meta["weights_hash"]) == 64


@pytest.mark.parametrize("recompute", [False, True])
def test_nothing_is_changed_and_nothing_is_left_behind(tmp_path: Path, recompute: bool) -> None:
    plain, traced = Model(recompute), Model(recompute)
    optimizer = adamw(traced)
    with trace(traced, optimizer, tmp_path, modules=MODULES):
        found = train(traced, optimizer, 2, micro=2)
    assert found == train(plain, adamw(plain), 2, micro=2)
    for one, two in zip(traced.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, two)
    written = len(lines_of(tmp_path))
    train(traced, optimizer, 1)
    assert len(lines_of(tmp_path)) == written
    forwards = [line for line in lines_of(tmp_path) if line["phase"] == "forward"]
    names = [line["name"] for line in forwards if line["step"] == 2]
    assert names == [*["output.0"] * 4, *["output.1"] * 4, "loss"]  # not again in the backward


def test_a_canonical_layout_is_what_is_written(tmp_path: Path) -> None:
    order = torch.tensor([4, 2, 0, 3, 1])

    def canonical(name: str, x: Tensor) -> Tensor:
        return x[order] if name.endswith("0.w.weight") else x

    one, two = Model(), Model()
    for model, folder, hook in ((one, "one", canonical), (two, "two", None)):
        optimizer = adamw(model)
        with trace(
            model, optimizer, tmp_path / folder, canonical=hook, keep_tensors=hook is not None
        ):
            train(model, optimizer, 1)
    permuted, plain = lines_of(tmp_path / "one"), lines_of(tmp_path / "two")
    differ = {x["name"] for x, y in zip(permuted, plain, strict=True) if x != y}
    weight = "layers.0.w.weight"
    assert differ == {weight, *(f"{weight}/{x}" for x in ("update", "exp_avg", "exp_avg_sq"))}
    for x, y in zip(permuted, plain, strict=True):
        assert x.get("sum2", 0) == pytest.approx(y.get("sum2", 0), rel=1e-12)
    assert permuted[1]["sk"] == sketch(dict(Model().named_parameters())[weight][order], 0).sk


def test_units_can_be_said_for_each_parameter(tmp_path: Path) -> None:
    model = Model()
    units = {"output.weight": "head"}
    with trace(model, adamw(model), tmp_path, names=NAMES, modules=MODULES, units=units):
        pass
    assert [x["unit"] for x in lines_of(tmp_path)][-1] == "head"


def test_without_names_every_module_of_a_list_is_a_unit(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trace(model, optimizer, tmp_path) as taps:
        taps.loss(model(IDS).logits.square().mean())
        model(IDS).logits.square().mean().backward()
        optimizer.step()
    lines = lines_of(tmp_path)
    outputs = [x["unit"] for x in lines if x["name"] == "output.1"]
    assert outputs == ["embed", "layers.0", "layers.1", "lm_head"]
    assert {x["name"] for x in lines if x["phase"] == "optim"} == {
        *(f"{name}/update" for name, _ in model.named_parameters()),
        "rate",
    }
    assert sum(x["name"] == "loss" for x in lines) == 1


def test_wrong_names_and_used_folders_are_refused(tmp_path: Path) -> None:
    model = Model()
    optimizer = adamw(model)
    for wrong in ({"names": {"embed": "x"}}, {"modules": {"layers.9": "x"}}):
        with pytest.raises(ConfigError, match="the model has no"):
            trace(model, optimizer, tmp_path, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="are both called"):
        trace(model, optimizer, tmp_path, names={"embed.weight": "lm_head.weight"})
    trace(model, optimizer, tmp_path).close()
    with pytest.raises(TraceError, match="holds a trace already"):
        trace(model, optimizer, tmp_path)


def test_a_canonical_layout_of_another_shape_is_refused(tmp_path: Path) -> None:
    model = Model()
    with pytest.raises(ConfigError, match="gave embed.weight the shape"):
        trace(model, adamw(model), tmp_path, canonical=lambda name, x: x[:1])
