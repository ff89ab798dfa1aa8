"""A commit of pipeline stages: each file names what its rank holds, and any layout takes it up."""

from pathlib import Path

import pytest
import torch

from core_torch.checkpoint.load import Reader, read
from core_torch.checkpoint.sound import find
from core_torch.checkpoint.state import Layout, SavedState, Shard
from core_torch.errors import CheckpointError
from core_torch.parallel.pieces import Cut
from core_torch.shard.access import rows_of_shard
from core_torch.tests.checkpoint_cases import run_ranks, save_as

TABLE, HEAD = torch.arange(15.0).view(5, 3), torch.arange(12.0).view(6, 2) + 100
COUNT = {"tok.weight": torch.tensor(3.0), "head.weight": torch.tensor(4.0)}  # steps of AdamW


def state_at(layout: Layout) -> SavedState:
    """Ranks 0 and 1 of a replica share the first stage, ranks 2 and 3 the last."""
    stage, shard = divmod(layout.shard, 2)
    name, full = ("head.weight", HEAD) if stage else ("tok.weight", TABLE)
    start, count = rows_of_shard(full.shape[0], 2, shard)
    held = Shard(full[start : start + count], tuple(full.shape), start)
    own = {f"param/{name}": held, f"step/{name}": Shard(COUNT[name], (), 0)}
    own["counter/step"] = Shard(torch.tensor(5), (), 0)
    return SavedState({f"anchor/{name}": held}, own, {"config_hash": None})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with a commit of 2 stages x 2 shards."""
    told = run_ranks(
        1, 4, lambda at, wait, gather: save_as(at, wait, gather, tmp_path, state_at(at))
    )
    assert all(isinstance(path, Path) for path in told)
    return tmp_path


def test_one_process_reads_all_stages(folder: Path) -> None:
    saved = read(folder, layout=Layout(0, 0, 1, 1))
    assert torch.equal(saved.own["param/tok.weight"].local, TABLE)
    assert torch.equal(saved.own["param/head.weight"].local, HEAD)
    assert saved.own["step/head.weight"].local == 4 and saved.own["counter/step"].local == 5
    assert set(saved.shared) == {"anchor/tok.weight", "anchor/head.weight"}


def test_a_rank_reads_its_stage_and_nothing_of_the_others(folder: Path) -> None:
    cuts = {"head.weight": Cut(rows_of_shard(6, 3, 2)), "tok.weight": None}
    own = Reader(find(folder), Layout(0, 5, 1, 6), cuts).own(0)
    assert set(own) == {"param/head.weight", "step/head.weight", "counter/step"}
    assert torch.equal(own["param/head.weight"].local, HEAD[4:]) and own["param/head.weight"].start


def test_the_same_number_of_files_cut_in_another_way_is_no_hindrance(folder: Path) -> None:
    cuts = {
        name: Cut(rows_of_shard(n, 4, 1)) for name, n in (("tok.weight", 5), ("head.weight", 6))
    }
    own = Reader(find(folder), Layout(0, 1, 1, 4), cuts).own(0)
    assert torch.equal(own["param/tok.weight"].local, TABLE[2:4])
    assert torch.equal(own["param/head.weight"].local, HEAD[2:4])


def test_a_tensor_that_the_run_does_not_know_is_loaded_and_so_told(folder: Path) -> None:
    cuts = {"tok.weight": Cut(rows_of_shard(5, 1, 0))}
    own = Reader(find(folder), Layout(0, 0, 1, 1), cuts).own(0)
    assert "param/head.weight" in own


def test_rows_that_no_stage_files_stop_the_commit(tmp_path: Path) -> None:
    def work(at: Layout, wait: object, gather: object) -> Path:
        state = state_at(at)
        if at.shard == 3:
            del state.own["param/head.weight"]
        return save_as(at, wait, gather, tmp_path, state)  # type: ignore[arg-type]

    errors = run_ranks(1, 4, work)
    assert all(isinstance(e, CheckpointError) and "3 of 6 rows" in str(e) for e in errors)
