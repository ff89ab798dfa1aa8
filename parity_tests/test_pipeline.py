"""Replicas cut into stages of a pipeline train as one process does, in float64.

The reference of each comparison has neither stages nor shards: the same rows are micro-batches
of a single rank of each replica.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core_torch.simulate.budget import plan_of
from parity_tests.cases import equalities, reshard, resume
from parity_tests.cases import pipeline as cases
from parity_tests.cases.equalities import TINY, VOCABULARY, configured
from parity_tests.checks import pipeline, trajectories
from parity_tests.checks.pipeline import Staged
from parity_tests.checks.trajectories import (
    PENALTY,
    Trajectory,
    assert_close,
    assert_same_decisions,
    assert_storm,
    same,
    storm,
)
from parity_tests.harness.pool import RankPool
from parity_tests.harness.ulps import ErrorTable
from parity_tests.test_planned_runs import bytes_of, committed_bytes
from parity_tests.test_resume import check_rest

Changes = dict[str, Any]
SYNCHRONOUS = {"method": "synchronous", "warmup": 0}
EDIT = {"every": 2, "warmup": 2, "penalty": PENALTY}
DILOCO = {"method": "diloco", "every": 3, "warmup": 2}
INTERLEAVED = {"pipeline": "interleaved", "virtual_stages": 2}


def full(*case: Any) -> Any:
    """A case that others see most of."""
    return pytest.param(*case, marks=pytest.mark.only_full)


def pair(
    pool: RankPool,
    mesh: dict[str, int],
    sync: dict[str, Any],
    shard: dict[str, Any],
    *,
    layers: int = 2,
    ranks: int = 4,
    faults: Any = (),
) -> tuple[Staged, Trajectory]:
    """A run on ``mesh`` with a few micro-batches, and one with whole replicas on the same rows."""
    replicas, shards, parts = mesh.get("replicas", 1), mesh.get("shards", 1), max(2, mesh["pp"])
    train = {"steps": 13 if faults else 6, "evaluate_every": 4}
    common: Changes = {"sync": sync, "model": {"layers": layers}}
    cut = common | {"mesh": mesh, "shard": shard, "train": train | {"accumulate": parts}}
    whole = common | {"train": train | {"accumulate": parts * shards}}
    staged = pipeline.launch(pool, cut, faults=faults, ranks=ranks)
    return staged, trajectories.launch(pool, replicas, 1, whole, faults=faults)


def check(errors: ErrorTable, name: str, staged: Staged, whole: Trajectory) -> None:
    """Losses, gradient norms, all that rounds have decided, and every tensor after each step."""
    per_replica = len(staged.ranks) // staged.replicas
    for place, rank in enumerate(staged.ranks):
        theirs = whole.ranks[place // per_replica]["records"]
        for key in ("loss", "grad_norm", "lr", "tokens"):
            mine, others = ([line[key] for line in lines] for lines in (rank["records"], theirs))
            np.testing.assert_allclose(mine, others, rtol=1e-12, err_msg=key)
        held_out, known = (lines[3]["validation_loss"] for lines in (rank["records"], theirs))
        assert known > 1
        np.testing.assert_allclose(held_out, known, rtol=1e-12)
    if whole.events:
        assert_same_decisions(staged, whole)
    for replica in range(staged.replicas):
        assert_close(errors, f"pipeline {name}", staged, whole, replica=replica)
        if whole.events:
            assert_close(errors, f"pipeline {name}", staged, whole, what="anchor", replica=replica)


CASES = [
    ({"pp": 2, "shards": 2}, EDIT, {}, 2),
    ({"pp": 2, "shards": 2}, SYNCHRONOUS, INTERLEAVED | {"method": "simple_fsdp"}, 5),
    ({"replicas": 2, "pp": 2}, DILOCO, INTERLEAVED, 4),
    full({"replicas": 2, "pp": 2}, SYNCHRONOUS, {}, 3),
    full({"replicas": 2, "pp": 2}, {"method": "co2", "every": 2, "warmup": 1}, {}, 2),
    full({"replicas": 2, "pp": 2}, EDIT | {"offload": True, "wire": "int8"}, {}, 2),
    full({"pp": 4}, SYNCHRONOUS, {}, 5),
    full({"pp": 2, "shards": 2}, DILOCO, {"method": "simple_fsdp"}, 2),
    full({"pp": 2, "shards": 2}, SYNCHRONOUS, INTERLEAVED | {"reshard_after_forward": False}, 4),
]


@pytest.mark.parametrize(("mesh", "sync", "shard", "layers"), CASES, ids=str)
def test_stages_train_as_one_process(
    pool: RankPool,
    errors: ErrorTable,
    mesh: dict[str, int],
    sync: dict[str, Any],
    shard: dict[str, Any],
    layers: int,
) -> None:
    staged, whole = pair(pool, mesh, sync, shard, layers=layers)
    assert bool(staged.events) is (sync is not SYNCHRONOUS)
    check(errors, f"{mesh} {sync.get('method', 'edit')}", staged, whole)


def test_the_penalty_decides_over_all_stages(pool: RankPool, errors: ErrorTable) -> None:
    faults = storm(flagged=[1], infected=[0], everyone=[0, 1])
    staged, whole = pair(pool, {"replicas": 2, "pp": 2}, EDIT, {}, faults=faults)
    assert_storm(staged)
    assert_same_decisions(staged, whole)
    for replica in range(2):
        assert_close(errors, "pipeline storm", staged, whole, replica=replica)


@pytest.mark.parametrize(
    ("shard", "model"),
    [({}, {}), full(INTERLEAVED | {"method": "simple_fsdp"}, {}), full({}, {"kind": "gpt2"})],
    ids=str,
)
def test_stages_of_slices_train_as_one_process(
    pool: RankPool,
    errors: ErrorTable,
    tmp_path: Path,
    shard: dict[str, Any],
    model: dict[str, Any],
) -> None:
    sizes = model | {"layers": 4, "hidden": 28, "kv_heads": 4 if model else 2}
    common: Changes = {"model": sizes, "sync": EDIT, "train": {"steps": 5, "accumulate": 2}}
    cut = common | {"mesh": {"pp": 2, "tp": 2}, "shard": shard}
    ranks = pool.run(cases.told_and_exported, cut, str(tmp_path))
    flat = common | {"mesh": {"replicas": 1}}
    whole, *_ = pool.run(cases.told_and_exported, flat, str(tmp_path))
    for rank in ranks:
        for key in ("loss", "grad_norm", "norm", "combined_norm"):
            np.testing.assert_allclose(rank[key], whole[key], rtol=1e-12, err_msg=key)
    assert len(whole["norm"]) == 2
    file = ranks[0]["file"]
    trajectories.check(errors, "pipeline of slices", file, whole["file"], whole["before"], 5)


@pytest.mark.only_full
@pytest.mark.parametrize("shard", [{}, INTERLEAVED], ids=str)
def test_replicas_of_sharded_stages_on_eight_ranks_train_as_one_process_each(
    pool: RankPool, errors: ErrorTable, shard: dict[str, Any]
) -> None:
    mesh = {"replicas": 2, "pp": 2, "shards": 2}
    staged, whole = pair(pool, mesh, EDIT, shard, layers=4, ranks=8)
    check(errors, "8 ranks edit", staged, whole)


@pytest.mark.only_full
def test_stages_keep_to_one_clock_of_their_replica(pool: RankPool) -> None:
    sync = {"method": "aedit", "every": "3s", "warmup": 1, "timed": {"min_total_steps": 1}}
    common: Changes = {"sync": sync, "train": {"steps": 6, "accumulate": 2}}
    step_ns = [10**9, 2 * 10**9]
    staged, whole = (
        pool.run(equalities.run, common | {"mesh": mesh}, None, [], False, step_ns)
        for mesh in ({"replicas": 2, "pp": 2}, {"replicas": 2})
    )
    for place, rank in enumerate(staged):
        of_replica = whole[place // 2]
        assert len(rank["records"]) == len(of_replica["records"])
        assert len(rank["events"]) == len(of_replica["events"]) >= 2
        for mine, theirs in zip(rank["events"], of_replica["events"], strict=True):
            assert [mine[key] for key in ("step", "steps")] == [theirs["step"], theirs["steps"]]
            for key in ("norm", "weight", "combined_norm"):
                np.testing.assert_allclose(mine[key], theirs[key], rtol=1e-12, err_msg=key)
    steps = [event["steps"] for event in whole[0]["events"]]
    assert any(fast != slow for fast, slow in steps)


STREAMING = {"method": "streaming_diloco", "every": 4, "warmup": 1, "wire": "int8"}
CO2_STAR = {"method": "co2_star", "every": 3, "warmup": 1, "wire": "bf16"}
SAVED = [
    (EDIT, {}, 5),
    full(STREAMING, INTERLEAVED, 4),
    full(CO2_STAR, {}, 5),
    full(SYNCHRONOUS, INTERLEAVED, 3),
    full(DILOCO, {"method": "simple_fsdp"}, 4),
]


@pytest.mark.parametrize(("sync", "shard", "stop"), SAVED, ids=str)
def test_a_run_of_stages_goes_on_from_its_commit_bit_for_bit(
    pool: RankPool, tmp_path: Path, sync: dict[str, Any], shard: dict[str, Any], stop: int
) -> None:
    changes = {
        "mesh": {"replicas": 2, "pp": 2},
        "model": {"layers": 4},
        "sync": sync,
        "shard": shard,
        "schedule": {"shape": "cosine"},
        "train": {"steps": 8, "accumulate": 2},
    }
    whole = pipeline.launch(pool, changes)
    told = pool.run(resume.interrupted, changes, str(tmp_path), stop)
    for before, after in zip(whole.ranks, told, strict=True):
        check_rest(before, after, 8 - stop)


CUT = {"mesh": {"pp": 2, "shards": 2}, "train": {"steps": 6, "accumulate": 2}}
FLAT = {"mesh": {"shards": 4}, "train": {"steps": 6}}


@pytest.mark.parametrize(
    ("before", "after"),
    [(CUT, FLAT), (FLAT, CUT), full(CUT, {"mesh": {"replicas": 1}} | {"train": FLAT["train"]})],
    ids=["from stages", "to stages", "to one process"],
)
def test_other_stages_and_shards_take_a_commit_up_without_a_changed_bit(
    pool: RankPool, tmp_path: Path, before: Changes, after: Changes
) -> None:
    before, after = before | {"sync": EDIT}, after | {"sync": EDIT}
    saved = staged_of(pool.run(reshard.saved, before, str(tmp_path), 4), before)
    taken = staged_of(pool.run(reshard.taken_up, before, after, str(tmp_path)), after)
    for key in ("theta", "exp_avg", "exp_avg_sq", "anchor", "velocity"):
        there, here = saved.whole(key, 0), taken.whole(key, 0)
        assert there.keys() == here.keys()
        assert all(same(there[name], here[name]) for name in there), key
    assert same(saved.stats(0), taken.stats(0))


def staged_of(told: list[Any], changes: Changes) -> Staged:
    """A run on a mesh that may have stages."""
    mesh = changes["mesh"]
    told = [rank | {"events": []} for rank in told if rank is not None]
    return Staged(told, mesh.get("replicas", 1), mesh.get("pp", 1))


def test_the_exported_model_is_the_anchor_of_all_stages(pool: RankPool, tmp_path: Path) -> None:
    changes = CUT | {"sync": EDIT, "shard": INTERLEAVED, "model": {"layers": 4}}
    told = pool.run(cases.exported, changes, str(tmp_path))
    anchor = staged_of(told, changes).whole("anchor", 0)
    file = told[0]["file"]
    assert file.keys() == anchor.keys() and len(file) == 3 + 9 * 4
    assert all(same(file[name], anchor[name]) for name in anchor)


PLANNED = [
    ({"sync": {"every": 1, "layerwise": False}}),
    full({"sync": {"method": "synchronous"}, "shard": {"reshard_after_forward": False}}),
    full({"sync": {"method": "diloco", "every": 1}, "shard": {"method": "simple_fsdp"}}),
]


@pytest.mark.parametrize("more", PLANNED, ids=str)
def test_stages_send_hold_and_commit_what_was_planned(
    pool: RankPool, tmp_path: Path, more: Changes
) -> None:
    changes = {
        "mesh": {"pp": 2, "shards": 2},
        "model": {"layers": 3},
        **more,
        "sync": more["sync"] | {"warmup": 0},
        "train": {"steps": 2, "accumulate": 3},
    }
    config = configured(TINY, changes)
    plan = plan_of(config, VOCABULARY)
    told = pool.run(cases.observed, changes, str(tmp_path))[plan.stage * 2]
    is_local = config.sync.method != "synchronous"
    step = plan.traffic.local_step if is_local else plan.traffic.synchronous_step
    foretold = bytes_of([*step, *plan.traffic.round], times=2)
    assert {tuple(key): size for key, size in told["sent"]} == foretold
    sizes = {part.name: part.bytes for part in plan.memory if part.name in told["held"]}
    assert {kind: size for kind, size in told["held"].items() if size} == sizes
    assert committed_bytes(tmp_path) == plan.checkpoint_bytes
