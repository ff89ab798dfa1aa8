"""Options of ``twinshard data``, one dataclass for each of its commands."""

import os
from dataclasses import dataclass

from core_torch.config import DataConfig, Problem
from core_torch.config_base import at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPrepareOptions:
    """How documents become tokens."""

    out: str = ""  # the new folder
    tokenizer: str = "byte"  # "byte", "bpe" (trained on the training part) or a tokenizer.json
    bpe_vocabulary: int = 1024  # size of a "bpe" tokenizer
    held_out: float = 0.05  # share of the text kept for validation, from its end
    field: str = "text"  # of JSON lines, column of parquet files: holds the document
    processes: int = 0  # that encode; 0: one for each core

    @property
    def config(self) -> DataConfig:
        """The same for ``prepare_folder``."""
        return DataConfig(
            tokenizer=self.tokenizer,
            bpe_vocabulary=self.bpe_vocabulary,
            held_out=self.held_out,
            field=self.field,
        )

    @property
    def workers(self) -> int:
        """Processes that encode."""
        return self.processes or os.cpu_count() or 1

    def validate(self) -> list[Problem]:
        """Problems of these options."""
        missing = [] if self.out else [Problem("out", "is missing: the new folder")]
        return missing + at_least(0, self, "processes") + self.config.validate()


@dataclass(frozen=True, kw_only=True, slots=True)
class DataShowOptions:
    """How much of a prepared folder to look at."""

    tokens: int = 64  # from the beginning, decoded
    check: bool = False  # read all tokens and compare them with their fingerprint

    def validate(self) -> list[Problem]:
        """Problems of these options."""
        return at_least(1, self, "tokens")
