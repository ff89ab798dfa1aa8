"""The state of an engine as tensors and plain numbers, and back. Taking it changes nothing.

    shared    equal on all replicas: anchor, velocity, exchanges in flight
    own       of each replica: what coding has left out
    counters  of each replica: whole numbers
    scalars   equal on all ranks: JSON leaves

A checkpoint (checkpoint/snapshot.py) files them by these names; ``LocalSGD.state_dict`` gives
them to anybody's own checkpoint.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from core_torch.collectives import Pending, psum
from core_torch.errors import CheckpointMismatch
from core_torch.sync.engine import LocalSGD
from core_torch.sync.meeting import Meeting
from core_torch.sync.penalty import NormStats, Verdict
from core_torch.sync.state import SyncState
from core_torch.sync.sync_round import Measured
from core_torch.sync.trigger import TimeTrigger


class Held(NamedTuple):
    """This rank's rows of something that is shaped like a parameter."""

    local: Tensor
    param: Tensor


def shared_tensors(sync: LocalSGD) -> dict[str, Held]:
    """Anchors, velocities and sums in flight, as ``kind/parameter``.

    Waits for what is in flight. Under CO2* every rank must call this together. Call
    ``let_go`` when the tensors have been used.
    """
    state, found = sync.state, dict[str, Held]()
    if state is None:
        return found
    for u, unit in enumerate(sync.units):
        for kind, tensors in zip(("anchor", "velocity"), state.store.get(u), strict=True):
            for name, param, x in zip(unit.names, unit.params, tensors, strict=True):
                found[f"{kind}/{name}"] = Held(x, param)
    for meeting in state.flights:
        for i, flight in meeting.flights.items():
            total = flight.wait()
            meeting.flights[i] = Pending(total, None)
            found |= _by_parameter("in_flight", sync, meeting.members[i], total)
    return found


def own_tensors(sync: LocalSGD) -> dict[str, Held]:
    """Residuals of coded exchanges, as ``residual/parameter``."""
    found = dict[str, Held]()
    for u, left in enumerate([] if sync.state is None else sync.state.residuals):
        if left is not None:
            found |= _by_parameter("residual", sync, u, left)
    return found


def let_go(sync: LocalSGD) -> None:
    """Frees what ``shared_tensors`` has brought from the host or from other replicas."""
    if sync.state is not None:
        for u in range(len(sync.units)):
            sync.state.store.release(u)


def _by_parameter(kind: str, sync: LocalSGD, u: int, flat: Tensor) -> dict[str, Held]:
    unit = sync.units[u]
    shards = unit.shards()
    parts = flat.split([x.numel() for x in shards])
    return {
        f"{kind}/{name}": Held(part.view(x.shape), param)
        for name, param, part, x in zip(unit.names, unit.params, parts, shards, strict=True)
    }


def counters(sync: LocalSGD) -> dict[str, int]:
    """Whole numbers in which replicas may differ under a time trigger.

    Equal on all shards, which must call this together: the first one's clock counts.
    """
    state, votes, elapsed = sync.state, sync.votes, 0
    if isinstance(sync.trigger, TimeTrigger):
        mine = torch.tensor(sync.trigger.elapsed_ns * (sync.axes.model.index == 0))
        elapsed = int(psum(mine.to(sync.device), sync.axes.model, scope="clock"))
    return {
        "step": sync.step,
        "steps_since": 0 if state is None else state.steps_since[0],
        "local_tokens": votes.local_tokens,
        "is_due": int(state is not None and state.is_due),
        "wants_checkpoint": int(votes.wants_checkpoint),
        "elapsed_ns": elapsed,
    }


def scalars(sync: LocalSGD) -> dict[str, Any]:
    """JSON leaves, equal on all ranks."""
    state = sync.state
    told: dict[str, Any] = {
        "agreed_tokens": sync.votes.agreed_tokens,
        "units": [unit.name for unit in sync.units],
        "has_parted": state is not None,
    }
    if state is None:
        return told
    coded = [u for u, left in enumerate(state.residuals) if left is not None]
    return told | {
        "rounds": state.rounds,
        "steps_since": [0] * len(sync.units) if sync.is_timed else state.steps_since,
        "stats": {name: x.tolist() for name, x in state.stats._asdict().items()},
        "flights": [_told(meeting) for meeting in state.flights],
        "coded": coded,
    }


