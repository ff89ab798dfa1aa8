"""Rounds in a compiled forward against rounds between two steps: the same bits (E5).

Four ranks, two replicas of two shards. Both schedules run on the same compiled graph.
"""

import functools
from typing import Any

import pytest

from parity_tests.cases import exchange
from parity_tests.cases.exchange import EVERY, STEPS
from parity_tests.cases.sharded_training import How, Told
from parity_tests.harness.pool import RankPool

SIMPLE: How = {"method": "simple_fsdp", "shards": 2}
UNITS = ["embedding", "layers.0", "layers.1", "head"]
# how to train, exchanges in flight, micro-batches of a step
RUNS: dict[str, tuple[How, int, int]] = {
    "eager": (SIMPLE, 2, 1),
    "manual": (SIMPLE | {"options": {}}, 1, 1),
    "auto, recomputing some, 3 micro-batches": (
        SIMPLE | {"options": {"wrap": "auto", "ahead": 2}, "recompute": "selective"},
        3,
        3,
    ),
    "inductor": (SIMPLE | {"options": {"backend": "inductor"}}, 2, 1),
}
ONLY_FULL = [name for name in RUNS if name != "inductor"]  # test_layerwise.py has their parts
COMPILED = [
    pytest.param(name, marks=pytest.mark.only_full) if name in ONLY_FULL else name
    for name in RUNS
    if name != "eager"
]
ROUNDS = (STEPS - 1) // EVERY


@pytest.fixture(scope="module")
def told(pool: RankPool) -> Any:
    """What the ranks told of a run, each made once."""

    @functools.cache
    def run(name: str) -> list[Told]:
        return pool.run(exchange.both_schedules, *RUNS[name], deadline=240.0)

    return run


def assert_same(one: Told, other: Told) -> None:
    """Losses, parameters after each forward, gradients of each step: every bit."""
    for what in ("losses", "parameters", "gradients"):
        assert one[what] == other[what], what
    assert len(set(one["parameters"])) >= STEPS, "it does train"


@pytest.mark.parametrize("name", COMPILED)
def test_a_round_in_the_forward_is_the_round_between_the_steps_bit_for_bit(
    told: Any, name: str
) -> None:
    for rank in told(name):
        assert_same(rank["in the forward"], rank["between steps"])


@pytest.mark.only_full
def test_rounds_in_a_compiled_forward_give_the_bits_of_eager_training(told: Any) -> None:
    for mine, eager in zip(told("manual"), told("eager"), strict=True):
        assert_same(mine["in the forward"], eager["between steps"])


def test_replicas_hold_what_the_exchange_made_and_have_data_of_their_own(told: Any) -> None:
    ranks = [rank["in the forward"] for rank in told("inductor")]
    assert ranks[0]["losses"] != ranks[2]["losses"], "replica 0 and replica 1"
    assert ranks[0]["losses"] != ranks[1]["losses"], "shards of one replica"


@pytest.mark.parametrize("name", COMPILED)
def test_each_forward_asks_once_and_a_round_starts_and_finishes_units_in_order(
    told: Any, name: str
) -> None:
    _, limit, accumulate = RUNS[name]
    for rank in told(name):
        calls = rank["in the forward"]["calls"]
        asked = [call for call in calls if call in ("begin", "ordinary")]
        due = [
            step > 0 and step % EVERY == 0 and k == 0
            for step in range(STEPS)
            for k in range(accumulate)
        ]
        assert asked == ["begin" if is_due else "ordinary" for is_due in due]
        rounds = " ".join(calls).replace("ordinary", "").split("begin")[1:]
        assert len(rounds) == ROUNDS == 2
        for found in rounds:
            assert found.split() == _calls(limit)


def _calls(limit: int) -> list[str]:
    """Of a round with ``limit`` exchanges in flight, as words."""
    first = [f"start {u}" for u in range(min(limit, len(UNITS)))]
    for u in range(len(UNITS)):
        first.append(f"finish {u}")
        if u + limit < len(UNITS):
            first.append(f"start {u + limit}")
    return " ".join([*first, "end"]).split()


@pytest.mark.parametrize("name", COMPILED)
def test_evaluation_carries_no_round_even_if_one_is_due(told: Any, name: str) -> None:
    for rank in told(name):
        seen = rank["in the forward"]["evaluated"]
        assert seen[1:-1:2] == seen[2::2], "calls at the end of a step and after an evaluation"


@pytest.mark.parametrize("name", COMPILED)
def test_nothing_is_compiled_after_the_first_step(told: Any, name: str) -> None:
    for rank in told(name):
        assert rank["programs"] == ["inference", "forward", "round", "backward"]
        for schedule in ("in the forward", "between steps"):
            graphs = rank[schedule]["graphs"]
            assert all(found == graphs[0] for found in graphs)


def test_the_round_runs_the_kernels_of_the_ordinary_forward(told: Any) -> None:
    for rank in told("inductor"):
        assert len(rank["kernels"]["forward"]) >= len(UNITS)
        assert rank["kernels"]["round"] == rank["kernels"]["forward"]


@pytest.mark.parametrize("name", COMPILED)
def test_the_round_adds_one_exchange_per_unit_to_the_collectives_of_a_forward(
    told: Any, name: str
) -> None:
    for rank in told(name):
        both = [tuple(found) for found in rank["round"]]
        gathers = [found for found in both if found[1] == "all_gather"]
        assert gathers == [tuple(found) for found in rank["forward"]]
        for kind in ("start", "wait"):
            names = [unit for k, op, unit in both if op == "all_reduce" and k == kind]
            assert names == UNITS
