"""Learning rates rise, stay or fall as told, and depend on tokens alone."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_torch.config import ScheduleConfig
from core_torch.schedules import SHAPES, decay_factor, learning_rate, warmup_factor

ENDING = dict(final_ratio=0.1, decay_share=0.2)


def rate(tokens: int, *, shape: str, warmup: int = 100, total: int = 1100) -> float:
    return learning_rate(
        tokens, peak=2.0, shape=shape, warmup_tokens=warmup, total_tokens=total, **ENDING
    )


def test_the_first_step_of_a_warm_up_already_moves_and_the_rise_is_straight() -> None:
    factors = [warmup_factor(t, warmup_tokens=4) for t in (1, 2, 3, 4, 5)]
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert warmup_factor(1, warmup_tokens=0) == 1.0


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_rises_to_the_peak_without_a_jump(shape: str) -> None:
    assert rate(25, shape=shape) == 0.5
    assert rate(99, shape=shape) == pytest.approx(1.98)
    assert rate(100, shape=shape) == 2.0


@pytest.mark.parametrize(
    ("shape", "quarter", "half", "nine_tenths", "end"),
    [
        ("constant", 1.0, 1.0, 1.0, 1.0),
        ("linear", 0.775, 0.55, 0.19, 0.1),
        ("cosine", 0.1 + 0.45 * (1 + math.sqrt(0.5)), 0.55, 0.12202456766718093, 0.1),
        ("wsd", 1.0, 1.0, 0.55, 0.1),
    ],
)
def test_each_shape_falls_in_its_own_way(
    shape: str, quarter: float, half: float, nine_tenths: float, end: float
) -> None:
    got = [decay_factor(p, shape=shape, **ENDING) for p in (0.0, 0.25, 0.5, 0.9, 1.0)]
    assert got == pytest.approx([1.0, quarter, half, nine_tenths, end], rel=1e-14)


def test_wsd_stays_at_the_peak_until_its_last_part() -> None:
    assert rate(899, shape="wsd") == 2.0
    assert rate(1000, shape="wsd") == pytest.approx(1.1)
    sharing_all = dict(final_ratio=0.1, decay_share=1.0)
    for progress in (0.0, 0.3, 1.0):
        wsd = decay_factor(progress, shape="wsd", **sharing_all)
        assert wsd == decay_factor(progress, shape="linear", **sharing_all)


@pytest.mark.parametrize("shape", SHAPES)
def test_after_the_end_the_rate_stays(shape: str) -> None:
    assert rate(1101, shape=shape) == rate(10**9, shape=shape) == rate(1100, shape=shape)


@settings(deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    first=st.integers(0, 2000),
    more=st.integers(0, 2000),
    warmup=st.integers(0, 1500),
)
def test_after_the_warm_up_no_shape_ever_rises_and_all_stay_between_peak_and_end(
    shape: str, first: int, more: int, warmup: int
) -> None:
    here = rate(warmup + first, shape=shape, warmup=warmup)
    later = rate(warmup + first + more, shape=shape, warmup=warmup)
    assert 0.2 * (1 - 1e-15) <= later <= here <= 2.0


@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_that_is_all_warm_up_ends_at_the_peak(shape: str) -> None:
    assert rate(99, shape=shape, total=100) == pytest.approx(1.98)
    assert rate(100, shape=shape, total=100) == 2.0


def test_an_unknown_shape_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'square' is not one of constant, linear, cosine, wsd"):
        decay_factor(0.5, shape="square", **ENDING)


def test_the_configuration_offers_exactly_these_shapes() -> None:
    assert ScheduleConfig.__annotations__["shape"].__args__ == SHAPES
