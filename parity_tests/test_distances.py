"""Differences between the cores are measured in one unit, collected, and bounded for a reason."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from parity_tests.harness import tolerances
from parity_tests.harness.ulps import ErrorTable, element_steps, mismatches, ulps


@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16])
def test_one_ulp_everywhere_is_about_one_u(dtype: Any) -> None:
    y = np.array([1.0, 1.5, 1.25, -1.75], dtype)
    x = (y.astype(np.float64) * (1 + tolerances.EPS[y.dtype.name])).astype(dtype)
    assert 0.5 < ulps(x, y) < 1.2
    assert element_steps(x, y).max() <= 2 and mismatches(y, y) == (0.0, 0)


def test_the_distance_of_zeros_of_huge_values_and_of_non_finite_ones_is_defined() -> None:
    zero, one, huge = np.zeros(2), np.ones(2), np.full(2, 2.0**1000)
    nan = np.array([1.0, float("nan")])
    assert ulps(zero, zero) == 0 and ulps(one, zero) == float("inf")
    assert ulps(huge, huge) == 0 and ulps(huge * (1 + 2**-52), huge) == pytest.approx(1)
    assert ulps(nan, nan) == 0 and ulps(one, nan) == float("inf")
    assert ulps(nan, one) == float("inf")
    assert ulps(np.array([np.inf]), np.array([-np.inf])) == float("inf")
    assert ulps(np.zeros(0), np.zeros(0)) == 0


def test_steps_between_floats_count_across_zero() -> None:
    x, y = np.array([0.0, 5e-324, 1.0]), np.array([-0.0, -5e-324, 1.0 + 2**-52])
    assert element_steps(x, y).tolist() == [0, 2, 1]


def test_arrays_of_different_shape_or_dtype_are_not_compared() -> None:
    with pytest.raises(ValueError, match="float64"):
        ulps(np.zeros(2), np.zeros(3))
    with pytest.raises(ValueError, match="float32"):
        ulps(np.zeros(2), np.zeros(2, np.float32))


def test_the_table_keeps_the_worst_case_and_a_check_beyond_tolerance_fails() -> None:
    table = ErrorTable()
    one = np.ones(3)
    table.check("gradient", one, one, tolerances.OPTIMIZER)
    table.check("gradient", one * (1 + 2**-50), one, tolerances.OPTIMIZER)
    with pytest.raises(AssertionError, match="gradient norm.weight: 64 u exceeds 16 u"):
        table.check("gradient", one * (1 + 2**-46), one, tolerances.OPTIMIZER, where="norm.weight")
    table.check("gradient", one, one, tolerances.OPTIMIZER)
    assert table.worst["gradient", "float64"].error == pytest.approx(64)
    head, line = table.lines()
    assert line.split()[:5] == ["gradient", "float64", "4", "64", "16"]


def test_tolerances_grow_with_depth_and_width_and_stay_far_below_a_wrong_formula() -> None:
    small = tolerances.model("float64", layers=2, width=64)
    large = tolerances.model("float64", layers=4, width=256)
    assert small.value == pytest.approx(45.2548, abs=1e-4) and large.value == 128.0
    assert tolerances.model("bfloat16", layers=4, width=256).value == 8
    deep = tolerances.model("bfloat16", layers=8, width=256, passes=2)
    assert deep == (16.0, "4 sqrt(p=2 L=8)")
    cap = tolerances.free_running("float64", steps=20, layers=4, width=256, params=1e6, update=1.0)
    assert cap.value * 2**-52 == pytest.approx(1e-12)


def test_adamw_amplifies_noise_only_where_gradients_are_as_small_as_its_eps() -> None:
    usual = dict(grad_ulps=100.0, dtype="float64", eps=1e-8)
    plain = tolerances.free_running_adamw(np.full(10, 1e-2), **usual)  # type: ignore[arg-type]
    mixed = np.array([1e-2] * 9 + [1e-8])
    steep = tolerances.free_running_adamw(mixed, **usual)  # type: ignore[arg-type]
    assert plain.value < 17 and steep.value > 1e6


def test_a_core_may_be_three_times_as_far_from_the_truth_as_the_other() -> None:
    assert tolerances.as_accurate(2.9, 1.0) and not tolerances.as_accurate(31.0, 10.0)
    assert tolerances.as_accurate(1.0, 0.0)


def test_tables_of_two_processes_become_one() -> None:
    mine, other = ErrorTable(), ErrorTable()
    one = np.ones(4)
    mine.check("gradient", one, one, tolerances.STATE)
    other.check("gradient", one * (1 + 2**-50), one, tolerances.STATE)
    other.check("loss", one, one, tolerances.STATE)
    mine.merge(other.as_lists())
    assert mine.counts == {("gradient", "float64"): 2, ("loss", "float64"): 1}
    assert mine.worst["gradient", "float64"] == other.worst["gradient", "float64"]
