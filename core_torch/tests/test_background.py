"""Saving while training goes on: what is saved, when it is over, and who hears of a failure."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core_torch.checkpoint.background import Saver
from core_torch.checkpoint.commit import commits
from core_torch.checkpoint.save import Gather
from core_torch.checkpoint.sound import verify
from core_torch.checkpoint.staging import Staging
from core_torch.checkpoint.state import Layout, SavedState, Shard
from core_torch.errors import CheckpointError
from core_torch.tests.checkpoint_cases import commit_step, run_ranks, state_of

ONE = Layout(0, 0, 1, 1)


def saver_of(run: Path, layout: Layout = ONE, **options: Any) -> Saver:
    told: dict[str, Any] = {"asynchronous": True, "tokenizer": None, "keep": 2}
    return Saver(run, layout, **{"gather": lambda value: [value]} | told | options)


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_the_commit_holds_the_state_as_it_was_although_training_went_on(tmp_path: Path) -> None:
    goes_on = threading.Event()

    def work(layout: Layout, barrier: Callable[[], None], gather: Gather) -> None:
        def late(value: Any) -> list[Any]:
            assert goes_on.wait(20)
            return gather(value)

        saver, state = saver_of(tmp_path / "behind", layout, gather=late), state_of(layout)
        saver.save(state, 5)
        assert (saver.newest, saver.committed) == (5, None)
        for shard in (*state.shared.values(), *state.own.values()):
            shard.local.add_(1)
        goes_on.set()
        saver.wait()
        assert (saver.newest, saver.committed) == (5, 5)

    assert run_ranks(2, 2, work) == [None] * 4
    at_once = commit_step(tmp_path / "at once", 5, replicas=2, shards=2)
    [behind] = commits(tmp_path / "behind")
    verify(behind)
    assert content(behind) == content(at_once)


def test_a_failure_behind_is_raised_on_all_ranks_at_the_next_save_and_costs_no_commit(
    tmp_path: Path,
) -> None:
    def work(layout: Layout, barrier: Callable[[], None], gather: Gather) -> Saver:
        saver, bad = saver_of(tmp_path, layout, gather=gather), state_of(layout)
        if layout.rank == 2:
            bad.own["param/c"] = Shard(torch.zeros(1, dtype=torch.complex64), (1,), 0)
        saver.save(state_of(layout), 5)
        saver.save(bad, 6)
        with pytest.raises(CheckpointError, match="step 6 was not saved: ValueError") as told:
            saver.save(state_of(layout), 7)
        assert told.value.where is not None and "rank 2 (replica 1, shard 0)" in told.value.where
        assert (saver.newest, saver.committed) == (5, 5)
        saver.wait()  # it was told once
        saver.save(state_of(layout), 8)
        saver.wait()
        return saver

    assert all(isinstance(one, Saver) for one in run_ranks(2, 2, work))
    kept = sorted(path.name for path in (tmp_path / "ckpt").iterdir())
    assert kept == ["step-00000005", "step-00000008"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_save_waits_for_the_one_before_it(tmp_path: Path, asynchronous: bool) -> None:
    seen: list[str] = []

    def slowly(point: str) -> None:
        seen.append(point)
        time.sleep(0.02)

    saver = saver_of(tmp_path, asynchronous=asynchronous, at_point=slowly)
    saver.save(state_of(ONE), 5)
    saver.save(state_of(ONE), 6)
    assert saver.newest == 6 and saver.committed == (5 if asynchronous else 6)
    saver.settle()
    assert saver.committed == 6
    half = len(seen) // 2
    assert half >= 3 and seen[:half] == seen[half:]


def test_copies_lie_in_the_same_memory_and_as_a_file_wants_them() -> None:
    staging, base, places = Staging(), torch.arange(12.0).reshape(3, 4), set()
    for mark in (0, 1):
        state = SavedState({}, {"a/x": Shard((base + mark).t(), (4, 3), 0)}, {})
        kept = staging.copy(state).own["a/x"].local
        assert kept.is_contiguous() and torch.equal(kept, (base + mark).t())
        places.add(kept.data_ptr())
    assert len(places) == 1
