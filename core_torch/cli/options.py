"""Options of the commands, one dataclass each; comments are help texts.

``train`` takes all of ``RunConfig`` besides its own.
"""

from dataclasses import dataclass
from typing import Literal

from core_torch.config import METHODS, Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """How to begin a run."""

    resume: Literal["no", "auto"] = "no"  # auto: go on from the last commit, if there is one
    force: bool = False  # take the folder from another process that seems to hold it

    def validate(self) -> list[Problem]:
        """Nothing can be wrong."""
        return []


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """What to show."""

    quick: bool = False  # fewer steps and a smaller model
    out: str = "runs/demo"  # folder for the runs and the report
    json: str = ""  # also write the results to this file
    methods: str = "synchronous,diloco,edit"  # which to compare, separated by commas

    @property
    def chosen(self) -> list[str]:
        """The methods, in the order given."""
        return [name.strip() for name in self.methods.split(",") if name.strip()]

    def validate(self) -> list[Problem]:
        """Problems of these options."""
        problems = [] if self.out else [Problem("out", "must name a folder")]
        known = f"methods are {', '.join(METHODS)}"
        if not self.chosen:
            problems.append(Problem("methods", f"names none; {known}"))
        strange = [name for name in self.chosen if name not in METHODS]
        return problems + [Problem("methods", f"{name!r} is unknown; {known}") for name in strange]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOptions:
    """What to write."""

    prompt: str = "\n"  # text to go on from
    tokens: int = 200  # how many to draw
    temperature: float = 0.8  # 0 takes the likeliest token each time
    seed: int = 0  # of the draws

    def validate(self) -> list[Problem]:
        """Problems of these options."""
        problems = [] if self.prompt else [Problem("prompt", "must hold at least one character")]
        lowest = {"tokens": 1, "temperature": 0, "seed": 0}
        for name, low in lowest.items():
            value = getattr(self, name)
            if not low <= value < float("inf"):
                problems.append(Problem(name, f"must be at least {low} and finite, got {value}"))
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    """Where to write."""

    out: str = ""  # folder of the report; empty: the first run's

    def validate(self) -> list[Problem]:
        """Nothing can be wrong."""
        return []


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorOptions:
    """What to examine."""

    ranks: int = 2  # processes that try the collectives
    json: str = ""  # also write the results to this file

    def validate(self) -> list[Problem]:
        """Problems of these options."""
        if 1 <= self.ranks <= 64:
            return []
        return [Problem("ranks", f"must lie in [1, 64], got {self.ranks}")]
