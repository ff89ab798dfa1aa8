"""Who wishes to stop or to commit: all ranks learn of it between steps.

A run stops, or commits by the clock, only where all ranks agree on the step. So wishes travel
with the rounds: under a time trigger as votes, else in one message of two numbers at each step
that all ranks make together, that is in synchronous training and where a round belongs. In
steps between rounds nobody sends anything.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from core_torch.train import TrainState

LATE = ("co2", "co2_star", "streaming_diloco")  # no step of theirs waits for a slow replica


class Wish(NamedTuple):
    """What a rank, or all together, want after a step."""

    stop: bool = False  # commit and end
    commit: bool = False  # commit and go on


class _Asked(NamedTuple):
    """A message on its way."""

    wishes: Tensor  # (2,) largest of all ranks once it has arrived
    work: dist.Work

    def answer(self) -> Wish:
        self.work.wait()
        stop, commit = self.wishes.tolist()
        return Wish(bool(stop), bool(commit))


class Agreement:
    """Lets the ranks of a run know after the same step what any of them wishes."""

    def __init__(self, state: TrainState) -> None:
        self.state = state
        self._asked: _Asked | None = None

    @property
    def is_by_votes(self) -> bool:
        """Whether replicas make steps of their own, so that only votes can settle anything."""
        sync = self.state.sync
        return sync is not None and sync.is_timed and sync.state is not None

    def after_step(self, mine: Wish) -> Wish:
        """What all wish, as far as this step tells; the same on all ranks that make it together.

        Where no step should wait, the answer is that of the meeting before. By votes, "all" are
        the ranks of this replica; what becomes of their wish is for the votes to say.
        """
        mesh = self.state.mesh
        if self.is_by_votes:
            return mine if mesh.model.size == 1 else self._lagging(mine, mesh.model.group)
        if self._meets_each_step():
            return self._lagging(mine, None)
        config = self.state.config.sync
        assert isinstance(config.every, int), "replicas with a time trigger go by votes"
        if (self.state.step - config.warmup) % config.every:
            return Wish()
        return self._lagging(mine, None) if config.method in LATE else self.ask(mine)

    def ask(self, mine: Wish) -> Wish:
        """What any rank of the world wishes; waits for all."""
        self.close()
        return self._start(mine, None).answer()

    def close(self) -> None:
        """Takes in what is still on its way."""
        if self._asked is not None:
            self._asked.answer()
            self._asked = None

    def _meets_each_step(self) -> bool:
        sync, replicas = self.state.sync, self.state.mesh.replica.size
        return sync is None or sync.is_synchronous or replicas == 1

    def _lagging(self, mine: Wish, group: dist.ProcessGroup | None) -> Wish:
        answer = Wish() if self._asked is None else self._asked.answer()
        fresh = mine._replace(commit=mine.commit and not answer.commit)  # else it came twice
        self._asked = self._start(fresh, group)
        return answer

    def _start(self, mine: Wish, group: dist.ProcessGroup | None) -> _Asked:
        wishes = torch.tensor([int(mine.stop), int(mine.commit)], device=self.state.mesh.device)
        work = dist.all_reduce(wishes, op=dist.ReduceOp.MAX, group=group, async_op=True)
        return _Asked(wishes, work)
