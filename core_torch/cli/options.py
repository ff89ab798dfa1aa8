"""Options of the commands, one dataclass each; comments are help texts.

``train`` takes all of ``RunConfig`` besides its own.
"""

from dataclasses import dataclass, field
from typing import Literal

from core_torch.bench.link import parse_network
from core_torch.bench.plan import FEWEST_STEPS, SIZES, VARIANTS
from core_torch.cli.watch_options import LogOptions, ProfileOptions
from core_torch.config import METHODS, ModelConfig, Problem
from core_torch.config_base import at_least
from core_torch.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """How to begin a run."""

    resume: str = "never"  # auto: go on from the last commit, if any; or a commit or run folder
    stop_after: int = 0  # inner step at which to commit and end, as if preempted; 0: none
    force: bool = False  # take the folder from another process that seems to hold it
    log: LogOptions = field(default_factory=LogOptions)  # beside metrics.jsonl
    profile: ProfileOptions = field(default_factory=ProfileOptions)  # of some steps

    def validate(self) -> list[Problem]:
        """Problems of these options."""
        problems = at_least(0, self, "stop_after")
        if not self.resume:
            problems.append(Problem("resume", "is never, auto, or the path of a commit or run"))
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """What to show."""

    quick: bool = False  # fewer steps and a smaller model
    out: str = "runs/demo"  # folder for the runs and the report
    json: str = ""  # also write the results to this file
    methods: str = "synchronous,diloco,edit"  # which to compare, separated by commas
    seeds: int = 1  # runs of each method, with other initial weights and order of the data

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
        if len(set(self.chosen)) < len(self.chosen):
            problems.append(Problem("methods", "names one twice"))
        if not 1 <= self.seeds <= 100:
            problems.append(Problem("seeds", f"must lie in [1, 100], got {self.seeds}"))
        strange = [name for name in self.chosen if name not in METHODS]
        return problems + [Problem("methods", f"{name!r} is unknown; {known}") for name in strange]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOptions:
    """What to write."""

    prompt: str = "\n"  # text to go on from
    tokens: int = 200  # how many to draw
    temperature: float = 0.8  # 0 takes the likeliest token each time
    top_k: int = 0  # draw from so many likeliest tokens; 0: from all
    top_p: float = 1.0  # draw from the likeliest tokens that have this share together
    seed: int = 0  # of the draws
    build: str = ""  # pkg:function that --model.build named, for a run with a module of one's own

    def validate(self) -> list[Problem]:
        """Problems of these options."""
        problems = [] if self.prompt else [Problem("prompt", "must hold at least one character")]
        lowest = {"tokens": 1, "temperature": 0, "top_k": 0, "seed": 0}
        for name, low in lowest.items():
            value = getattr(self, name)
            if not low <= value < float("inf"):
                problems.append(Problem(name, f"must be at least {low} and finite, got {value}"))
        if not 0 < self.top_p <= 1:
            problems.append(Problem("top_p", f"must lie in (0, 1], got {self.top_p}"))
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


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """What to measure, and how long."""

    ranks: int = 2  # processes, one thread each
    size: Literal["tiny", "small", "medium"] = "small"  # of the model; times of tiny say nothing
    network: str = "loopback"  # between the ranks: loopback, or RATE,DELAY such as 1gbit,1ms
    steps: int = FEWEST_STEPS  # timed ones in each launch
    launches: int = 3  # results are medians over them
    variants: str = ",".join(VARIANTS)  # which to compare, separated by commas
    costs: str = ""  # JSON of measured costs: written if not there, else estimates come from it
    json: str = ""  # also write the results to this file

    @property
    def chosen(self) -> list[str]:
        """The variants, in the order given."""
        return [name.strip() for name in self.variants.split(",") if name.strip()]

    def validate(self) -> list[Problem]:
        """Problems of these options."""
        problems = []
        lowest = {"ranks": 2, "steps": FEWEST_STEPS, "launches": 1}
        for name, low in lowest.items():
            if getattr(self, name) < low:
                problems.append(Problem(name, f"must be at least {low}, got {getattr(self, name)}"))
        problems += _network_problems(self.network)
        known = f"variants are {', '.join(VARIANTS)}"
        if not self.chosen:
            problems.append(Problem("variants", f"names none; {known}"))
        if len(set(self.chosen)) < len(self.chosen):
            problems.append(Problem("variants", "names one twice"))
        strange = [name for name in self.chosen if name not in VARIANTS]
        return problems + [Problem("variants", f"{name!r} is unknown; {known}") for name in strange]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchSyncOptions:
    """What to measure, and how long. Two replicas of one rank, a core each."""

    size: Literal["tiny", "small"] = "small"  # of the models; times of tiny say nothing
    slow_replica: float = 3.0  # how many times longer a step of the last replica takes
    network: str = "loopback"  # between the replicas: loopback, or RATE,DELAY such as 1gbit,1ms
    steps: int = 200  # of EDiT's replicas; A-EDiT trains on as many tokens
    seconds: float = 2.0  # between rounds of A-EDiT
    rounds: int = 8  # timed ones, for the overlap
    backend: Literal["aot_eager", "inductor"] = "aot_eager"  # of the compiled forward
    json: str = ""  # also write the results to this file

    def validate(self) -> list[Problem]:
        """Problems of these options."""
        problems = []
        lowest = {"slow_replica": 1.0, "steps": 20, "seconds": 0.1, "rounds": 1}
        for name, low in lowest.items():
            value = getattr(self, name)
            if not low <= value < float("inf"):
                problems.append(Problem(name, f"must be at least {low}, got {value}"))
        return problems + _network_problems(self.network)


