"""A sketch adds up over shards, sees every element and its place, and tells distances."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core_torch.sketch import SIGNS, Sketch, signs, sketch

NAN, INF = float("nan"), float("inf")
quick = settings(deadline=None, max_examples=40)


def sign(k: int, i: int) -> int:
    """Bit k of splitmix64 of i, in whole numbers without end."""
    mask = (1 << 64) - 1
    z = (i + 1) * 0x9E3779B97F4A7C15 & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    z ^= z >> 31
    return 1 - 2 * (z >> k & 1)


def added(parts: list[Sketch]) -> Sketch:
    """The sketch of all parts together."""
    return Sketch(
        sum(part.sum2 for part in parts),
        max(part.amax for part in parts),
        sum(part.bad for part in parts),
        [math.fsum(values) for values in zip(*(part.sk for part in parts), strict=True)],
    )


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


@pytest.mark.parametrize("start", [0, 1, 10**6, 3 * 10**9])
def test_signs_are_bits_of_the_scrambled_place(start: int) -> None:
    expected = [[float(sign(k, start + i)) for i in range(40)] for k in range(SIGNS)]
    assert signs(start, 40).tolist() == expected
    assert signs(start, 40).dtype == torch.float64


def test_signs_are_balanced_and_those_of_two_k_are_strangers() -> None:
    s = signs(0, 100_000)
    products = s @ s.T / s.shape[1]
    off = products - torch.eye(SIGNS, dtype=torch.float64)
    assert off.abs().max() < 0.02  # six standard deviations of 100,000 coins
    assert s.mean(dim=1).abs().max() < 0.02


def test_a_sketch_is_made_of_all_elements_in_order_of_rows() -> None:
    x = normal(3, 5)
    found, flat = sketch(x, 7), x.reshape(-1).tolist()
    for k in range(SIGNS):
        expected = math.fsum(sign(k, 7 + i) * value for i, value in enumerate(flat))
        assert found.sk[k] == pytest.approx(expected, abs=1e-14)
    assert found.sum2 == pytest.approx(math.fsum(v * v for v in flat), rel=1e-15)
    assert found.amax == max(map(abs, flat)) and found.bad == 0
    assert sketch(x.T, 0).sk == sketch(x.T.contiguous(), 0).sk


@quick
@given(
    count=st.integers(0, 70),
    cuts=st.lists(st.integers(0, 70), max_size=3),
    bad=st.sampled_from([0.0, NAN, INF, -INF]),
    seed=st.integers(0, 99),
)
def test_sketches_of_shards_add_up(count: int, cuts: list[int], bad: float, seed: int) -> None:
    x = normal(count, seed=seed)
    if count:
        x[seed % count] = bad
    edges = [0, *sorted(min(cut, count) for cut in cuts), count]
    parts = [sketch(x[a:b], a) for a, b in zip(edges, edges[1:], strict=False)]
    whole, together = sketch(x, 0), added(parts)
    assert (whole.amax, whole.bad) == (together.amax, together.bad)
    assert whole.sum2 == pytest.approx(together.sum2, rel=1e-14)
    assert whole.sk == pytest.approx(together.sk, abs=1e-13)


def test_a_tensor_of_many_chunks_is_one() -> None:
    x = normal(100_001)
    assert sketch(x, 3).sk == pytest.approx((signs(3, len(x)) @ x).tolist(), abs=1e-10)
    together = added([sketch(x[:70_000], 3), sketch(x[70_000:], 70_003)])
    assert sketch(x, 3).sk == pytest.approx(together.sk, abs=1e-10)
    assert sketch(x, 3).sum2 == pytest.approx(float(x @ x), rel=1e-12)


def test_what_is_not_finite_is_counted_and_taken_as_zero() -> None:
    found = sketch(torch.tensor([1.0, NAN, -3.0, INF, -INF]), 0)
    assert found == sketch(torch.tensor([1.0, 0.0, -3.0, 0.0, 0.0]), 0)._replace(bad=3)
    assert found.amax == 3 and found.sum2 == 10


def test_an_empty_shard_adds_nothing() -> None:
    assert sketch(torch.zeros(0, 4), 99) == Sketch(0.0, 0.0, 0, [0.0] * SIGNS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_every_dtype_is_summed_in_float64(dtype: torch.dtype) -> None:
    x = torch.arange(1, 300).to(dtype)
    assert sketch(x, 0) == sketch(x.double(), 0)


def test_a_sketch_takes_no_part_in_a_gradient() -> None:
    x = normal(4).requires_grad_()
    y = x * 2
    sketch(y, 0)
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0] * 4


def test_sketches_tell_the_distance_of_tensors() -> None:
    ratios = []
    for seed in range(30):
        x, noise = normal(2_000, seed=seed), 1e-6 * normal(2_000, seed=100 + seed)
        one, two = sketch(x, 0), sketch(x + noise, 0)
        square = np.mean([(a - b) ** 2 for a, b in zip(one.sk, two.sk, strict=True)])
        ratios.append(square / float(noise @ noise))
    assert 0.15 < min(ratios) and max(ratios) < 3
    assert np.mean(ratios) == pytest.approx(1, abs=0.2)
