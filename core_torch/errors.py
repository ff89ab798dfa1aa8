"""Typed errors. Each says what happened, where, why it is likely, and the next command.

Standard library only. ``exit_code`` is what the process returns; ``outcome.json`` records it
too, because torchrun flattens every code to 1.
"""

from typing import ClassVar

EXIT_OK = 0
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130


class TwinshardError(Exception):
    """Base of all errors that a user can meet; never raised itself.

    Args:
        what: one line, the fact.
        where: rank, replica, step, operation or file, as far as they apply.
        likely: probable cause.
        next: command or change that leads on.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: str = "", likely: str = "", next: str = "") -> None:
        self.what, self.where, self.likely, self.next = what, where, likely, next
        super().__init__(what)

    def __str__(self) -> str:
        lines = [f"{type(self).__name__}: {self.what}"]
        if self.where:
            lines.append(f"  at {self.where}")
        if self.likely:
            lines.append(f"  likely: {self.likely}")
        if self.next:
            lines.append(f"  next:   {self.next}")
        return "\n".join(lines)


class ConfigError(TwinshardError):
    """The configuration cannot work; lists every problem at once."""

    exit_code = 2


class DataError(TwinshardError):
    """Text, tokens or tokenizer are missing, empty or do not fit each other."""

    exit_code = 3


class CheckpointError(TwinshardError):
    """No committed checkpoint where one is needed, or it cannot be written."""

    exit_code = 4


class CheckpointCorrupt(CheckpointError):
    """A committed file is not what its commit says."""


class CheckpointMismatch(CheckpointError):
    """A sound checkpoint that belongs to another model, layout or method."""


class NonFinite(TwinshardError):
    """A loss, gradient or pseudo-gradient is NaN or infinite and no penalty may drop it."""

    exit_code = 5


class ReplicasDiffer(TwinshardError):
    """Replicas that must hold equal parameters do not."""

    exit_code = 5


class Preempted(TwinshardError):
    """Asked to stop, the run committed its step and ended; it goes on from there."""

    exit_code = EXIT_PREEMPTED


class PeerLost(TwinshardError):
    """Another rank ended or did not answer within the deadline."""

    exit_code = 6
