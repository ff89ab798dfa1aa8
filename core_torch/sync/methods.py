"""The table of methods. A method is a row; one engine runs every row.

The paper behind each row, its equations and its reference are in docs/algorithms/.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from core_torch.config import Co2Config, PenaltyConfig, SyncConfig


class Method(NamedTuple):
    """One row of the table."""

    unit: Literal["none", "model", "fragments", "units"]  # what one exchange covers
    trigger: Literal["steps", "seconds"]  # what makes a round due
    finish: Literal["at once", "steps later", "next round"]  # when an exchange is used
    combine: Literal["mean", "penalty"]
    outer: Literal["nesterov", "momentum"]  # momentum: with staleness penalty and clip
    outer_lr: float  # lr 1, momentum 0 is plain averaging
    outer_momentum: float


METHODS: dict[str, Method] = {
    "synchronous": Method("none", "steps", "at once", "mean", "nesterov", 1.0, 0.0),
    "post_local_sgd": Method("model", "steps", "at once", "mean", "nesterov", 1.0, 0.0),
    "diloco": Method("model", "steps", "at once", "mean", "nesterov", 0.7, 0.9),
    "streaming_diloco": Method("fragments", "steps", "steps later", "mean", "nesterov", 0.7, 0.9),
    "co2": Method("model", "steps", "next round", "mean", "momentum", 1.0, 0.5),
    "co2_star": Method("model", "steps", "next round", "mean", "momentum", 1.0, 0.5),
    "edit": Method("units", "steps", "at once", "penalty", "nesterov", 0.8, 0.85),
    "aedit": Method("units", "seconds", "at once", "penalty", "nesterov", 0.8, 0.85),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The numbers of one run's rounds: a row with its settings filled in."""

    method: Method
    outer_lr: float
    outer_momentum: float
    penalty: PenaltyConfig | None  # None: plain mean, nobody may be left out
    prefetch_units: int = 2  # exchanges in flight at once
    layerwise: bool = False  # rounds inside the next forward
    wire: Literal["fp32", "bf16", "int8"] = "fp32"
    store: Literal["device", "host", "replicas"] = "device"  # of anchor and velocity
    fragments: int = 1
    delay_steps: int = 0  # from the start of an exchange to its use
    mix: float = 0.0  # share of its own value that a parameter keeps
    co2: Co2Config = Co2Config()
    min_total_steps: int = 0  # fewer steps in all: a round without exchange
    step_weight: float = 0.0  # share of a weight that goes by steps

    @property
    def excludes(self) -> bool:
        """True if a bad replica is left out of a round; otherwise it ends the run."""
        return self.penalty is not None and self.penalty.exclude


def rules_of(config: SyncConfig) -> Rules:
    """Fills the row of ``config.method`` with the settings given."""
    row, outer, name = METHODS[config.method], config.outer, config.method
    streams, is_timed = row.unit == "fragments", row.trigger == "seconds"
    return Rules(
        method=row,
        outer_lr=row.outer_lr if outer.lr is None else outer.lr,
        outer_momentum=row.outer_momentum if outer.momentum is None else outer.momentum,
        penalty=config.penalty if row.combine == "penalty" else None,
        prefetch_units=config.prefetch_units,
        layerwise=config.rounds_in_forward,
        wire=config.wire,
        store="replicas" if name == "co2_star" else "host" if config.offload else "device",
        fragments=config.streaming.fragments if streams else 1,
        delay_steps=config.streaming.delay if streams else 0,
        mix=config.streaming.mix if streams else 0.0,
        co2=config.co2,
        min_total_steps=config.timed.min_total_steps if is_timed else 0,
        step_weight=config.timed.step_weight if is_timed else 0.0,
    )
