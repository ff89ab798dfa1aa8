"""Options of ``twinshard ckpt export`` and ``ckpt import``."""

from dataclasses import dataclass
from typing import Literal

from core_torch.config import Problem
from core_torch.config_base import at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class CkptExportOptions:
    """Which model of the run, and how to write it for transformers."""

    out: str = ""  # folder of the exported model
    step: int | None = None  # of a commit, whose anchor is exported; unset: the run's last model
    dtype: Literal["same", "float32", "bfloat16"] = "same"  # of the files; same: as trained
    max_shard_bytes: int = 5_000_000_000  # larger models are cut into files of at most this

    def validate(self) -> list[Problem]:
        """Problems of these options."""
        problems = [] if self.out else [Problem("out", "must name a folder")]
        problems += [] if self.step is None else at_least(0, self, "step")
        return problems + at_least(1, self, "max_shard_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class CkptImportOptions:
    """Where the run that begins with the model is to be."""

    run: str = ""  # folder of the new run

    def validate(self) -> list[Problem]:
        """Problems of these options."""
        return [] if self.run else [Problem("run", "must name a folder")]
