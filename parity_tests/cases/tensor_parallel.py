"""Runs on meshes with an axis tp, and each rank's account of them as plain data. Imports no jax.

A rank tells its piece of every tensor as it lies in memory, and along which dimension tp has cut
it. ``checks/tensor_parallel.py`` puts the pieces together without DTensor's help, so the
placements that the core believes in are tested with the numbers.
"""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from core_torch.shard.access import local_shard
from core_torch.train import TrainState, evaluate, finish, train
from parity_tests.cases.equalities import Changes, begin
from parity_tests.harness.torch_bridge import to_numpy

Told = dict[str, Any]


def trained(changes: Changes) -> Told | None:
    """Trains to the end and finishes; None on a rank outside the mesh."""
    state = begin(changes)
    return None if state is None else account_of(state)


def account_of(state: TrainState) -> Told:
    """Trains ``state`` to the end, evaluates, finishes; what was seen, and all tensors then."""
    records = list(train(state))
    validation = evaluate(state)
    events = [record.round for record in records if record.round is not None] + finish(state)
    mesh = state.mesh
    return {
        "place": (mesh.replica.index, mesh.shard.index, mesh.tp.index),
        "losses": [record.loss for record in records],
        "grad_norms": [record.grad_norm for record in records],
        "validation": validation,
        "norms": [event.norm for event in events],
        "weights": [event.weight for event in events],
        "combined": [event.combined_norm for event in events],
        "tensors": tensors_of(state),
        "cut": {name: cut_over_tp(p) for name, p in state.model.named_parameters()},
    }


def tensors_of(state: TrainState) -> dict[str, Any]:
    """Parameters and moments, by kind and name."""
    named = dict(state.model.named_parameters())
    held = {"theta": {name: to_numpy(local_shard(p)) for name, p in named.items()}}
    for key in ("exp_avg", "exp_avg_sq"):
        of = {name: state.optimizer.state[p][key] for name, p in named.items()}
        held[key] = {name: to_numpy(local_shard(x)) for name, x in of.items()}
    return held


def cut_over_tp(p: Tensor) -> int | None:
    """The dimension along which tp has cut ``p``; None if every rank of tp holds all of it."""
    if not isinstance(p, DTensor) or "tp" not in (p.device_mesh.mesh_dim_names or ()):
        return None
    placement = p.placements[-1]
    return None if placement.is_replicate() else int(placement.dim)  # type: ignore[attr-defined]
