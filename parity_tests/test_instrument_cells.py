"""Which cells ``twinshard parity run`` compares by default, and that each can be configured."""

import itertools
from collections import Counter

import pytest

from core_torch.config import METHODS, RunConfig, all_problems
from parity_tests.cases.equalities import configured
from parity_tests.checks.cells import core_changes
from parity_tests.instrument.cells import FACTORS, cell_of, covering, dtype_of, product
from parity_tests.instrument.matrix import named


def test_the_default_cells_hold_every_pair_of_choices_and_each_method_four_times() -> None:
    chosen = covering()
    for i, j in itertools.combinations(range(len(FACTORS)), 2):
        assert {(c[i], c[j]) for c in chosen} == set(itertools.product(FACTORS[i], FACTORS[j]))
    counted = Counter(method for method, *_ in chosen)
    assert set(counted) == set(METHODS) and min(counted.values()) >= 4
    assert len(chosen) <= 60


def test_the_full_product_holds_every_choice_once() -> None:
    everything = product()
    assert len(everything) == len(set(everything)) == 8 * 4 * 3 * 6 * 3
    assert set(covering()) <= set(everything)


@pytest.mark.parametrize("choice", covering(), ids=lambda c: "-".join(map(str, c)))
def test_a_default_cell_is_a_run_that_the_core_accepts(choice: tuple[str, ...]) -> None:
    cell = cell_of(choice)
    assert dtype_of(cell) == choice[2] and len(cell.step_ns) in (0, cell.replicas)
    found = all_problems(configured(RunConfig(), core_changes(cell)))
    # Thresholds of the penalty are lower than any run should have, so that all of it acts.
    assert {problem.path for problem in found} <= {"sync.penalty.warmup_rounds"}


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ([], 1728),
        (["edit"], 216),  # not aedit
        (["co2", "4x1"], 54),  # not co2_star
        (["diloco"], 216),
        (["streaming"], 216),  # a part of a name, as nothing is called so
        (["simple_fsdp", "bfloat16", "aedit"], 24),  # not simple_fsdp_aot
        (["nothing"], 0),
    ],
)
def test_words_choose_cells(words: list[str], count: int) -> None:
    assert len(named([cell_of(choice) for choice in product()], words)) == count
