"""Tensor parallel with sequence parallel, under both sharding cores and under local SGD, against
one process for each replica: the same rows, in float64, within bounds derived from rounding.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core_torch.simulate.budget import plan_of
from parity_tests.cases import tensor_parallel
from parity_tests.cases.equalities import TINY, VOCABULARY, configured
from parity_tests.checks.tensor_parallel import (
    PiecedRun,
    assert_as_alone,
    assert_same_state,
    changes_of,
)
from parity_tests.checks.trajectories import same
from parity_tests.harness.pool import RankPool
from parity_tests.harness.ulps import ErrorTable
from parity_tests.test_planned_runs import HELD, bytes_of, committed_bytes

SYNCHRONOUS = {"method": "synchronous", "warmup": 0, "every": 1}
SIMPLE = {"method": "simple_fsdp"}
COMPILED = SIMPLE | {"compile": "aot_eager"}
CO2 = {"method": "co2_star"}


def run_of(pool: RankPool, shape: tuple[int, int, int], **more: Any) -> PiecedRun:
    """Trains on a mesh of (replicas, shards, tp) ranks."""
    ranks = max(4, int(np.prod(shape)))
    return PiecedRun(pool.run(tensor_parallel.trained, changes_of(*shape, **more), ranks=ranks))


@cache
def alone(pool: RankPool, replicas: int, method: str, model: str = "llama") -> PiecedRun:
    """One process for each replica."""
    sync = SYNCHRONOUS if method == "synchronous" else {"method": method}
    return run_of(pool, (replicas, 1, 1), sync=sync, model=MODELS[model])


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"hidden": 28},
    "tied": {"hidden": 28, "tied": True},
    "qwen3": {"hidden": 28, "kind": "qwen3", "head_dim": 6},
    "gpt2": {"hidden": 28, "kind": "gpt2"},
}


only_full = pytest.mark.only_full


@pytest.mark.parametrize(
    "shard",
    [
        {},
        pytest.param(SIMPLE, marks=only_full),
        pytest.param(COMPILED, marks=only_full),
        pytest.param({"recompute": "full"}, marks=only_full),
        pytest.param(SIMPLE | {"recompute": "selective"}, marks=only_full),
    ],
    ids=str,
)
def test_two_shards_of_two_slices_train_as_one_process(
    pool: RankPool, errors: ErrorTable, shard: dict[str, Any]
) -> None:
    run = run_of(pool, (1, 2, 2), sync=SYNCHRONOUS, shard=shard)
    assert_as_alone(errors, "shard x tp", run, alone(pool, 1, "synchronous"))


@only_full
@pytest.mark.parametrize("shard", [{}, SIMPLE], ids=str)
def test_gradients_that_stay_sums_over_slices_between_micro_batches_are_those_of_one_batch(
    pool: RankPool, errors: ErrorTable, shard: dict[str, Any]
) -> None:
    halves = {"train": {"accumulate": 2}, "data": {"batch": 1}}
    run = run_of(pool, (1, 2, 2), sync=SYNCHRONOUS, shard=shard, **halves)
    assert_as_alone(errors, "micro-batches, shard x tp", run, alone(pool, 1, "synchronous"))


@only_full
@pytest.mark.parametrize("shard", [{}, SIMPLE], ids=str)
@pytest.mark.parametrize("model", ["tied", "qwen3", "gpt2"])
def test_a_tied_head_and_every_other_architecture_is_cut_in_the_same_way(
    pool: RankPool, errors: ErrorTable, model: str, shard: dict[str, Any]
) -> None:
    run = run_of(pool, (1, 2, 2), sync=SYNCHRONOUS, shard=shard, model=MODELS[model])
    assert_as_alone(errors, f"{model}, shard x tp", run, alone(pool, 1, "synchronous", model))
    run = run_of(pool, (2, 1, 2), sync={"method": "edit"}, shard=shard, model=MODELS[model])
    assert_as_alone(errors, f"{model}, replica x tp", run, alone(pool, 2, "edit", model))


ROUNDS = [
    ("edit", {}, {"reshard_after_forward": False}),
    ("edit", {"layerwise": True}, {"forward_prefetch": 1}),
    ("edit", {"layerwise": True}, SIMPLE),
    ("edit", {"layerwise": True}, COMPILED),
    ("diloco", {}, {}),
    ("post_local_sgd", {}, SIMPLE),
    ("co2_star", {}, {}),
]
BY_DEFAULT = {1}


@pytest.mark.parametrize(
    ("method", "sync", "shard"),
    [pytest.param(*r, marks=[] if i in BY_DEFAULT else only_full) for i, r in enumerate(ROUNDS)],
)
def test_replicas_of_two_slices_meet_as_one_process_each(
    pool: RankPool, errors: ErrorTable, method: str, sync: dict[str, Any], shard: dict[str, Any]
) -> None:
    looked_at = {"evaluate_every": 1}  # must not change what follows
    run = run_of(pool, (2, 1, 2), sync={"method": method} | sync, shard=shard, train=looked_at)
    assert len(run.first["norm"]) == 3
    assert_as_alone(errors, "replica x tp", run, alone(pool, 2, method))


@only_full
@pytest.mark.parametrize("shard", [{}, SIMPLE], ids=str)
@pytest.mark.parametrize("method", ["synchronous", "edit", "diloco"])
def test_two_replicas_of_two_shards_of_two_slices_train_as_one_process_each(
    pool: RankPool, errors: ErrorTable, method: str, shard: dict[str, Any]
) -> None:
    sync = SYNCHRONOUS if method == "synchronous" else {"method": method}
    run = run_of(pool, (2, 2, 2), sync=sync, shard=shard)
    assert_as_alone(errors, "replica x shard x tp", run, alone(pool, 2, method))


@only_full
def test_a_norm_to_which_every_slice_adds_its_copy_of_the_gains_is_noticed(pool: RankPool) -> None:
    changes = changes_of(2, 1, 2, sync={"method": "edit"})
    wrong = PiecedRun(pool.run(tensor_parallel.miscounted, changes))
    right = alone(pool, 2, "edit")
    for key in ("grad_norms", "norm", "combined_norm"):
        x, y = (np.array(run.first[key], np.float64)[0] for run in (wrong, right))
        assert (x > y * (1 + 1e-4)).any(), key


# --- checkpoints ---

EDIT = {"method": "edit"}


def test_a_run_of_two_slices_goes_on_from_its_commit_bit_for_bit(
    pool: RankPool, tmp_path: Path
) -> None:
    changes = changes_of(2, 1, 2, sync=EDIT)
    whole = PiecedRun(pool.run(tensor_parallel.committed, changes, str(tmp_path), 4))
    again = PiecedRun(pool.run(tensor_parallel.gone_on, changes, str(tmp_path)))
    assert {"theta", "exp_avg", "anchor", "velocity"} <= set(whole.kinds("saved"))
    assert_same_state(whole, again)
    assert_same_state(whole, again, "after")
    for place, rank in whole.ranks.items():
        assert same(rank["after"], again.ranks[place]["after"])
        assert same(rank["losses"], again.ranks[place]["losses"])


@pytest.mark.parametrize(
    ("before", "after", "more"),
    [
        ((2, 1, 2), (2, 2, 1), {}),
        pytest.param((2, 2, 1), (2, 1, 2), {}, marks=only_full),
        pytest.param((2, 1, 2), (2, 1, 1), {}, marks=only_full),
        pytest.param((1, 2, 2), (1, 1, 4), {"sync": SYNCHRONOUS}, marks=only_full),
        pytest.param((1, 1, 4), (1, 2, 2), {"sync": SYNCHRONOUS}, marks=only_full),
        pytest.param((1, 2, 2), (1, 4, 1), {"sync": SYNCHRONOUS}, marks=only_full),
        pytest.param((1, 4, 1), (1, 2, 2), {"sync": SYNCHRONOUS}, marks=only_full),
        pytest.param((2, 1, 2), (2, 2, 1), {"sync": CO2}, marks=only_full),
        pytest.param((2, 1, 2), (2, 2, 1), {"sync": EDIT | {"wire": "bf16"}}, marks=only_full),
    ],
    ids=str,
)
def test_a_commit_is_taken_up_by_other_slices_without_a_changed_bit(
    pool: RankPool,
    tmp_path: Path,
    before: tuple[int, int, int],
    after: tuple[int, int, int],
    more: dict[str, Any],
) -> None:
    heads = {"hidden": 28, "kv_heads": 4}  # for four slices
    both: dict[str, Any] = {"sync": EDIT, "model": heads} | more
    first, then = changes_of(*before, **both), changes_of(*after, **both)
    saved = PiecedRun(pool.run(tensor_parallel.committed, first, str(tmp_path), 4))
    taken = PiecedRun(pool.run(tensor_parallel.gone_on, then, str(tmp_path)))
    assert_same_state(saved, taken)
    if "wire" not in more.get("sync", {}):  # a code may tip over by one rounding of float64
        np.testing.assert_allclose(taken.first["losses"], saved.first["losses"], rtol=1e-12)


@only_full
@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2)], ids=str)
def test_the_exported_model_is_the_anchor_whole(
    pool: RankPool, tmp_path: Path, shape: tuple[int, int, int]
) -> None:
    changes = changes_of(*shape, sync=EDIT, steps=3)
    run = PiecedRun(pool.run(tensor_parallel.exported, changes, str(tmp_path)))
    assert same(dict(sorted(run.first["file"].items())), anchor_of(run))


def anchor_of(run: PiecedRun) -> dict[str, np.ndarray]:
    """The whole anchor by name, in order."""
    return dict(sorted(run.whole("anchor", "anchor").items()))


# --- somebody's own loop ---


def test_local_sgd_around_a_model_that_torch_has_cut_over_tp_measures_it_once(
    pool: RankPool,
) -> None:
    cut, copied = (pool.run(tensor_parallel.own_loop, is_cut) for is_cut in (True, False))
    for a, b in zip(cut, copied, strict=True):
        np.testing.assert_allclose(a["losses"], b["losses"], rtol=1e-12)
        assert len(a["events"]) == len(b["events"]) == 3
        for mine, theirs in zip(a["events"], b["events"], strict=True):
            for key in ("norm", "weight", "combined_norm"):
                np.testing.assert_allclose(mine[key], theirs[key], rtol=1e-10)


# --- what a plan foretells ---


@pytest.mark.parametrize(
    ("shape", "more"),
    [
        ((2, 1, 2), {"sync": {"method": "edit", "every": 1, "warmup": 0}}),
        pytest.param((1, 2, 2), {"sync": SYNCHRONOUS, "shard": SIMPLE}, marks=only_full),
        pytest.param(
            (1, 2, 2), {"sync": SYNCHRONOUS, "shard": {"recompute": "full"}}, marks=only_full
        ),
    ],
    ids=str,
)
def test_slices_send_hold_and_commit_what_was_planned(
    pool: RankPool, tmp_path: Path, shape: tuple[int, int, int], more: dict[str, Any]
) -> None:
    changes = changes_of(*shape, steps=3, **more)
    config = configured(TINY, changes)
    plan = plan_of(config, VOCABULARY)
    told = pool.run(tensor_parallel.planned_for, changes, str(tmp_path))[0]
    messages = [m for m in plan.traffic.local_step if config.sync.method != "synchronous"]
    messages += [m for m in plan.traffic.synchronous_step if config.sync.method == "synchronous"]
    messages += plan.traffic.round
    over_tp = bytes_of(m for m in messages if m.axis == "tp")
    assert told["tp"] == {op: size for (_, op), size in over_tp.items()}
    others = bytes_of(m for m in messages if m.axis != "tp")
    assert dict((tuple(key), size) for key, size in told["ledger"]) == others
    foretold = {part.name: part.bytes for part in plan.memory if part.name in HELD}
    assert foretold.pop("gradients") == foretold["parameters"]
    assert {kind: size for kind, size in told["held"].items() if size} == foretold
    assert committed_bytes(tmp_path) == plan.checkpoint_bytes
