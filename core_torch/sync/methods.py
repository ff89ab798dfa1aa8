"""The table of methods. A method is a row; one engine runs every row.

The paper behind each row, its equations and its reference are in docs/algorithms/.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from core_torch.config import PenaltyConfig, SyncConfig


class Method(NamedTuple):
    """One row of the table."""

    unit: Literal["none", "model", "units"]  # what one exchange covers
    combine: Literal["mean", "penalty"]
    outer_lr: float  # lr 1, momentum 0 is plain averaging
    outer_momentum: float


METHODS: dict[str, Method] = {
    "synchronous": Method("none", "mean", 1.0, 0.0),
    "post_local_sgd": Method("model", "mean", 1.0, 0.0),
    "diloco": Method("model", "mean", 0.7, 0.9),
    "edit": Method("units", "penalty", 0.8, 0.85),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The numbers of one run's rounds: a row with its settings filled in."""

    outer_lr: float
    outer_momentum: float
    penalty: PenaltyConfig | None  # None: plain mean, nobody may be left out
    prefetch_units: int  # exchanges in flight at once

    @property
    def excludes(self) -> bool:
        """True if a bad replica is left out of a round; otherwise it ends the run."""
        return self.penalty is not None and self.penalty.exclude


def rules_of(config: SyncConfig) -> Rules:
    """Fills the row of ``config.method`` with the settings given."""
    row, outer = METHODS[config.method], config.outer
    return Rules(
        outer_lr=row.outer_lr if outer.lr is None else outer.lr,
        outer_momentum=row.outer_momentum if outer.momentum is None else outer.momentum,
        penalty=config.penalty if row.combine == "penalty" else None,
        prefetch_units=config.prefetch_units,
    )
