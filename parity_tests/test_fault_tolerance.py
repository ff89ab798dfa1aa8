"""A replica that fails does not reach the others, and is healthy again one round later."""

from typing import Any

import numpy as np
import pytest

from parity_tests.cases import independent
from parity_tests.checks.trajectories import (
    IN_EVERY_UNIT,
    LOUD,
    PENALTY,
    QUIET,
    UNITS,
    Fault,
    Trajectory,
    assert_bitwise,
    assert_storm,
    launch,
    same,
    storm,
)
from parity_tests.harness.pool import RankPool

VALUES = [float("nan"), float("inf"), 1e30]
# Without warm-up, in which a gradient of three replicas is not one of two. Rounds are due after
# even steps and, forced, after the last.
LOCAL: dict[str, dict[str, Any]] = {
    "sync": {"every": 2, "warmup": 0, "penalty": PENALTY},
    "train": {"steps": 13},
}
BEFORE_ROUNDS = (1, 3, 5, 7, 9, 11, 13)
# Rounds after steps 4, 6 and 8.
PLAIN: dict[str, dict[str, Any]] = {"sync": {"every": 2, "warmup": 2}, "train": {"steps": 8}}


# --- E10: a bad replica is as good as none ---


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    "shape", [pytest.param((3, 1), marks=pytest.mark.only_full), (2, 2)], ids=str
)
def test_healthy_replicas_train_as_if_the_bad_one_did_not_exist(
    pool: RankPool, shape: tuple[int, int], value: float
) -> None:
    bad, shards = shape[0] - 1, shape[1]
    faults = storm([0], [bad - 1], range(bad))
    ever = [(step, bad, name, value) for step in BEFORE_ROUNDS for name in IN_EVERY_UNIT]
    more = launch(pool, bad + 1, shards, LOCAL, faults=[*faults, *ever])
    fewer = launch(pool, bad, shards, LOCAL, faults=faults)
    assert_storm(fewer, unequal=bad > 1)
    assert not more.seen("finite")[..., bad].any()
    assert (more.seen("weight")[..., bad] == 0).all()
    assert_bitwise(more, fewer, {n: n for n in range(bad)})
    for step in range(more.steps + 1):
        wide, narrow = more.stats(step), fewer.stats(step)
        assert all(same(wide[key][:, :bad].copy(), narrow[key]) for key in wide)
    for step in (2, 13):  # the bad one has never had an effect, and none on its own statistics
        assert all((x[:, bad] == 0).all() for x in more.stats(step).values())


@pytest.mark.parametrize("value", VALUES)
def test_a_bad_replica_is_healed_by_the_round_and_counts_in_the_next(
    pool: RankPool, value: float
) -> None:
    run = launch(pool, 2, 2, PLAIN, faults=[(5, 1, name, value) for name in IN_EVERY_UNIT])
    assert run.seen("anomalous")[:, :, 1].tolist() == [[False] * 4, [True] * 4, [False] * 4]
    assert not run.seen("anomalous")[:, :, 0].any() and not run.seen("rollback").any()
    assert (run.seen("weight")[1] == [1, 0]).all()  # exact zeros
    for key in ("theta", "anchor"):
        assert same(run.whole(key, 6, 0), run.whole(key, 6, 1))
    assert healed(run, 6, replica=1) == [name for name in run.whole("theta", 6)]
    assert healed(run, 6, replica=0) == []
    assert (run.seen("weight")[2] > 0).all() and run.seen("finite")[2].all()
    assert run.stats(6)["count_R"].tolist() == [[2, 1]] * 4
    assert run.stats(8)["count_R"].tolist() == [[3, 2]] * 4
    assert run.rank(1)["history"][8]["adam_step"][LOUD] == 2


def healed(run: Trajectory, step: int, *, replica: int) -> list[str]:
    """Parameters whose AdamW state is that of a fresh start; it must be so on every shard."""
    names = []
    moments = [run.whole(key, step, replica) for key in ("exp_avg", "exp_avg_sq")]
    shards = len(run.ranks) // run.replicas
    for name in moments[0]:
        taken = {run.rank(replica, m)["history"][step]["adam_step"][name] for m in range(shards)}
        assert len(taken) == 1
        fresh = not any(moment[name].any() for moment in moments)
        assert fresh == (taken == {0.0}), name
        names += [name] if fresh else []
    return names


def test_only_the_unit_that_went_bad_is_left_out_and_healed(pool: RankPool) -> None:
    run = launch(pool, 2, 2, PLAIN, faults=[(5, 1, QUIET, 1e30)])
    assert run.seen("anomalous")[1].tolist() == [[False, True]] + [[False, False]] * 3
    assert healed(run, 6, replica=1) == [QUIET]
    assert run.rank(1)["history"][6]["adam_step"][LOUD] == 6
    assert not run.seen("anomalous")[2].any()


# --- rollback ---


