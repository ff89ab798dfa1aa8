"""SimpleFSDP with everything else: other meshes, tensor parallelism, activation checkpointing,
checkpoints on other numbers of ranks and from FSDP2.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parity_tests.cases import resume, sharded_meshes, sharded_modules, sharded_training
from parity_tests.cases.sharded_training import LAYERS, VOCABULARY, How, Told
from parity_tests.checks.trajectories import Trajectory, launch, same
from parity_tests.harness import tolerances
from parity_tests.harness.pool import RankPool
from parity_tests.harness.ulps import ErrorTable

MODEL = tolerances.model("float64", layers=LAYERS, width=VOCABULARY)
ODD = tolerances.model("float64", layers=2, width=sharded_modules.ODD_VOCABULARY)

# --- meshes ---


def assert_as_alone(errors: ErrorTable, ranks: list[Told], truth: Told, quantity: str) -> None:
    """Every rank's whole gradients and parameters are those of one process."""
    losses = np.mean([rank["losses"] for rank in ranks], axis=0)
    np.testing.assert_allclose(losses, truth["losses"], rtol=1e-14)
    for rank in ranks:
        for mine, expected in zip(rank["grads"], truth["grads"], strict=True):
            assert list(mine) == list(expected)
            for name, grad in expected.items():
                errors.check(f"{quantity}, gradient", mine[name], grad, MODEL, where=name)
        for name, p in truth["params"].items():
            errors.check(f"{quantity}, parameters", rank["params"][name], p, MODEL, where=name)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("fully_shard", None),
        ("replicate", None),
        ("hybrid_shard", None),
        pytest.param("fully_shard", {}, marks=pytest.mark.only_full),
        pytest.param("replicate", {}, marks=pytest.mark.only_full),
        ("hybrid_shard", {}),  # compiled, it holds what the other two do
    ],
)
def test_every_mode_trains_as_one_process(
    pool: RankPool, errors: ErrorTable, mode: str, options: dict[str, Any] | None
) -> None:
    ranks = pool.run(sharded_meshes.over_mesh, mode, options)
    assert_as_alone(errors, ranks, sharded_training.alone({"dtype": "float64"}, steps=2), mode)
    for rank in ranks:
        assert Counter(map(tuple, rank["collectives"])) == COLLECTIVES[mode, options is not None]


GATHERS, SCATTERS = ("shard", "all_gather"), ("shard", "reduce_scatter")
SUMS, REPLICA_SUMS = ("shard", "all_reduce"), ("replica", "all_reduce")
COLLECTIVES = {  # of one step. Units by default: embedding, two layers, norm, output
    ("fully_shard", False): {GATHERS: 21 + 20, SCATTERS: 21},
    ("replicate", False): {SUMS: 21},
    ("hybrid_shard", False): {GATHERS: 21 + 20, SCATTERS: 21, REPLICA_SUMS: 21},
    ("fully_shard", True): {GATHERS: 5 + 3, SCATTERS: 5},
    ("replicate", True): {SUMS: 5},
    ("hybrid_shard", True): {GATHERS: 5 + 3, SCATTERS: 5, REPLICA_SUMS: 5},
}


@pytest.mark.parametrize("mode", ["replicate", "hybrid_shard"])
def test_odd_parameters_have_the_gradient_of_one_process_in_every_mode(
    pool: RankPool, errors: ErrorTable, mode: str
) -> None:
    truth = sharded_meshes.odd_gradients(sharded_modules.odd_model(), 0, 1)
    for rank in pool.run(sharded_meshes.odd_over_mesh, mode):
        assert list(rank) == list(truth)
        for name, grad in truth.items():
            errors.check("odd gradients over meshes", rank[name], grad, ODD, where=name)


@pytest.mark.parametrize(
    "options", [None, pytest.param({}, marks=pytest.mark.only_full)], ids=["eager", "manual"]
)
def test_sharding_around_tensor_parallelism_trains_as_one_process(
    pool: RankPool, errors: ErrorTable, options: dict[str, Any] | None
) -> None:
    hidden = 30  # 15 rows on a tensor-parallel rank, so 8 and 7 on its shards
    ranks = pool.run(sharded_meshes.tensor_parallel, hidden, options)
    truth = sharded_training.alone({"dtype": "float64", "hidden": hidden}, steps=2)
    same_data = [ranks[0], ranks[2]]  # ranks 1 and 3 see the rows of 0 and 2
    assert_as_alone(errors, same_data, truth, "shard x tp")
    assert same(ranks[1]["grads"], ranks[0]["grads"])
    assert all(rank["rows"] == (4, 16) for rank in ranks)  # 16 rows over two and two ranks
    assert all("_StridedShard" in rank["placements"] for rank in ranks)


