"""Sources of a mixture have their shares, epoch by epoch, and no draw depends on another."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_torch.config import DataConfig
from core_torch.config_data import BLOCK
from core_torch.data.batches import Layout, batch_for, count_sequences
from core_torch.data.mixture import allotted, mixed_batch_for, sources_of

T = 2  # tokens of a sequence
weights_st = st.lists(st.floats(0.01, 10), min_size=1, max_size=5)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2000), weights_st)
def test_parts_are_whole_and_off_by_less_than_one(total: int, weights: list[float]) -> None:
    parts = allotted(total, weights)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - total * weight / sum(weights)) < 1


def test_what_is_left_goes_to_the_largest_remainders_and_then_to_the_first() -> None:
    assert allotted(10, [1, 1, 1]) == [4, 3, 3]
    assert allotted(4, [1.2, 1.7, 1.1]) == [1, 2, 1]
    assert allotted(BLOCK, [3, 1]) == [768, 256]


@settings(deadline=None, max_examples=20)
@given(weights_st, st.integers(0, 2**64 - 1), st.integers(0, 3))
def test_draws_of_each_source_are_numbered_without_gaps(
    weights: list[float], seed: int, blocks: int
) -> None:
    draws = np.arange((blocks + 1) * BLOCK)
    source, own = sources_of(draws, weights, seed)
    for j, share in enumerate(allotted(BLOCK, weights)):
        assert own[source == j].tolist() == list(range((blocks + 1) * share))
        in_last_block = source[blocks * BLOCK :] == j
        assert in_last_block.sum() == share


def tokens_of(sequences: list[int]) -> list[np.ndarray]:
    """Token values say source and sequence: 1000 * source + sequence, in both places."""
    return [
        np.append(np.repeat(1000 * j + np.arange(n), T), 0).astype(np.uint32)
        for j, n in enumerate(sequences)
    ]


def rows(
    tokens: list[np.ndarray], weights: list[float], layout: Layout, steps: range, first_row: int = 0
) -> list[int]:
    """What all ranks read, in the order of draws within each micro-step."""
    found = []
    for step in steps:
        of_ranks = [
            mixed_batch_for(
                tokens, weights, layout, step=step, replica=n, shard=m, first_row=first_row
            )[0][:, 0]
            for m in range(layout.shards)
            for n in range(layout.replicas)
        ]
        stacked = np.array(of_ranks).reshape(layout.shards, layout.replicas, layout.batch)
        found += stacked.transpose(0, 2, 1).ravel().tolist()
    return found


def layout_of(tokens: list[np.ndarray], **changes: int) -> Layout:
    whole = {"batch": 4, "replicas": 2, "shards": 2, "seed": 5} | changes
    return Layout(
        num_sequences=sum(count_sequences(len(x), T) for x in tokens), sequence=T, **whole
    )


def test_each_source_is_shown_epoch_by_epoch_each_sequence_once() -> None:
    tokens, weights = tokens_of([90, 7, 40]), [5.0, 2.0, 1.0]
    seen = rows(tokens, weights, layout_of(tokens), range(64))  # a block
    of_source = collections.defaultdict(list)
    for token in seen:
        of_source[token // 1000].append(token % 1000)
    assert [len(of_source[j]) for j in range(3)] == [640, 256, 128]
    for j, size in enumerate((90, 7, 40)):
        for epoch in range(len(of_source[j]) // size):
            shown = of_source[j][epoch * size :][:size]
            assert sorted(shown) == list(range(size)), (j, epoch)
    assert of_source[1][:7] != of_source[1][7:14], "epochs have orders of their own"


def test_sources_of_one_size_have_orders_of_their_own() -> None:
    tokens = tokens_of([50, 50])
    seen = rows(tokens, [1.0, 1.0], layout_of(tokens), range(16))
    orders = [[x % 1000 for x in seen if x // 1000 == j][:50] for j in range(2)]
    assert orders[0] != orders[1]


def test_a_mixture_of_one_source_is_that_source() -> None:
    tokens = tokens_of([30])
    layout = layout_of(tokens)
    for step in (0, 3, 50):
        mixed = mixed_batch_for(tokens, [7.0], layout, step=step, replica=1, shard=0)
        np.testing.assert_array_equal(
            mixed, batch_for(tokens[0], layout, step=step, replica=1, shard=0)
        )


def test_another_mesh_and_batch_go_on_with_the_same_order_of_draws() -> None:
    tokens, weights = tokens_of([90, 70]), [2.0, 1.0]
    whole = rows(tokens, weights, layout_of(tokens), range(8))  # 128 draws
    before = rows(tokens, weights, layout_of(tokens), range(3))  # 24 rows of each replica
    changed = layout_of(tokens, replicas=4, shards=1, batch=2)
    rows_taken = 24 * 2 // 4  # of each of the four
    after = rows(tokens, weights, changed, range(3, 10), first_row=rows_taken - 3 * 2)
    assert before + after == whole[:104]


def test_the_order_of_a_mixture_is_the_same_in_every_version_so_that_old_runs_resume() -> None:
    source, own = sources_of(np.arange(12), [3.0, 2.0, 1.0], 3)
    assert source.tolist() == [0, 1, 0, 2, 1, 0, 0, 0, 1, 0, 0, 0]
    assert own.tolist() == [0, 0, 1, 0, 1, 2, 3, 4, 2, 5, 6, 7]
    tokens = tokens_of([8, 8])
    layout = layout_of(tokens, batch=16, replicas=1, shards=1, seed=3)
    seen = rows(tokens, [1.0, 1.0], layout, range(1))
    assert seen == [
        *(6, 1003, 1, 1001, 1006, 5, 2, 7),
        *(1007, 4, 3, 0, 1004, 7, 3, 1002),
    ]


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        ("a", "takes folders with weights"),
        ("a:1,", "takes folders with weights"),
        ("a:x", "takes folders with weights"),
        (":1", "takes folders with weights"),
        ("a:0,b:1", "takes folders with weights"),
        ("a:inf", "takes folders with weights"),
        ("a:1,a:2", "names a folder twice"),
        ("a:1,b:2000", "the weight 1 of 'a' must be at least 1/1024 of all"),
    ],
)
def test_a_mixture_that_means_nothing_is_refused(mixture: str, message: str) -> None:
    [problem] = DataConfig(mixture=mixture).validate()
    assert problem.path == "mixture" and message in problem.message


def test_a_mixture_stands_instead_of_a_path_and_may_hold_colons() -> None:
    [problem] = DataConfig(path="x", mixture="a:1,b:2").validate()
    assert "instead of path" in problem.message
    shares = DataConfig(mixture="c:/a:3, b:0.5").shares
    assert shares == [("c:/a", 3.0), ("b", 0.5)] and not DataConfig().shares
