"""Sketches add up over shards, tell distances, and count what is not finite."""

import numpy as np
import pytest

from reference_jax.sketch import SIGNS, signs, sketch


def by_hand(i: int) -> list[int]:
    """splitmix64 of one place, in whole numbers of any size."""
    z, mask = (i + 1) * 0x9E3779B97F4A7C15 % 2**64, 2**64 - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return [-1 if z >> k & 1 else 1 for k in range(SIGNS)]


@pytest.mark.parametrize("start", [0, 5, 2**40])
def test_signs_are_the_bits_of_the_scrambled_place(start: int) -> None:
    expected = np.array([by_hand(start + i) for i in range(4)]).T
    np.testing.assert_array_equal(signs(start, 4), expected)


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64"])
def test_sketches_of_shards_add_up_to_that_of_the_tensor(dtype: str) -> None:
    x = np.random.default_rng(0).normal(0, 9, size=(7, 5)).astype(dtype)
    whole, parts = sketch(x, 0), [sketch(x[a:b], a * 5) for a, b in ((0, 3), (3, 3), (3, 7))]
    assert whole.amax == max(p.amax for p in parts) == np.abs(x).max()
    np.testing.assert_allclose(sum(p.sum2 for p in parts), np.square(x.astype(float)).sum())
    np.testing.assert_allclose(np.sum([p.sk for p in parts], axis=0), whole.sk, rtol=1e-12)


def test_another_order_of_the_same_elements_is_seen() -> None:
    x = np.arange(1.0, 25.0).reshape(4, 6)
    assert sketch(x, 0).sum2 == sketch(x.T, 0).sum2
    assert np.std(np.subtract(sketch(x, 0).sk, sketch(x.T, 0).sk)) > 10


def test_sixteen_sums_tell_a_distance_up_to_a_factor_of_two() -> None:
    rng, ratios = np.random.default_rng(1), []
    for _ in range(50):
        x, gap = rng.normal(size=300), 1e-7 * rng.normal(size=300)
        told = np.square(np.subtract(sketch(x + gap, 0).sk, sketch(x, 0).sk)).mean()
        ratios.append(float(np.sqrt(told) / np.linalg.norm(gap)))
    assert 0.4 < min(ratios) and max(ratios) < 2 and abs(np.mean(ratios) - 1) < 0.1


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    seen = sketch(np.array([1.0, np.nan, -np.inf, -2.0], np.float32), 0)
    assert (seen.bad, seen.sum2, seen.amax) == (2, 5.0, 2.0)
    assert seen.sk == sketch(np.array([1.0, 0.0, 0.0, -2.0]), 0).sk


def test_nothing_has_a_sketch_too() -> None:
    assert sketch(np.zeros((0, 3)), 12) == (0.0, 0.0, 0, [0.0] * SIGNS)
