"""What ranks do at a hand-over: stop and commit, or go on from a commit. Imports no jax."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from core_torch.checkpoint.load import read
from core_torch.checkpoint.snapshot import layout_of, restore
from core_torch.train import finish, train
from parity_tests.cases.equalities import Account, Changes, snapshot
from parity_tests.cases.resume import commit_at
from parity_tests.cases.training import Whole, begin


def stop(
    changes: Changes,
    tokens: np.ndarray,
    params: Whole,
    folder: str,
    at: int,
    step_ns: Sequence[int] = (),
) -> Account:
    """Trains to step ``at``, commits, and tells the state there; all four ranks take part."""
    state = begin(changes, tokens, params, step_ns)
    assert state is not None, "a commit speaks to all ranks of the world"
    commit_at(state, Path(folder), at)
    return {"states": [snapshot(state)], "events": [], "error": None}


def go_on(
    changes: Changes,
    tokens: np.ndarray,
    params: Whole,
    folder: str,
    step_ns: Sequence[int] = (),
) -> Account | None:
    """Takes over the newest commit and trains to the end; None on a rank outside the mesh.

    Returns:
        ``states`` at the hand-over and after each step, the last one after ``finish``;
        ``events`` and ``records``.
    """
    state = begin(changes, tokens, params, step_ns)
    if state is None:
        return None
    restore(state, read(Path(folder), layout=layout_of(state.mesh)))
    told: Account = {"states": [snapshot(state)], "events": [], "records": [], "error": None}
    for record in train(state):
        told["records"].append(record.as_line())
        told["events"] += [] if record.round is None else [asdict(record.round)]
        told["states"].append(snapshot(state))
    told["events"] += [asdict(event) for event in finish(state)]
    told["states"][-1] = snapshot(state)
    return told
