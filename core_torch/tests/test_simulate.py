"""The arithmetic of a plan against the model that it is about, autograd and FLOP counters."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from core_torch.config import DataConfig, MeshConfig, ModelConfig, RunConfig, ShardConfig
from core_torch.config_file import replace_at
from core_torch.models import build_model, token_loss
from core_torch.shard.access import rows_of_shard
from core_torch.shard.wrap import plan_units, unit_parameters
from core_torch.simulate.budget import (
    USABLE,
    block_flops,
    duration,
    fits,
    mean_bytes,
    plan_of,
    smallest_change,
    token_flops,
)
from core_torch.simulate.memory import end_bytes, layer_bytes
from core_torch.simulate.shapes import Parameter, units_of_model
from core_torch.simulate.traffic import BALLOT, code_bytes, exchange
from core_torch.sync import coded
from core_torch.sync.methods import rules_of
from core_torch.sync.votes import Votes

VOCABULARY = 61
MODEL = ModelConfig(dim=48, layers=2, heads=4, kv_heads=2, hidden=101, context=32)
QWEN = replace(MODEL, kind="qwen3", head_dim=16)
GPT2 = replace(MODEL, kind="gpt2", tied=True)
BATCH, SEQUENCE = 2, 16
CONFIG = RunConfig(model=MODEL, data=DataConfig(batch=BATCH, sequence=SEQUENCE))
IDS = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)


@pytest.mark.parametrize(
    "model",
    [MODEL, replace(MODEL, tied=True), replace(MODEL, kv_heads=4, layers=1), QWEN, GPT2],
    ids=lambda m: m.kind,
)
def test_units_and_their_parameters_are_those_of_the_built_model(model: ModelConfig) -> None:
    built = build_model(model, VOCABULARY, seed=0)
    shapes = {name: tuple(p.shape) for name, p in built.named_parameters()}
    planned = units_of_model(model, VOCABULARY)
    groups = unit_parameters(built, plan_units(built))
    assert list(planned) == list(groups)
    for unit, names in groups.items():
        assert {p.name: p.shape for p in planned[unit]} == {name: shapes[name] for name in names}


@pytest.mark.parametrize("rows", [1, 3, 8, 61])
@pytest.mark.parametrize("shards", [1, 2, 5, 64])
def test_a_chunk_is_what_the_first_rank_holds(rows: int, shards: int) -> None:
    assert Parameter("x", (rows, 3)).chunk(shards) == 3 * rows_of_shard(rows, shards, 0).rows


@pytest.mark.parametrize("wire", ["bf16", "int8"])
@pytest.mark.parametrize("size", [1, 256, 257])
def test_codes_have_the_size_that_the_wire_says(wire: str, size: int) -> None:
    encoded = coded.encode(torch.ones(size), wire)
    assert code_bytes(size, wire) == coded.code_bytes(size, wire) == encoded.numel()
    sync = replace_at(CONFIG, {"sync.wire": wire}).sync
    assert exchange(size, 4, rules_of(sync), 3).bytes == 3 * encoded.numel()


def test_a_ballot_has_as_many_numbers_as_a_replica_casts() -> None:
    assert Votes(replicas=2).ballot(1, device=torch.device("cpu")).numel() == BALLOT


def kept(model: torch.nn.Module, forward: Callable[[], Any]) -> int:
    """Bytes of everything that autograd keeps of ``forward`` besides parameters and buffers."""
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    found: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        found[x.untyped_storage().data_ptr()] = x
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        result = forward()
    del result
    storages = [x.untyped_storage() for at, x in found.items() if at not in own and x.ndim]
    return sum(storage.nbytes() for storage in storages)


@pytest.mark.parametrize(
    ("dtype", "item"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float64, 8)]
)
@pytest.mark.parametrize("sizes", [MODEL, QWEN, GPT2], ids=lambda m: m.kind)
def test_an_eager_forward_keeps_the_activations_that_were_planned(
    sizes: ModelConfig, dtype: torch.dtype, item: int
) -> None:
    stored = torch.float64 if item == 8 else torch.float32
    model = build_model(sizes, VOCABULARY, seed=0, dtype=stored)
    for p in model.parameters():
        p.data = p.data.to(dtype)
    found = kept(model, lambda: token_loss(model(IDS), IDS + 1))
    logarithms = VOCABULARY * max(item, 4)  # part of the plan's "logits"
    tokens = sizes.layers * layer_bytes(sizes, item) + end_bytes(sizes, item) + logarithms
    places = SEQUENCE * 8 if sizes.kind == "gpt2" else 0
    assert found == BATCH * SEQUENCE * (tokens + 2 * 8) + places
    if item != 8:
        compute = "same" if item == 4 else "bfloat16"
        config = replace_at(replace(CONFIG, model=sizes), {"train.compute": compute})
        parts = {part.name: part for part in plan_of(config, VOCABULARY).memory}
        assert parts["activations"].bytes == found - BATCH * SEQUENCE * logarithms
        assert parts["activations"].checked and not parts["gathered parameters"].checked


def counted(model: torch.nn.Module, backend: SDPBackend) -> int:
    """FLOPs of a forward and a backward by torch's formulas."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(backend):
        token_loss(model(IDS), IDS).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "sizes", [MODEL, replace(MODEL, tied=True), QWEN, GPT2], ids=lambda m: f"{m.kind}-{m.tied}"
)
def test_flops_are_those_that_torch_counts(sizes: ModelConfig) -> None:
    config = replace(CONFIG, model=sizes)
    model, tokens = build_model(config.model, VOCABULARY, seed=0), BATCH * SEQUENCE
    units = units_of_model(config.model, VOCABULARY)
    attention = 6 * sizes.layers * SEQUENCE * sizes.heads * sizes.head_width
    products = tokens * (token_flops(config, units) - attention)
    # Torch has no formula for the flash attention of CPUs; as products it is not halved.
    assert counted(model, SDPBackend.FLASH_ATTENTION) == products
    assert counted(model, SDPBackend.MATH) == products + 2 * tokens * attention
    head = 6 * VOCABULARY * MODEL.dim
    assert block_flops(config) == token_flops(config, units) - head


