"""Short runs that tell what `twinshard plan` foretells: messages, tensors held, a commit's size."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from core_torch.models import token_loss
from core_torch.shard.access import local_shard
from core_torch.sync.saved import own_tensors
from core_torch.sync.store import OnDevice, OnHost, OverReplicas
from core_torch.train import TrainState, micro_batch, train
from parity_tests.cases.equalities import Changes, begin
from parity_tests.cases.resume import commit_at


def observed(changes: Changes, folder: str, step_ns: Sequence[int] = ()) -> dict[str, Any] | None:
    """Trains to the end without finishing, and commits to ``folder`` unless that is empty.

    Returns:
        The trace of messages, its length before the first step and after each, bytes held by
        category, and bytes of gradients after one more backward.
    """
    state = begin(changes, step_ns=step_ns)
    if state is None:
        return None
    trace = state.mesh.ledger.trace
    assert trace is not None
    marks = [len(trace)]
    for _ in train(state):
        marks.append(len(trace))
    told: dict[str, Any] = {"trace": [tuple(message) for message in trace], "marks": marks}
    told["held"] = {name: total_bytes(tensors) for name, tensors in held(state)}
    if folder:
        commit_at(state, Path(folder), state.step)
    inputs, targets, _ = micro_batch(state, 0)
    state.sharded.begin_micro_batch(is_last=True)
    token_loss(state.model(inputs), targets).backward()
    state.sharded.finish_gradients()
    gradients = [local_shard(p.grad) for p in state.model.parameters() if p.grad is not None]
    told["held"]["gradients"] = total_bytes(gradients)
    return told


def held(state: TrainState) -> Iterator[tuple[str, list[Tensor]]]:
    """Tensors that this rank holds between two steps, by the plan's categories."""
    params = list(state.model.parameters())
    yield "parameters", [local_shard(p) for p in params]
    moments = [state.optimizer.state[p][key] for p in params for key in ("exp_avg", "exp_avg_sq")]
    yield "AdamW moments", [local_shard(x) for x in moments]
    yield "rotary tables", list(state.model.buffers())
    if state.sync is None or state.sync.state is None:
        return
    store = state.sync.state.store
    if isinstance(store, OverReplicas):
        yield "anchor", [anchor for anchor, _ in store._parts.values()]
        yield "velocity", [velocity for _, velocity in store._parts.values()]
    else:
        assert isinstance(store, OnDevice | OnHost)
        states = (store._states if isinstance(store, OnDevice) else store._host).values()
        yield "anchor", [x for unit in states for x in unit.anchor]
        yield "velocity", [x for unit in states for x in unit.velocity]
    yield "residuals", [x.local for x in own_tensors(state.sync).values()]


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all elements."""
    return sum(x.numel() * x.element_size() for x in tensors)
