"""Chapter 13. The clock: when a round is due by time, and how to test that without waiting.

You learn why a trigger is given its clock as an argument, and why time is an integer.

    (V2) a replica enters the next round after an inner step with  now - began >= T
    (V3) after the round  began <- now: what a replica waited does not count

All is int64 nanoseconds: float32 seconds since 1970 tick once in two minutes. Only differences
of one clock are ever used, so the clocks of two machines may disagree about the date. With a
*virtual* clock, which moves by c_n per step of replica n and else stands still, a run by time is
as reproducible as one by steps: between two rounds replica n makes ceil(T / c_n) steps.

Who communicates: nobody; each replica asks its own clock. (In the core the first rank of a
replica's shards asks, and tells its peers, or they might disagree by a step.)
"""

from collections.abc import Callable

Clock = Callable[[], int]  # monotonic nanoseconds


class VirtualClock:
    """A clock that moves only when it is told to."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        """The time, as ``time.monotonic_ns`` would tell it."""
        return self.now_ns

    def advance(self, ns: int) -> None:
        """Lets ``ns`` pass."""
        self.now_ns += ns


class TimeTrigger:
    """(V2, V3) due when ``interval_ns`` have passed since the end of the last round."""

    def __init__(self, interval_ns: int, clock: Clock) -> None:
        self.interval_ns, self.clock = interval_ns, clock
        self.began_ns = clock()

    def is_over(self) -> bool:
        """(V2)"""
        return self.clock() - self.began_ns >= self.interval_ns

    def restart(self) -> None:
        """(V3)"""
        self.began_ns = self.clock()


def main() -> None:
    """Three replicas of different speed between two rounds that are a second apart."""
    second = 10**9
    for cost_ns in (second // 10, second // 4, second * 3 // 10):
        clock = VirtualClock()
        trigger = TimeTrigger(second, clock)
        steps = 0
        while not trigger.is_over():
            clock.advance(cost_ns)
            steps += 1
        late = (clock() - second) / second
        print(f"a step takes {cost_ns / second:.2f} s: {steps:2} steps, enters {late:.2f} s late")
    print("The others wait for the latest, never for longer than one of its steps.")


if __name__ == "__main__":
    main()
