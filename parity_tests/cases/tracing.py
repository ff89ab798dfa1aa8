"""What ranks do to record the trace of a run, whole or stopped and resumed. Imports no jax."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from core_torch.checkpoint.load import read
from core_torch.checkpoint.snapshot import layout_of, restore
from core_torch.errors import TwinshardError
from core_torch.taps import tap
from core_torch.train import TrainState, finish, train
from parity_tests.cases.equalities import Account, Changes, Fault, inject, snapshot
from parity_tests.cases.resume import commit_at
from parity_tests.cases.training import Whole, begin


def record(
    changes: Changes,
    tokens: np.ndarray,
    params: Whole,
    folder: str,
    step_ns: Sequence[int] = (),
    keep_tensors: bool = False,
    faults: Sequence[Fault] = (),
    weights_hash: str = "",
) -> Account | None:
    """Trains to the end, finishes, and writes the trace; None on a rank outside the mesh.

    Args:
        changes: to the default configuration.
        tokens: training data.
        params: whole initial weights.
        folder: of the trace; "": none is written, and all else is as it is with one.
        step_ns: by the clock, what a step of each replica takes.
        keep_tensors: see ``core_torch.trace.Tracer``.
        faults: values to write into a parameter between two steps.
        weights_hash: for ``meta.json``.

    Returns:
        ``losses``, ``events`` and ``steps``; this rank's ``state`` at the end; the name of the
        ``error`` that ended the run; the ``trace`` of collectives.
    """
    state = begin(changes, tokens, params, step_ns)
    if state is None:
        return None
    how: dict[str, Any] = {"keep_tensors": keep_tensors, "weights_hash": weights_hash}
    with tap(state, folder, **how) if folder else nullcontext():
        told = trained(state, faults)
    return told | ends_as(state)


def record_in_two_parts(
    changes: Changes,
    tokens: np.ndarray,
    params: Whole,
    folder: str,
    commits: str,
    stop: int,
    overrun: int = 0,
    step_ns: Sequence[int] = (),
    keep_tensors: bool = False,
) -> Account | None:
    """Trains to step ``stop``, commits, and lets a run that is built anew go on with the trace.

    All four ranks take part.

    Args:
        changes: see ``record``.
        tokens: see ``record``.
        params: see ``record``.
        folder: of the trace.
        commits: folder of checkpoints.
        stop: inner step of the commit; by the clock the first on which all agree from there on.
        overrun: inner steps that the first part makes after its commit, for nothing.
        step_ns: see ``record``.
        keep_tensors: see ``record``.
    """
    state = begin(changes, tokens, params, step_ns)
    assert state is not None, "a commit speaks to all ranks of the world"
    with tap(state, folder, keep_tensors=keep_tensors):
        commit_at(state, Path(commits), stop)
        steps = train(state)
        for _ in range(overrun):
            next(steps)
    resumed = begin(changes, tokens, params, step_ns)
    assert resumed is not None
    restore(resumed, read(Path(commits), layout=layout_of(resumed.mesh)))
    with tap(resumed, folder, resumed=True, keep_tensors=keep_tensors):
        told = trained(resumed, ())
    return told | ends_as(resumed)


def trained(state: TrainState, faults: Sequence[Fault]) -> Account:
    """Trains to the end, or to an error of the library; see ``record``."""
    told: dict[str, Any] = {"losses": [], "events": [], "error": None}
    try:
        for step in train(state):
            told["losses"].append(step.loss)
            told["events"] += [] if step.round is None else [asdict(step.round)]
            for fault in faults:
                inject(state, *fault)
        told["events"] += [asdict(event) for event in finish(state)]
    except TwinshardError as error:
        told["error"] = type(error).__name__
    return told


def ends_as(state: TrainState) -> Account:
    """What a run has come to. To look at it may send something, which no trace should tell."""
    sent = [tuple(dispatch) for dispatch in state.mesh.ledger.trace or []]
    return {"steps": state.step, "trace": sent, "state": snapshot(state)}
