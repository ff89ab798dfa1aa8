"""Options of ``train`` for watching a run: loggers beside the records, and a profile.

They belong to one start of a run, not to the run: config.toml does not keep them.
"""

from dataclasses import dataclass
from importlib.util import find_spec

from core_torch.config import Problem
from core_torch.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class LogOptions:
    """Who else is told what metrics.jsonl gets."""

    tensorboard: bool = False  # event files in RUN/tensorboard; pip install tensorboard
    wandb: str = ""  # project on Weights & Biases; pip install wandb

    @property
    def packages(self) -> list[str]:
        """What has to be installed."""
        return ["tensorboard"] * self.tensorboard + ["wandb"] * bool(self.wandb)

    def validate(self) -> list[Problem]:
        """Nothing can be wrong."""
        return []


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions:
    """Which inner steps to look into; files in RUN/profile, of every rank."""

    steps: str = ""  # FIRST:LAST, both included, for example 3:6; empty: none
    memory: bool = False  # also every allocation in these steps; on a GPU as a snapshot

    @property
    def range(self) -> tuple[int, int] | None:
        """First and last step."""
        if not self.steps:
            return None
        first, _, last = self.steps.partition(":")
        return int(first), int(last)

    def validate(self) -> list[Problem]:
        """Problems of these options."""
        try:
            found = self.range
        except ValueError:
            found = (0, 0)
        if found is not None and not 1 <= found[0] <= found[1]:
            return [Problem("steps", f"takes FIRST:LAST, for example 3:6, got {self.steps!r}")]
        if self.memory and found is None:
            return [
                Problem("memory", "needs the steps to look into, for example --profile.steps 3:6")
            ]
        return []


def check_installed(options: LogOptions) -> None:
    """Checks that what ``options`` ask for is installed.

    Raises:
        ConfigError: a package is missing; with the command that brings it.
    """
    missing = [name for name in options.packages if find_spec(name) is None]
    if missing:
        listed = " and ".join(missing)
        raise ConfigError(
            f"log.{missing[0]} needs a package that is not installed: {listed}",
            next=f"pip install {' '.join(missing)}",
        )
