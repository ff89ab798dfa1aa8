"""Schedule: in which order a round's exchanges start and finish, and what is in flight.

Knows no formula. The two verbs are arguments, so the same order runs in the engine, in
forward hooks, in tests and in a simulator.
"""

from collections import deque
from collections.abc import Callable
from typing import TypeVar

Flight = TypeVar("Flight")
Result = TypeVar("Result")


def start_ahead(
    count: int,
    start: Callable[[int], Flight],
    finish: Callable[[int, Flight], Result],
    *,
    limit: int,
) -> list[Result]:
    """Starts and finishes ``count`` exchanges in order, at most ``limit`` of them in flight.

    Args:
        count: number of units.
        start: begins unit u's exchange and returns what ``finish`` needs.
        finish: completes it.
        limit: bound on exchanges begun and not completed, 1 or more; a bound on memory.

    Returns:
        What ``finish`` returned, in order.
    """
    in_flight: deque[tuple[int, Flight]] = deque()
    results: list[Result] = []
    for u in range(count):
        if len(in_flight) == limit:
            results.append(finish(*in_flight.popleft()))
        in_flight.append((u, start(u)))
    while in_flight:
        results.append(finish(*in_flight.popleft()))
    return results
