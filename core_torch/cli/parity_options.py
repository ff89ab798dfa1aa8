"""Options of ``twinshard parity``, one dataclass for each of its commands."""

import re
from dataclasses import dataclass
from typing import Literal

from core_torch.config import METHODS, Problem
from core_torch.config_base import at_least

MOST_REPLICAS, SHARDS = 4, (1, 2, 4)  # shards divide the four sequences of a replica's batch


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityRecordOptions:
    """Which run to record, and by whom."""

    core: Literal["torch", "jax"] = "torch"  # jax: the reference
    method: str = "edit"  # of training
    mesh: str = "2x2"  # replicas x shards; the reference computes a replica on one device
    dtype: Literal["float64", "float32", "bfloat16"] = "float64"  # bfloat16: compute only
    model: Literal["tiny", "gqa", "odd", "tied", "qwen", "gpt2"] = "tiny"  # the first four: Llama
    sharding: Literal["fsdp2", "simple_fsdp", "simple_fsdp_aot"] = "fsdp2"  # of the core
    steps: int = 8  # inner steps
    tensors: bool = False  # of the core: also keep every tensor, to see which element differs
    golden: bool = False  # write the golden traces of all methods anew, into --out
    out: str = ""  # folder of the trace

    @property
    def shape(self) -> tuple[int, int]:
        """Replicas and shards."""
        replicas, _, shards = self.mesh.partition("x")
        return int(replicas), int(shards)

    def validate(self) -> list[Problem]:
        """Problems of these options."""
        problems = [] if self.out else [Problem("out", "must name a folder")]
        if self.method not in METHODS:
            known = ", ".join(METHODS)
            problems.append(Problem("method", f"{self.method!r} is unknown; methods are {known}"))
        problems += mesh_problems("mesh", self.mesh)
        if self.steps < 1:
            problems.append(Problem("steps", f"must be at least 1, got {self.steps}"))
        if self.tensors and self.core == "jax":
            problems.append(Problem("tensors", "are kept by the core only"))
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityCheckOptions:
    """What to check, and where to write what was found."""

    shards: int = 0  # of the core; 0: as recorded
    sharding: Literal["", "fsdp2", "simple_fsdp", "simple_fsdp_aot"] = ""  # empty: as recorded
    methods: str = ""  # which traces of the folder, separated by commas; empty: all
    page: str = ""  # also write an HTML page
    json: str = ""  # also write the results to this file

    @property
    def chosen(self) -> list[str]:
        """Names of folders, in the order given."""
        return [name.strip() for name in self.methods.split(",") if name.strip()]

    def validate(self) -> list[Problem]:
        """Problems of these options; names depend on the folder."""
        if self.shards in (0, *SHARDS):
            return []
        return [Problem("shards", f"must be 1, 2 or 4, or 0, got {self.shards}")]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityDiffOptions:
    """Where to write what was found."""

    page: str = ""  # also write an HTML page
    json: str = ""  # also write the results to this file

    def validate(self) -> list[Problem]:
        """Nothing can be wrong."""
        return []


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityMineOptions:
    """Your own model, and how to run it beside the reference."""

    model: str = ""  # MODULE:FUNCTION of your code, which builds the torch module
    map: str = ""  # names.toml: which of its parameters is which; or huggingface-llama
    dtype: Literal["float64", "float32"] = "float64"  # float64 judges formulas
    steps: int = 1  # of AdamW; beta2 shows from the second on
    batch: int = 2  # sequences
    sequence: int = 64  # positions; fewer hide mistakes of the rotary embedding
    seed: int = 0  # of the tokens
    keep_gains: bool = False  # leave gains of norms alone; else each is moved by about 0.1
    as_is: bool = False  # in float64: leave what asks for a narrower dtype by name
    out: str = ""  # folder that keeps both traces; empty: they are not kept
    page: str = ""  # also write an HTML page
    json: str = ""  # also write the results to this file

    def validate(self) -> list[Problem]:
        """Problems of these options."""
        problems = []
        if not self.model:
            problems.append(Problem("model", "must name MODULE:FUNCTION, such as my_model:build"))
        if not self.map:
            problems.append(Problem("map", "must name a TOML file, or huggingface-llama"))
        problems += at_least(1, self, "steps", "batch", "sequence")
        problems += at_least(0, self, "seed")
        if self.as_is and self.dtype != "float64":
            problems.append(Problem("as_is", "is about float64; float32 is always as it is"))
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityRunOptions:
    """Which cells to compare, how, and where to write what was found."""

    mode: Literal["free", "locked"] = "free"  # locked: each phase on the core's own inputs
    only: str = ""  # cells whose name holds all these words, separated by commas
    full: bool = False  # every combination, not only each pair of choices
    page: str = ""  # also write an HTML page
    json: str = ""  # also write the results to this file

    @property
    def words(self) -> list[str]:
        """The words of ``only``."""
        return [word.strip() for word in self.only.split(",") if word.strip()]

    def validate(self) -> list[Problem]:
        """Nothing can be wrong that does not depend on the cells."""
        return []


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityCanaryOptions:
    """Which faults to inject, and where to write what was found."""

    only: str = ""  # faults whose name holds this text; empty: all
    page: str = ""  # also write an HTML page
    json: str = ""  # also write the results to this file

    def validate(self) -> list[Problem]:
        """Nothing can be wrong that does not depend on the faults."""
        return []


def mesh_problems(name: str, mesh: str) -> list[Problem]:
    """What is wrong with a mesh that is written as ``2x2``."""
    found = re.fullmatch(r"(\d+)x(\d+)", mesh)
    if found is None:
        return [Problem(name, f"must be REPLICASxSHARDS, such as 2x2, got {mesh!r}")]
    replicas, shards = map(int, found.groups())
    problems = []
    if not 1 <= replicas <= MOST_REPLICAS:
        problems.append(Problem(name, f"replicas must lie in [1, {MOST_REPLICAS}], got {replicas}"))
    if shards not in SHARDS:
        problems.append(Problem(name, f"shards must be 1, 2 or 4, got {shards}"))
    return problems