def _told(meeting: Meeting) -> dict[str, Any]:
    measured = meeting.measured
    return {
        "number": meeting.number,
        "step": meeting.step,
        "forced": meeting.forced,
        "members": meeting.members,
        "steps": meeting.steps,
        "norm": measured.norm_UR.tolist(),
        "weight": measured.weight_UR.tolist(),
        "accept": measured.accept_U.tolist(),
        "verdict": {name: x.tolist() for name, x in measured.verdict._asdict().items()},
    }


def prepare(sync: LocalSGD, told: dict[str, Any], counted: dict[str, int]) -> None:
    """Counts, statistics and places for tensors, which are filled in after.

    Raises:
        CheckpointMismatch: other units than those saved.
    """
    names = [unit.name for unit in sync.units]
    if told["units"] != names:
        raise CheckpointMismatch(
            f"units of a round: saved {told['units']}, now {names}",
            likely="another method, model or number of fragments",
            next="go on with the configuration that was saved",
        )
    sync.state = None
    sync.step = counted["step"]
    if told["has_parted"]:
        sync.begin_apart()
        assert sync.state is not None
        _fill(sync, sync.state, told, counted)
    sync.votes.agreed_tokens = told["agreed_tokens"]
    sync.votes.local_tokens = counted["local_tokens"]
    sync.votes.wants_checkpoint = bool(counted["wants_checkpoint"])
    if isinstance(sync.trigger, TimeTrigger):
        sync.trigger.restart(counted["elapsed_ns"])


def _fill(sync: LocalSGD, state: SyncState, told: dict[str, Any], counted: dict[str, int]) -> None:
    state.rounds, state.is_due = told["rounds"], bool(counted["is_due"])
    state.steps_since = list(told["steps_since"])
    if sync.is_timed:
        state.steps_since = [counted["steps_since"]] * len(sync.units)
    like = state.stats.mean_R
    state.stats = NormStats(
        **{
            name: torch.tensor(told["stats"][name], dtype=x.dtype, device=x.device)
            for name, x in state.stats._asdict().items()
        }
    )
    empty = [
        torch.zeros(sum(x.numel() for x in unit.shards()), dtype=like.dtype, device=like.device)
        for unit in sync.units
    ]
    for u in told["coded"]:
        state.residuals[u] = empty[u].clone()
    for saved in told["flights"]:
        verdict = {k: torch.tensor(v, device=like.device) for k, v in saved["verdict"].items()}
        numbers = (
            torch.tensor(saved[name], dtype=like.dtype, device=like.device)
            for name in ("norm", "weight")
        )
        norm_UR, weight_UR = numbers
        accept_U = torch.tensor(saved["accept"], device=like.device)
        meeting = Meeting(
            **{k: saved[k] for k in ("number", "step", "forced", "members", "steps")},
            measured=Measured(norm_UR, Verdict(**verdict), weight_UR, accept_U),
        )
        for i, u in enumerate(meeting.members):
            meeting.flights[i] = Pending(empty[u].clone(), None)
        state.flights.append(meeting)


def settle(sync: LocalSGD) -> None:
    """After the tensors of ``shared_tensors`` were filled in: keeps them where they belong."""
    if sync.state is not None:
        for u in range(len(sync.units)):
            sync.state.store.put(u, sync.state.store.get(u))


def state_dict(sync: LocalSGD) -> dict[str, Any]:
    """Everything, for a checkpoint of one's own: tensors hold this rank's rows.

    Tensors are copies. ``tensors`` are keyed by ``kind/parameter``; the rest are JSON leaves.
    """
    held = shared_tensors(sync) | own_tensors(sync)
    tensors = {name: x.local.clone() for name, x in held.items()}
    let_go(sync)
    return {"scalars": scalars(sync), "counters": counters(sync), "tensors": tensors}


@torch.no_grad()
def load_state_dict(sync: LocalSGD, saved: dict[str, Any]) -> None:
    """Inverse of ``state_dict``, on the same ranks.

    Raises:
        CheckpointMismatch: it belongs to another model or method.
    """
    prepare(sync, saved["scalars"], saved["counters"])
    held = shared_tensors(sync) | own_tensors(sync)
    if held.keys() != saved["tensors"].keys():
        strange = sorted(held.keys() ^ saved["tensors"].keys())[:4]
        raise CheckpointMismatch(f"tensors saved and wanted differ: {', '.join(strange)}")
    for name, x in held.items():
        if x.local.shape != saved["tensors"][name].shape:
            raise CheckpointMismatch(
                f"{name}: saved {list(saved['tensors'][name].shape)}, now {list(x.local.shape)}",
                likely="another number of ranks",
            )
        x.local.copy_(saved["tensors"][name])
    settle(sync)
