"""Rounds from their first message to their last, whenever the engine asks for one.

    measure    the small messages, and everything that they decide
    start      a unit's exchange
    finish     waits for it, outer step, parameters
    conclude   statistics, and the event to be told

A round performed at once goes through all four. One that is used later (Streaming DiLoCo, CO2)
rests in ``state.flights`` between start and finish.
"""

import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from core_torch.collectives import Pending
from core_torch.shard.access import local_shard
from core_torch.sync import sync_round
from core_torch.sync.events import RoundEvent, describe
from core_torch.sync.meeting import Meeting, Told
from core_torch.sync.methods import Rules
from core_torch.sync.observer import Observer
from core_torch.sync.outer import heal
from core_torch.sync.penalty import update_stats
from core_torch.sync.schedule import InOrder
from core_torch.sync.state import SyncState
from core_torch.sync.sync_round import Axes
from core_torch.sync.unit_state import UnitState
from core_torch.sync.units import SyncUnit
from core_torch.sync.votes import Votes


class Wait(NamedTuple):
    """How long the end of a unit's exchange has blocked this process. Of no meaning on CUDA."""

    unit: str
    seconds: float


class Rounds:
    """Runs rounds on the state of one model.

    Args:
        units: what the exchanges cover.
        optimizer: the inner optimizer; its state is healed where a replica went non-finite.
        rules: numbers of the method.
        axes: of the rounds.
        votes: counters that travel with the norms under a time trigger.
        is_timed: whether they do.
    """

    def __init__(
        self,
        units: list[SyncUnit],
        optimizer: Optimizer,
        rules: Rules,
        axes: Axes,
        votes: Votes,
        *,
        is_timed: bool,
    ) -> None:
        self.units, self.rules, self.axes, self.votes = units, rules, axes, votes
        self._optimizer, self._is_timed = optimizer, is_timed
        self._done: deque[Meeting] = deque()  # completed and not yet told
        self.waits: list[Wait] | None = None  # a list: enter how long each exchange has blocked
        self.observer: Observer | None = None

    def members(self, group: int) -> list[int]:
        """Units that take part in a round of ``group``: a fragment, or all."""
        return [group] if self.rules.fragments > 1 else list(range(len(self.units)))

    def perform(self, state: SyncState, meeting: Meeting, *, at_once: bool = False) -> None:
        """A whole measured round; or the start of one that is used later."""
        if meeting.is_empty:
            return
        order, when = self.in_order(state, meeting), self.rules.method.finish
        if at_once or when == "at once" or (when == "steps later" and not self.rules.delay_steps):
            order.complete()
            self.conclude(state, meeting)
            return
        for i in range(len(meeting.members)):
            self._start(state, meeting, i)
        if when == "next round" and state.flights:
            self.finish_flights(state, newest=meeting)
        elif when == "next round":
            self._return_to_anchor(state)
        for u in meeting.members:
            state.store.release(u)
        state.flights.append(meeting)

    def measure(self, state: SyncState, members: list[int], *, step: int, forced: bool) -> Meeting:
        """The first messages of a round of some units. Numbers it, and begins their next one."""
        counters = None
        if self._is_timed:
            device = self.units[0].like.device
            counters = self.votes.ballot(state.steps_since[0], device=device)
        measured, ballots_RC = self._measure(state, members, counters)
        state.rounds += 1
        meeting = Meeting(
            number=state.rounds,
            step=step,
            forced=forced,
            members=members,
            steps=[state.steps_since[members[0]]] * self.axes.replica.size,
            measured=measured,
        )
        if ballots_RC is not None:  # the one thing that the host must know during a round
            meeting.steps, meeting.forced = self.votes.count(ballots_RC.tolist())
            fewest = 1 if meeting.forced else self.rules.min_total_steps
            meeting.is_empty = sum(meeting.steps) < fewest
        if meeting.is_empty and meeting.forced:  # the last one, with nothing left, is no event
            return meeting
        if self.observer is not None:
            taking_part = [self.units[u] for u in members]
            self.observer.measured(meeting, taking_part, self._bring(state, members))
        if meeting.is_empty:
            self._end(state, meeting)
            return meeting
        for u in members:
            state.steps_since[u] = 0
        return meeting

    def in_order(self, state: SyncState, meeting: Meeting) -> InOrder:
        """The exchanges of a measured round, to be moved on one by one."""
        absent = sum(not self.units[u].params for u in meeting.members)  # on other stages
        return InOrder(
            len(meeting.members),
            lambda i: self._start(state, meeting, i),
            lambda i: self._finish(state, meeting, i),
            limit=self.rules.prefetch_units + absent,
        )

    def finish_flights(self, state: SyncState, newest: Meeting | None = None) -> None:
        """Uses the oldest exchanges first, until none is in flight.

        Args:
            state: of the model.
            newest: the round now, which says how far replicas have moved since; None: each says
                so itself.
        """
        while state.flights:
            self._finish_oldest(state, newest)

    def finish_late(self, state: SyncState, step: int) -> None:
        """Uses exchanges whose delay in inner steps has passed."""
        if self.rules.method.finish != "steps later":
            return
        while state.flights and state.flights[0].step + self.rules.delay_steps <= step:
            self._finish_oldest(state)

    def conclude(self, state: SyncState, meeting: Meeting) -> None:
        """After the last unit: what was seen enters the statistics, unless it was forced."""
        if self.rules.excludes and self.rules.penalty is not None and not meeting.forced:
            measured, alpha = meeting.measured, self.rules.penalty.ema_alpha
            state.stats = update_stats(
                measured.norm_UR, measured.verdict, state.stats, ema_alpha=alpha
            )
        self._end(state, meeting)

    def tell(self, *, newest_too: bool) -> RoundEvent | None:
        """The oldest event not yet told. To read the newest is to wait for it on CUDA."""
        if len(self._done) > (0 if newest_too else 1):
            return describe(self._done.popleft(), self.units)
        return None

    def take_over(self, other: "Rounds") -> None:
        """Will tell what ``other`` has not told."""
        self._done.extend(other._done)
        other._done.clear()

    def _bring(self, state: SyncState, members: list[int]) -> Iterator[UnitState]:
        """The outer states of units one after the other, each let go before the next."""
        for u in members:
            yield state.store.get(u)
            if len(members) > 1:  # a single one is needed again at once
                state.store.release(u)

    def _measure(
        self, state: SyncState, members: list[int], counters: torch.Tensor | None
    ) -> tuple[sync_round.Measured, torch.Tensor | None]:
        """The small messages of a round."""
        return sync_round.measure_all(
            [self.units[u] for u in members],
            self._bring(state, members),
            state.stats,
            self.rules,
            self.axes,
            counters,
        )

    def _start(self, state: SyncState, meeting: Meeting, i: int) -> None:
        """Starts the exchange of the meeting's i-th unit."""
        u = meeting.members[i]
        held = state.store.get(u)
        if i + 1 < len(meeting.members):
            state.store.prefetch(meeting.members[i + 1])
        meeting.flights[i], state.residuals[u] = sync_round.start(
            self.units[u],
            held,
            meeting.measured.weight_UR[i],
            self.rules,
            self.axes,
            state.residuals[u],
        )

    def _finish(
        self, state: SyncState, meeting: Meeting, i: int, newest: Meeting | None = None
    ) -> None:
        """Uses the exchange of the meeting's i-th unit; see ``finish_flights``."""
        u, rules, progress = meeting.members[i], self.rules, None
        if rules.method.outer == "momentum" and rules.co2.staleness:
            progress = sync_round.progress_norms((newest or meeting).measured)[i]
        flight = meeting.flights.pop(i)
        if self.waits is not None:
            began = time.perf_counter()
            flight = Pending(flight.wait(), None)
            self.waits.append(Wait(self.units[u].name, time.perf_counter() - began))
        if self.observer is not None:
            flight = Pending(flight.wait(), None)
            self.observer.combined(meeting, self.units[u], flight.total, state.store.get(u))
        done = sync_round.finish(
            self.units[u],
            state.store.get(u),
            flight,
            meeting.measured.accept_U[i],
            rules,
            self.axes,
            progress=progress,
            keep=0.0 if meeting.forced else rules.mix,
        )
        if self.observer is not None:
            self.observer.finished(meeting, i, self.units[u], done)
        state.store.put(u, done.state)  # at once, so that old and new never lie side by side
        meeting.finished[i] = Told(done.combined_norm, done.clip, done.gap)
        is_finite_R = meeting.measured.verdict.is_finite_R[i]
        self._heal(self.units[u], ~is_finite_R[self.axes.replica.index])

    def _finish_oldest(self, state: SyncState, newest: Meeting | None = None) -> None:
        """Uses the exchanges that have been in flight for longest; see ``finish_flights``."""
        meeting = state.flights.pop(0)
        for i in range(len(meeting.members)):
            self._finish(state, meeting, i, newest)
        self.conclude(state, meeting)

    def _end(self, state: SyncState, meeting: Meeting) -> None:
        """Nothing of the meeting is left to do: it can be told."""
        if self.observer is not None:
            members = [self.units[u] for u in meeting.members]
            self.observer.concluded(meeting, members, state.stats if self.rules.excludes else None)
        self._done.append(meeting)

    def _return_to_anchor(self, state: SyncState) -> None:
        """Begins the second round of CO2 at the anchor too, although nothing has come back yet.

        If parameters kept their own value, their first progress would enter twice: in what this
        meeting has sent, and again in what the next one sends.
        """
        for u, unit in enumerate(self.units):
            unit.write(state.store.get(u).anchor)

    def _heal(self, unit: SyncUnit, is_bad: torch.Tensor) -> None:
        """Restarts the inner optimizer of a unit where this replica went non-finite."""
        for p in unit.params:
            for value in self._optimizer.state.get(p, {}).values():
                if isinstance(value, torch.Tensor):
                    held = local_shard(value)
                    held.copy_(heal(held, is_bad))
