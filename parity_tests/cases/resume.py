"""Runs that are saved, forgotten, built anew and continued. Imports no jax."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from core_torch.checkpoint.background import Saver
from core_torch.checkpoint.load import read
from core_torch.checkpoint.save import save
from core_torch.checkpoint.snapshot import layout_of, restore
from core_torch.checkpoint.snapshot import snapshot as saved_state
from core_torch.checkpoint.staging import Staging
from core_torch.cli import session as session_module
from core_torch.cli.signals import StopWish
from core_torch.collectives import gather_json
from core_torch.errors import Preempted
from core_torch.train import TrainState, train
from parity_tests.cases.equalities import (
    Account,
    Changes,
    account_of,
    begin,
    configured,
    snapshot,
)


def interrupted(
    changes: Changes, folder: str, stop: int, step_ns: Sequence[int] = ()
) -> Account | None:
    """Trains to step ``stop``, commits, and lets a newly built run go on from the commit.

    By the clock replica 0 asks for a commit at ``stop``, and all make it when they have agreed.
    """
    state = begin(changes, step_ns=step_ns)
    if state is None:
        return None
    commit_at(state, Path(folder), stop)
    return account_of(resumed(changes, folder, step_ns))


def saved_behind(changes: Changes, folder: str, stop: int) -> Account | None:
    """``interrupted``, where the commit is written while training goes on for two steps."""
    state = begin(changes)
    assert state is not None, "a commit speaks to all ranks of the world"
    group, steps = dist.new_group(backend="gloo"), train(state)
    saver = Saver(
        Path(folder),
        layout_of(state.mesh),
        asynchronous=True,
        gather=lambda value: gather_json(value, device=state.mesh.device, group=group),
        tokenizer=None,
        keep=2,
    )
    while state.step < stop:
        next(steps)
    saver.save(saved_state(state), state.common_step)
    for _ in range(2):
        next(steps)
    saver.wait()
    dist.destroy_process_group(group)
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
    steps, timed = train(state), state.sync is not None and state.sync.is_timed
    while not (has_agreed(state, stop) if timed else state.step >= stop):
        next(steps)
    commit(state, folder)


def preempted(
    changes: Changes, folder: str, stop: int, step_ns: Sequence[int] = ()
) -> dict[str, Any]:
    """Trains as the command does; a signal asks rank 1 to stop after its step ``stop``.

    Returns:
        Step of the commit and own steps. All ranks take part.
    """
    state = begin(changes, step_ns=step_ns)
    assert state is not None, "a commit speaks to all ranks of the world"
    asked, config = StopWish(), configured(state.config, {"run": folder})

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == stop and dist.get_rank() == 1:
            asked.signal = "SIGTERM"

    with mock.patch.object(session_module, "build", lambda *_, **__: state):
        session = session_module.Session(
            config, state.mesh, state.corpus, resume_from=None, emit=on_event, asked=asked
        )
    with mock.patch.object(session, "commit", lambda: commit(state, Path(folder))):
        try:
            session.run()
        except Preempted:
            return {"commit": state.common_step, "steps": state.step}
    raise AssertionError("the run did not stop")


def go_on(changes: Changes, folder: str, step_ns: Sequence[int] = ()) -> Account:
    """What a newly built run does from the newest commit to its end."""
    return account_of(resumed(changes, folder, step_ns))


def commit(state: TrainState, folder: Path) -> None:
    """Saves the step; all ranks of the world take part."""
    device = state.mesh.device

    def gather(value: Any) -> list[Any]:
        return gather_json(value, device=device)

    save(
        folder,
        Staging().copy(saved_state(state)),
        step=state.common_step,
        mesh_layout=layout_of(state.mesh),
        gather=gather,
        tokenizer=None,
        keep=2,
    )


def has_agreed(state: TrainState, stop: int) -> bool:
    """Asks for a commit at step ``stop`` of replica 0; True once all have agreed to make it."""
    assert state.sync is not None
    votes = state.sync.votes
    votes.wants_checkpoint |= state.mesh.replica.index == 0 and state.step == stop
    agreed, votes.checkpoint_agreed = votes.checkpoint_agreed, False
    return agreed


def resumed(changes: Changes, folder: str, step_ns: Sequence[int] = ()) -> TrainState:
    """A run built from nothing but its configuration, its data and the newest commit."""
    state = begin(changes, step_ns=step_ns)
    assert state is not None
    restore(state, read(Path(folder), layout=layout_of(state.mesh)))
    return state
