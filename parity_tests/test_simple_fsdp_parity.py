"""SimpleFSDP and its chapter of the reference: the same gradients, the same messages."""

import pytest

from parity_tests.checks.simple_fsdp import PLACED, Placed, check_step, expected_messages
from parity_tests.harness.pool import RankPool
from parity_tests.harness.ulps import ErrorTable
from reference_jax.simple_fsdp import total


@pytest.mark.parametrize("how", ["eager", "manual"])
@pytest.mark.parametrize("placed", PLACED, ids=str)
def test_gradients_and_messages_are_those_of_the_chapter(
    pool: RankPool, errors: ErrorTable, placed: Placed, how: str
) -> None:
    check_step(pool, errors, placed, how)


@pytest.mark.parametrize("how", ["fsdp2", pytest.param("none", marks=pytest.mark.only_full)])
def test_so_are_those_of_fsdp2_and_of_a_graph_without_buckets(
    pool: RankPool, errors: ErrorTable, how: str
) -> None:
    check_step(pool, errors, PLACED[0], how)


def test_by_hand_a_step_gathers_less_than_fsdp2_and_scatters_the_same() -> None:
    """The numbers of the page: four units, of which the backward gathers the blocks again."""
    calls = {
        how: [total(sent, op) for sent in sides for op in ("all-gather", "reduce-scatter")]
        for how in ("fsdp2", "manual", "none")
        for sides in [expected_messages(PLACED[0], how)]
    }
    assert [x for x, _ in calls["fsdp2"]] == [4, 0, 4, 4]
    assert [x for x, _ in calls["manual"]] == [4, 0, 2, 4]
    assert [x for x, _ in calls["none"]] == [21, 0, 18, 21]
    size = calls["fsdp2"][0][1]
    assert [x for _, x in calls["fsdp2"]] == [size, 0, size, size]
    kept = 8 * (2 * 260 * 18 + 20)  # both tables of 257 rows and the last norm, rows divided by 4
    assert calls["manual"][2][1] == calls["none"][2][1] == size - kept
