"""The engine of local SGD: one object that a training loop tells of its inner steps.

It owns the state, asks the trigger what is due, and says when a round is performed: right after
an inner step, inside the next forward, or at the end. rounds.py performs it; all formulas are
elsewhere.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from core_torch.collectives import all_gather, psum
from core_torch.errors import ConfigError, ReplicasDiffer
from core_torch.mesh import Mesh
from core_torch.sync.events import RoundEvent
from core_torch.sync.meeting import Meeting
from core_torch.sync.methods import Rules
from core_torch.sync.rounds import Rounds
from core_torch.sync.schedule import InOrder
from core_torch.sync.state import SyncState, checksum, take_anchor
from core_torch.sync.store import make_store
from core_torch.sync.sync_round import Axes
from core_torch.sync.trigger import StepTrigger, TimeTrigger
from core_torch.sync.units import SyncUnit
from core_torch.sync.votes import Votes


class LocalSGD:
    """Keeps replicas together.

    Args:
        units: what the exchanges cover, in order of the forward.
        optimizer: the inner optimizer; its state is healed where a replica went non-finite.
        mesh: replica and shard axes.
        rules: numbers of the method.
        trigger: when rounds are due.
    """

    def __init__(
        self,
        units: list[SyncUnit],
        optimizer: Optimizer,
        mesh: Mesh,
        *,
        rules: Rules,
        trigger: StepTrigger | TimeTrigger,
    ) -> None:
        self.units, self.optimizer, self.rules, self.trigger = units, optimizer, rules, trigger
        self.axes = Axes(mesh.replica, mesh.model)
        self.step = 0  # own: completed inner steps of this replica
        self.state: SyncState | None = None  # None before replicas part
        self.votes = Votes(replicas=mesh.replica.size)
        self.device = units[0].like.device
        self.rounds = Rounds(units, optimizer, rules, self.axes, self.votes, is_timed=self.is_timed)
        self._forward: tuple[Meeting, InOrder] | None = None  # a round inside a forward
        self._join_if_due()

    @property
    def is_synchronous(self) -> bool:
        """True while the next inner step averages gradients over the replicas too."""
        return self.trigger.is_synchronous(self.step)

    @property
    def is_timed(self) -> bool:
        """True if rounds go by the clock, so that replicas make different numbers of steps."""
        return isinstance(self.trigger, TimeTrigger)

    @torch.no_grad()
    def after_step(self, tokens: int = 0) -> RoundEvent | None:
        """Call after each inner step.

        Args:
            tokens: that this replica has trained on in the step; needed by time triggers.

        Returns:
            The event of a round that is complete and was not told yet, if there is one. On CUDA
            the newest is held back until another is complete, for to read it is to wait.

        Raises:
            ConfigError: a round was due and the forward of this step did not carry it.
        """
        self.end_forward()  # units that the forward has not reached
        state = self.state
        if state is not None and state.is_due:
            raise ConfigError(
                f"the round that was due after inner step {self.step} was not in the next forward",
                likely="the module was in eval mode, or its forward was called past its hooks",
                next="call the module itself in train mode, or set sync.layerwise to false",
            )
        self.step += 1
        self.votes.local_tokens += tokens
        if state is not None:
            state.steps_since = [count + 1 for count in state.steps_since]
            self.rounds.finish_late(state, self.step)
            group = self._group_due()
            if group is not None and self.rules.layerwise:
                state.is_due = True
            elif group is not None:
                self._perform(self.rounds.members(group), forced=False)
        self._join_if_due()
        return self.rounds.tell(newest_too=self.device.type != "cuda")

    @torch.no_grad()
    def serve(self) -> None:
        """Takes part in the next round right now, outside a forward; it is told later."""
        if self.state is not None:
            self.state.is_due = self.votes.is_stepping = False
            self._perform(self.rounds.members(0), forced=False)
            self.votes.is_stepping = True

    @torch.no_grad()
    def finish(self) -> list[RoundEvent]:
        """Call once at the end: nothing stays in flight, and no inner step is lost.

        A round that is due is performed; then what is in flight is used; then, if inner steps
        followed the last round, a forced round, which leaves the norm statistics alone. Under a
        time trigger this replica serves rounds until all replicas have called this.

        Returns:
            All events that were not told yet.
        """
        self.end_forward()
        if self.state is not None and self.is_timed:
            self._serve_until_all_stop(self.state)
        elif self.state is not None:
            self.settle(self.state)
        events = []
        while (event := self.rounds.tell(newest_too=True)) is not None:
            events.append(event)
        return events

    @contextmanager
    def anchor_weights(self) -> Iterator[None]:
        """Puts the anchor in place of the parameters, for evaluation and samples.

        Restores every bit on exit. Before replicas part the parameters are used as they are.
        """
        state = self.state
        if state is None:
            yield
            return
        kept = [[x.clone() for x in unit.shards()] for unit in self.units]
        try:
            for u, unit in enumerate(self.units):
                unit.write(state.store.get(u).anchor)
                state.store.release(u)
            yield
        finally:
            for unit, values in zip(self.units, kept, strict=True):
                unit.write(values)

    # A round inside a forward. forward_sync.py and compiled graphs call what follows.

    @torch.no_grad()
    def begin_forward(self) -> bool:
        """Call when a training forward begins. True if it carries a round, now measured."""
        state = self.state
        if state is None or not state.is_due:
            return False
        state.is_due = False
        members = self.rounds.members(0)
        meeting = self.rounds.measure(state, members, step=self.step, forced=False)
        self._restart_clock()
        if not meeting.is_empty:
            self._forward = (meeting, self.rounds.in_order(state, meeting))
        return not meeting.is_empty

    @torch.no_grad()
    def reach(self, u: int) -> None:
        """Completes the round of unit u and of all before it; later ones may be in flight."""
        if self._forward is not None:
            self._forward[1].reach(u)

    @torch.no_grad()
    def start(self, u: int) -> None:
        """Starts unit u's exchange of the round in this forward."""
        assert self._forward is not None, "no round in this forward"
        self._forward[1].start(u)

    @torch.no_grad()
    def complete(self, u: int) -> None:
        """Completes unit u's exchange; its parameters are new when this returns."""
        assert self._forward is not None, "no round in this forward"
        self._forward[1].finish(u)

    @torch.no_grad()
    def end_forward(self) -> None:
        """Completes what is left of the round in this forward."""
        if self._forward is not None:
            assert self.state is not None
            meeting, order = self._forward
            order.complete()
            self._forward = None
            self.rounds.conclude(self.state, meeting)

    def _join_if_due(self) -> None:
        """Takes the anchor when replicas part, after proof that they are equal."""
        if not self.trigger.joins(self.step):
            return
        mine = checksum([x for unit in self.units for x in unit.shards()])
        # Over the shards too, each with its own factor, so that all ranks see one difference.
        mine = psum(mine * (2 * self.axes.model.index + 1), self.axes.model, scope="checksum")
        sums = all_gather(mine, self.axes.replica, scope="checksum").tolist()
        if len(set(sums)) > 1:
            differing = [n for n, value in enumerate(sums) if value != sums[0]]
            raise ReplicasDiffer(
                f"replicas {differing} hold other parameters than replica 0",
                where=f"inner step {self.step}",
                likely="weights initialised from different seeds, or loaded from different files",
                next="twinshard doctor",
            )
        self.begin_apart()
        self._restart_clock()

    def begin_apart(self) -> None:
        """Makes the state from the parameters as they are: anchors equal to them, no motion."""
        store = make_store(self.rules.store, self.units, self.axes.replica)
        self.state = take_anchor(self.units, store, replicas=self.axes.replica.size)
        self.votes.agree()

    def _group_due(self) -> int | None:
        """The group whose round belongs after this step. The first shard's clock decides."""
        if isinstance(self.trigger, StepTrigger):
            return self.trigger.due(self.step)
        is_due = self.trigger.is_over() or self.votes.has_enough
        mine = torch.tensor(int(is_due and self.axes.model.index == 0), device=self.device)
        return 0 if int(psum(mine, self.axes.model, scope="trigger")) else None

    def _perform(self, members: list[int], *, forced: bool, at_once: bool = False) -> Meeting:
        assert self.state is not None, "a round before replicas parted"
        meeting = self.rounds.measure(self.state, members, step=self.step, forced=forced)
        self.rounds.perform(self.state, meeting, at_once=at_once)
        self._restart_clock()
        return meeting

    def _restart_clock(self) -> None:
        if isinstance(self.trigger, TimeTrigger):
            self.trigger.restart()

    def settle(self, state: SyncState) -> None:
        """Performs what is due, in flight or left over, where replicas keep step."""
        everything = list(range(len(self.units)))
        if state.is_due:
            state.is_due = False
            self._perform(everything, forced=False)
        if self.rules.method.finish == "next round":
            if any(state.steps_since):
                self._perform(everything, forced=True)
            if state.flights:
                self.rounds.finish_flights(state)
        else:
            self.rounds.finish_flights(state)
            if any(state.steps_since):
                self._perform(everything, forced=True, at_once=True)

    def _serve_until_all_stop(self, state: SyncState) -> None:
        """Rounds without steps between them, until every replica is here."""
        state.is_due = self.votes.is_stepping = False
        self.votes.is_stopping = True
        while not self._perform(self.rounds.members(0), forced=False).forced:
            pass
        self.votes.is_stopping, self.votes.is_stepping = False, True
