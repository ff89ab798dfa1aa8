"""Options of ``twinshard ckpt``, one dataclass for each of its commands."""

from dataclasses import dataclass

from core_torch.config import Problem
from core_torch.config_base import at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class CkptLsOptions:
    """There is nothing to choose."""

    def validate(self) -> list[Problem]:
        """Nothing can be wrong."""
        return []


@dataclass(frozen=True, kw_only=True, slots=True)
class CkptVerifyOptions:
    """There is nothing to choose."""

    def validate(self) -> list[Problem]:
        """Nothing can be wrong."""
        return []


@dataclass(frozen=True, kw_only=True, slots=True)
class CkptShowOptions:
    """Which commit to look into."""

    step: int | None = None  # of the commit; unset: the newest

    def validate(self) -> list[Problem]:
        """Problems of these options."""
        return [] if self.step is None else at_least(0, self, "step")


@dataclass(frozen=True, kw_only=True, slots=True)
class CkptPruneOptions:
    """What stays."""

    keep: int = 2  # newest commits that stay
    force: bool = False  # although another process seems to hold the run's folder

    def validate(self) -> list[Problem]:
        """Problems of these options."""
        return at_least(2, self, "keep")
