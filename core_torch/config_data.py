"""Settings of the tokens that a run reads. Standard library only."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from core_torch.config_base import Problem, above, at_least

BLOCK = 1024  # draws in which every source of a mixture has its share, see data/mixture.py


class Share(NamedTuple):
    """A prepared folder and its weight in a mixture."""

    path: str
    weight: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where tokens come from and how they are cut."""

    path: str = ""  # file or folder of documents, or a prepared folder; empty: shipped corpus
    mixture: str = ""  # instead of path: prepared folders and weights, e.g. "prose:3,code:1"
    field: str = "text"  # of JSON lines, column of parquet files: holds the document
    tokenizer: str = "byte"  # "byte", "bpe" (trained on the data) or a tokenizer.json
    bpe_vocabulary: int = 1024  # size of a "bpe" tokenizer
    sequence: int = 128  # tokens per sequence
    packing: Literal["stream", "documents"] = "stream"  # documents: none sees the one before it
    batch: int = 8  # sequences per rank and micro-batch
    held_out: float = 0.05  # share of the text kept for validation, from its end
    seed: int = 0  # order of the sequences

    @property
    def shares(self) -> list[Share]:
        """The mixture, in the order given; a weight that is no number is NaN."""
        return [_share(part) for part in self.mixture.split(",")] if self.mixture else []

    def validate(self) -> list[Problem]:
        problems = at_least(1, self, "sequence", "batch") + above(0, self, "held_out")
        problems += at_least(0, self, "seed")
        if self.held_out > 0.5:
            problems.append(Problem("held_out", f"must be at most 0.5, got {self.held_out}"))
        if self.tokenizer == "bpe" and self.bpe_vocabulary < 257:
            message = (
                f"must be at least 257 (256 bytes and the end of text), got {self.bpe_vocabulary}"
            )
            problems.append(Problem("bpe_vocabulary", message))
        return problems + self._mixture_problems()

    def _mixture_problems(self) -> list[Problem]:
        if self.mixture and self.path:
            return [Problem("mixture", f"stands instead of path; path is {self.path!r}")]
        shares = self.shares
        if not all(share.path and 0 < share.weight < math.inf for share in shares):
            message = f'takes folders with weights, e.g. "prose:3,code:1"; got {self.mixture!r}'
            return [Problem("mixture", message)]
        if len({share.path for share in shares}) < len(shares):
            return [Problem("mixture", f"names a folder twice: {self.mixture!r}")]
        total = sum(share.weight for share in shares)
        small = [share for share in shares if share.weight / total < 1 / BLOCK]
        message = f"must be at least 1/{BLOCK} of all"
        return [
            Problem("mixture", f"the weight {weight:g} of {path!r} {message}")
            for path, weight in small
        ]


def _share(part: str) -> Share:
    path, _, weight = part.strip().rpartition(":")
    try:
        return Share(path, float(weight))
    except ValueError:
        return Share(path, math.nan)
