"""Plans of buckets: complete or refused by name, hashed alike everywhere, chosen by score only."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from core_torch.errors import ConfigError
from core_torch.shard.plan import Choice, Plan, best, check_plan, plan_hash

NAMES = ["a.weight", "b.weight", "c.weight"]


def test_every_parameter_in_exactly_one_bucket_is_accepted_in_any_order() -> None:
    check_plan([["c.weight"], ["b.weight", "a.weight"]], NAMES)


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        ([NAMES, ["d.weight"]], "d.weight is no sharded parameter"),
        ([NAMES, ["b.weight"]], "b.weight is listed 2 times"),
        ([["a.weight", "c.weight"]], "b.weight is in no bucket"),
        ([NAMES, []], "bucket 1 is empty"),
        ([["a.weight"], "b.weight"], "holds the bare name b.weight"),
    ],
)
def test_a_plan_that_does_not_fit_names_what_is_wrong(plan: Plan, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_plan(plan, NAMES)


def test_all_problems_of_a_plan_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check_plan([["x"], ["a.weight", "a.weight"]], NAMES)
    for name in ("x", "a.weight", "b.weight", "c.weight"):
        assert f"{name} is" in caught.value.what


def test_the_hash_tells_plans_apart_and_is_the_same_in_another_process() -> None:
    plans: list[Plan] = [[["a", "b"]], [["a"], ["b"]], [["b", "a"]], [["ab"]], [["a, b"]], []]
    assert len({plan_hash(plan) for plan in plans}) == len(plans)
    code = "import sys; from core_torch.shard.plan import plan_hash as f; "
    run = [sys.executable, "-c", code + 'sys.stdout.write(f([["a", "b"]]))']
    root = Path(__file__).parents[2]
    elsewhere = subprocess.run(
        run, cwd=root, capture_output=True, text=True, check=True, timeout=120
    )
    assert elsewhere.stdout == plan_hash([["a", "b"]]) and len(elsewhere.stdout) == 16


SCORES = {"slow": (3.0, 10), "fast": (1.0, 90), "middle": (1.05, 40), "tiny": (9.0, 5)}


def chosen(limit: int | None = None, tolerance: float = 0.0, names: tuple[str, ...] = ()) -> Choice:
    plans = [[[name]] for name in names or SCORES]
    return best(plans, lambda plan: SCORES[plan[0][0]], memory_limit=limit, tolerance=tolerance)


def test_the_fastest_plan_within_the_limit_wins() -> None:
    assert chosen() == Choice([["fast"]], 1.0, 90, True)
    assert chosen(89) == Choice([["middle"]], 1.05, 40, True)
    assert chosen(40).plan == [["middle"]] and chosen(39).plan == [["slow"]]


def test_without_a_plan_that_fits_the_leanest_wins_and_says_so() -> None:
    assert chosen(4) == Choice([["tiny"]], 9.0, 5, False)


def test_within_the_tolerance_less_memory_wins() -> None:
    assert chosen(tolerance=0.05).plan == [["middle"]]
    assert chosen(tolerance=0.04).plan == [["fast"]]


def test_ties_do_not_depend_on_the_order_of_the_candidates() -> None:
    plans: list[Plan] = [[["b"], ["c"]], [["b", "c"]], [["a", "c"]], [["a"], ["c"]]]
    winners = [best(list(p), lambda plan: (1.0, 1)).plan for p in itertools.permutations(plans)]
    assert winners == [[["a", "c"]]] * 24, "fewer buckets, then names"


def test_nothing_to_choose_from_is_refused() -> None:
    with pytest.raises(ValueError, match="no candidates"):
        best([], lambda plan: (1.0, 1))
