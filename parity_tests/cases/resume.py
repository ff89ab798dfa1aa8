"""Runs that are saved, forgotten, built anew and continued. Imports no jax."""

from pathlib import Path
from typing import Any

import torch.distributed as dist

from core_torch.checkpoint.load import read
from core_torch.checkpoint.save import save
from core_torch.checkpoint.snapshot import layout_of, restore
from core_torch.checkpoint.snapshot import snapshot as saved_state
from core_torch.collectives import gather_json
from core_torch.train import TrainState, train
from parity_tests.cases.equalities import Account, Changes, account_of, begin, snapshot


def interrupted(changes: Changes, folder: str, stop: int) -> Account | None:
    """Trains to step ``stop``, commits, and lets a newly built run go on from the commit."""
    state = begin(changes)
    if state is None:
        return None
    commit_at(state, Path(folder), stop)
    return account_of(resumed(changes, folder))


def commit_only(changes: Changes, folder: str, stop: int) -> Account | None:
    """Trains to step ``stop``, commits, and tells the state there; all four ranks take part."""
    state = begin(changes)
    assert state is not None, "a commit speaks to all ranks of the world"
    commit_at(state, Path(folder), stop)
    return {"history": [snapshot(state)], "events": []}


def load_only(changes: Changes, folder: str) -> Account | None:
    """The state of a newly built run after it took over a commit, perhaps on another mesh."""
    if begin(changes) is None:
        return None
    return {"history": [snapshot(resumed(changes, folder))], "events": []}


def commit_at(state: TrainState, folder: Path, stop: int) -> None:
    """Takes the inner steps up to ``stop`` and saves; nothing of ``train`` outlives it."""
    steps = train(state)
    while state.step < stop:
        next(steps)
    device = state.mesh.device

    def gather(value: Any) -> list[Any]:
        return gather_json(value, device=device)

    save(
        folder,
        saved_state(state),
        step=state.step,
        mesh_layout=layout_of(state.mesh),
        barrier=dist.barrier,
        gather=gather,
        tokenizer=None,
        keep=2,
    )


def resumed(changes: Changes, folder: str) -> TrainState:
    """A run built from nothing but its configuration, its data and the newest commit."""
    state = begin(changes)
    assert state is not None
    restore(state, read(Path(folder), layout=layout_of(state.mesh)))
    return state
