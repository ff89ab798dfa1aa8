"""Runs on meshes with an axis tp, and each rank's account of them as plain data. Imports no jax.

A rank tells its piece of every tensor as it lies in memory, and along which dimension tp has cut
it. ``checks/tensor_parallel.py`` puts the pieces together without DTensor's help, so that the
placements in which the core believes are tested with the numbers.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from core_torch import train as core_train
from core_torch.checkpoint.export import export_model
from core_torch.checkpoint.resume import resume
from core_torch.config import SyncConfig
from core_torch.evaluation import evaluate
from core_torch.shard.access import local_shard
from core_torch.sync import units
from core_torch.sync.local_sgd import local_sgd
from core_torch.sync.saved import shared_tensors
from core_torch.train import TrainState, finish, train
from parity_tests.cases import library, planned
from parity_tests.cases.equalities import Changes, begin
from parity_tests.cases.planned import total_bytes
from parity_tests.cases.resume import commit_at
from parity_tests.harness.rank_mesh import mesh_for
from parity_tests.harness.torch_bridge import to_numpy

Told = dict[str, Any]


def trained(changes: Changes) -> Told | None:
    """Trains to the end and finishes; None on a rank outside the mesh."""
    state = begin(changes)
    return None if state is None else account_of(state)


def account_of(state: TrainState) -> Told:
    """Trains ``state`` to the end, evaluates, finishes; what was seen, and all tensors."""
    before = tensors_of(state)
    records = list(train(state))
    validation = evaluate(state)
    events = [record.round for record in records if record.round is not None] + finish(state)
    return {
        "losses": [record.loss for record in records],
        "grad_norms": [record.grad_norm for record in records],
        "validation": [validation],
        "norm": [event.norm for event in events],
        "weight": [event.weight for event in events],
        "combined_norm": [event.combined_norm for event in events],
        "before": before,
        "after": tensors_of(state),
        **place_of(state),
    }


def place_of(state: TrainState) -> Told:
    """Where this rank stands and along which dimension tp has cut each parameter."""
    mesh, named = state.mesh, state.model.named_parameters()
    return {
        "place": (mesh.replica.index, mesh.shard.index, mesh.tp.index),
        "cut": {name: cut_over_tp(p) for name, p in named},
    }


def tensors_of(state: TrainState) -> dict[str, Any]:
    """This rank's pieces of parameters, moments, anchors and velocities, by kind and name."""
    named = dict(state.model.named_parameters())
    held = {"theta": {name: to_numpy(local_shard(p)) for name, p in named.items()}}
    for kind in ("exp_avg", "exp_avg_sq"):
        of = {name: state.optimizer.state[p][kind] for name, p in named.items()}
        held[kind] = {name: to_numpy(local_shard(x)) for name, x in of.items()}
    shared = {} if state.sync is None else shared_tensors(state.sync)
    for path, x in shared.items():
        kind, _, name = path.partition("/")
        held.setdefault(kind, {})[name] = to_numpy(x.local)
    return held


def cut_over_tp(p: Tensor) -> int | None:
    """The dimension along which tp has cut ``p``; None if every rank of tp holds all of it."""
    if not isinstance(p, DTensor) or "tp" not in (p.device_mesh.mesh_dim_names or ()):
        return None
    placement = p.placements[-1]
    return None if placement.is_replicate() else int(placement.dim)  # type: ignore[attr-defined]


@contextmanager
def _gains_counted_twice() -> Iterator[None]:
    def one(x: Tensor, holders: int) -> int:
        return 1

    with (
        mock.patch.object(units, "copies_of", one),
        mock.patch.object(core_train, "copies_of", one),
    ):
        yield


def miscounted(changes: Changes) -> Told | None:
    """As ``trained``, with every rank of tp adding its copy of the gains to norms."""
    with _gains_counted_twice():
        return trained(changes)


def committed(changes: Changes, folder: str, stop: int) -> Told | None:
    """Trains to step ``stop`` and commits; the state there, then the account of what follows."""
    state = begin(changes)
    assert state is not None, "a commit speaks to all ranks of the world"
    commit_at(state, Path(folder), stop)
    saved = {"saved": tensors_of(state)}
    return saved | account_of(state)


def gone_on(changes: Changes, folder: str) -> Told | None:
    """A newly built run that takes over a commit, perhaps on another mesh, and ends."""
    state = begin(changes)
    if state is None:
        return None
    resume(state, Path(folder))
    return {"saved": tensors_of(state)} | account_of(state)


def exported(changes: Changes, folder: str) -> Told:
    """The anchor of a short run as a file, and as the ranks hold it."""
    state = begin(changes)
    assert state is not None
    for _ in train(state):
        pass
    path = export_model(state, Path(folder))
    told = {"anchor": tensors_of(state), **place_of(state)}
    torch.distributed.barrier()
    return told | {"file": {name: to_numpy(x) for name, x in load_file(path).items()}}


# --- somebody's own loop ---


def own_loop(is_cut: bool, steps: int = 6) -> Told:
    """EDiT around a small torch model on a mesh replica x tp; ``is_cut``: over tp, by torch.

    Otherwise every rank of tp holds all of it, and computes the same.
    """
    mesh = mesh_for(2, 1, tp=2).torch_mesh["replica", "tp"]
    model = library.Tower().double()
    if is_cut:
        whole = ColwiseParallel(output_layouts=Replicate())
        plan: dict[str, ParallelStyle] = {f"blocks.{i}": whole for i in range(3)}
        parallelize_module(model, mesh["tp"], plan)
    optimizer = library.optimizer_of(model)
    sync = local_sgd(model, optimizer, mesh, SyncConfig(method="edit", every=2, warmup=1))
    losses, events = [], list[Any]()
    for step in range(steps):
        x, y = library.data_of(step, mesh.get_local_rank("replica"), 0)
        loss = ((model(x) - y) ** 2).mean()
        torch.autograd.backward(loss)
        losses.append(loss.item())
        sync.before_step()
        optimizer.step()
        optimizer.zero_grad()
        events.append(sync.after_step())
    events += sync.finish()
    sync.detach()
    return library.told_of(model, losses, events)


# --- what is sent and held ---


class OverTp(TorchDispatchMode):
    """Counts the payload of DTensor's collectives as the ledger would: nobody else's are these.

    Not by their group: DTensor keeps what it has worked out on an equal mesh, and its groups.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = Counter[str]()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        kind = NAMES.get(op)
        if kind is not None:
            payload = result if kind == "all_gather" else args[0]
            self.bytes[kind] += payload.numel() * payload.element_size()
        return result


_C10D = torch.ops._c10d_functional
NAMES = {
    _C10D.all_gather_into_tensor.default: "all_gather",
    _C10D.reduce_scatter_tensor.default: "reduce_scatter",
    _C10D.all_reduce.default: "all_reduce",
}


def planned_for(changes: Changes, folder: str) -> Told:
    """Bytes of an inner step by axis and operation, bytes held, and a commit in ``folder``."""
    state = begin(changes)
    assert state is not None
    steps = train(state)
    next(steps)
    trace = state.mesh.ledger.trace
    assert trace is not None
    trace.clear()
    with OverTp() as counter:
        next(steps)
    sizes = {"float32": 4, "float64": 8, "int64": 8}
    ledger = Counter[tuple[str, str]]()
    for message in trace:
        ledger[message.axis, message.op] += message.numel * sizes[message.dtype]
    held = {name: total_bytes(tensors) for name, tensors in planned.held(state)}
    commit_at(state, Path(folder), state.step)
    return {"tp": dict(counter.bytes), "ledger": list(ledger.items()), "held": held}