def test_when_all_replicas_are_bad_nothing_changes(pool: RankPool) -> None:
    faults = [(5, 0, LOUD, float("nan")), (5, 1, LOUD, float("inf"))]
    run = launch(pool, 2, 2, PLAIN, faults=faults)
    assert run.seen("rollback").tolist() == [[False] * 4, [True] * 4, [False] * 4]
    for replica in range(2):
        for key in ("anchor", "velocity"):
            assert same(run.whole(key, 6, replica), run.whole(key, 4, replica))
        assert same(run.whole("theta", 6, replica), run.whole("anchor", 4))
        assert len(healed(run, 6, replica=replica)) == 21
    assert same(run.stats(6), run.stats(4))
    assert not same(run.whole("anchor", 8), run.whole("anchor", 6))  # and the run goes on
    assert run.stats(8)["count_R"].tolist() == [[2, 2]] * 4


def test_when_all_replicas_are_flagged_only_their_flags_change(pool: RankPool) -> None:
    sync = PLAIN["sync"] | {"penalty": PENALTY | {"z_threshold": 30.0}}
    faults = [(7, n, QUIET, 20.0 + n) for n in range(2)]
    run = launch(pool, 2, 2, PLAIN | {"sync": sync, "train": {"steps": 10}}, faults=faults)
    assert run.events[2]["rollback"] == [True, False, False, False]
    assert run.events[2]["flagged"][0] == [True, True] and run.seen("finite").all()
    for key in ("anchor", "velocity"):
        before, after = run.whole(key, 6), run.whole(key, 8)
        changed = [name for name in before if not same(before[name], after[name])]
        assert QUIET not in changed and len(changed) == 20
    before_stats, stats = run.stats(6), run.stats(8)
    for key in ("mean_R", "var_R", "count_R"):
        assert same(stats[key][0], before_stats[key][0])
    assert stats["flags_R"].tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]
    assert healed(run, 8, replica=0) == []  # finite moments are kept
    assert not run.seen("anomalous")[3].any() and (run.stats(10)["flags_R"] == 0).all()


def test_a_lasting_change_of_regime_is_accepted_at_the_third_flag(pool: RankPool) -> None:
    sync = PLAIN["sync"] | {"penalty": PENALTY | {"z_threshold": 30.0}}
    faults = [(step, 0, QUIET, 20.0 * (-1) ** step) for step in (7, 9, 11)]
    faults = [(step, n, name, value + step) for step, n, name, value in faults]
    run = launch(pool, 2, 2, PLAIN | {"sync": sync, "train": {"steps": 12}}, faults=faults)
    assert run.seen("flagged")[2:, 0, 0].tolist() == [True] * 3
    assert run.seen("rearmed")[:, 0, 0].tolist() == [False] * 4 + [True]
    assert run.seen("anomalous")[:, 0, 0].tolist() == [False, False, True, True, False]
    assert run.stats(12)["count_R"][0, 0] == 1 and run.stats(12)["flags_R"][0, 0] == 0
    assert run.stats(12)["mean_R"][0, 0] == run.events[-1]["norm"][0][0]


# --- errors that must reach every rank ---


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    "method", ["diloco", pytest.param("post_local_sgd", marks=pytest.mark.only_full)]
)
def test_without_a_penalty_a_bad_replica_stops_all_ranks_and_the_anchor_survives(
    pool: RankPool, method: str, value: float
) -> None:
    changes = PLAIN | {"sync": {"method": method, "every": 2, "warmup": 2}}
    run = launch(pool, 2, 2, changes, faults=[(5, 1, QUIET, value)])
    assert [rank["error"] for rank in run.ranks] == ["NonFinite"] * 4
    assert [len(rank["history"]) - 1 for rank in run.ranks] == [5] * 4
    for key in ("anchor", "velocity"):
        assert same(run.whole(key, -1), run.whole(key, 5))
    for replica in range(2):
        assert same(run.whole("theta", -1, replica), run.whole("anchor", 4))


def test_replicas_from_other_seeds_are_refused_on_all_ranks(pool: RankPool) -> None:
    mesh = {"replicas": 2, "shards": 2}
    told = pool.run(independent.error_of_other_seeds, {"mesh": mesh, "sync": {"warmup": 0}})
    assert told == ["replicas [1] hold other parameters than replica 0"] * 4


def test_replicas_that_differ_in_one_element_are_refused_on_all_ranks(pool: RankPool) -> None:
    faults: list[Fault] = [(2, 1, QUIET, 1e-300)]
    changes = {"sync": {"every": 2, "warmup": 3}, "train": {"steps": 3}}
    run = launch(pool, 2, 2, changes, faults=faults)
    assert [rank["error"] for rank in run.ranks] == ["ReplicasDiffer"] * 4


def test_the_units_are_those_that_these_tests_count_on(pool: RankPool) -> None:
    run = launch(pool, 1, 2, PLAIN)
    assert [event["units"] for event in run.events] == [UNITS] * 3
    assert len(run.whole("theta", 0)) == 21
    np.testing.assert_array_equal(run.seen("effective_replicas"), 1.0)
