"""Flat buffers: what was packed comes back, for every shape, rank and padding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core_torch.collectives import rows_sent
from core_torch.shard.layout import (
    Layout,
    pack_gradients,
    pack_shards,
    unpack_gathered,
    unpack_shards,
)
from core_torch.tests.graph_cases import axis

quick = settings(deadline=None, max_examples=60, derandomize=True)
SHAPES = st.lists(
    st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5
)


def layouts_of(shapes: list[tuple[int, ...]], ranks: int) -> list[Layout]:
    return [Layout(f"p{i}", torch.Size(shape), ranks) for i, shape in enumerate(shapes)]


def numbered(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Full tensors of which no two elements are equal, and none is 0."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.arange(1.0, sum(sizes) + 1)
    return [x.view(shape) for x, shape in zip(flat.split(sizes), shapes, strict=True)]


def own(full: Tensor, layout: Layout, rank: int) -> Tensor:
    start, count = layout.rows(rank)
    return full[start : start + count]


@quick
@given(SHAPES, st.integers(2, 5))
def test_shards_of_all_ranks_packed_and_stacked_are_the_full_parameters(
    shapes: list[tuple[int, ...]], ranks: int
) -> None:
    layouts, full = layouts_of(shapes, ranks), numbered(shapes)
    rows = [
        pack_shards(
            [own(x, layout, rank) for x, layout in zip(full, layouts, strict=True)],
            layouts,
            torch.float32,
        )
        for rank in range(ranks)
    ]
    again = unpack_gathered(torch.stack(rows), layouts)
    assert all(torch.equal(a, b) for a, b in zip(again, full, strict=True))


@quick
@given(SHAPES, st.integers(2, 5), st.integers(0, 4))
def test_each_rank_finds_its_rows_of_the_gradients_in_the_row_meant_for_it(
    shapes: list[tuple[int, ...]], ranks: int, me: int
) -> None:
    layouts, full, order = (
        layouts_of(shapes, ranks),
        numbered(shapes),
        rows_sent(axis("shard", ranks, me % ranks)),
    )
    packed = pack_gradients(list(full), layouts, order, torch.float64)
    for row, rank in zip(packed, order, strict=True):
        for part, x, layout in zip(unpack_shards(row, layouts, rank), full, layouts, strict=True):
            assert torch.equal(part, own(x, layout, rank).double())


@quick
@given(SHAPES, st.integers(2, 5))
def test_padding_is_zero_in_both_directions(shapes: list[tuple[int, ...]], ranks: int) -> None:
    layouts, full = layouts_of(shapes, ranks), numbered(shapes)
    packed = pack_gradients(list(full), layouts, range(ranks), torch.float32)
    last = [own(x, layout, ranks - 1) for x, layout in zip(full, layouts, strict=True)]
    shard = pack_shards(last, layouts, torch.float32)
    assert int((packed != 0).sum()) == sum(x.numel() for x in full)  # no number of full is 0
    assert int((shard != 0).sum()) == sum(x.numel() for x in last)


def test_a_rank_beyond_the_last_row_holds_nothing_and_sends_zeros() -> None:
    bias = Layout("bias", torch.Size((1,)), 4)
    assert [bias.local_shape(rank) for rank in range(4)] == [(1,), (0,), (0,), (0,)]
    assert pack_shards([torch.empty(0)], [bias], torch.float32).tolist() == [0.0]


def test_vocabulary_257_over_four_ranks_leaves_the_last_62_rows() -> None:
    table = Layout("table", torch.Size((257, 2)), 4)
    assert [tuple(table.rows(rank)) for rank in range(4)] == [
        (0, 65),
        (65, 65),
        (130, 65),
        (195, 62),
    ]
    assert table.chunk_numel == 130


def test_a_scalar_is_whole_on_every_rank() -> None:
    scalar = Layout("scale", torch.Size(()), 1)
    assert (scalar.chunk_rows, scalar.chunk_numel, scalar.local_shape(3)) == (1, 1, ())
    [back] = unpack_shards(torch.tensor([5.0]), [scalar], 3)
    assert back.shape == () and back == 5.0


def test_packing_gradients_empties_the_list_so_that_each_can_be_freed() -> None:
    gradients = [torch.ones(2, 2), torch.ones(3)]
    pack_gradients(gradients, layouts_of([(2, 2), (3,)], 2), [0, 1], torch.float32)
    assert gradients == []


@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float64])
def test_a_buffer_has_the_dtype_that_is_asked_for(wanted: torch.dtype) -> None:
    layouts = layouts_of([(4, 2)], 2)
    assert pack_shards([torch.ones(2, 2)], layouts, wanted).dtype == wanted
    assert pack_gradients([torch.ones(4, 2)], layouts, [0, 1], wanted).dtype == wanted


@pytest.mark.parametrize("rows", [2, 4])
def test_gathered_parameters_are_contiguous_and_do_not_keep_the_buffer_alive(rows: int) -> None:
    gathered = torch.arange(8.0 * rows // 2).view(2, -1)
    full = unpack_gathered(gathered, layouts_of([(rows, 3), (rows,)], 2))
    memory = {x.untyped_storage().data_ptr() for x in full}
    assert len(memory) == 2 and gathered.untyped_storage().data_ptr() not in memory
    assert all(x.is_contiguous() for x in full), "as they were traced"
