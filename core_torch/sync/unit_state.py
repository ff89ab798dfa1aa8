"""The outer state of one unit."""

from typing import NamedTuple

from torch import Tensor


class UnitState(NamedTuple):
    """A unit's outer state. Every tensor is this rank's rows, in the order of the unit."""

    anchor: list[Tensor]
    velocity: list[Tensor]
