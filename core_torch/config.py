"""Every configuration of Twinshard: frozen dataclasses, each with ``validate()``.

Standard library only, so that ``twinshard --help`` is instant. A configuration is read from
TOML (config_file.py), from the command line (cli/arguments.py, which walks the same
dataclasses) or built in Python. ``validate`` returns all problems of one config, ``check``
raises those of a whole run together.
"""

from dataclasses import dataclass, field, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from core_torch.config_base import Problem, above, at_least, seconds_of
from core_torch.config_data import DataConfig
from core_torch.config_model import ModelConfig, RopeScaling
from core_torch.config_parallel import tensor_parallel_problems
from core_torch.config_pipeline import Schedule, pipeline_problems
from core_torch.config_sync import (
    METHODS,
    Co2Config,
    OuterConfig,
    PenaltyConfig,
    StreamingConfig,
    SyncConfig,
    TimedConfig,
)
from core_torch.errors import ConfigError

__all__ = [
    "METHODS",
    "CheckpointConfig",
    "Co2Config",
    "DataConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimConfig",
    "OuterConfig",
    "PenaltyConfig",
    "Problem",
    "RopeScaling",
    "RunConfig",
    "ScheduleConfig",
    "ShardConfig",
    "StreamingConfig",
    "SyncConfig",
    "TimedConfig",
    "TrainConfig",
    "all_problems",
    "check",
    "problems_error",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig:
    """Ranks = replicas x pp x shards x tp; the last three hold one copy of the model."""

    replicas: int = 1  # copies that drift apart between sync rounds
    shards: int = 1  # ranks over which a stage is sharded; each sees data of its own
    pp: int = 1  # pipeline stages
    tp: int = 1  # ranks that cut each matrix product (tensor parallel)
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if every rank has one
    deadline_seconds: float = 600.0  # longest wait for another rank

    @property
    def ranks(self) -> int:
        return self.replicas * self.pp * self.shards * self.tp

    @property
    def readers(self) -> int:
        """Ranks that see data of their own."""
        return self.replicas * self.shards

    @property
    def product(self) -> str:
        """The ranks as a product, for messages."""
        sizes = {name: getattr(self, name) for name in ("replicas", "pp", "shards", "tp")}
        shown = (f"mesh.{n} {k}" for n, k in sizes.items() if k > 1 or n in ("replicas", "shards"))
        return " x ".join(shown)

    def validate(self) -> list[Problem]:
        problems = at_least(1, self, "replicas", "shards", "pp", "tp")
        return problems + above(0, self, "deadline_seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardConfig:
    """How a replica is sharded over its ranks, and what is compiled."""

    method: Literal["fsdp2", "simple_fsdp"] = "fsdp2"  # simple_fsdp: can be compiled whole
    compile: Literal["off", "aot_eager", "inductor"] = "off"  # one graph; off: eager
    wrap: Literal["none", "manual", "auto"] = "manual"  # which parameters share a collective
    reshard_after_forward: bool = True  # free gathered parameters until the backward
    forward_prefetch: int = 0  # units that fsdp2 gathers before their turn; 0: as torch does
    recompute: Literal["none", "selective", "full"] = "none"  # activation checkpointing of blocks
    memory_limit_mib: int = 0  # of a step, for wrap auto; 0: no limit
    costs: str = ""  # JSON of ``bench shard --costs``, for wrap auto; empty: typical ones
    pipeline: Schedule = "1f1b"  # order of work, if mesh.pp is above 1
    virtual_stages: int = 2  # of each rank, if the pipeline is interleaved

    def validate(self) -> list[Problem]:
        problems = at_least(0, self, "memory_limit_mib", "forward_prefetch")
        problems += at_least(2, self, "virtual_stages")
        if self.forward_prefetch and self.method != "fsdp2":
            message = f"{self.forward_prefetch} is for fsdp2; shard.method is {self.method}"
            problems.append(Problem("forward_prefetch", message))
        if self.compile != "off" and self.method != "simple_fsdp":
            message = f"{self.compile} needs shard.method simple_fsdp, got {self.method}"
            problems.append(Problem("compile", message))
        if self.wrap != "manual" and self.compile == "off":
            message = f"{self.wrap} is for compiled graphs; shard.compile is off"
            problems.append(Problem("wrap", message))
        if self.memory_limit_mib and self.wrap != "auto":
            message = f"{self.memory_limit_mib} limits what wrap auto plans; wrap is {self.wrap}"
            problems.append(Problem("memory_limit_mib", message))
        if self.costs and self.wrap != "auto":
            message = f"{self.costs!r} is for wrap auto; wrap is {self.wrap}"
            problems.append(Problem("costs", message))
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """The inner optimizer, AdamW. Matrices decay, gains do not."""

    lr: float = 2e-3  # peak learning rate
    beta1: float = 0.9  # decay of the mean gradient
    beta2: float = 0.95  # decay of the mean squared gradient
    eps: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.1  # decoupled decay
    max_norm: float = 1.0  # clips the replica's own gradient norm; 0 is off
    implementation: Literal["plain", "fused"] = "plain"  # fused: torch's kernel, other rounding

    def validate(self) -> list[Problem]:
        problems = above(0, self, "lr", "eps") + at_least(0, self, "weight_decay", "max_norm")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                problems.append(Problem(name, f"must lie in [0, 1), got {value}"))
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Learning rate as a function of the tokens seen by all replicas together."""

    shape: Literal["constant", "linear", "cosine", "wsd"] = "cosine"  # after the warm-up
    warmup_tokens: int = 0  # linear rise from 0
    total_tokens: int = 0  # end of the decay; 0: the planned length of the run
    final_ratio: float = 0.1  # learning rate at the end / peak
    decay_share: float = 0.2  # last part on which "wsd" falls

    def validate(self) -> list[Problem]:
        problems = at_least(0, self, "warmup_tokens", "total_tokens", "final_ratio")
        problems += above(0, self, "decay_share")
        for name in ("final_ratio", "decay_share"):
            if getattr(self, name) > 1:
                problems.append(Problem(name, f"must be at most 1, got {getattr(self, name)}"))
        if self.total_tokens and self.total_tokens < self.warmup_tokens:
            message = f"ends before the warm-up of {self.warmup_tokens} tokens does"
            problems.append(Problem("total_tokens", f"{self.total_tokens} {message}"))
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Length, numbers and evaluation of a run."""

    steps: int = 200  # inner steps of every replica
    accumulate: int = 1  # micro-batches per inner step
    seed: int = 0  # initial weights
    init: str = ""  # folder of a Hugging Face model whose weights to begin with; empty: drawn
    dtype: Literal["float32", "float64"] = "float32"  # parameters, moments, anchors
    compute: Literal["same", "bfloat16"] = "same"  # forward and backward
    z_loss: float = 0.0  # times the squared log of the softmax's sum, added to the loss; 0 is off
    loss_chunk: int = 0  # tokens whose logits are held at a time; 0: a whole micro-batch's
    evaluate_every: int = 0  # steps; 0: only at the end
    evaluate_sequences: int = 64  # held-out sequences, at most what there is

    def validate(self) -> list[Problem]:
        problems = at_least(1, self, "steps", "accumulate", "evaluate_sequences")
        problems += at_least(0, self, "seed", "evaluate_every", "z_loss", "loss_chunk")
        if self.dtype == "float64" and self.compute != "same":
            problems.append(Problem("compute", "float64 runs compute in float64 only"))
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When to commit a checkpoint."""

    every: int | str = 0  # steps, or seconds, e.g. 600s; 0: only at the end
    keep: int = 2  # newest commits that stay
    asynchronous: bool = True  # train on while a copy of the state is written

    @property
    def seconds(self) -> float | None:
        """The interval in seconds, if ``every`` is one."""
        return seconds_of(self.every)

    def validate(self) -> list[Problem]:
        problems = at_least(2, self, "keep")
        if isinstance(self.every, int):
            return at_least(0, self, "every") + problems
        if not self.seconds:
            message = f"takes steps, e.g. 400, or seconds, e.g. 600s; got {self.every!r}"
            problems.append(Problem("every", message))
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A whole training run."""

    run: str = ""  # folder of everything that the run writes; empty: the next runs/METHOD-NNN
    model: ModelConfig = field(default_factory=ModelConfig)  # architecture
    data: DataConfig = field(default_factory=DataConfig)  # tokens
    mesh: MeshConfig = field(default_factory=MeshConfig)  # ranks
    shard: ShardConfig = field(default_factory=ShardConfig)  # one replica over its ranks
    optim: OptimConfig = field(default_factory=OptimConfig)  # inner optimizer
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)  # learning rate
    sync: SyncConfig = field(default_factory=SyncConfig)  # replicas
    train: TrainConfig = field(default_factory=TrainConfig)  # length and numbers
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)  # commits

    @property
    def rows_per_step(self) -> int:
        """Sequences that one replica sees in an inner step."""
        return self.mesh.shards * self.train.accumulate * self.data.batch

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all replicas together see in one inner step each."""
        return self.mesh.replicas * self.rows_per_step * self.data.sequence

    @property
    def stages(self) -> int:
        """Stages of a replica's pipeline: of each rank of pp one, or several if interleaved."""
        is_interleaved = self.shard.pipeline == "interleaved"
        return self.mesh.pp * (self.shard.virtual_stages if is_interleaved else 1)

    @property
    def total_tokens(self) -> int:
        """Tokens at the end of the learning-rate decay."""
        return self.schedule.total_tokens or self.train.steps * self.tokens_per_step

    def validate(self) -> list[Problem]:
        problems = tensor_parallel_problems(
            self.mesh.tp, self.model, self.data.sequence, self.sync.wire
        )
        problems += self._pipeline()
        if self.data.sequence > self.model.context:
            message = f"{self.data.sequence} tokens exceed model.context {self.model.context}"
            problems.append(Problem("data.sequence", message))
        if self.train.loss_chunk and self.mesh.pp * self.mesh.tp > 1:
            message = "cuts the loss of a whole head; mesh.pp and mesh.tp must be 1"
            problems.append(Problem("train.loss_chunk", f"{self.train.loss_chunk} {message}"))
        return problems

    def _pipeline(self) -> list[Problem]:
        pp, shard, parts = self.mesh.pp, self.shard, self.train.accumulate
        found = pipeline_problems(pp, self.stages, shard.pipeline, parts, self.model)
        if pp > 1 and shard.compile != "off":
            message = f"{shard.compile} makes one graph of the model, mesh.pp {pp} parts it"
            found.append(Problem("shard.compile", message))
        if pp > 1 and self.sync.layerwise:
            message = f"no forward of a rank passes all units with mesh.pp {pp}; leave it unset"
            found.append(Problem("sync.layerwise", message))
        return found


def all_problems(config: Any, prefix: str = "") -> list[Problem]:
    """Problems of a config and of every config in it, with dotted paths."""
    problems = [Problem(prefix + p.path, p.message) for p in config.validate()]
    for name, kind in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if is_dataclass(value):
            problems += all_problems(value, f"{prefix}{name}.")
        elif get_origin(kind) is Literal and value not in get_args(kind):
            message = f"must be one of {', '.join(get_args(kind))}, got {value!r}"
            problems.append(Problem(prefix + name, message))
    return problems


def check(config: Any) -> None:
    """Raises one ConfigError that names every problem, or returns."""
    problems = all_problems(config)
    if problems:
        raise problems_error(problems)


def problems_error(problems: list[Problem]) -> ConfigError:
    """One ConfigError for all ``problems``."""
    listed = "".join(f"\n    {p.path}: {p.message}" for p in problems)
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return ConfigError(f"{count} in the configuration{listed}", next="twinshard train --help")