def _small() -> ModelConfig:
    return SIZES["small"].model


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphOptions:
    """What to model, and where to draw it."""

    model: ModelConfig = field(default_factory=_small)  # architecture
    ranks: int = 2  # that share the model; none is started
    batch: int = 2  # sequences per rank
    sequence: int = 256  # tokens per sequence
    network: str = "1gbit,1ms"  # between the ranks: loopback, or RATE,DELAY
    wrap: Literal["none", "manual", "auto"] = "manual"  # which parameters share a collective
    backend: Literal["inductor", "aot_eager"] = "inductor"  # fused kernels, or operator by operator
    recompute: Literal["none", "selective", "full"] = "none"  # activation checkpointing of blocks
    memory_limit_mib: int = 0  # of a step besides the shards, for wrap auto; 0: no limit
    gflops: float = 50.0  # 10^9 operations per second of a rank
    gbytes: float = 10.0  # 10^9 bytes per second of its memory
    out: str = ""  # write the timelines as a page; as one picture if the name ends in .svg
    json: str = ""  # also write the results to this file

    def validate(self) -> list[Problem]:
        """Problems of these options; the model has its own."""
        problems = []
        for name in ("ranks", "batch", "sequence"):
            if getattr(self, name) < 1:
                problems.append(Problem(name, f"must be at least 1, got {getattr(self, name)}"))
        for name in ("gflops", "gbytes"):
            if not 0 < getattr(self, name) < float("inf"):
                problems.append(Problem(name, f"must be above 0, got {getattr(self, name)}"))
        if self.model.vocabulary < 1:
            problems.append(Problem("model.vocabulary", "must be at least 1: there is no data"))
        if self.sequence > self.model.context:
            message = f"{self.sequence} exceeds model.context {self.model.context}"
            problems.append(Problem("sequence", message))
        if self.memory_limit_mib < 0:
            message = f"must be at least 0, got {self.memory_limit_mib}"
            problems.append(Problem("memory_limit_mib", message))
        if self.memory_limit_mib > 0 and self.wrap != "auto":
            message = f"{self.memory_limit_mib} limits what wrap auto plans; wrap is {self.wrap}"
            problems.append(Problem("memory_limit_mib", message))
        return problems + _network_problems(self.network)


def _network_problems(text: str) -> list[Problem]:
    try:
        parse_network(text)
    except ConfigError as error:
        return [Problem("network", error.what.removeprefix("network: "))]
    return []
