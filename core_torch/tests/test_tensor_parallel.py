"""Cuts over tp on ranks that are not there: which piece a rank holds, and how often it exists."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from core_torch.config import (
    DataConfig,
    MeshConfig,
    ModelConfig,
    RunConfig,
    ShardConfig,
    SyncConfig,
    all_problems,
)
from core_torch.errors import ConfigError
from core_torch.mesh import Mesh
from core_torch.models import build_model
from core_torch.models.own import Own
from core_torch.parallel.pieces import cut_of, dim_over_tp, rows_to_file
from core_torch.parallel.tensor import tensor_parallel
from core_torch.shard.access import copies_of, local_shard
from core_torch.shard.base import Sharded
from core_torch.shard.model import shard_model
from core_torch.shard.preview import pretended
from core_torch.simulate.shapes import units_of_model
from core_torch.simulate.tensor import cut_over_tp
from core_torch.sync.build import build_engine

VOCABULARY = 61  # 31 and 30 tokens, so 16, 15, 15 and 15 on two shards
MODEL = ModelConfig(dim=16, layers=1, heads=4, kv_heads=2, hidden=28, context=8)
MODELS = [
    MODEL,
    replace(MODEL, tied=True),
    replace(MODEL, kind="qwen3", head_dim=6),
    replace(MODEL, kind="gpt2", tied=True),
]
WHOLE = ("norm.weight", "norm.bias", "wo.bias", "w2.bias")  # on every rank of tp


def on_rank(model: ModelConfig, rank: int, method: Any = "fsdp2") -> Iterator[tuple[Mesh, Sharded]]:
    """A model cut over two slices and two shards, from one rank's point of view."""
    with pretended(MeshConfig(shards=2, tp=2), rank=rank) as mesh:
        built = build_model(model, VOCABULARY, seed=0)
        tensor_parallel(built, mesh)
        yield mesh, shard_model(built, mesh, ShardConfig(method=method))


@pytest.mark.parametrize("method", ["fsdp2", "simple_fsdp"])
@pytest.mark.parametrize("model", MODELS, ids=lambda m: f"{m.kind}{' tied' * m.tied}")
def test_the_first_rank_holds_what_a_plan_counts_and_knows_how_often_it_exists(
    model: ModelConfig, method: str
) -> None:
    planned = cut_over_tp(units_of_model(model, VOCABULARY), 2)
    shapes = {p.name: p for params in planned.values() for p in params}
    for mesh, sharded in on_rank(model, 0, method):
        named = dict(sharded.module.named_parameters())
        assert named.keys() == shapes.keys()
        for name, p in named.items():
            assert local_shard(p).numel() == shapes[name].chunk(2), name
            assert copies_of(p, mesh.holders) == (2 if name.endswith(WHOLE) else 1), name


@pytest.mark.parametrize("model", MODELS[:1])
def test_pieces_of_all_ranks_are_the_whole_and_none_is_filed_twice(model: ModelConfig) -> None:
    wanted = dict(build_model(model, VOCABULARY, seed=0).named_parameters())
    seen = {name: torch.zeros_like(p, dtype=torch.int64) for name, p in wanted.items()}
    for rank in range(4):
        for mesh, sharded in on_rank(model, rank):
            for name, p in sharded.module.named_parameters():
                cut, local = cut_of(p, mesh), local_shard(p)
                rows = slice(cut.rows.start, cut.rows.start + cut.rows.rows)
                assert torch.equal(local, cut.of(wanted[name].detach()[rows])), name
                if dim_over_tp(p) != 1:  # those are exchanged first
                    filed, start = rows_to_file(local, p, mesh)
                    assert torch.equal(filed, of_rows(wanted[name], start, len(filed)))
                    seen[name][start : start + len(filed)] += 1
    for name, counts in seen.items():
        by_columns = name.endswith(("wo.weight", "w2.weight"))
        assert (counts == (0 if by_columns else 1)).all(), name


def of_rows(x: Tensor, start: int, count: int) -> Tensor:
    """``count`` rows of ``x``."""
    return x.detach()[start : start + count]


def test_a_model_of_ones_own_cannot_be_cut_and_says_so() -> None:
    own = Own(MODEL, VOCABULARY, torch.nn.Embedding(VOCABULARY, VOCABULARY), {})
    with (
        pretended(MeshConfig(tp=2)) as mesh,
        pytest.raises(ConfigError, match="2 ranks cannot cut Own"),
    ):
        tensor_parallel(own, mesh)


def test_everything_that_slices_do_not_divide_is_named_at_once() -> None:
    model = replace(MODEL, heads=6, kv_heads=3, dim=24, hidden=30)
    config = RunConfig(model=model, data=DataConfig(sequence=6), mesh=MeshConfig(tp=4))
    found = {problem.path: problem.message for problem in all_problems(config)}
    assert found == {
        "model.heads": "mesh.tp 4 does not divide 6",
        "model.kv_heads": "mesh.tp 4 does not divide 3",
        "model.hidden": "mesh.tp 4 does not divide 30",
        "data.sequence": "mesh.tp 4 does not divide 6",
    }
    assert not all_problems(replace(config, mesh=MeshConfig(tp=1)))


def test_a_code_that_would_round_copies_apart_is_refused() -> None:
    config = RunConfig(sync=SyncConfig(wire="int8"), mesh=MeshConfig(replicas=2, tp=2))
    assert [problem.path for problem in all_problems(config)] == ["sync.wire"]
    for changes in ({"sync": SyncConfig(wire="bf16")}, {"mesh": MeshConfig(replicas=2, shards=2)}):
        assert not all_problems(replace(config, **changes))
    for mesh, sharded in on_rank(MODEL, 0):
        optimizer = torch.optim.AdamW(sharded.module.parameters())
        with pytest.raises(ConfigError, match="int8 would round copies"):
            build_engine(sharded, optimizer, mesh, config.sync, clock=time.monotonic_ns)
