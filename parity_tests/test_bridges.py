"""Values travel between the cores by copy, under one name, shard for shard."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from core_torch.config import ModelConfig
from parity_tests.cases import probes
from parity_tests.harness import codec, jax_bridge, names, torch_bridge
from parity_tests.harness.pool import RankPool


def same(x: Any, y: Any) -> bool:
    """Equal in type, dtype, shape and every bit."""
    return codec.encode(x) == codec.encode(y)


def test_every_parameter_has_a_unit_in_reading_order() -> None:
    model = ModelConfig(vocabulary=10, dim=8, layers=2, heads=2, kv_heads=1, hidden=12)
    shapes = names.expected_shapes(model)
    assert len(shapes) == 2 * 9 + 3 and shapes["layers.1.attention.wk.weight"] == (4, 8)
    untied = names.by_unit(list(shapes), tied=False)
    assert list(untied) == ["embedding", "layers.0", "layers.1", "head"]
    assert untied["head"] == ["norm.weight", "output.weight"]
    tied = names.by_unit(list(shapes)[:-1], tied=True)
    assert tied["embedding"] == ["tok_embeddings.weight", "norm.weight"]


def test_a_nested_tree_gets_dotted_names_and_a_missing_name_is_an_error() -> None:
    tree = {"layers": [{"w": 1}, {"w": 2}], "norm": {"weight": 3}}
    assert names.flatten(tree) == {"layers.0.w": 1, "layers.1.w": 2, "norm.weight": 3}
    with pytest.raises(AssertionError, match=r"only in the core: \['b'\]"):
        names.same_names({"a": 0, "b": 0}, {"a": 0})


@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16])
def test_both_bridges_copy_and_keep_the_dtype(dtype: Any) -> None:
    x = np.array([1.0, -2.5, 0.0], dtype)
    tensor, array = torch_bridge.to_torch(x), jax_bridge.to_jax(x)
    back_from_torch, back_from_jax = torch_bridge.to_numpy(tensor), jax_bridge.to_numpy(array)
    assert same(back_from_torch, x) and same(back_from_jax, x)
    tensor[0] = 9.0
    x[1] = 9.0
    back_from_jax[2] = 9.0
    assert back_from_torch[0] == 1.0 and tensor[1] == -2.5
    assert jax_bridge.to_numpy(array).tolist() == [1.0, -2.5, 0.0]


def test_jax_has_eight_devices_and_float64_here() -> None:
    assert jax.device_count() == 8
    assert (jnp.ones(1) / 3).dtype == jnp.float64


WHOLE = {
    name: np.random.default_rng(rows).normal(size=(rows, 3))
    for name, rows in {"a": 8, "b": 5, "c": 1}.items()
}
ROWS_PER_SHARD = {
    4: [[2, 2, 2, 2], [2, 2, 1, 0], [1, 0, 0, 0]],
    2: [[4, 4], [3, 2], [1, 0]],
    1: [[8], [5], [1]],
}


def on_devices(
    replicas: int, shards: int, *, stacked: bool, padding: float = 0.0
) -> dict[str, jax.Array]:
    """``WHOLE`` on a (replicas, shards) mesh, rows padded, once more per replica if stacked."""
    mesh = jax.make_mesh((replicas, shards), ("replica", "shard"))
    axes = ("replica", "shard") if stacked else ("shard",)
    spec = PartitionSpec(*axes)
    padded = {k: jax_bridge.pad_rows(v, shards) for k, v in WHOLE.items()}
    for name, value in WHOLE.items():
        padded[name][len(value) :] = padding
    if stacked:
        padded = {k: np.stack([v] * replicas) for k, v in padded.items()}
    return {k: jax_bridge.to_jax(v, NamedSharding(mesh, spec)) for k, v in padded.items()}


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (4, 1)])
def test_uneven_shards_of_ranks_equal_those_of_devices_and_assemble(
    pool: RankPool, shape: tuple[int, int], stacked: bool
) -> None:
    ranks = pool.run(probes.uneven_shards, *shape, WHOLE)
    assert all(same(whole, WHOLE) for whole in jax_bridge.assemble(ranks, replicas=shape[0]))
    reference = on_devices(*shape, stacked=stacked)
    pairs = list(jax_bridge.paired(ranks, reference, replicas=shape[0], stacked=stacked))
    assert len(pairs) == 4 * len(WHOLE)
    assert all(same(pair.core, pair.reference) for pair in pairs)
    held = [[len(rank[name]["rows"]) for rank in ranks[: shape[1]]] for name in WHOLE]
    assert held == ROWS_PER_SHARD[shape[1]]


def test_padding_that_is_not_zero_and_rows_at_the_wrong_rank_are_noticed(pool: RankPool) -> None:
    ranks = pool.run(probes.uneven_shards, 2, 2, WHOLE)
    dirty = on_devices(2, 2, stacked=True, padding=1e-9)
    with pytest.raises(AssertionError, match="padding"):
        list(jax_bridge.paired(ranks, dirty, replicas=2, stacked=True))
    swapped = [ranks[1], ranks[0], ranks[3], ranks[2]]
    with pytest.raises(AssertionError):
        list(jax_bridge.paired(swapped, on_devices(2, 2, stacked=True), replicas=2, stacked=True))
    with pytest.raises(AssertionError, match="not next"):
        jax_bridge.assemble(swapped, replicas=2)