def test_recomputation_trades_memory_for_work() -> None:
    plans = [
        plan_of(replace(CONFIG, shard=ShardConfig(recompute=mode)), VOCABULARY)
        for mode in ("none", "selective", "full")
    ]
    assert plans[0].peak_bytes > plans[1].peak_bytes > plans[2].peak_bytes
    assert plans[0].done_flops < plans[1].done_flops < plans[2].done_flops
    assert len({plan.token_flops for plan in plans}) == 1


@pytest.mark.parametrize(
    ("layers", "limit", "words"),
    [
        (2, 10_000_000, None),
        (16, 5_700_000, ["--shard.recompute full"]),
        (64, 14_000_000, ["--shard.recompute full", "--sync.offload true"]),
        (64, 13_000_000, ["--mesh.shards 4", "--shard.recompute selective"]),
        (2, 100_000, []),
    ],
)
def test_the_smallest_change_that_fits_is_found(
    layers: int, limit: int, words: list[str] | None
) -> None:
    config = replace(CONFIG, model=replace(MODEL, layers=layers), mesh=MeshConfig(shards=2))
    plan = plan_of(config, VOCABULARY)
    if words is None:
        assert fits(plan, limit)
        return
    change = smallest_change(plan, limit)
    assert ([] if change is None else change[0]) == words
    if change is not None:
        assert change[1].peak_bytes <= USABLE * limit < plan.peak_bytes


def test_offload_moves_the_outer_state_to_the_host_and_rounds_share_their_interval() -> None:
    mesh = MeshConfig(replicas=2)
    near = plan_of(replace(CONFIG, mesh=mesh), VOCABULARY)
    far = plan_of(replace(near.config, sync=replace(CONFIG.sync, offload=True)), VOCABULARY)
    hosted = sum(part.bytes for part in far.memory if part.place == "host")
    assert hosted == 2 * 4 * near.parameters
    per_round = sum(m.bytes for m in near.traffic.round)
    assert mean_bytes(near, "replica") == per_round / CONFIG.sync.every  # type: ignore[operator]


def test_durations_follow_rates_and_rings() -> None:
    config = replace(CONFIG, mesh=MeshConfig(replicas=3), sync=replace(CONFIG.sync, every=1))
    plan = plan_of(config, VOCABULARY)
    took = duration(plan, tflops=1e-3, bandwidth=1.0, replica_bandwidth=0.5)
    assert took.compute == pytest.approx(plan.token_flops * BATCH * SEQUENCE / 1e9)
    sums = sum(m.bytes for m in plan.traffic.round if m.op == "all_reduce")
    rest = sum(m.bytes for m in plan.traffic.round if m.op == "all_gather")
    assert took.replica == pytest.approx((sums * 4 / 3 + rest * 2 / 3) / 0.5e9)
    assert took.shard == 0.0 and took.hidden < took.exposed
