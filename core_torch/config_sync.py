"""How replicas stay together: the configuration of core_torch/sync.

Standard library only. A setting that the chosen method does not use is a problem, so that
nobody believes in something that does not happen.
"""

from dataclasses import dataclass, field
from typing import Literal

from core_torch.config_base import Problem, above, at_least, seconds_of

METHODS = (
    "synchronous",
    "post_local_sgd",
    "diloco",
    "streaming_diloco",
    "co2",
    "co2_star",
    "edit",
    "aedit",
)
LAYERWISE = ("edit", "aedit")  # exchange unit by unit, so a round can run inside a forward


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterConfig:
    """The outer optimizer. Unset fields take the method's default."""

    lr: float | None = None  # diloco 0.7, edit 0.8, co2 1.0
    momentum: float | None = None  # diloco 0.9, edit 0.85, co2 0.5

    def validate(self) -> list[Problem]:
        problems = []
        if self.lr is not None and not self.lr > 0:
            problems.append(Problem("lr", f"must be above 0, got {self.lr}"))
        if self.momentum is not None and not 0 <= self.momentum < 1:
            problems.append(Problem("momentum", f"must lie in [0, 1), got {self.momentum}"))
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class PenaltyConfig:
    """EDiT's pseudo-gradient penalty. Norms are L2, in parameter units, one per unit."""

    exclude: bool = True  # leave anomalous replicas out
    weigh: bool = True  # softmax(-norm / T) instead of equal weights
    clip: bool = True  # cap the combined pseudo-gradient
    z_threshold: float = 3.0  # standard deviations above a replica's own mean
    ema_alpha: float = 0.02  # smallest weight of a new norm in mean and variance
    warmup_rounds: int = 20  # accepted rounds before z_threshold applies; at least 10
    spike_ratio: float = 100.0  # before that: multiple of the median, from 3 replicas on
    rearm_after: int = 3  # flags in a row after which a new regime is accepted
    temperature: float = 1.0  # T, see temperature_unit
    temperature_unit: Literal["parameter", "median"] = "parameter"  # median: free of scale
    max_norm: float = 10.0  # clip threshold
    eps: float = 1e-6  # keeps divisions finite

    def validate(self) -> list[Problem]:
        problems = above(0, self, "z_threshold", "temperature", "max_norm", "eps")
        problems += above(1, self, "spike_ratio") + at_least(1, self, "rearm_after")
        problems += at_least(10, self, "warmup_rounds")
        if not 0 < self.ema_alpha <= 1:
            problems.append(Problem("ema_alpha", f"must lie in (0, 1], got {self.ema_alpha}"))
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamingConfig:
    """Streaming DiLoCo: the model in fragments that are exchanged one after the other."""

    fragments: int = 2  # P; sync.every must be a multiple
    delay: int = 1  # inner steps between the start of an exchange and its use
    mix: float = 0.5  # share of its own value that a parameter keeps; 0 replaces it

    def validate(self) -> list[Problem]:
        problems = at_least(1, self, "fragments") + at_least(0, self, "delay")
        if not 0 <= self.mix <= 1:
            problems.append(Problem("mix", f"must lie in [0, 1], got {self.mix}"))
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class Co2Config:
    """CO2: an exchange is used one round late, and what is stale counts less."""

    staleness: bool = True  # divide by the staleness gap
    clip: float = 1.0  # largest element of the momentum, in parameter units

    def validate(self) -> list[Problem]:
        return above(0, self, "clip")


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedConfig:
    """A-EDiT: rounds by the clock, so replicas bring different numbers of steps."""

    min_total_steps: int = 100  # fewer in all replicas together: a round without exchange
    step_weight: float = 0.0  # share of a weight that goes by steps; 0: by norms alone

    def validate(self) -> list[Problem]:
        problems = at_least(1, self, "min_total_steps")
        if not 0 <= self.step_weight <= 1:
            problems.append(Problem("step_weight", f"must lie in [0, 1], got {self.step_weight}"))
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncConfig:
    """How replicas stay together."""

    method: Literal[
        "synchronous",
        "post_local_sgd",
        "diloco",
        "streaming_diloco",
        "co2",
        "co2_star",
        "edit",
        "aedit",
    ] = "edit"  # a row of the table of methods
    every: int | str = 128  # between rounds: inner steps; for aedit seconds, e.g. 600s
    warmup: int = 0  # synchronous inner steps at the start
    layerwise: bool | None = None  # rounds inside the next forward; unset: for edit and aedit
    prefetch_units: int = 2  # exchanges in flight at once
    wire: Literal["fp32", "bf16", "int8"] = "fp32"  # what an exchange sends; fp32: as stored
    offload: bool = False  # keep anchor and velocity in host memory between rounds
    outer: OuterConfig = field(default_factory=OuterConfig)  # outer optimizer
    penalty: PenaltyConfig = field(default_factory=PenaltyConfig)  # edit and aedit
    streaming: StreamingConfig = field(default_factory=StreamingConfig)  # streaming_diloco
    co2: Co2Config = field(default_factory=Co2Config)  # co2 and co2_star
    timed: TimedConfig = field(default_factory=TimedConfig)  # aedit

    @property
    def rounds_in_forward(self) -> bool:
        """Whether rounds run layer by layer inside the next forward."""
        return self.method in LAYERWISE and self.layerwise is not False

    @property
    def seconds(self) -> float | None:
        """The interval in seconds, if ``every`` is one."""
        return seconds_of(self.every)

    def validate(self) -> list[Problem]:
        problems = at_least(0, self, "warmup") + at_least(1, self, "prefetch_units")
        problems += self._interval() + self._unused()
        fragments, delay = self.streaming.fragments, self.streaming.delay
        if self.method == "streaming_diloco" and isinstance(self.every, int):
            if fragments > 0 and self.every % fragments:
                message = f"{fragments} fragments need sync.every to be a multiple of {fragments}"
                problems.append(Problem("streaming.fragments", f"{message}, got {self.every}"))
            if delay >= self.every:
                message = f"a delay of {delay} steps must be below sync.every {self.every}"
                problems.append(Problem("streaming.delay", message))
        if self.method == "co2_star" and self.offload:
            message = "co2_star cuts anchor and momentum over the replicas already"
            problems.append(Problem("offload", message))
        return problems

    def _interval(self) -> list[Problem]:
        if self.method == "aedit":
            if not self.seconds:
                message = f"aedit counts seconds, e.g. 600s; got {self.every!r}"
                return [Problem("every", message)]
            return []
        if isinstance(self.every, str):
            message = f"{self.method} counts inner steps, e.g. 128; got {self.every!r}"
            return [Problem("every", message)]
        return at_least(1, self, "every")

    def _unused(self) -> list[Problem]:
        """Settings that differ from the default although the method does not use them."""
        method = self.method
        has_rounds = method != "synchronous"
        used = {
            "warmup": has_rounds,
            "layerwise": method in LAYERWISE,
            "wire": has_rounds,
            "offload": has_rounds,
            "penalty": method in LAYERWISE,
            "outer": method not in ("synchronous", "post_local_sgd"),
            "streaming": method == "streaming_diloco",
            "co2": method in ("co2", "co2_star"),
            "timed": method == "aedit",
        }
        why = {
            "warmup": "has no rounds to warm up for",
            "layerwise": "does not exchange unit by unit; edit and aedit do",
            "wire": "sends gradients, not pseudo-gradients",
            "offload": "has no anchor",
            "penalty": "has no penalty; edit and aedit have",
            "outer": "has no outer optimizer",
            "streaming": "has no fragments; streaming_diloco has",
            "co2": "has no staleness penalty; co2 and co2_star have",
            "timed": "counts steps; aedit goes by time",
        }
        usual = SyncConfig(method="synchronous")
        unused = [name for name, is_used in used.items() if not is_used]
        changed = [name for name in unused if getattr(self, name) != getattr(usual, name)]
        simple = ("warmup", "layerwise", "wire", "offload")
        got = {name: f", got {getattr(self, name)}" for name in simple}
        return [Problem(name, f"{method} {why[name]}{got.get(name, '')}") for name in changed]
