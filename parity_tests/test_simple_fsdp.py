"""SimpleFSDP against FSDP2 and against itself: bits, counts of collectives, traps of public code.

Two ranks add two numbers, which has one order, so everything that is not fused must agree to the
last bit; on four ranks FSDP2's own reduce-scatter adds in another order.
"""

import functools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from parity_tests.cases import sharded_modules, sharded_training
from parity_tests.cases.sharded_training import LAYERS, SEQUENCE, VOCABULARY, How, Told
from parity_tests.checks.trajectories import same
from parity_tests.harness import tolerances
from parity_tests.harness.jax_bridge import assemble
from parity_tests.harness.pool import RankPool
from parity_tests.harness.ulps import ErrorTable

SIMPLE: How = {"method": "simple_fsdp", "shards": 2}
FSDP2: How = {"method": "fsdp2", "shards": 2}
STEPS = 20
UNITS = ["tok_embeddings.weight", "layers.0", "layers.1", "head"]  # one parameter: its own name
PARAMETERS, IN_BLOCKS = 21, 18
SEQUENTIAL = {"wrap": "none", "ahead": 0, "behind": 0}
PIPELINED = {"wrap": "auto", "ahead": 2}
HALVES = [
    [f"layers.{i}.{name}.weight" for i in range(LAYERS) for name in names]
    for names in (
        ("attention_norm", "attention.wq", "attention.wk", "attention.wv", "attention.wo"),
        ("ffn_norm", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
    )
]
ACROSS = {"wrap": [*HALVES, ["output.weight", "tok_embeddings.weight", "norm.weight"]], "ahead": 2}
PLANS: dict[str, dict[str, Any]] = {
    "none": SEQUENTIAL,
    "manual": {},
    "auto": PIPELINED,
    "across units": ACROSS | {"behind": 0},
}


@pytest.fixture(scope="module")
def told(pool: RankPool) -> Any:
    """Runs that several tests look at, each made once: (how, steps) -> what the ranks told."""

    @functools.cache
    def run(how: str, steps: int) -> list[Told]:
        ranks = pool.run(sharded_training.trained, RUNS[how], steps)
        return [rank for rank in ranks if rank is not None]

    return run


RUNS: dict[str, How] = {
    "fsdp2": FSDP2,
    "eager": SIMPLE,
    **{name: SIMPLE | {"options": options} for name, options in PLANS.items()},
    "regional": SIMPLE | {"regional": True},
    "inductor": SIMPLE | {"options": {"backend": "inductor"}},
    "fsdp2 on 4": FSDP2 | {"shards": 4},
    "eager on 4": SIMPLE | {"shards": 4},
    "fsdp2 bf16": FSDP2 | {"compute": "bfloat16"},
    "eager bf16": SIMPLE | {"compute": "bfloat16"},
    "manual bf16": SIMPLE | {"compute": "bfloat16", "options": {}},
}


def assert_same_training(run: list[Told], other: list[Told]) -> None:
    """Losses, gradients of each step, and parameters at the end: every bit on every rank."""
    for mine, theirs in zip(run, other, strict=True):
        assert mine["losses"] == theirs["losses"]
        for step, (one, two) in enumerate(zip(mine["grads"], theirs["grads"], strict=True)):
            assert same(one, two), f"gradients of step {step}"
        assert same(mine["params"], theirs["params"])
        assert mine["losses"][-1] != mine["losses"][0]


# --- bits ---


@pytest.mark.parametrize("how", ["eager", *PLANS])
def test_twenty_steps_are_those_of_fsdp2_bit_for_bit(told: Any, how: str) -> None:
    assert_same_training(told(how, STEPS), told("fsdp2", STEPS))


@pytest.mark.parametrize("how", ["eager bf16", "manual bf16"])
def test_computing_in_bfloat16_gives_the_bits_of_fsdp2s_mixed_precision(
    told: Any, how: str
) -> None:
    run = told(how, 5)
    assert_same_training(run, told("fsdp2 bf16", 5))
    grads = run[0]["grads"][0].values()
    assert {grad["rows"].dtype.name for grad in grads} == {"float32"}
    assert {dispatch[1:3] for dispatch in map(tuple, run[0]["forward"] + run[0]["backward"])} == {
        ("all_gather", "bfloat16"),
        ("reduce_scatter", "float32"),
    }


def test_blocks_can_be_compiled_by_themselves(told: Any) -> None:
    run = told("regional", 3)
    assert_same_training(run, told("fsdp2", 3))
    # A block gathers as one what eager mode gathers parameter by parameter: 9 of them in each.
    gathers = [d for d in map(tuple, run[0]["forward"]) if d[1] == "all_gather"]
    assert len(gathers) == 3 + LAYERS


def test_inductor_and_four_ranks_differ_from_fsdp2_by_rounding_only(
    told: Any, errors: ErrorTable
) -> None:
    for how, other in (("inductor", "fsdp2"), ("eager on 4", "fsdp2 on 4")):
        run, truth = told(how, STEPS), told(other, STEPS)
        begin = sharded_training.alone({}, steps=0)["params"]
        first, expected = (whole([rank["grads"][0] for rank in x]) for x in (run, truth))
        for name, grad in expected.items():
            where = f"{name}, {how}"
            errors.check("gradient, simple_fsdp", first[name], grad, MODEL, where=where)
        end, expected_end = (whole([rank["params"] for rank in x]) for x in (run, truth))
        for name, start in begin.items():
            update = expected_end[name] - start
            tolerance = tolerances.free_running(
                "float32",
                steps=STEPS,
                layers=LAYERS,
                width=VOCABULARY,
                params=float(np.linalg.norm(start)),
                update=float(np.linalg.norm(update)),
            )
            errors.check(f"20 steps, {how}", end[name] - start, update, tolerance, where=name)


MODEL = tolerances.model("float32", layers=LAYERS, width=VOCABULARY)


def whole(parts: list[Told]) -> dict[str, np.ndarray]:
    """Whole tensors from each rank's rows."""
    return assemble(parts, replicas=1)[0]


# --- counts ---


def count(run: list[Told], phase: str) -> dict[str, int]:
    """Collectives of one step by operation, the same on every rank."""
    seen = [Counter(op for _, op, *_ in rank[phase]) for rank in run]
    assert all(mine == seen[0] for mine in seen)
    return dict(seen[0])


def test_without_buckets_each_parameter_is_gathered_and_scattered_by_itself(told: Any) -> None:
    eager, compiled = told("eager", STEPS), told("none", STEPS)
    assert count(eager, "forward") == count(compiled, "forward") == {"all_gather": PARAMETERS}
    assert count(compiled, "backward") == {"all_gather": IN_BLOCKS, "reduce_scatter": PARAMETERS}
    # Eager: the head as well; the embedding's gradient does not need the embedding.
    assert count(eager, "backward") == {"all_gather": PARAMETERS - 1, "reduce_scatter": PARAMETERS}


def test_the_manual_plan_makes_one_collective_per_unit_and_direction(told: Any) -> None:
    run = told("manual", STEPS)
    assert count(run, "forward") == {"all_gather": 4}
    assert count(run, "backward") == {"all_gather": 2, "reduce_scatter": 4}
    scopes = {phase: [d[4] for d in run[0][phase]] for phase in ("forward", "backward")}
    assert scopes["forward"] == UNITS
    gathered_again = [d[4] for d in run[0]["backward"] if d[1] == "all_gather"]
    assert gathered_again == ["layers.1", "layers.0"]  # neither the embedding nor the last unit


@pytest.mark.parametrize("how", PLANS)
def test_a_run_dispatches_what_its_compiled_programs_say(told: Any, how: str) -> None:
    [first, second] = told(how, STEPS)
    assert first["compiled"] == second["compiled"]
    compiled = first["compiled"]
    assert compiled["programs"] == ["forward", "backward"]  # twenty steps, one compilation
    for phase in ("forward", "backward"):
        starts = [(op, name) for kind, op, name in compiled[phase] if kind == "start"]
        waits = [(op, name) for kind, op, name in compiled[phase] if kind == "wait"]
        assert starts == [(d[1], d[4]) for d in first[phase]]
        assert sorted(starts) == sorted(waits)


def test_the_automatic_plan_needs_no_more_collectives_than_the_manual_one(told: Any) -> None:
    for phase in ("forward", "backward"):
        mine, manual = (count(told(how, STEPS), phase) for how in ("auto", "manual"))
        assert mine.keys() == manual.keys()
        assert all(mine[op] <= manual[op] for op in mine)


@pytest.mark.parametrize("how", ["manual", "auto", "across units"])
def test_buckets_change_no_byte_that_is_sent(told: Any, how: str) -> None:
    mine, unbucketed = told(how, STEPS), told("none", STEPS)
    assert payload(mine, "forward") == payload(unbucketed, "forward")
    if how == "across units":  # a bucket that is needed in part is gathered in part
        assert count(mine, "backward") == {"all_gather": 2, "reduce_scatter": 3}
    assert payload(mine, "backward") == payload(unbucketed, "backward")


def payload(run: list[Told], phase: str) -> dict[str, int]:
    """Elements per operation."""
    total: Counter[str] = Counter()
    for _, op, _, numel, _ in run[0][phase]:
        total[op] += numel
    return dict(total)


def test_gathers_start_ahead_and_scatters_are_waited_for_behind(told: Any) -> None:
    compiled = told("manual", STEPS)[0]["compiled"]
    forward = [(kind, name) for kind, _, name in compiled["forward"]]
    for before, after in zip(UNITS, UNITS[1:], strict=False):
        assert forward.index(("start", after)) < forward.index(("wait", before))
    scatters = [(k, name) for k, op, name in compiled["backward"] if op == "reduce_scatter"]
    order = [name for kind, name in scatters if kind == "start"]
    assert sorted(order) == sorted(UNITS)
    for before, after in zip(order, order[1:], strict=False):
        assert scatters.index(("wait", before)) > scatters.index(("start", after))
    sequential = [kind for kind, *_ in told("none", STEPS)[0]["compiled"]["forward"]]
    assert sequential == ["start", "wait"] * PARAMETERS


# --- the traps of public implementations ---


def test_gradients_are_means_over_ranks_and_not_sums(pool: RankPool) -> None:
    mine = whole(pool.run(sharded_modules.equal_data, 2)[:2])
    [own] = sharded_training.alone({"dtype": "float64"})["grads"]
    assert same(mine, own)  # the mean of two equal numbers is exact


@pytest.mark.parametrize("options", [None, {}], ids=["eager", "manual"])
def test_tied_weights_stay_one_parameter_with_one_optimizer_state(
    pool: RankPool, options: dict[str, Any] | None, errors: ErrorTable
) -> None:
    ranks = pool.run(sharded_modules.tied, options)[:2]
    truth = sharded_training.alone({"tied": True}, steps=2)["params"]
    mine = whole([rank["params"] for rank in ranks])
    assert list(mine) == list(truth) and "output.weight" not in mine
    for name, expected in truth.items():
        errors.check("tied weights, simple_fsdp", mine[name], expected, TIED, where=name)
    for rank in ranks:
        assert rank["one"] and rank["parameters"] == rank["states"] == PARAMETERS - 1
        if options is not None:  # both uses in one scatter
            assert [scope for scope, _ in rank["scatters"]] == ["layers.1", "layers.0", "embedding"]
            assert rank["scatters"][-1][1] == 2 * (31 * 16 + 8)  # padded rows, and the norm; once


TIED = tolerances.model("float32", layers=LAYERS, width=VOCABULARY + SEQUENCE)


@pytest.mark.parametrize(
    "options", [None, pytest.param({}, marks=pytest.mark.only_full)], ids=["eager", "manual"]
)
def test_a_second_model_keeps_its_own_mesh_and_precision(
    pool: RankPool, options: dict[str, Any] | None
) -> None:
    for rank in pool.run(sharded_modules.two_models, options):
        assert rank["shard"] == {
            "logits": "torch.bfloat16",
            "grads": ["torch.float32"],
            "axes": ["shard"],
            "dtypes": ["bfloat16"],
        }
        assert rank["replica"] == {
            "logits": "torch.float32",
            "grads": ["torch.float32"],
            "axes": ["replica"],
            "dtypes": ["float32"],
        }
