"""What rounds tell somebody who watches them; see taps/run.py. Nobody does by default."""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from core_torch.sync.meeting import Meeting
from core_torch.sync.penalty import NormStats
from core_torch.sync.sync_round import Finished
from core_torch.sync.unit_state import UnitState
from core_torch.sync.units import SyncUnit


class Observer(Protocol):
    """Called at the points of a round, in its order. It changes no tensor, and keeps
    none for longer than a unit's outer step."""

    def measured(
        self, meeting: Meeting, units: list[SyncUnit], states: Iterator[UnitState]
    ) -> None:
        """A round is decided, nothing has moved.

        Args:
            meeting: just numbered; perhaps empty.
            units: that take part.
            states: theirs, one after the other, each let go before the next.
        """

    def combined(self, meeting: Meeting, unit: SyncUnit, total: Tensor, state: UnitState) -> None:
        """The sum of a unit has arrived and was not used yet.

        Args:
            meeting: of the exchange.
            unit: of the exchange.
            total: (numel,) of this rank's rows.
            state: anchor and velocity before the outer step.
        """

    def finished(self, meeting: Meeting, i: int, unit: SyncUnit, done: Finished) -> None:
        """The meeting's i-th unit has taken its outer step and written its parameters."""

    def concluded(self, meeting: Meeting, units: list[SyncUnit], stats: NormStats | None) -> None:
        """A round is over; ``stats`` (U, R) are those after it, where the method has them."""
