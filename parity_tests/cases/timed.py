"""Runs by the clock on real ranks: one replica slow, one out of data early. Imports no jax."""

import time
from collections.abc import Sequence
from dataclasses import asdict

from core_torch.train import finish, train
from parity_tests.cases.equalities import Account, Changes, begin, snapshot


def run(
    changes: Changes, step_ns: Sequence[int], leaves_after: Sequence[int], pause_ms: Sequence[int]
) -> Account | None:
    """Trains to the end and finishes; None on a rank outside the mesh.

    Args:
        changes: to ``TINY``.
        step_ns: of each replica's virtual clock; none: ``time.monotonic_ns``.
        leaves_after: steps after which a replica has no more data; 0: never.
        pause_ms: what each replica sleeps after a step.
    """
    clock = None if step_ns else time.monotonic_ns
    state = begin(changes, step_ns=step_ns, clock=clock)
    if state is None:
        return None
    n, events = state.mesh.replica.index, []
    trace = state.mesh.ledger.trace
    assert trace is not None and state.sync is not None
    marks = [len(trace)]
    for record in train(state):
        events += [] if record.round is None else [record.round]
        marks.append(len(trace))
        if record.step == leaves_after[n]:
            break
        time.sleep(pause_ms[n] / 1000)
    steps = state.step
    events += finish(state)
    return {
        "steps": steps,
        "marks": marks,
        "events": [asdict(event) for event in events],
        "trace": [tuple(dispatch) for dispatch in trace],
        "agreed": state.sync.votes.agreed_tokens,
        "theta": snapshot(state)["theta"],
    }
