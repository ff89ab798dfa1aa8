"""Where anchors and velocities lie between rounds, and how they come and go.

    device    beside the parameters
    host      in host memory (pinned if there is a GPU); a unit is fetched while the one before
              it is exchanged
    replicas  cut over the replica axis too, and gathered for a meeting (CO2*)

``get`` gives a unit as this rank's rows, ``put`` keeps it. What ``get`` has brought stays at
hand until ``put`` or ``release``, so a meeting fetches it once.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from core_torch.collectives import Axis, all_gather
from core_torch.sync.unit_state import UnitState
from core_torch.sync.units import SyncUnit


class Store(Protocol):
    """What every store can do."""

    def get(self, u: int) -> UnitState:
        """The state of unit u on this rank's device. Do not write to it."""

    def put(self, u: int, state: UnitState) -> None:
        """Keeps the state of unit u."""

    def release(self, u: int) -> None:
        """Lets go of what ``get`` has brought."""

    def prefetch(self, u: int) -> None:
        """Begins to bring unit u, if that can be done in the background."""


class OnDevice:
    """Beside the parameters: nothing is ever moved."""

    def __init__(self, units: Sequence[SyncUnit]) -> None:
        self._states: dict[int, UnitState] = {}

    def get(self, u: int) -> UnitState:
        """See ``Store``."""
        return self._states[u]

    def put(self, u: int, state: UnitState) -> None:
        """See ``Store``."""
        self._states[u] = state

    def release(self, u: int) -> None:
        """Nothing was brought."""

    def prefetch(self, u: int) -> None:
        """Nothing has to be brought."""


class OnHost:
    """In host memory. On a CPU the copies are made all the same: nothing may be aliased."""

    def __init__(self, units: Sequence[SyncUnit]) -> None:
        self._host: dict[int, UnitState] = {}
        self._here: dict[int, tuple[UnitState, torch.cuda.Event | None]] = {}
        self._device = units[0].like.device
        is_cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if is_cuda else None

    def get(self, u: int) -> UnitState:
        """See ``Store``."""
        self.prefetch(u)
        state, arrived = self._here[u]
        if arrived is not None:  # on CUDA the copy runs on a stream of its own
            now = torch.cuda.current_stream(self._device)
            now.wait_event(arrived)
            for x in (*state.anchor, *state.velocity):
                x.record_stream(now)
            self._here[u] = (state, None)
        return state

    def put(self, u: int, state: UnitState) -> None:
        """See ``Store``."""
        if u not in self._host:
            self._host[u] = UnitState(*([self._buffer(x) for x in part] for part in state))
        for kept, new in zip(self._host[u], state, strict=True):
            for mine, x in zip(kept, new, strict=True):
                mine.copy_(x, non_blocking=True)
        self.release(u)

    def release(self, u: int) -> None:
        """See ``Store``."""
        self._here.pop(u, None)

    def prefetch(self, u: int) -> None:
        """See ``Store``; in the background on CUDA."""
        if u in self._here or u not in self._host:
            return
        held = self._host[u]
        if self._stream is None:
            self._here[u] = (UnitState(*([x.clone() for x in part] for part in held)), None)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # the last put is over
        with torch.cuda.stream(self._stream):
            parts = ([x.to(self._device, non_blocking=True) for x in part] for part in held)
            arrived = torch.cuda.Event()
            self._here[u] = (UnitState(*parts), arrived)
            arrived.record(self._stream)

    def _buffer(self, like: Tensor) -> Tensor:
        return torch.empty_like(like, device="cpu", pin_memory=self._stream is not None)


class OverReplicas:
    """Each replica keeps 1 / N of every unit; ``get`` gathers it, which every rank must do."""

    def __init__(self, units: Sequence[SyncUnit], axis: Axis) -> None:
        self._units, self._axis = units, axis
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}
        self._here: dict[int, UnitState] = {}

    def get(self, u: int) -> UnitState:
        """See ``Store``."""
        if u not in self._here:
            self._here[u] = UnitState(*(self._whole(u, part) for part in self._parts[u]))
        return self._here[u]

    def put(self, u: int, state: UnitState) -> None:
        """See ``Store``."""
        anchor, velocity = (self._part(u, tensors) for tensors in state)
        self._parts[u] = (anchor, velocity)
        self.release(u)

    def release(self, u: int) -> None:
        """See ``Store``."""
        self._here.pop(u, None)

    def prefetch(self, u: int) -> None:
        """A gather in the background would need a group of its own; none is made."""

    def _part(self, u: int, tensors: list[Tensor]) -> Tensor:
        flat = self._units[u].flat(tensors)
        width = -(-flat.numel() // self._axis.size)
        padded = flat.new_zeros(width * self._axis.size)
        padded[: flat.numel()] = flat
        return padded.view(self._axis.size, width)[self._axis.index].clone()

    def _whole(self, u: int, part: Tensor) -> list[Tensor]:
        unit = self._units[u]
        shapes = [x.shape for x in unit.shards()]
        if not shapes:  # another stage of the pipeline holds the unit
            return []
        sizes = [shape.numel() for shape in shapes]
        flat = all_gather(part, self._axis, scope=unit.name).view(-1)[: sum(sizes)]
        return [x.view(shape) for x, shape in zip(flat.split(sizes), shapes, strict=True)]


def make_store(kind: str, units: Sequence[SyncUnit], axis: Axis) -> Store:
    """The store of ``Rules.store``; ``axis`` is the replica axis."""
    if kind == "replicas":
        return OverReplicas(units, axis)
    return OnHost(units) if kind == "host" else OnDevice(units)
