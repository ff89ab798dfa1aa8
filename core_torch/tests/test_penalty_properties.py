"""A round's decisions hold for any norms: unit by unit, replica by replica, in any order."""

from functools import partial
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core_torch.sync.penalty import (
    NormStats,
    judge,
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
quick = settings(deadline=None, max_examples=50)

any_norm = st.one_of(st.floats(0, 1e3), st.sampled_from([*BAD, 0.0, 1e-30, 1e19]))


@st.composite
def tables(draw: st.DrawFn) -> tuple[Tensor, NormStats]:
    """Norms and statistics of up to four units and five replicas, warm ones among them."""
    units, replicas = draw(st.integers(1, 4)), draw(st.integers(1, 5))

    def table(values: st.SearchStrategy[float]) -> list[list[float]]:
        row = st.lists(values, min_size=replicas, max_size=replicas)
        return draw(st.lists(row, min_size=units, max_size=units))

    real = [torch.tensor(table(v), dtype=F64) for v in (any_norm, st.floats(0, 9), st.floats(0, 9))]
    whole = [torch.tensor(table(v)) for v in (st.integers(15, 25), st.integers(0, 3))]
    return real[0], NormStats(real[1], real[2], whole[0], whole[1])


def decide(norm_R: Tensor, stats: NormStats) -> list[Tensor]:
    """Everything that a round computes from norms, as one list."""
    verdict = judged(norm_R, stats)
    out_R = verdict.is_anomaly_R
    weights = [mixing_weights(norm_R, out_R, temperature=1.0, relative=r) for r in (False, True)]
    # The counts stand in for numbers of steps: they are permuted and cut along.
    weights += [step_weights(w, stats.count_R, out_R, share=0.5) for w in weights]
    after = update_stats(norm_R, verdict, stats, ema_alpha=0.02)
    return [*verdict, *weights, uniform_weights(out_R, dtype=F64), *after]


@quick
@given(tables())
def test_units_in_one_batch_are_judged_exactly_as_one_by_one(
    drawn: tuple[Tensor, NormStats],
) -> None:
    norm_UR, stats = drawn
    together = decide(norm_UR, stats)
    for u in range(norm_UR.shape[0]):
        alone = decide(norm_UR[u], NormStats(*(x[u] for x in stats)))
        for batched, single in zip(together, alone, strict=True):
            assert torch.equal(batched[u], single)


@quick
@given(tables(), st.randoms(use_true_random=False))
def test_permuting_replicas_permutes_every_decision(
    drawn: tuple[Tensor, NormStats], random: Random
) -> None:
    norm_UR, stats = drawn
    order = list(range(norm_UR.shape[1]))
    random.shuffle(order)
    straight = decide(norm_UR, stats)
    permuted = decide(norm_UR[:, order], NormStats(*(x[:, order] for x in stats)))
    for x, y in zip(straight, permuted, strict=True):
        # Only the softmax adds up in another order.
        torch.testing.assert_close(y, x[:, order], rtol=8 * 2.0**-52, atol=0.0)


@pytest.mark.parametrize("bad", BAD)
def test_a_round_with_a_bad_replica_equals_a_round_without_it(bad: float) -> None:
    pseudo_RP = torch.from_numpy(np.random.default_rng(1).normal(size=(3, 16)))
    sick_RP = pseudo_RP.clone()
    sick_RP[1, 4] = bad

    def calm(replicas: int) -> NormStats:
        counts = torch.full((replicas,), 20)
        return NormStats(
            4.0 * torch.ones(replicas, dtype=F64),
            torch.ones(replicas, dtype=F64),
            counts,
            0 * counts,
        )

    def combine(rows_RP: Tensor, stats: NormStats) -> Tensor:
        norm_R = rows_RP.square().sum(-1).sqrt()
        out_R = judged(norm_R, stats).is_anomaly_R
        weight_R = mixing_weights(norm_R, out_R, temperature=1.0, relative=False)
        return sum(
            (weigh(d, w) for d, w in zip(rows_RP, weight_R, strict=True)),
            start=torch.zeros(16, dtype=F64),
        )

    with_it = combine(sick_RP, calm(3))
    without = combine(pseudo_RP[[0, 2]], calm(2))
    assert torch.equal(with_it, without)
