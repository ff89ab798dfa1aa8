"""Triggers: turn counts of steps into "due". They never read a clock.

The one convention: the anchor is taken after inner step t = warmup; a round is due after
inner step t when t > warmup and (t - warmup) is a multiple of the interval.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTrigger:
    """Rounds every ``every`` inner steps after ``warmup`` synchronous ones."""

    warmup: int
    every: int

    def is_synchronous(self, completed: int) -> bool:
        """True if the step that follows ``completed`` steps averages gradients everywhere."""
        return completed < self.warmup

    def joins(self, step: int) -> bool:
        """True if replicas part after inner step ``step``: the anchor is taken here."""
        return step == self.warmup

    def is_due(self, step: int) -> bool:
        """True if a round belongs after inner step ``step``."""
        return step > self.warmup and (step - self.warmup) % self.every == 0