# --- activation checkpointing ---

EAGER_AND_MANUAL: tuple[dict[str, Any] | None, ...] = (None, {})


def trained(pool: RankPool, recompute: str | None, options: dict[str, Any] | None) -> list[Told]:
    """Three steps on two ranks."""
    how: How = {"method": "simple_fsdp", "shards": 2, "dtype": "float64"}
    how |= {} if recompute is None else {"recompute": recompute}
    how |= {} if options is None else {"options": options}
    return [rank for rank in pool.run(sharded_training.trained, how, 3) if rank is not None]


def test_recomputed_activations_give_the_same_bits_and_need_less_memory(pool: RankPool) -> None:
    plain = trained(pool, None, None)
    compiled = {}
    for recompute in (None, "selective", "full"):
        for options in EAGER_AND_MANUAL:
            run = trained(pool, recompute, options)
            for mine, theirs in zip(run, plain, strict=True):
                assert mine["losses"] == theirs["losses"]
                assert same(mine["grads"], theirs["grads"]), (recompute, options)
                assert same(mine["params"], theirs["params"])
            if options is not None:
                compiled[recompute] = run[0]["compiled"]
            elif recompute is not None:  # eager: each block's parameters once more
                assert gathers(run) == gathers(plain)
    saved = {mode: found["saved_bytes"] for mode, found in compiled.items()}
    assert saved["full"] < saved["selective"] < saved[None]
    assert compiled["full"]["peak_bytes"] < compiled[None]["peak_bytes"]
    for found in compiled.values():  # the backward gathers each block once, as without
        assert found["backward"].count(("start", "all_gather", "layers.0")) == 1
        assert found["backward"].count(("start", "all_gather", "layers.1")) == 1


def gathers(run: list[Told]) -> int:
    """All-gathers of a backward."""
    return sum(op == "all_gather" for _, op, *_ in run[0]["backward"])


# --- checkpoints ---

SIMPLE = {"method": "simple_fsdp"}
TENSORS = ("theta", "exp_avg", "exp_avg_sq", "anchor", "velocity")
EDIT: dict[str, Any] = {"method": "edit", "every": 3, "warmup": 2}


def changes_of(replicas: int, shards: int, shard: dict[str, Any]) -> dict[str, Any]:
    """Nine steps with rounds after 5 and 8, on this mesh and this way of sharding."""
    return {
        "mesh": {"replicas": replicas, "shards": shards},
        "shard": shard,
        "sync": EDIT,
        "train": {"steps": 9},
    }


def test_a_checkpoint_of_four_shards_loads_on_two_and_on_one(
    pool: RankPool, tmp_path: Path
) -> None:
    saved = pool.run(resume.commit_only, changes_of(1, 4, SIMPLE), str(tmp_path), 7)
    before = Trajectory(saved, replicas=1)
    for shards in (2, 1):
        again = pool.run(resume.load_only, changes_of(1, shards, SIMPLE), str(tmp_path))
        after = Trajectory(again, replicas=1)
        assert len(after.ranks) == shards
        for key in TENSORS:
            assert same(before.whole(key, 0), after.whole(key, 0)), key


@pytest.mark.parametrize(
    "first, then",
    [({}, SIMPLE), pytest.param(SIMPLE, {}, marks=pytest.mark.only_full)],
    ids=["from fsdp2", "to fsdp2"],
)
def test_a_run_changes_between_fsdp2_and_simple_fsdp_at_a_checkpoint_and_no_bit_changes(
    pool: RankPool, tmp_path: Path, first: dict[str, Any], then: dict[str, Any]
) -> None:
    whole = launch(pool, 2, 2, changes_of(2, 2, {}))
    both = (changes_of(2, 2, shard) for shard in (first, then))
    ranks = pool.run(sharded_meshes.handed_over, *both, str(tmp_path), 4)
    again = Trajectory(ranks, replicas=2)
    assert again.steps == 5
    for before, after in zip(whole.ranks, again.ranks, strict=True):
        for kept, found in zip(before["history"][4:], after["history"], strict=True):
            assert all(same(kept.get(key), found.get(key)) for key in TENSORS)
