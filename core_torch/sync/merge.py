"""The replicas of a checkpoint become one, where a run goes on with another number of them.

What they did since the last round counts as it would have counted at the end of the run: what is
due, in flight or left over is performed by the method's own rounds (``LocalSGD.settle``), but
among replicas whose rows this rank has read from files. So nothing crosses the replica axis, and
nothing is coded; every rank does the same for its own rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from core_torch.collectives import Axis, Ledger, Pending
from core_torch.sync import sync_round
from core_torch.sync.engine import LocalSGD
from core_torch.sync.meeting import Meeting
from core_torch.sync.outer import mix
from core_torch.sync.penalty import NormStats
from core_torch.sync.rounds import Rounds
from core_torch.sync.state import SyncState
from core_torch.sync.sync_round import Axes, Measured


class SavedReplica(NamedTuple):
    """What a round must know of a replica that is not running any more."""

    params: dict[str, Tensor]  # this rank's rows
    residuals: dict[str, Tensor]  # the same; empty where nothing was coded
    steps: int  # inner steps since its last round
    tokens: int  # own, since the count was agreed on last


class MergingRounds(Rounds):
    """Rounds among saved replicas. The live model stands for each of them in turn.

    Args:
        sync: whose units, rules and inner optimizer; restored from replica ``place``.
        saved: all replicas.
        place: the replica that the live model goes on from.
    """

    def __init__(self, sync: LocalSGD, saved: list[SavedReplica], place: int) -> None:
        unseen = Ledger()
        axes = Axes(Axis("replica", None, len(saved), place, unseen), sync.axes.model)
        super().__init__(
            sync.units, sync.optimizer, sync.rules, axes, sync.votes, is_timed=sync.is_timed
        )
        self._alone = Axes(Axis("replica", None, 1, 0, unseen), sync.axes.model)
        self._saved, self._place = saved, place
        self._params = [  # by replica, unit and parameter
            [[replica.params[name] for name in unit.names] for unit in sync.units]
            for replica in saved
        ]

    def _become(self, replica: int, members: list[int]) -> None:
        for u in members:
            self.units[u].write(self._params[replica][u])

    def _measure(
        self, state: SyncState, members: list[int], counters: Tensor | None
    ) -> tuple[Measured, Tensor | None]:
        units, columns, ballots_RC = [self.units[u] for u in members], [], None
        for replica in range(len(self._saved)):
            self._become(replica, members)
            held = self._bring(state, members)
            columns.append(sync_round.gather_norms(units, held, self._alone, None)[0])
        self._become(self._place, members)
        norm_UR = torch.cat(columns, dim=1)
        if counters is not None:  # all stop here, so the round is a forced one
            rows = [[one.steps, one.tokens, 1, 0, 0] for one in self._saved]
            ballots_RC = torch.tensor(rows, device=norm_UR.device)
        steps_R = None if ballots_RC is None else ballots_RC[:, 0]
        return sync_round.decide(norm_UR, state.stats, self.rules, steps_R), ballots_RC

    def _start(self, state: SyncState, meeting: Meeting, i: int) -> None:
        u, weight_R = meeting.members[i], meeting.measured.weight_UR[i]
        held, sums = state.store.get(u), []
        for replica in range(len(self._saved)):
            self._become(replica, [u])
            weight = weight_R[replica : replica + 1]
            flight, _ = sync_round.start(self.units[u], held, weight, self.rules, self._alone)
            sums.append(flight.wait())
        self._become(self._place, [u])
        meeting.flights[i] = Pending(torch.stack(sums).sum(dim=0), None)

    def _finish(
        self, state: SyncState, meeting: Meeting, i: int, newest: Meeting | None = None
    ) -> None:
        super()._finish(state, meeting, i, newest)
        u, keep = meeting.members[i], 0.0 if meeting.forced else self.rules.mix
        anchor = state.store.get(u).anchor
        for params in self._params:  # what ``super`` has done to the live ones
            pairs = zip(params[u], anchor, strict=True)
            params[u] = [mix(x, a, alpha=keep) for x, a in pairs]
        state.store.release(u)


@torch.no_grad()
def merge(sync: LocalSGD, saved: list[SavedReplica], place: int) -> None:
    """Lets an engine restored from replica ``place`` go on among other replicas.

    All ranks must call this. Afterwards the parameters are the anchor, unless nothing was to be
    done; norm statistics of new replica n are those of saved replica n modulo their number; of
    what coding has left out everybody owes the mean, so that under equal weights the sum is kept.
    """
    replicas, votes = sync.axes.replica.size, sync.votes
    tokens = votes.agreed_tokens + sum(one.tokens for one in saved)
    if sync.state is not None:
        rounds = MergingRounds(sync, saved, place)
        if sync.is_timed:  # replicas differ: one may be due that made no step, and another not
            most = max(one.steps for one in saved)
            sync.state.steps_since, sync.state.is_due = [most] * len(sync.units), False
        own, sync.rounds = sync.rounds, rounds
        try:
            sync.settle(sync.state)
        finally:
            sync.rounds = own
        own.take_over(rounds)
        columns = [n % len(saved) for n in range(replicas)]
        stats = (x[:, columns].contiguous() for x in sync.state.stats)
        sync.state.stats = NormStats(*stats)
        _share_residuals(sync, sync.state, saved)
    votes.agreed_tokens, votes.local_tokens, votes.wants_checkpoint = tokens, 0, False


def _share_residuals(sync: LocalSGD, state: SyncState, saved: list[SavedReplica]) -> None:
    for u, unit in enumerate(sync.units):
        if state.residuals[u] is not None:
            rows = [
                torch.cat([one.residuals[name].reshape(-1) for name in unit.names]) for one in saved
            ]
            state.residuals[u] = torch.stack(rows).mean(dim=0)
