"""Triggers: turn counts of steps, or of nanoseconds, into "due". They never read a clock.

The one convention: the anchor is taken after inner step t = warmup; a round is due after
inner step t when t > warmup and (t - warmup) is a multiple of the interval. Under a time
trigger a round is due when the interval has passed since the last one ended; the clock is an
argument.
"""

from collections.abc import Callable
from dataclasses import dataclass

from core_torch.config import SyncConfig

Clock = Callable[[], int]  # monotonic nanoseconds; their origin means nothing


@dataclass(frozen=True, slots=True)
class StepTrigger:
    """Rounds every ``every`` inner steps after ``warmup`` synchronous ones.

    With several groups (fragments of the model) group g is due ``g * every / groups`` steps
    after group 0, so that exchanges spread evenly over the interval.
    """

    warmup: int
    every: int
    groups: int = 1

    def is_synchronous(self, completed: int) -> bool:
        """True if the step that follows ``completed`` steps averages gradients everywhere."""
        return completed < self.warmup

    def joins(self, step: int) -> bool:
        """True if replicas part after inner step ``step``: the anchor is taken here."""
        return step == self.warmup

    def due(self, step: int) -> int | None:
        """The group whose round belongs after inner step ``step``, or None."""
        since = step - self.warmup
        if since <= 0 or since % (self.every // self.groups):
            return None
        return since // (self.every // self.groups) % self.groups


@dataclass(slots=True)
class TimeTrigger:
    """Rounds when ``interval_ns`` have passed since the end of the last one.

    Each replica asks its own clock. Nothing but differences of one clock is ever used, so
    clocks of different machines may disagree.
    """

    warmup: int
    interval_ns: int
    clock: Clock
    began_ns: int = 0

    def is_synchronous(self, completed: int) -> bool:
        """As for ``StepTrigger``."""
        return completed < self.warmup

    def joins(self, step: int) -> bool:
        """As for ``StepTrigger``."""
        return step == self.warmup

    @property
    def elapsed_ns(self) -> int:
        """Since the end of the last round. This is what a checkpoint keeps, never a timestamp."""
        return self.clock() - self.began_ns

    def restart(self, elapsed_ns: int = 0) -> None:
        """Begins the next interval, ``elapsed_ns`` ago."""
        self.began_ns = self.clock() - elapsed_ns

    def is_over(self) -> bool:
        """True if the interval has passed on this rank's clock."""
        return self.elapsed_ns >= self.interval_ns


def make_trigger(config: SyncConfig, clock: Clock) -> StepTrigger | TimeTrigger:
    """The trigger that a checked configuration asks for."""
    if config.seconds is not None:
        return TimeTrigger(config.warmup, round(config.seconds * 1e9), clock)
    streams = config.method == "streaming_diloco"
    groups = config.streaming.fragments if streams else 1
    return StepTrigger(config.warmup, int(config.every), groups)
