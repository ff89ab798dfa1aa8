"""What a wire format sends, and what it leaves for the next round, is all there was."""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core_torch.sync.wire import (
    BLOCK,
    LEVELS,
    decode_bfloat16,
    dequantise,
    encode_bfloat16,
    quantise,
    residual,
)

F32, F64 = torch.float32, torch.float64
NAN, INF = float("nan"), float("inf")
ONE, ZERO = torch.tensor(1.0), torch.tensor(0.0)
quick = settings(deadline=None, max_examples=60)


def through_bfloat16(x: Tensor) -> Tensor:
    return decode_bfloat16(encode_bfloat16(x), dtype=x.dtype)


def through_int8(x: Tensor) -> Tensor:
    values, scales = quantise(x, block=4)
    return dequantise(values, scales, size=x.shape[0], dtype=x.dtype)


CODECS = [through_bfloat16, through_int8]
codecs = pytest.mark.parametrize("codec", CODECS, ids=lambda f: f.__name__)

finite = st.one_of(
    st.floats(-(2.0**60), 2.0**60, width=32), st.floats(-1, 1, width=32), st.just(1e-40)
)
vectors = st.lists(finite, min_size=1, max_size=11)


@codecs
@quick
@given(vectors, st.sampled_from([F32, F64]))
def test_what_is_sent_and_what_remains_are_exactly_what_was_meant(
    codec: Callable[[Tensor], Tensor], values: list[float], dtype: torch.dtype
) -> None:
    total = torch.tensor(values, dtype=dtype)
    decoded = codec(total)
    rest = residual(total, decoded, torch.full_like(total, NAN), ONE)
    for x, y, e in zip(total.tolist(), decoded.tolist(), rest.tolist(), strict=True):
        assert Fraction(y) + Fraction(e) == Fraction(x)  # the subtraction rounds nowhere


@codecs
@quick
@given(st.lists(vectors.map(lambda v: (v + [0.0] * 11)[:11]), min_size=1, max_size=6))
def test_over_rounds_everything_sent_and_the_last_residual_are_the_sum_of_what_was_meant(
    codec: Callable[[Tensor], Tensor], rounds: list[list[float]]
) -> None:
    pseudo_grads = torch.tensor(rounds, dtype=F64)
    owed, sent = torch.zeros(11, dtype=F64), torch.zeros(11, dtype=F64)
    for d in pseudo_grads:
        total = d + owed
        decoded = codec(total)
        owed, sent = residual(total, decoded, owed, ONE), sent + decoded
    # A residual is at most half a block's scale, so every sum here has the block's size; each
    # round adds three roundings of that.
    size = pseudo_grads.abs().sum(dim=0).max() + 1e-300
    assert bool(((sent + owed - pseudo_grads.sum(dim=0)).abs() <= 18 * 2.0**-52 * size).all())


def test_without_the_residual_small_progress_would_never_arrive() -> None:
    d = torch.tensor([127.0, 0.4, 0.4, -0.4])
    owed, sent = torch.zeros(4), torch.zeros(4)
    for _ in range(10):
        decoded = through_int8(d + owed)
        owed, sent = residual(d + owed, decoded, owed, ONE), sent + decoded
    assert through_int8(d).tolist() == [127.0, 0.0, 0.0, 0.0]
    torch.testing.assert_close(sent, torch.tensor([1270.0, 4.0, 4.0, -4.0]))


def test_the_residual_of_a_replica_that_was_left_out_stays_even_if_it_sent_nan() -> None:
    total, old = torch.tensor([NAN, INF, 1.0]), torch.tensor([0.1, -0.0, 0.3])
    kept = residual(total, torch.tensor([NAN, NAN, 0.9]), old, ZERO)
    assert kept.view(torch.int32).tolist() == old.view(torch.int32).tolist()


@quick
@given(vectors, st.sampled_from([F32, F64]), st.sampled_from([1, 3, 4, 256]))
def test_an_int8_value_is_off_by_at_most_half_its_blocks_scale(
    values: list[float], dtype: torch.dtype, block: int
) -> None:
    x = torch.tensor(values, dtype=dtype)
    codes, scales = quantise(x, block=block)
    assert codes.shape == (-(-len(values) // block), block) and scales.shape == codes.shape[:1]
    assert codes.dtype == torch.int8 and scales.dtype == F32
    assert codes.abs().max() <= LEVELS and bool((scales > 0).all())
    assert not codes.flatten()[len(values) :].any()
    back = dequantise(codes, scales, size=len(values), dtype=F64)
    step = scales.to(F64).repeat_interleave(block)[: len(values)]
    # 0.5, and what rounding the scale itself to 24 bits takes from the largest value
    assert bool(((back - x.to(F64)).abs() <= step * (0.5 + 127 * 2.0**-22)).all())


def test_the_largest_value_of_a_block_uses_the_whole_range_and_blocks_are_independent() -> None:
    x = torch.tensor([1e-9, -2e-9, 0.0, 0.0, 1e9, 3e9, -3e9, 1.0])
    codes, scales = quantise(x, block=4)
    assert codes.tolist() == [[64, -127, 0, 0], [42, 127, -127, 0]]
    np.testing.assert_allclose(scales, [2e-9 / 127, 3e9 / 127], rtol=1e-6)


def test_halves_are_rounded_to_even() -> None:
    codes, scales = quantise(torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5]), block=6)
    assert scales.tolist() == [1.0] and codes.tolist() == [[127, 0, 2, 2, 0, -2]]
    tie = torch.tensor([1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, 1.0 + 2.0**-8 + 2.0**-20])
    assert through_bfloat16(tie).tolist() == [1.0, 1.0 + 2.0**-6, 1.0 + 2.0**-7]


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_a_block_of_nothing_and_one_of_next_to_nothing_send_zeros_and_a_scale_of_one(
    dtype: torch.dtype,
) -> None:
    codes, scales = quantise(torch.tensor([0.0, -0.0, 1e-42, -1e-38], dtype=dtype), block=2)
    assert not codes.any() and scales.tolist() == [1.0, 1.0]
    assert through_bfloat16(torch.tensor([1e-42, -1e-39], dtype=dtype)).tolist() == [0.0, 0.0]


@quick
@given(vectors, st.sampled_from([F32, F64]))
def test_bfloat16_rounds_to_the_nearest_and_twice_changes_nothing(
    values: list[float], dtype: torch.dtype
) -> None:
    x = torch.tensor(values, dtype=dtype)
    once = through_bfloat16(x)
    assert encode_bfloat16(x).dtype == torch.bfloat16 and once.dtype == dtype
    assert torch.equal(through_bfloat16(once), once)
    assert bool(((once - x).abs() <= x.abs() * 2.0**-8 + 2e-38).all())


def test_a_bad_block_spoils_no_other() -> None:
    x = torch.tensor([NAN, 1.0, INF, 1.0, 2.0, -2.0])
    decoded = dequantise(*quantise(x, block=2), size=6, dtype=F32)
    assert decoded[4:].tolist() == [2.0, -2.0]


def test_the_usual_block_costs_a_little_over_a_byte_a_value() -> None:
    codes, scales = quantise(torch.ones(10 * BLOCK), block=BLOCK)
    sent = sum(x.numel() * x.element_size() for x in (codes, scales))
    assert sent == 10 * (BLOCK + 4)
