"""A rank's rows are those of torch.chunk, and writing to them changes the parameter."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import Parameter

from core_torch.collectives import Axis, Ledger
from core_torch.shard.access import gather_rows, is_sharded, local_shard, rows_of_shard


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process only, as DTensors need one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("shards", range(1, 10))
def test_rows_are_those_of_torch_chunk_for_every_small_size(shards: int) -> None:
    for size in range(25):
        pieces = list(torch.arange(size).chunk(shards))
        pieces += [torch.arange(0)] * (shards - len(pieces))  # the last ranks hold nothing
        for index, piece in enumerate(pieces):
            start, count = rows_of_shard(size, shards, index)
            assert torch.arange(size)[start : start + count].tolist() == piece.tolist()
            assert 0 <= start <= size and count == len(piece)


def test_a_plain_parameter_is_its_own_shard() -> None:
    param = Parameter(torch.zeros(3, 2))
    local = local_shard(param)
    local[1] = 5.0
    assert param[1].tolist() == [5.0, 5.0]
    assert not local.requires_grad and param.requires_grad
    assert not is_sharded(param)


def test_the_shard_of_a_dtensor_shares_its_storage(alone: None) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    cut = Parameter(distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)]))
    local = local_shard(cut)
    assert type(local) is torch.Tensor and not local.requires_grad
    local.fill_(5.0)
    assert bool((cut.detach().to_local() == 5.0).all())  # type: ignore[attr-defined]
    assert is_sharded(cut)
    assert not is_sharded(distribute_tensor(torch.zeros(3), mesh, [Replicate()]))


def test_gathering_over_one_rank_gives_a_copy_and_sends_nothing() -> None:
    axis = Axis("shard", None, 1, 0, Ledger())
    rows = torch.arange(6.0).view(3, 2)
    full = gather_rows(rows, rows.shape, axis, scope="test")
    assert torch.equal(full, rows) and full.data_ptr() != rows.data_ptr()
    assert axis.ledger.bytes_over("shard") == 0
