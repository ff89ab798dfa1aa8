"""Schedule: in which order a round's exchanges start and finish, and what is in flight.

Knows no formula. The two verbs are arguments, so the same order runs right after an inner step,
in forward hooks, in a compiled graph, in tests and in a simulator.
"""

from collections.abc import Callable


class InOrder:
    """Exchanges 0 .. count - 1, each started and finished once, in this order on every rank.

    Args:
        count: number of units.
        start: begins unit u's exchange.
        finish: completes it.
        limit: bound on exchanges begun and not completed, 1 or more; a bound on memory.
    """

    def __init__(
        self,
        count: int,
        start: Callable[[int], None],
        finish: Callable[[int], None],
        *,
        limit: int,
    ) -> None:
        self.count, self.limit = count, limit
        self.started = self.finished = 0
        self._start, self._finish = start, finish

    @property
    def is_done(self) -> bool:
        """True when nothing is left."""
        return self.finished == self.count

    def start(self, u: int) -> None:
        """Begins unit u's exchange; it must be the next one."""
        assert u == self.started < self.finished + self.limit, (u, self.started, self.finished)
        self.started += 1
        self._start(u)

    def finish(self, u: int) -> None:
        """Completes unit u's exchange; it must be the oldest in flight."""
        assert u == self.finished < self.started, (u, self.started, self.finished)
        self._finish(u)
        self.finished += 1

    def reach(self, u: int) -> None:
        """Completes everything up to unit u, and keeps as many in flight as allowed."""
        self.start_ahead()
        while self.finished <= min(u, self.count - 1):
            self.finish(self.finished)
            self.start_ahead()

    def start_ahead(self) -> None:
        """Begins exchanges until ``limit`` are in flight or none is left."""
        while self.started < min(self.count, self.finished + self.limit):
            self.start(self.started)

    def complete(self) -> None:
        """Everything that is left."""
        self.reach(self.count - 1)
