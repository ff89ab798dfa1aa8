"""What replicas tell each other in a round besides norms: counts and votes, whole numbers all.

Under a time trigger replicas make different numbers of steps, so nobody knows how many tokens
all have seen together, or whether another wants to stop. Each replica puts this on a ballot
that travels with the norms of the next round. Between rounds it estimates, by the same rule
for every method:

    tokens = agreed at the last numbered round + N * own since                          (V1)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Counted(NamedTuple):
    """What a round's ballots say."""

    steps: list[int]  # inner steps of each replica since its last round
    all_stop: bool  # nobody will come to another round


@dataclass(slots=True, kw_only=True)
class Votes:
    """A replica's counters, and what all have agreed on."""

    replicas: int
    agreed_tokens: int = 0  # of all replicas, at the last numbered round
    local_tokens: int = 0  # own, since then
    enough_tokens: int | None = None  # a run ends here; None: never by tokens
    is_stopping: bool = False  # own: never comes back to training
    is_stepping: bool = True  # own: comes back to a step after this round, so it can commit then
    wants_checkpoint: bool = False  # own
    checkpoint_agreed: bool = False  # commit after this step; the one who commits resets it

    @property
    def tokens(self) -> int:
        """Estimate of the tokens that all replicas have seen. (V1)"""
        return self.agreed_tokens + self.replicas * self.local_tokens

    @property
    def has_enough(self) -> bool:
        """True if by its own estimate the replica should stop."""
        return self.enough_tokens is not None and self.tokens >= self.enough_tokens

    def agree(self) -> None:
        """All replicas have made equal numbers of steps, so the estimate is the truth."""
        self.agreed_tokens, self.local_tokens = self.tokens, 0

    def ballot(self, steps: int, *, device: torch.device) -> Tensor:
        """(5,) int64: inner steps, tokens, stop, stepping, checkpoint."""
        votes = (self.is_stopping, self.is_stepping, self.wants_checkpoint)
        return torch.tensor([steps, self.local_tokens, *map(int, votes)], device=device)

    def count(self, ballots: Sequence[Sequence[int]]) -> Counted:
        """Counts the ballots of all replicas, and begins the next interval."""
        steps, tokens, stop, stepping, checkpoint = (list(x) for x in zip(*ballots, strict=True))
        self.agreed_tokens += sum(tokens)
        self.local_tokens = 0
        if any(checkpoint) and all(stepping):  # who serves from outside a step cannot commit
            self.checkpoint_agreed, self.wants_checkpoint = True, False
        return Counted(steps, all(stop))
