"""Stop anywhere, build everything anew, go on: bit for bit the run that never stopped (E9)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parity_tests.cases import equalities, resume
from parity_tests.checks.trajectories import PENALTY, Trajectory, launch, same
from parity_tests.harness.pool import RankPool

STEPS = 9
EDIT: dict[str, Any] = {"method": "edit", "every": 3, "warmup": 2, "penalty": PENALTY}
DILOCO: dict[str, Any] = {"method": "diloco", "every": 3, "warmup": 2}
POST: dict[str, Any] = {"method": "post_local_sgd", "every": 3, "warmup": 0}
STREAMING: dict[str, Any] = {"method": "streaming_diloco", "every": 4, "warmup": 2, "wire": "int8"}
CO2: dict[str, Any] = {"method": "co2", "every": 3, "warmup": 2}
CO2_STAR: dict[str, Any] = {"method": "co2_star", "every": 3, "warmup": 2, "wire": "bf16"}
INSIDE: dict[str, Any] = EDIT | {"layerwise": True, "offload": True, "wire": "int8"}
AEDIT: dict[str, Any] = EDIT | {"method": "aedit", "every": "3s", "timed": {"min_total_steps": 1}}
SYNCHRONOUS: dict[str, Any] = {"method": "synchronous", "warmup": 0}
TENSORS = ("theta", "exp_avg", "exp_avg_sq", "anchor", "velocity")


def changes_of(sync: dict[str, Any], *, replicas: int = 2, shards: int = 2) -> dict[str, Any]:
    """A run of ``STEPS`` steps whose learning rate depends on the tokens seen."""
    return {
        "sync": sync,
        "mesh": {"replicas": replicas, "shards": shards},
        "schedule": {"shape": "cosine"},
        "train": {"steps": STEPS},
    }


CASES = [
    (EDIT, 1),  # in the warm-up
    (EDIT, 2),  # as the replicas part
    (EDIT, 4),  # between two rounds
    (EDIT, 8),  # right after a round
    (DILOCO, 6),
    (POST, 0),  # before the first step
    (SYNCHRONOUS, 5),
    (STREAMING, 4),  # a fragment in flight
    (CO2_STAR, 6),  # a whole model in flight, anchors cut over the replicas
    (INSIDE, 5),  # a round that the next forward will carry
]
EVERY_METHOD = (DILOCO, POST, SYNCHRONOUS, STREAMING, CO2, CO2_STAR, EDIT, INSIDE)
REST = [(sync, stop) for sync in EVERY_METHOD for stop in range(9) if (sync, stop) not in CASES]


def name_of(value: Any) -> str:
    """Of a parameter of a test."""
    return str(value["method"] if isinstance(value, dict) else value)


@pytest.fixture(scope="module")
def wholes() -> dict[str, Trajectory]:
    """Runs that never stopped, by their configuration; made when they are needed."""
    return {}


@pytest.mark.parametrize(
    ("sync", "stop"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.only_full) for case in REST)],
    ids=name_of,
)
def test_a_resumed_run_is_the_run_that_never_stopped(
    pool: RankPool, wholes: dict[str, Trajectory], tmp_path: Path, sync: dict[str, Any], stop: int
) -> None:
    changes = changes_of(sync)
    if repr(changes) not in wholes:
        wholes[repr(changes)] = launch(pool, 2, 2, changes)
    check_resumed(pool, wholes[repr(changes)], tmp_path, changes, stop)


def test_a_step_of_several_micro_batches_goes_on_with_the_next_of_them(
    pool: RankPool, tmp_path: Path
) -> None:
    changes = changes_of(EDIT)
    changes["train"]["accumulate"] = 2
    check_resumed(pool, launch(pool, 2, 2, changes), tmp_path, changes, 4)


@pytest.mark.parametrize(
    ("sync", "stop"),
    [(CO2_STAR, 6), pytest.param(EDIT, 4, marks=pytest.mark.only_full)],
    ids=name_of,
)
def test_a_commit_that_is_written_while_training_goes_on_holds_the_step_that_began_it(
    pool: RankPool, tmp_path: Path, sync: dict[str, Any], stop: int
) -> None:
    changes = changes_of(sync)
    whole = launch(pool, 2, 2, changes)
    check_resumed(pool, whole, tmp_path, changes, stop, stopping=resume.saved_behind)


def check_resumed(
    pool: RankPool,
    whole: Trajectory,
    folder: Path,
    changes: dict[str, Any],
    stop: int,
    stopping: Callable[..., Any] = resume.interrupted,
) -> None:
    """Compares the rest of a run that stopped with that of one that never did."""
    again = Trajectory(pool.run(stopping, changes, str(folder), stop), replicas=2)
    assert again.steps == STEPS - stop
    for before, after in zip(whole.ranks, again.ranks, strict=True):
        check_rest(before, after, STEPS - stop)
    measured_later = sum(e["step"] > stop for e in whole.events)  # others were due or in flight
    assert len(again.events) >= measured_later
    assert repr(whole.events[len(whole.events) - len(again.events) :]) == repr(again.events)


def check_rest(before: dict[str, Any], after: dict[str, Any], steps: int) -> None:
    """Compares the last ``steps`` steps of one rank, and the state before them."""
    for kept, found in zip(before["history"][-steps - 1 :], after["history"], strict=True):
        assert all(same(kept.get(key), found.get(key)) for key in (*TENSORS, "adam_step"))
        assert same(kept.get("stats"), found.get("stats"))
    for kept, found in zip(before["records"][-steps:], after["records"], strict=True):
        for key in ("step", "tokens", "loss", "grad_norm", "lr"):
            assert kept[key] == found[key], key


@pytest.mark.parametrize(
    ("sync", "commit"),
    [
        (EDIT, 5),  # the next round
        pytest.param(AEDIT, None, marks=pytest.mark.only_full),  # the next vote
        pytest.param(SYNCHRONOUS, 5, marks=pytest.mark.only_full),  # told at 4, read at 5
        pytest.param(CO2_STAR, 8, marks=pytest.mark.only_full),  # told at 5, read at 8
    ],
    ids=name_of,
)
def test_a_signal_to_one_rank_stops_all_where_the_run_can_go_on(
    pool: RankPool, tmp_path: Path, sync: dict[str, Any], commit: int | None
) -> None:
    changes, step_ns = changes_of(sync), [10**9, 2 * 10**9] if sync is AEDIT else []
    whole = pool.run(equalities.run, changes, None, [], False, step_ns)
    stopped = pool.run(resume.preempted, changes, str(tmp_path), 3, step_ns)
    assert len({told["commit"] for told in stopped}) == 1
    assert commit in (None, stopped[0]["commit"])
    again = pool.run(resume.go_on, changes, str(tmp_path), step_ns)
    for before, after, told in zip(whole, again, stopped, strict=True):
        left = len(before["records"]) - told["steps"]
        assert left >= 1
        check_rest(before, after, left)


def test_replicas_of_unequal_speed_go_on_from_the_commit_they_agreed_on(
    pool: RankPool, tmp_path: Path
) -> None:
    changes, step_ns = changes_of(AEDIT), [10**9, 2 * 10**9]
    whole = pool.run(equalities.run, changes, None, [], False, step_ns)
    again = pool.run(resume.interrupted, changes, str(tmp_path), 4, step_ns)
    for before, after in zip(whole, again, strict=True):
        count = len(after["history"])
        assert 2 <= count < len(before["history"])
        check_rest(before, after, count - 1)
        told = [[e["round"], e["steps"], e["norm"]] for e in after["events"] + after["closing"]]
        every = [[e["round"], e["steps"], e["norm"]] for e in before["events"] + before["closing"]]
        assert told == every[-len(told) :] and len(told) >= 2
    steps = [len(whole[rank]["history"]) - 1 for rank in (0, 2)]
    assert steps[0] > steps[1]


def test_another_number_of_shards_holds_the_same_tensors(pool: RankPool, tmp_path: Path) -> None:
    saved = pool.run(resume.commit_only, changes_of(EDIT), str(tmp_path), 7)
    smaller = changes_of(EDIT, shards=1)
    loaded = pool.run(resume.load_only, smaller, str(tmp_path))
    before, after = Trajectory(saved, replicas=2), Trajectory(loaded, replicas=2)
    for key in TENSORS:
        for replica in (0, 1):
            assert same(before.whole(key, 0, replica), after.whole(key, 0, replica)), key
    assert same(before.stats(0), after.stats(0))
