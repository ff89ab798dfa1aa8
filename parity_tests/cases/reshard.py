"""Runs that are saved on one layout and go on, on the same ranks, on another. Imports no jax."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core_torch.checkpoint.resume import resume
from core_torch.data.corpus import Corpus
from core_torch.train import TrainState, finish
from parity_tests.cases.equalities import (
    TINY,
    Account,
    Changes,
    account_of,
    begin,
    configured,
    corpus_for,
    snapshot,
)
from parity_tests.cases.resume import commit_at


def saved(changes: Changes, folder: str, stop: int, step_ns: Sequence[int] = ()) -> Account | None:
    """Trains to step ``stop`` and commits; then ends the run there, as if there were no more.

    Only on a mesh of all ranks of the world, because a commit speaks to all.
    """
    state = start(changes, changes, step_ns)
    assert state is not None
    commit_at(state, Path(folder), stop)
    told: Account = {"history": [snapshot(state)], "counted": counted(state)}
    told["events"] = [event.norm for event in finish(state)]
    told["finished"] = snapshot(state)
    return told


def taken_up(
    before: Changes, after: Changes, folder: str, step_ns: Sequence[int] = ()
) -> Account | None:
    """A run of ``after`` that goes on from the newest commit, to its end.

    Its text is that of ``before``. None on a rank outside its mesh.
    """
    state = start(after, before, step_ns)
    if state is None:
        return None
    resume(state, Path(folder))
    at_load = counted(state)
    return account_of(state) | {"counted": at_load}


def whole(changes: Changes, before: Changes) -> Account | None:
    """The run of ``changes`` that never stopped, on the text of ``before``."""
    state = start(changes, before)
    return None if state is None else account_of(state)


def start(changes: Changes, text_of: Changes, step_ns: Sequence[int] = ()) -> TrainState | None:
    """A run of ``changes`` before its first step; every replica draws its own part of one text."""
    state = begin(changes, step_ns=step_ns)
    if state is not None:
        state.corpus = text(text_of)
    return state


def text(changes: Changes) -> Corpus:
    """In it, what a draw of a run of ``changes`` reads does not depend on who draws it now."""
    config = configured(TINY, changes)
    return corpus_for(config, range(config.mesh.replicas))


def counted(state: TrainState) -> dict[str, Any]:
    """Where the run stands in its data and its schedule."""
    sync = state.sync
    told: dict[str, Any] = {"step": state.step, "tokens": state.tokens, "rows": state.rows}
    if sync is not None and sync.state is not None:
        told["since"] = list(sync.state.steps_since)
    return told
