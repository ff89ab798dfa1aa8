"""Both cores take the same decisions about replicas that fail, and end up in the same place."""

import dataclasses

import pytest

from parity_tests.checks.faults import (
    STORM,
    assert_storm,
    check_faults,
    check_non_finite,
    check_spike,
)
from parity_tests.checks.training import check_training
from parity_tests.harness.pool import RankPool
from parity_tests.harness.ulps import ErrorTable


def test_flags_nan_and_rollbacks_of_edit_agree(pool: RankPool, errors: ErrorTable) -> None:
    check_faults(pool, errors)


@pytest.mark.only_full
def test_the_same_storm_in_float32_agrees(pool: RankPool, errors: ErrorTable) -> None:
    cell = dataclasses.replace(STORM, dtype="float32", model="gqa")
    assert_storm(check_training(pool, errors, cell))


def test_a_spike_before_the_statistics_are_warm_is_left_out_by_both(
    pool: RankPool, errors: ErrorTable
) -> None:
    check_spike(pool, errors)


def test_without_a_penalty_both_stop_at_the_same_round(pool: RankPool, errors: ErrorTable) -> None:
    check_non_finite(pool, errors)
