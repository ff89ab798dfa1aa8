"""Configuration of the architecture. Standard library only."""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from core_torch.config_base import Problem, above, at_least

_SPEC = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Llama 3 stretching of rotary frequencies for longer contexts; ``factor=1`` is off."""

    factor: float = 1.0  # how many times longer than the original context
    low_freq_factor: float = 1.0  # wavelengths above original_context / this are stretched
    high_freq_factor: float = 4.0  # wavelengths below original_context / this are kept
    original_context: int = 8192  # tokens

    def validate(self) -> list[Problem]:
        problems = at_least(1, self, "factor", "original_context")
        problems += above(0, self, "low_freq_factor")
        if not self.high_freq_factor > self.low_freq_factor:
            message = f"must exceed low_freq_factor {self.low_freq_factor}"
            problems.append(Problem("high_freq_factor", f"{message}, got {self.high_freq_factor}"))
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder-only transformer. ``vocabulary=0`` takes the tokenizer's."""

    kind: Literal["llama", "qwen3", "gpt2", "own"] = "llama"  # own: what build makes
    build: str = field(default="", metadata={"from_file": False})  # pkg:function, never in a file
    vocabulary: int = 0  # token ids
    dim: int = 128  # width of the residual stream
    layers: int = 4  # transformer blocks
    heads: int = 4  # query heads
    kv_heads: int = 2  # key/value heads, shared by heads / kv_heads query heads each
    head_dim: int = 0  # width of a head; 0: dim / heads
    hidden: int = 344  # width inside the feed-forward
    context: int = 1024  # longest sequence, tokens
    norm_eps: float = 1e-5  # inside the root of norms
    rope_theta: float = 500_000.0  # base of the rotary wavelengths; gpt2 has none
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)  # longer contexts
    tied: bool = False  # embedding and head share one weight
    init_std: float = 0.02  # standard deviation of initial matrices

    def __post_init__(self) -> None:
        if self.build:  # what a run's config.toml says of it: only that it is one's own
            object.__setattr__(self, "kind", "own")

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.head_dim or self.dim // self.heads

    def validate(self) -> list[Problem]:
        problems = at_least(1, self, "dim", "layers", "heads", "kv_heads", "hidden", "context")
        problems += at_least(0, self, "vocabulary", "init_std", "head_dim")
        problems += above(0, self, "norm_eps", "rope_theta")
        if problems:
            return problems
        if self.kind == "own":
            return _build_problems(self)
        problems = _head_problems(self)
        if self.kind == "gpt2":
            problems += _rotary_problems(self)
        return problems


def _build_problems(model: ModelConfig) -> list[Problem]:
    """A module of one's own takes from the sizes what it likes; the name of its function counts."""
    if not model.build:
        message = (
            "own needs the function, which no file names: --model.build pkg:function (sample: "
            "--build), or build= in Python"
        )
        return [Problem("kind", message)]
    if not _SPEC.fullmatch(model.build):
        message = f"must be module:function, such as my_model:build, got {model.build!r}"
        return [Problem("build", message)]
    return []


def _head_problems(model: ModelConfig) -> list[Problem]:
    problems, width = list[Problem](), model.head_width
    if not model.head_dim and model.dim % model.heads:
        near = max(h for h in range(1, model.heads + 1) if model.dim % h == 0)
        message = f"{model.heads} heads do not divide dim {model.dim}; {near} would"
        problems.append(Problem("heads", message))
    elif width % 2 and model.kind != "gpt2":
        path, told = ("head_dim", "") if model.head_dim else ("heads", "dim / heads = ")
        problems.append(Problem(path, f"{told}{width} must be even for rotary embedding"))
    if model.heads % model.kv_heads:
        message = f"{model.kv_heads} key/value heads do not divide {model.heads} heads"
        problems.append(Problem("kv_heads", message))
    return problems


def _rotary_problems(model: ModelConfig) -> list[Problem]:
    """What would be passed over by a model with learned positions."""
    default: dict[str, Any] = {"rope_theta": 500_000.0, "rope_scaling.factor": 1.0}
    given = {"rope_theta": model.rope_theta, "rope_scaling.factor": model.rope_scaling.factor}
    return [
        Problem(path, f"gpt2 learns its positions and has no {path}; leave it at {default[path]:g}")
        for path, value in given.items()
        if value != default[path]
    ]
