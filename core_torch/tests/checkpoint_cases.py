"""Ranks as threads, small states to save, and hands that damage what was saved."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from core_torch.checkpoint.commit import COMMIT, AtPoint, no_fault
from core_torch.checkpoint.files import record_of
from core_torch.checkpoint.save import Gather, save
from core_torch.checkpoint.staging import Staging
from core_torch.checkpoint.state import Layout, SavedState, Shard
from core_torch.shard.access import rows_of_shard

T = TypeVar("T")


def run_ranks(
    replicas: int, shards: int, work: Callable[[Layout, Callable[[], None], Gather], T]
) -> list[T | Exception]:
    """``work(layout, barrier, gather)`` on one thread for each rank; results in rank order."""
    world = replicas * shards
    meeting = threading.Barrier(world, timeout=60)
    board: list[Any] = [None] * world
    results: list[Any] = [None] * world

    def serve(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            board[rank] = json.dumps(value)
            meeting.wait()
            answers = [json.loads(text) for text in board]
            meeting.wait()
            return answers

        layout = Layout(*divmod(rank, shards), replicas, shards)
        try:
            results[rank] = work(layout, lambda: (meeting.wait(), None)[1], gather)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def cut(full: torch.Tensor, layout: Layout) -> Shard:
    """The rows of ``full`` that a rank holds."""
    if not full.ndim:
        return Shard(full.clone(), (), 0)
    start, count = rows_of_shard(full.shape[0], layout.shards, layout.shard)
    return Shard(full[start : start + count].clone(), tuple(full.shape), start)


def full_tensors(replica: int, rows: int = 7, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """What a replica holds as whole tensors, different for each replica."""
    generator = torch.Generator().manual_seed(replica)
    weight = torch.randn(rows, 3, generator=generator).to(dtype)
    return {
        "param/output.weight": weight,
        "param/norm.weight": torch.randn(2, generator=generator).to(dtype),
        "exp_avg/output.weight": weight * 0.5,
        "step/output.weight": torch.tensor(3.0 + replica),
    }


def state_of(layout: Layout, rows: int = 7, mark: float = 0.0) -> SavedState:
    """A rank's state; ``mark`` tells one save from another."""
    own = {
        name: cut(full + mark, layout) for name, full in full_tensors(layout.replica, rows).items()
    }
    anchor = full_tensors(99, rows)["param/output.weight"] + mark
    shared = {"anchor/output.weight": cut(anchor, layout)}
    return SavedState(shared, own, {"step": 5, "mark": mark, "config_hash": "c0ffee"})


def save_as(
    layout: Layout,
    barrier: Callable[[], None],
    gather: Gather,
    run: Path,
    state: SavedState,
    *,
    step: int = 5,
    tokenizer: Path | None = None,
    keep: int = 2,
    at_point: AtPoint = no_fault,
) -> Path:
    """``save`` with what tests seldom vary filled in."""
    return save(
        run,
        Staging().copy(state),
        step=step,
        mesh_layout=layout,
        gather=gather,
        tokenizer=tokenizer,
        keep=keep,
        at_point=at_point,
    )


def commit_step(
    run: Path, step: int, *, replicas: int = 1, shards: int = 1, mark: float = 0.0, **options: Any
) -> Path:
    """Saves ``state_of`` every rank and returns the folder; raises what rank 0 raised."""

    def work(layout: Layout, barrier: Callable[[], None], gather: Gather) -> Path:
        state = state_of(layout, mark=mark)
        return save_as(layout, barrier, gather, run, state, step=step, **options)

    first = run_ranks(replicas, shards, work)[0]
    if isinstance(first, Exception):
        raise first
    return first


def rewrite_json(path: Path, change: Callable[[Any], Any]) -> None:
    """Replaces a JSON file by ``change`` of its content; ``change`` may work in place."""
    value = json.loads(path.read_text())
    path.write_text(json.dumps(change(value) or value))


def recommit(step_folder: Path) -> None:
    """Makes COMMIT.json fit what lies in the folder now, as a forger would."""

    def renew(commit: Any) -> None:
        files = [p for p in step_folder.rglob("*") if p.is_file() and p.name != COMMIT]
        commit["files"] = {
            p.relative_to(step_folder).as_posix(): record_of(p)._asdict() for p in files
        }

    rewrite_json(step_folder / COMMIT, renew)
