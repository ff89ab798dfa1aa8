"""One round between its first message and its last: what was decided and what is in flight."""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from core_torch.sync.sync_round import Flight, Measured


class Told(NamedTuple):
    """What is told of a unit after its round; all ()."""

    combined_norm: Tensor
    clip: Tensor
    gap: Tensor


@dataclass(slots=True, kw_only=True)
class Meeting:
    """A numbered round of some units. Plain data; the engine moves it on."""

    number: int
    step: int  # inner step after which it was measured
    forced: bool  # by ``finish()``, outside the rhythm
    members: list[int]  # units that take part; rows of ``measured`` are in this order
    steps: list[int]  # inner steps of each replica since its last round
    measured: Measured
    is_empty: bool = False  # too few steps in all: nothing is exchanged
    flights: dict[int, Flight] = field(default_factory=dict)  # by place among the members
    finished: dict[int, Told] = field(default_factory=dict)  # same
