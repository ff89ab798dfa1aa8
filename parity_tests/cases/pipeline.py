"""Runs on meshes with an axis pp, and what their ranks have sent, held and exported. No jax."""

from collections import Counter
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from core_torch.checkpoint.export import export_model
from core_torch.shard.access import local_shard
from core_torch.train import finish, train
from parity_tests.cases.equalities import Account, Changes, begin, snapshot
from parity_tests.cases.planned import held, total_bytes
from parity_tests.cases.resume import commit_at
from parity_tests.harness.torch_bridge import to_numpy


def observed(changes: Changes, folder: str) -> dict[str, Any]:
    """Trains to the end without finishing and commits; bytes sent by axis and operation, and held.

    The proof that replicas are equal as they part is left out.
    """
    state = begin(changes)
    assert state is not None and state.mesh.ledger.trace is not None
    for _ in train(state):
        pass
    sent = Counter[tuple[str, str]]()
    for axis, op, dtype, numel, scope in state.mesh.ledger.trace:
        if scope != "checksum":
            sent[axis, op] += numel * {"float64": 8, "float32": 4, "int64": 8}[dtype]
    bytes_held = {name: total_bytes(tensors) for name, tensors in held(state)}
    commit_at(state, Path(folder), state.step)
    return {"sent": list(sent.items()), "held": bytes_held}


def told_and_exported(changes: Changes, folder: str) -> dict[str, Any] | None:
    """Trains to the end and finishes: what it tells, and on the lead the whole model."""
    state = begin(changes)
    if state is None:
        return None
    before = {name: to_numpy(local_shard(p)) for name, p in state.model.named_parameters()}
    records = list(train(state))
    events = [record.round for record in records if record.round is not None] + finish(state)
    path = export_model(state, Path(folder))
    return {
        "loss": [record.loss for record in records],
        "grad_norm": [record.grad_norm for record in records],
        "norm": [event.norm for event in events],
        "combined_norm": [event.combined_norm for event in events],
        "before": before,
        "file": file_at(path) if state.mesh.is_lead else None,
    }


def file_at(path: Path) -> dict[str, Any]:
    """The tensors of an exported model."""
    return {name: to_numpy(x) for name, x in load_file(path).items()}


def exported(changes: Changes, folder: str) -> Account:
    """Trains to the end, exports the anchor; this rank's state, and on rank 0 the file."""
    state = begin(changes)
    assert state is not None
    for _ in train(state):
        pass
    path = export_model(state, Path(folder))
    told: Account = {"events": [], "history": [snapshot(state)], "file": None}
    if state.mesh.is_lead:
        told["file"] = file_at(path)
    return told
