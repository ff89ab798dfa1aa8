"""The penalty keeps bad replicas out, lets careful ones lead, and forgets no accepted round."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core_torch.sync.outer import nesterov_step
from core_torch.sync.penalty import (
    NormStats,
    Verdict,
    clip_coefficient,
    effective_replicas,
    finite_norms,
    init_stats,
    judge,
    median_over_replicas,
    mixing_weights,
    step_weights,
    uniform_weights,
    update_stats,
    weigh,
)

F64 = torch.float64
BAD = [float("nan"), float("inf"), 1e30]
judged = partial(
    judge, z_threshold=3.0, warmup_rounds=20, spike_ratio=100.0, rearm_after=3, eps=1e-6
)


def stats_with(
    mean: float, std: float, *, count: int, replicas: int = 3, flags: int = 0
) -> NormStats:
    mean_R = torch.full((replicas,), mean, dtype=F64)
    count_R = torch.full((replicas,), count)
    return NormStats(
        mean_R, torch.full_like(mean_R, std**2), count_R, torch.full_like(count_R, flags)
    )


def norms(*values: float, dtype: torch.dtype = F64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def close(x: Tensor, golden: Tensor) -> None:
    """Golden values are given to eight digits."""
    torch.testing.assert_close(x, golden, rtol=0.0, atol=5e-9)


def nobody(replicas: int) -> Tensor:
    return torch.zeros(replicas, dtype=torch.bool)


def run_rounds(rounds: list[list[float]], stats: NormStats) -> tuple[list[Verdict], NormStats]:
    verdicts = []
    for row in rounds:
        verdict = judged(norms(*row), stats)
        stats = update_stats(norms(*row), verdict, stats, ema_alpha=0.02)
        verdicts.append(verdict)
    return verdicts, stats


def test_the_golden_round_of_the_specification_comes_out() -> None:
    anchor = norms(1, 2, -1, 0.5)
    local_RP = torch.stack(
        [norms(0.9, 1.8, -1.1, 0.4), norms(0.8, 2.1, -0.9, 0.6), norms(1, 1.7, -1.2, 0.45)]
    )
    pseudo_RP = anchor - local_RP
    norm_R = pseudo_RP.norm(dim=-1)
    weight_R = mixing_weights(norm_R, nobody(3), temperature=1.0, relative=False)
    combined = torch.stack([weigh(d, w) for d, w in zip(pseudo_RP, weight_R, strict=True)]).sum(0)
    close(norm_R, norms(0.26457513, 0.26457513, 0.36400549))
    close(weight_R, norms(0.34419226, 0.34419226, 0.31161549))
    expected = norms(0.10325768, 0.12790387, 0.0623231, 0.01558077)
    close(combined, expected)

    for max_norm, beta, after in (
        (10.0, 1.0, norms(0.84717864, 1.81070227, -1.09223818, 0.47694045)),
        (0.1, 0.56660334, norms(0.91341091, 1.89274327, -1.05226246, 0.48693438)),
    ):
        factor = clip_coefficient(combined.norm(), max_norm=max_norm, eps=1e-6)
        close(factor, torch.tensor(beta, dtype=F64))
        next_anchor, _ = nesterov_step(
            anchor,
            torch.zeros(4, dtype=F64),
            factor * combined,
            torch.tensor(True),
            lr=0.8,
            momentum=0.85,
        )
        close(next_anchor, after)


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("bad", BAD)
def test_nan_infinity_and_1e30_are_left_out_alike_in_both_dtypes_and_before_warm_up(
    bad: float, dtype: torch.dtype
) -> None:
    norm_R = norms(1.0, bad, dtype=dtype)
    verdict = judged(norm_R, init_stats((2,), dtype=dtype, device=norm_R.device))
    assert verdict.is_finite_R.tolist() == [True, False]
    assert verdict.is_flagged_R.tolist() == [False, False]  # not a matter of statistics
    assert verdict.is_anomaly_R.tolist() == [False, True]
    for relative in (False, True):
        weight_R = mixing_weights(norm_R, verdict.is_anomaly_R, temperature=1.0, relative=relative)
        assert weight_R.tolist() == [1.0, 0.0]


def test_a_norm_is_finite_as_long_as_its_square_is_in_float32() -> None:
    assert finite_norms(norms(1.8e19, 1.9e19)).tolist() == [True, False]
    assert finite_norms(norms(1.8e19, 1.9e19, dtype=torch.float32)).tolist() == [True, False]


def test_a_norm_far_above_its_mean_is_an_anomaly_and_one_far_below_is_not() -> None:
    verdict = judged(norms(1.2, 1.4, 0.0), stats_with(1.0, 0.1, count=20))
    assert verdict.is_flagged_R.tolist() == [False, True, False]
    assert verdict.is_anomaly_R.tolist() == [False, True, False]


def test_statistics_count_from_the_twentieth_accepted_round_on() -> None:
    early, warm = stats_with(1.0, 0.1, count=19), stats_with(1.0, 0.1, count=20)
    assert not judged(norms(1, 9, 1), early).is_anomaly_R.any()
    assert judged(norms(1, 9, 1), warm).is_anomaly_R.tolist() == [False, True, False]


def test_before_warm_up_a_spike_is_seen_among_three_replicas_but_not_among_two() -> None:
    three = judged(norms(1, 101, 1), stats_with(0.0, 0.0, count=0))
    assert three.is_flagged_R.tolist() == [False, True, False]
    below = judged(norms(1, 99, 1), stats_with(0.0, 0.0, count=0))
    assert not below.is_flagged_R.any()
    # Of two, the larger is at most twice the median: only a small ratio could ever tell.
    empty = stats_with(0.0, 0.0, count=0, replicas=2)
    two = judged(norms(1, 1e9), empty, spike_ratio=1.5)
    assert not two.is_anomaly_R.any()


def test_a_spike_is_measured_against_the_finite_replicas() -> None:
    verdict = judged(
        norms(1, 1, 1e6, float("nan"), 1e30, float("inf"), 1),
        stats_with(0.0, 0.0, count=0, replicas=7),
    )
    assert verdict.is_flagged_R.tolist() == [False, False, True, False, False, False, False]


def test_once_warm_the_median_no_longer_matters() -> None:
    stats = NormStats(
        norms(1, 1000, 1), norms(0.01, 1e4, 0.01), torch.full((3,), 20), torch.zeros(3)
    )
    assert not judged(norms(1, 1000, 1), stats).is_anomaly_R.any()


def test_the_third_flag_in_a_row_is_accepted_and_seeds_the_statistics_anew() -> None:
    verdicts, stats = run_rounds([[1, 50, 1]] * 3, stats_with(1.0, 0.1, count=20))
    assert [v.is_flagged_R[1].item() for v in verdicts] == [True, True, True]
    assert [v.is_rearmed_R[1].item() for v in verdicts] == [False, False, True]
    assert [v.is_anomaly_R[1].item() for v in verdicts] == [True, True, False]
    assert stats.mean_R[1] == 50 and stats.var_R[1] == 0
    assert stats.count_R.tolist() == [23, 1, 23] and stats.flags_R.tolist() == [0, 0, 0]


def test_a_change_of_regime_that_all_replicas_share_is_accepted_after_two_rollbacks() -> None:
    verdicts, stats = run_rounds([[50, 60, 70]] * 3, stats_with(1.0, 0.1, count=20))
    assert [v.is_anomaly_R.all().item() for v in verdicts] == [True, True, False]
    assert stats.mean_R.tolist() == [50, 60, 70] and stats.count_R.tolist() == [1, 1, 1]


def test_a_spike_before_warm_up_can_re_arm_too() -> None:
    verdicts, stats = run_rounds([[1, 500, 1]] * 3, stats_with(0.0, 0.0, count=0))
    assert [v.is_anomaly_R[1].item() for v in verdicts] == [True, True, False]
    assert stats.mean_R[1] == 500 and stats.count_R.tolist() == [3, 1, 3]


def test_an_accepted_norm_between_flags_starts_their_count_again() -> None:
    high, fine = [1.0, 50.0, 1.0], [1.0, 1.0, 1.0]
    verdicts, stats = run_rounds([high, high, fine, high, high], stats_with(1.0, 0.1, count=20))
    assert not any(v.is_rearmed_R.any() for v in verdicts)
    assert stats.flags_R.tolist() == [0, 2, 0]


@pytest.mark.parametrize("bad", BAD)
def test_a_non_finite_norm_changes_no_statistic_and_is_never_accepted(bad: float) -> None:
    before = stats_with(1.0, 0.1, count=20, flags=2)
    verdicts, after = run_rounds([[1, bad, 1]] * 5, before)
    assert all(v.is_anomaly_R.tolist() == [False, True, False] for v in verdicts)
    for old, new in zip(before, after, strict=True):
        assert new[1] == old[1]


def test_an_anomaly_moves_nothing_but_its_flags() -> None:
    before = stats_with(1.0, 0.1, count=20)
    _, after = run_rounds([[1, 99, 1]], before)
    assert after.mean_R[1] == before.mean_R[1] and after.var_R[1] == before.var_R[1]
    assert after.count_R.tolist() == [21, 20, 21] and after.flags_R.tolist() == [0, 1, 0]


def accepted(norm_R: Tensor) -> Verdict:
    none = torch.zeros_like(norm_R, dtype=torch.bool)
    return Verdict(~none, none, none, none)


def test_statistics_are_the_exact_mean_and_variance_first_and_a_moving_average_later() -> None:
    alpha, rounds = 0.1, 30
    samples = np.random.default_rng(0).lognormal(size=rounds)
    stats = init_stats((1,), dtype=F64, device=torch.device("cpu"))
    for t, sample in enumerate(samples, start=1):
        norm_R = norms(float(sample))
        stats = update_stats(norm_R, accepted(norm_R), stats, ema_alpha=alpha)
        # Weight of each sample so far: equal up to 1 / alpha of them, then decaying.
        weights = np.full(min(t, round(1 / alpha)), 1.0 / min(t, round(1 / alpha)))
        for _ in range(t - len(weights)):
            weights = np.append(weights * (1 - alpha), alpha)
        mean = weights @ samples[:t]
        variance = weights @ (samples[:t] - mean) ** 2
        if t <= 1 / alpha:
            np.testing.assert_allclose([mean, variance], [samples[:t].mean(), samples[:t].var()])
        # 30 updates of at most ten roundings each, of numbers of one size: 300 eps.
        np.testing.assert_allclose(stats.mean_R.item(), mean, rtol=1e-13)
        np.testing.assert_allclose(stats.var_R.item(), variance, rtol=1e-13, atol=1e-15)
        assert stats.count_R.item() == t


def test_a_lasting_anomaly_never_widens_the_detector() -> None:
    stats = stats_with(1.0, 0.1, count=20)
    high, fine = [1.0, 50.0, 1.0], [1.0, 1.0, 1.0]
    verdicts, _ = run_rounds([high, fine] * 50, stats)
    assert all(v.is_anomaly_R[1] for v in verdicts[::2])


def test_the_median_skips_what_is_not_kept_and_halves_the_middle_of_an_even_number() -> None:
    values = norms(5, 1, float("nan"), 3, 100)
    keep = torch.tensor([True, True, False, True, True])
    assert median_over_replicas(values, keep).tolist() == [4.0]
    assert median_over_replicas(values, keep & (values < 50)).tolist() == [3.0]
    assert median_over_replicas(values, keep & False).tolist() == [float("inf")]
    assert median_over_replicas(norms(7), torch.tensor([True])).tolist() == [7.0]


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9), st.integers(0, 2**9 - 1))
def test_the_median_is_that_of_numpy(values: list[float], mask: int) -> None:
    keep = [bool(mask >> i & 1) for i in range(len(values))]
    kept = [v for v, k in zip(values, keep, strict=True) if k]
    expected = np.median(kept) if kept else np.inf
    got = median_over_replicas(norms(*values), torch.tensor(keep)).item()
    np.testing.assert_allclose(got, expected, rtol=1e-15)


def test_weights_prefer_the_smaller_step_as_softmax_does() -> None:
    weight_R = mixing_weights(norms(0.5, 1.0, 4.0), nobody(3), temperature=2.0, relative=False)
    expected = np.exp(-np.array([0.5, 1.0, 4.0]) / 2.0)
    np.testing.assert_allclose(weight_R.numpy(), expected / expected.sum(), rtol=1e-15)


positive = st.floats(1e-6, 1e6)


@settings(deadline=None)
@given(st.lists(st.tuples(positive, st.booleans()), min_size=1, max_size=8), st.booleans())
def test_weights_sum_to_one_with_exact_zeros_for_those_left_out(
    pairs: list[tuple[float, bool]], relative: bool
) -> None:
    norm_R, out_R = norms(*(p[0] for p in pairs)), torch.tensor([p[1] for p in pairs])
    mixed_R = mixing_weights(norm_R, out_R, temperature=1.0, relative=relative)
    for weight_R in (mixed_R, uniform_weights(out_R, dtype=F64)):
        assert weight_R[out_R].count_nonzero() == 0 and bool((weight_R >= 0).all())
        total = 0.0 if out_R.all() else 1.0
        assert abs(weight_R.sum().item() - total) <= 8 * 2.0**-52  # eight additions


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("value", [1.0, *BAD])
def test_when_everybody_is_left_out_nobody_has_weight(value: float, relative: bool) -> None:
    norm_R = norms(value, value)
    weight_R = mixing_weights(norm_R, ~nobody(2), temperature=1.0, relative=relative)
    assert weight_R.tolist() == [0.0, 0.0]
    assert uniform_weights(~nobody(2), dtype=F64).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("scale", [2.0**-30, 2.0**40])
def test_a_relative_temperature_does_not_see_the_scale_and_a_plain_one_does(scale: float) -> None:
    norm_R, out_R = norms(1.0, 1.5, 4.0, 1e9), torch.tensor([False, False, False, True])
    for relative, same in ((True, True), (False, False)):
        weight_R = mixing_weights(norm_R, out_R, temperature=0.5, relative=relative)
        scaled_R = mixing_weights(norm_R * scale, out_R, temperature=0.5, relative=relative)
        assert torch.equal(weight_R, scaled_R) is same  # a power of two rounds nowhere


def test_the_relative_temperature_is_a_multiple_of_the_median() -> None:
    norm_R = norms(2.0, 4.0, 10.0)
    relative_R = mixing_weights(norm_R, nobody(3), temperature=0.5, relative=True)
    assert torch.equal(
        relative_R, mixing_weights(norm_R, nobody(3), temperature=2.0, relative=False)
    )


def test_the_relative_temperature_ignores_those_left_out() -> None:
    three_R, out_R = norms(2.0, 4.0, 1e9), torch.tensor([False, False, True])
    alone_R = mixing_weights(norms(2.0, 4.0), nobody(2), temperature=1.0, relative=True)
    weight_R = mixing_weights(three_R, out_R, temperature=1.0, relative=True)
    assert weight_R.tolist() == [*alone_R.tolist(), 0.0]


def test_replicas_that_did_not_move_share_the_weight() -> None:
    weight_R = mixing_weights(norms(0.0, 0.0), nobody(2), temperature=1.0, relative=True)
    assert weight_R.tolist() == [0.5, 0.5]


def test_a_share_of_the_weight_goes_by_steps_among_those_who_are_let_in() -> None:
    weight_R, out_R = norms(0.75, 0.25, 0.0), torch.tensor([False, False, True])
    steps_R = torch.tensor([1, 3, 100])
    assert step_weights(weight_R, steps_R, out_R, share=1.0).tolist() == [0.25, 0.75, 0.0]
    assert step_weights(weight_R, steps_R, out_R, share=0.5).tolist() == [0.5, 0.5, 0.0]
    assert torch.equal(step_weights(weight_R, steps_R, out_R, share=0.0), weight_R)
    assert torch.equal(step_weights(weight_R, 0 * steps_R, out_R, share=0.5), weight_R)


@settings(deadline=None)
@given(
    st.lists(st.tuples(positive, st.integers(0, 500), st.booleans()), min_size=1, max_size=8),
    st.floats(0.0, 1.0),
)
def test_weights_by_steps_sum_to_one_or_nothing_whatever_the_steps(
    rows: list[tuple[float, int, bool]], share: float
) -> None:
    norm_R, out_R = norms(*(r[0] for r in rows)), torch.tensor([r[2] for r in rows])
    weight_R = mixing_weights(norm_R, out_R, temperature=1.0, relative=True)
    shared_R = step_weights(weight_R, torch.tensor([r[1] for r in rows]), out_R, share=share)
    assert shared_R[out_R].count_nonzero() == 0 and bool((shared_R >= 0).all())
    total = 0.0 if out_R.all() else 1.0
    assert abs(shared_R.sum().item() - total) <= 32 * 2.0**-52  # four roundings a replica


def test_uniform_weights_are_exact_fractions() -> None:
    out_R = torch.tensor([False, True, False, False, False])
    assert uniform_weights(out_R, dtype=torch.float32).tolist() == [0.25, 0, 0.25, 0.25, 0.25]


def test_effective_replicas_count_all_one_or_none() -> None:
    weight_UR = torch.tensor([[0.25] * 4, [0, 1.0, 0, 0], [0.0] * 4, [0.5, 0.5, 0, 0]])
    assert effective_replicas(weight_UR).tolist() == [4.0, 1.0, 0.0, 2.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_zero_times_nan_stays_out_of_the_sum(bad: float) -> None:
    pseudo = norms(bad, 1.0, bad)
    assert weigh(pseudo, torch.tensor(0.0, dtype=F64)).tolist() == [0.0, 0.0, 0.0]
    assert weigh(norms(2.0, -4.0), torch.tensor(0.5, dtype=F64)).tolist() == [1.0, -2.0]


@settings(deadline=None)
@given(st.floats(0, 1e18), st.floats(1e-3, 1e3))
def test_clipping_never_amplifies_and_leaves_at_most_the_threshold(
    norm: float, max_norm: float
) -> None:
    factor = clip_coefficient(norms(norm), max_norm=max_norm, eps=1e-6).item()
    assert 0 < factor <= 1
    assert factor * norm <= max_norm * (1 + 4 * 2.0**-52)  # three roundings
    if norm + 1e-6 <= max_norm:
        assert factor == 1


def test_clipping_does_not_divide_by_zero() -> None:
    assert clip_coefficient(norms(0.0), max_norm=10.0, eps=1e-6).tolist() == [1.0]


def test_norms_of_another_number_of_replicas_are_refused() -> None:
    with pytest.raises(ValueError, match=r"norms of shape \(2,\) for statistics of \(3,\)"):
        judged(norms(1, 1), stats_with(1.0, 0.1, count=0))
