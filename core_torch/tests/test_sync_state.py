"""Anchors are copies, units cover every parameter once, and checksums see what differs."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core_torch.errors import ConfigError
from core_torch.sync.state import checksum, take_anchor
from core_torch.sync.store import OnDevice
from core_torch.sync.units import SyncUnit, sync_units

DTYPES = [torch.float32, torch.float64]
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def tower(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, list[str]]]:
    """Two linear layers, a unit each."""
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
    return module, {"first": ["0.weight", "0.bias"], "second": ["1.weight", "1.bias"]}


@both_dtypes
def test_the_anchor_is_a_copy_and_nothing_moves_yet(dtype: torch.dtype) -> None:
    module, groups = tower(dtype)
    units = sync_units(module, groups, kind="units")
    state = take_anchor(units, OnDevice(units), replicas=3)
    before = [p.detach().clone() for p in module.parameters()]
    with torch.no_grad():
        for p in module.parameters():
            p.add_(1.0)
    held = [state.store.get(u) for u in range(2)]
    anchors = [a for unit in held for a in unit.anchor]
    assert all(torch.equal(a, b) for a, b in zip(anchors, before, strict=True))
    assert all(not v.any() for unit in held for v in unit.velocity)
    assert {x.dtype for unit in held for x in (*unit.anchor, *unit.velocity)} == {dtype}
    assert not any(a.requires_grad for a in anchors)
    assert (state.rounds, state.steps_since, state.is_due) == (0, [0, 0], False)


@both_dtypes
def test_statistics_start_empty_with_a_row_for_each_unit(dtype: torch.dtype) -> None:
    module, groups = tower(dtype)
    units = sync_units(module, groups, kind="units")
    stats = take_anchor(units, OnDevice(units), replicas=3).stats
    assert all(x.shape == (2, 3) and not x.any() for x in stats)
    assert [x.dtype for x in stats] == [dtype, dtype, torch.int64, torch.int64]
    places = {x.data_ptr() for x in stats}
    assert len(places) == 4, "no two statistics may share their storage"


def test_units_hold_the_parameters_themselves_in_the_order_given() -> None:
    module, groups = tower()
    units = sync_units(module, groups, kind="units")
    assert [(u.name, list(u.names)) for u in units] == list(groups.items())
    params = dict(module.named_parameters())
    assert all(p is params[n] for u in units for n, p in zip(u.names, u.params, strict=True))
    assert [u.factors for u in units] == [(1, 1), (1, 1)]


def test_writing_to_the_shards_of_a_unit_writes_to_the_parameters() -> None:
    module, groups = tower()
    [first, _] = sync_units(module, groups, kind="units")
    for x in first.shards():
        assert not x.requires_grad
        x.fill_(7.0)
    layer = module.get_submodule("0")
    assert all(bool((p == 7.0).all()) for p in layer.parameters())


def test_a_whole_model_is_one_unit_with_every_parameter_in_order() -> None:
    module, groups = tower()
    [unit] = sync_units(module, groups, kind="model")
    assert unit.name == "model"
    assert list(unit.names) == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parameters_stored_in_half_precision_are_refused_by_name(dtype: torch.dtype) -> None:
    module, groups = tower()
    module.get_submodule("1").to(dtype)
    with pytest.raises(ConfigError, match=rf"1\.weight is stored in {dtype}; .* float32 or wider"):
        sync_units(module, groups, kind="units")


@both_dtypes
def test_equal_tensors_have_equal_checksums_however_they_are_stored(dtype: torch.dtype) -> None:
    x = random_tensors(dtype)
    assert checksum(x).dtype == torch.int64 and checksum(x).shape == ()
    assert torch.equal(checksum(x), checksum([t.clone() for t in x]))
    wide = torch.stack((x[0], x[0] + 1), dim=-1)
    assert torch.equal(checksum([wide[..., 0]]), checksum([x[0]]))


@both_dtypes
def test_a_checksum_sees_the_last_bit_of_any_element(dtype: torch.dtype) -> None:
    x = random_tensors(dtype)
    for k, tensor in enumerate(x):
        for i in range(tensor.numel()):
            y = [t.clone() for t in x]
            flat = y[k].view(-1)
            flat[i] = torch.nextafter(flat[i], torch.tensor(torch.inf, dtype=dtype))
            assert differ(x, y)


@both_dtypes
def test_a_checksum_sees_the_sign_of_a_zero_and_a_nan(dtype: torch.dtype) -> None:
    zeros = [torch.zeros(4, dtype=dtype)]
    for value in (-0.0, float("nan"), float("inf")):
        y = [torch.zeros(4, dtype=dtype)]
        y[0][2] = value
        assert differ(zeros, y)


@both_dtypes
@pytest.mark.parametrize("distance", [1, 2, 64, 2048, 4096])
def test_a_checksum_sees_two_values_change_places(dtype: torch.dtype, distance: int) -> None:
    for first, second in ((1.0, 2.0), (1.0, -1.0), (0.0, -0.0), (0.1, 0.7)):
        x = torch.ones(5000, dtype=dtype)
        x[0], x[distance] = first, second
        y = x.clone()
        y[0], y[distance] = second, first
        assert differ([x], [y])


@both_dtypes
def test_a_checksum_sees_signs_flip_in_pairs_and_everywhere(dtype: torch.dtype) -> None:
    x = torch.arange(1, 65, dtype=dtype)
    y = x.clone()
    y[3], y[7] = -x[3], -x[7]
    assert differ([x], [y])
    assert differ([x], [-x])


@both_dtypes
def test_a_checksum_sees_values_and_whole_tensors_change_places(dtype: torch.dtype) -> None:
    one, minus, two = (torch.full((4,), v, dtype=dtype) for v in (1.0, -1.0, 2.0))
    for x, y in itertools.combinations((one, minus, two), 2):
        assert differ([x, y], [y, x])


@both_dtypes
def test_checksums_of_the_shards_of_one_tensor_differ(dtype: torch.dtype) -> None:
    x = random_tensors(dtype)[0]
    sums = [checksum([part]).item() for part in x.chunk(x.shape[0])]
    assert len(set(sums)) == x.shape[0]


@both_dtypes
def test_a_checksum_sees_where_tensors_end(dtype: torch.dtype) -> None:
    x = random_tensors(dtype)[0].view(-1)
    assert differ([x[:3], x[3:]], [x[:4], x[4:]])
    assert torch.equal(checksum([x, x[:0]]), checksum([x]))  # an empty shard adds nothing


few_values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 0.5, -2.0])


@settings(deadline=None)
@given(st.data(), st.sampled_from(DTYPES), st.integers(1, 12), st.integers(1, 3))
def test_lists_of_simple_values_have_the_same_checksum_only_if_their_bits_agree(
    data: st.DataObject, dtype: torch.dtype, size: int, count: int
) -> None:
    """Simple values have many zero bits at the end, where a weak sum loses what differs."""
    one = st.lists(few_values, min_size=size, max_size=size)
    both = [data.draw(st.lists(one, min_size=count, max_size=count)) for _ in range(2)]
    x, y = ([torch.tensor(row, dtype=dtype) for row in rows] for rows in both)
    same = all(
        np.array_equal(np.signbit(a), np.signbit(b)) and np.array_equal(a, b)
        for a, b in zip(*both, strict=True)
    )
    assert differ(x, y) is not same


def random_tensors(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator, dtype=dtype) for s in ((4, 3), (5,), (1, 1))]


def differ(x: list[Tensor], y: list[Tensor]) -> bool:
    return checksum(x).item() != checksum(y).item()


def test_a_sync_unit_cannot_be_changed() -> None:
    unit = SyncUnit("head", (), (), ())
    with pytest.raises(AttributeError):
        unit.name = "tail"  # type: ignore[misc]
