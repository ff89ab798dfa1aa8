"""The greedy rule by hand, the recursion against the timeline, proposals against the best."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_torch.shard.auto_wrap import (
    Need,
    Problem,
    Rule,
    candidates,
    estimate,
    exhaustive,
    greedy,
)
from core_torch.shard.cost import Costs
from core_torch.shard.plan import Plan, best, check_plan, plan_hash
from core_torch.shard.timeline import simulate, simulate_step
from core_torch.tests.program_cases import costs, programs_of

FACTOR = 1.1  # over the optimum, at most, for the best of the candidates
quick = settings(deadline=None, max_examples=60, derandomize=True)


def problem(
    payloads: list[int],
    seconds: list[float],
    *,
    units: str = "",
    ranks: int = 2,
    activations: int = 0,
) -> Problem:
    """Needs "p0", "p1", ...; the backward computes twice as long as the forward."""
    count = len(payloads)
    names = units or "u" * count
    return Problem(
        needs=tuple(Need(f"p{i}", names[i], n, n) for i, n in enumerate(payloads)),
        forward_seconds=tuple(seconds),
        backward_seconds=tuple(2 * s for s in seconds),
        forward_bytes=(activations,) * count,
        backward_bytes=(activations,) * count,
        ranks=ranks,
    )


def lengths(plan: Plan) -> list[int]:
    return [len(bucket) for bucket in plan]


def alone(of: Problem) -> Plan:
    return [[need.name] for need in of.needs]


def together(of: Problem) -> Plan:
    return [[need.name for need in of.needs]]


# A gather of 20 bytes among two ranks takes 1 + 10 / 10 = 2 seconds, of 180 bytes 10 seconds.


def test_greedy_grows_a_bucket_while_it_hides_behind_the_compute_before_it() -> None:
    of = problem([180] * 6, [20.0] * 6)
    # Knee: 180 bytes. The first bucket has nothing to hide behind. Two needs take 19 seconds,
    # three 28; behind the 40 seconds of two, four take 37.
    assert lengths(greedy(of, costs(), Rule())) == [1, 2, 3]
    assert lengths(greedy(of, costs(), Rule(slack=0.4))) == [1, 3, 2]
    assert lengths(greedy(of, costs(), Rule(largest_bytes=360))) == [1, 2, 2, 1]


def test_greedy_backwards_counts_the_scatter_of_the_step_before() -> None:
    of = problem([180] * 6, [15.0] * 6)
    # From the end: behind 30 seconds and beside a scatter of 10, two needs take 19.
    # Behind 60 seconds and beside a scatter of 19, four would take 37: the other three go in.
    assert lengths(greedy(of, costs(), Rule(backward=True))) == [3, 2, 1]


def test_a_bucket_reaches_the_knee_before_overlap_is_asked_for() -> None:
    of = problem([60] * 9, [0.001] * 9)
    # Of 60 bytes' 4 seconds latency is a quarter; of 180 bytes' 10 a tenth.
    assert lengths(greedy(of, costs(), Rule())) == [3, 3, 3]
    assert lengths(greedy(of, costs(), Rule(latency_share=0.25))) == [1] * 9
    assert lengths(greedy(of, costs(), Rule(backward=True))) == [3, 3, 3]


def test_where_communication_dominates_the_published_rule_degenerates_and_ours_does_not() -> None:
    of = problem([40] * 39, [0.01] * 39, units="".join(chr(65 + i // 9) for i in range(39)))
    assert len(greedy(of, costs(), Rule(latency_share=1.0))) == 39, "as published"
    assert len(greedy(of, costs(), Rule())) <= 8
    assert len(candidates(of, costs())[0]) <= 8


def test_greedy_stops_at_the_memory_limit() -> None:
    of = problem([60] * 9, [0.001] * 9)
    pairs = [["p0", "p1"], ["p2", "p3"], ["p4", "p5"], ["p6", "p7"], ["p8"]]
    limit = estimate(of, costs(), pairs).peak_bytes
    assert estimate(of, costs(), greedy(of, costs(), Rule())).peak_bytes > limit
    found = greedy(of, costs(), Rule(), memory_limit=limit)
    assert estimate(of, costs(), found).peak_bytes <= limit
    assert 3 < len(found) < 9, "merged as far as memory allows"


def test_greedy_backwards_knows_that_gradients_pile_up_towards_the_first_need() -> None:
    of = replace(problem([60] * 4, [0.001] * 4), backward_bytes=(1000, 0, 0, 0))
    of = replace(of, needs=tuple(need._replace(gradient_bytes=240) for need in of.needs))
    limit = estimate(of, costs(), alone(of)).peak_bytes
    found = greedy(of, costs(), Rule(backward=True), memory_limit=limit)
    assert estimate(of, costs(), found).peak_bytes <= limit
    assert lengths(found) == [1, 1, 2]


def test_the_estimate_of_two_buckets_by_hand() -> None:
    of = problem([40, 60], [5.0, 2.0], activations=100)
    found = estimate(of, costs(), alone(of))
    # Forward: gathers end at 3 and 7; compute 3..8, 8..10. Backward from 0: gathers of the
    # second end at 4, of the first at 7; compute 4..8; scatter 8..12; compute 8..18; scatter
    # 18..21.
    assert found.seconds == 10 + 21
    # Backward, second bucket: 60 gathered and 30 + 60 in its flight; 20 + 40 of the first.
    # First bucket: sending 40 + 20 of its 40, while 60 + 30 of the second are on their way.
    assert found.peak_bytes == 100 + max(60 + 90 + 60, 60 + 90 + 60, 40 + 60 + 90)
    with pytest.raises(ValueError, match="in order of first use"):
        estimate(of, costs(), [["p1"], ["p0"]])


def test_a_problem_without_needs_or_with_numbers_missing_is_refused() -> None:
    with pytest.raises(ValueError, match="2 needs do not have one number each"):
        replace(problem([1, 2], [1.0, 1.0]), forward_seconds=(1.0,))
    with pytest.raises(ValueError, match="nothing needs a collective"):
        problem([], [])


def random_problem(seed: int) -> tuple[Problem, Costs]:
    """Up to eight needs; compute from far below to far above communication; some frozen."""
    random = Random(seed)
    count = random.randint(1, 8)
    seconds = [10 ** random.uniform(-4, -1.5) for _ in range(count)]
    payloads = [8 * int(10 ** random.uniform(2, 6)) for _ in range(count)]
    units = "".join(chr(65 + i // random.randint(1, 3)) for i in range(count))
    of = problem(payloads, seconds, units=units, ranks=random.choice([2, 4, 8]))
    frozen = [random.random() < 0.1 for _ in range(count)]
    pairs = zip(of.needs, frozen, strict=True)
    needs = tuple(n._replace(gradient_bytes=0) if f else n for n, f in pairs)
    memory = [tuple(random.randint(0, 10**6) for _ in range(count)) for _ in range(2)]
    of = replace(of, needs=needs, forward_bytes=memory[0], backward_bytes=memory[1])
    link = dict(
        latency_seconds=10 ** random.uniform(-5, -2.5),
        link_bytes_per_second=10 ** random.uniform(7, 10),
    )
    return of, costs(**link)


def random_limit(of: Problem, costs: Costs, seed: int) -> int:
    """Somewhere between the memory of the finest and of the coarsest plan."""
    least, most = (estimate(of, costs, plan).peak_bytes for plan in (alone(of), together(of)))
    return round(least + (most - least) * Random(seed).uniform(-0.1, 1.1))


seeds = st.integers(0, 2**32)


@quick
@given(seeds)
def test_the_recursion_agrees_with_the_timeline_of_the_scheduled_programs(seed: int) -> None:
    of, cost = random_problem(seed)
    for plan in (alone(of), together(of), exhaustive(of, cost).plan):
        forward, backward = programs_of(of, plan)
        found = estimate(of, cost, plan)
        step = simulate_step(forward, backward, cost, carried={})
        parts = [simulate(program, cost) for program in (forward, backward)]
        assert found.seconds == pytest.approx(step.seconds, rel=1e-12)
        assert found.seconds == pytest.approx(sum(part.seconds for part in parts), rel=1e-12)
        assert found.peak_bytes == step.peak_bytes == max(part.peak_bytes for part in parts)


@quick
@given(seeds)
def test_the_best_candidate_is_near_the_best_of_all_partitions(seed: int) -> None:
    of, cost = random_problem(seed)
    limit = random_limit(of, cost, seed)
    for memory_limit in (None, limit):
        proposed = candidates(of, cost, memory_limit=memory_limit)
        for plan in proposed:
            check_plan(plan, [need.name for need in of.needs])
        found = best(proposed, lambda p: estimate(of, cost, p), memory_limit=memory_limit)
        optimum = exhaustive(of, cost, memory_limit=memory_limit)
        assert found.fits == optimum.fits, "a plan fits, yet none was proposed"
        if found.fits:
            assert found.seconds <= optimum.seconds * FACTOR
            assert proposed[0] == found.plan or found.seconds == pytest.approx(
                estimate(of, cost, proposed[0]).seconds
            )


@quick
@given(seeds, st.booleans())
def test_greedy_exceeds_the_limit_only_where_no_merging_at_all_does(
    seed: int, backward: bool
) -> None:
    of, cost = random_problem(seed)
    limit = random_limit(of, cost, seed)
    plan = greedy(of, cost, Rule(backward=backward), memory_limit=limit)
    check_plan(plan, [need.name for need in of.needs])
    if estimate(of, cost, alone(of)).peak_bytes <= limit:
        assert estimate(of, cost, plan).peak_bytes <= limit
    else:
        assert plan == alone(of)


def test_candidates_hold_the_units_merged_and_halved_ones_and_equal_portions() -> None:
    of = problem([10, 10, 40, 20, 20, 20, 20, 60], [1.0] * 8, units="eaaabbbh")
    proposed = [lengths(plan) for plan in candidates(of, costs())]
    units, pairs, halves, portions = [1, 3, 3, 1], [4, 4], [1, 2, 1, 1, 2, 1], [5, 3]
    for lengths_of in (units, pairs, [7, 1], halves, portions, [8]):
        assert lengths_of in proposed
    assert len({tuple(p) for p in proposed}) == len(proposed)


def test_candidates_hold_what_greedy_gives_in_both_directions() -> None:
    for seed in range(20):
        of, cost = random_problem(seed)
        proposed = candidates(of, cost)
        for backward in (False, True):
            assert greedy(of, cost, Rule(backward=backward)) in proposed


def test_exhaustive_search_is_for_eight_collectives_at_most() -> None:
    of = problem([1] * 9, [1.0] * 9)
    with pytest.raises(ValueError, match="9 needs have 256 partitions"):
        exhaustive(of, costs())


def test_a_model_of_forty_layers_is_planned_too() -> None:
    units = "".join(chr(1000 + i // 9) for i in range(360))
    of = problem([900 + i % 9 for i in range(360)], [30.0] * 360, units=units)
    fastest, finest = candidates(of, costs())[0], alone(of)
    peaks = [estimate(of, costs(), plan).peak_bytes for plan in (finest, fastest)]
    limit = (peaks[0] + peaks[1]) // 2
    assert peaks[0] < limit < peaks[1]
    assert estimate(of, costs(), candidates(of, costs(), memory_limit=limit)[0]).peak_bytes <= limit


def test_proposals_are_the_same_each_time_and_in_another_process() -> None:
    of, cost = random_problem(5)
    code = (
        "from core_torch.tests.test_auto_wrap import candidates, plan_hash, random_problem; "
        "import sys; sys.stdout.write(''.join(map(plan_hash, candidates(*random_problem(5)))))"
    )
    hashes = "".join(plan_hash(plan) for plan in candidates(of, cost))
    for seed in ("1", "2"):  # of Python's own hashes, which order sets
        run = subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        assert run.stdout == hashes
