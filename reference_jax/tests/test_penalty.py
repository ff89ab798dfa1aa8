"""The penalty keeps bad replicas out and lets careful ones lead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from reference_jax.sync import penalty
from reference_jax.sync.penalty import (
    NormStats,
    Verdict,
    effective_replicas,
    init_stats,
    median_over_replicas,
    step_weights,
    uniform_weights,
    weigh,
)

NAN, INF = float("nan"), float("inf")
LIMITS = {
    "z_threshold": 3.0,
    "warmup_rounds": 4,
    "spike_ratio": 100.0,
    "rearm_after": 3,
    "eps": 1e-6,
}

judge = jax.jit(penalty.judge, static_argnames=tuple(LIMITS))
update_stats = jax.jit(penalty.update_stats, static_argnames="ema_alpha")
mixing_weights = jax.jit(penalty.mixing_weights, static_argnames=("temperature", "relative"))


def stats_of(mean: float, std: float, *, count: int, replicas: int, flags: int = 0) -> NormStats:
    full_R = jnp.full(replicas, mean)
    counts_R = jnp.full(replicas, count)
    return NormStats(full_R, full_R * 0 + std**2, counts_R, jnp.full(replicas, flags))


def verdict_of(norms: list[float], stats: NormStats) -> Verdict:
    verdict: Verdict = judge(jnp.array(norms), stats, **LIMITS)
    return verdict


def nobody(replicas: int) -> Array:
    return jnp.zeros(replicas, bool)


def test_a_norm_far_above_its_mean_is_flagged_and_one_far_below_is_not() -> None:
    verdict = verdict_of([1.0, 2.0, 0.0], stats_of(1.0, 0.1, count=4, replicas=3))
    assert verdict.is_anomaly_R.tolist() == [False, True, False]


def test_cold_statistics_flag_only_spikes_and_only_among_three() -> None:
    cold3, cold2 = (stats_of(0.0, 0.0, count=3, replicas=n) for n in (3, 2))
    assert verdict_of([1.0, 99.0, 101.0], cold3).is_anomaly_R.tolist() == [False, False, False]
    assert verdict_of([1.0, 1.0, 101.0], cold3).is_anomaly_R.tolist() == [False, False, True]
    assert not verdict_of([1.0, 1e6], cold2).is_anomaly_R.any()


@pytest.mark.parametrize("bad", [NAN, INF, 1e30])
def test_a_norm_without_a_finite_square_in_float32_is_out_in_float64_too(bad: float) -> None:
    verdict = verdict_of([1.0, bad], stats_of(0.0, 0.0, count=0, replicas=2))
    assert verdict.is_finite_R.tolist() == [True, False]
    assert verdict.is_anomaly_R.tolist() == [False, True]
    assert not verdict.is_flagged_R.any()


def test_the_third_flag_in_a_row_is_accepted_and_starts_the_statistics_anew() -> None:
    stats = stats_of(1.0, 0.1, count=9, replicas=2)
    seen = []
    for _ in range(3):
        norm_R = jnp.array([1.0, 5.0])
        verdict = judge(norm_R, stats, **LIMITS)
        stats = update_stats(norm_R, verdict, stats, ema_alpha=0.02)
        seen.append(bool(verdict.is_anomaly_R[1]))
    assert seen == [True, True, False]
    assert [float(field_R[1]) for field_R in stats] == [5, 0, 1, 0]


def test_statistics_are_the_exact_mean_and_variance_at_first() -> None:
    norms = np.array([1.0, 3.0, 2.0, 6.0])
    stats = init_stats((1,), dtype=jnp.float64)
    fine = Verdict(~nobody(1), nobody(1), nobody(1), nobody(1))
    for norm in norms:
        stats = update_stats(jnp.array([norm]), fine, stats, ema_alpha=0.02)
    np.testing.assert_allclose([stats.mean_R[0], stats.var_R[0]], [norms.mean(), norms.var()])


def test_a_rollback_changes_nothing_but_the_flags_in_a_row() -> None:
    before = stats_of(1.0, 0.1, count=9, replicas=2, flags=1)
    norm_R = jnp.array([9.0, NAN])
    after = update_stats(norm_R, judge(norm_R, before, **LIMITS), before, ema_alpha=0.02)
    for old, new in zip(before[:3], after[:3], strict=True):
        np.testing.assert_array_equal(old, new)
    assert after.flags_R.tolist() == [2, 1]


def test_weights_sum_to_one_prefer_the_smaller_and_skip_anomalies() -> None:
    norm_R = jnp.array([0.5, 1.0, NAN])
    weight_R = mixing_weights(
        norm_R, jnp.array([False, False, True]), temperature=1.0, relative=False
    )
    np.testing.assert_allclose(weight_R, [1 / (1 + np.exp(-0.5)), 1 / (1 + np.exp(0.5)), 0])
    assert weight_R[2] == 0


def test_relative_weights_do_not_depend_on_scale() -> None:
    norm_R = jnp.array([0.5, 1.0, 4.0])
    small, large = (
        mixing_weights(norm_R * s, nobody(3), temperature=2.0, relative=True) for s in (1.0, 1e3)
    )
    np.testing.assert_allclose(small, large, rtol=1e-14)
    np.testing.assert_allclose(small, np.exp(-norm_R / 2) / np.exp(-norm_R / 2).sum())


def test_nobody_left_means_no_weight_for_anybody() -> None:
    everybody = ~nobody(2)
    weights = [
        mixing_weights(jnp.ones(2), everybody, temperature=1.0, relative=r) for r in (False, True)
    ]
    for weight_R in [*weights, uniform_weights(everybody, dtype=jnp.float64)]:
        assert weight_R.tolist() == [0, 0] and effective_replicas(weight_R) == 0


def test_a_share_of_the_weight_goes_by_steps_among_those_who_are_let_in() -> None:
    weight_R, out_R = jnp.array([0.75, 0.25, 0.0]), jnp.array([False, False, True])
    steps_R = jnp.array([1, 3, 100])
    for share, expected in ((0.0, [0.75, 0.25, 0]), (0.5, [0.5, 0.5, 0]), (1.0, [0.25, 0.75, 0])):
        assert step_weights(weight_R, steps_R, out_R, share=share).tolist() == expected
    assert step_weights(jnp.zeros(2), steps_R[:2], ~nobody(2), share=0.5).tolist() == [0, 0]


def test_the_median_of_an_even_number_is_between_the_two_in_the_middle() -> None:
    norm_R = jnp.array([4.0, NAN, 1.0])
    assert median_over_replicas(norm_R, jnp.array([True, False, True])) == 2.5
    assert median_over_replicas(norm_R, nobody(3)) == INF


def test_weight_zero_times_nan_is_zero() -> None:
    assert weigh(jnp.array([NAN, INF]), jnp.array(0.0)).tolist() == [0, 0]


def test_statistics_of_another_number_of_replicas_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2,\) for statistics of \(3,\)"):
        verdict_of([1.0, 1.0], stats_of(1.0, 0.1, count=0, replicas=3))
