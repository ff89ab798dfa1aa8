"""The engine of local SGD: one object that a training loop tells of its inner steps.

It owns the state, asks the trigger what is due, and runs rounds with the two verbs of
sync_round.py in the order of schedule.py. All formulas are elsewhere.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from core_torch.collectives import Pending, all_gather, psum
from core_torch.errors import ReplicasDiffer
from core_torch.mesh import Mesh
from core_torch.shard.access import local_shard
from core_torch.sync import sync_round
from core_torch.sync.events import RoundEvent, describe
from core_torch.sync.methods import Rules
from core_torch.sync.outer import heal
from core_torch.sync.penalty import update_stats
from core_torch.sync.schedule import start_ahead
from core_torch.sync.state import SyncState, checksum, take_anchor
from core_torch.sync.sync_round import Axes, Finished, Measured
from core_torch.sync.trigger import StepTrigger
from core_torch.sync.units import SyncUnit


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
        trigger: StepTrigger,
    ) -> None:
        self.units, self.optimizer, self.rules, self.trigger = units, optimizer, rules, trigger
        self.axes = Axes(mesh.replica, mesh.round_shard)
        self.step = 0
        self.state: SyncState | None = None  # None before replicas part
        self._join_if_due()

    @property
    def is_synchronous(self) -> bool:
        """True while the next inner step averages gradients over the replicas too."""
        return self.trigger.is_synchronous(self.step)

    @torch.no_grad()
    def after_step(self) -> RoundEvent | None:
        """Call after each inner step. Returns the round's event if one was due."""
        self.step += 1
        if self.state is not None:
            self.state.steps_since += 1
        self._join_if_due()
        return self._round(forced=False) if self.trigger.is_due(self.step) else None

    @torch.no_grad()
    def finish(self) -> RoundEvent | None:
        """Call once at the end: a forced round, so that no inner step is lost.

        It leaves the norm statistics alone. Returns None if no step followed the last round.
        """
        if self.state is None or self.state.steps_since == 0:
            return None
        return self._round(forced=True)

    @contextmanager
    def anchor_weights(self) -> Iterator[None]:
        """Puts the anchor in place of the parameters, for evaluation and samples.

        Restores every bit on exit. Before replicas part the parameters are used as they are.
        """
        if self.state is None:
            yield
            return
        kept = [[x.clone() for x in unit.shards()] for unit in self.units]
        try:
            self._write([s.anchor for s in self.state.units])
            yield
        finally:
            self._write(kept)

    def _write(self, values: list[list[torch.Tensor]]) -> None:
        for unit, tensors in zip(self.units, values, strict=True):
            for x, value in zip(unit.shards(), tensors, strict=True):
                x.copy_(value)

    def _join_if_due(self) -> None:
        """Takes the anchor when replicas part, after proof that they are equal."""
        if not self.trigger.joins(self.step):
            return
        mine = checksum([x for unit in self.units for x in unit.shards()])
        # Over the shards too, each with its own factor, so that all ranks see one difference.
        mine = psum(mine * (2 * self.axes.shard.index + 1), self.axes.shard, scope="checksum")
        sums = all_gather(mine, self.axes.replica, scope="checksum").tolist()
        if len(set(sums)) > 1:
            differing = [n for n, value in enumerate(sums) if value != sums[0]]
            raise ReplicasDiffer(
                f"replicas {differing} hold other parameters than replica 0",
                where=f"inner step {self.step}",
                likely="weights initialised from different seeds, or loaded from different files",
                next="twinshard doctor",
            )
        self.state = take_anchor(self.units, replicas=self.axes.replica.size)

    def _round(self, *, forced: bool) -> RoundEvent:
        state = self.state
        assert state is not None, "a round before replicas parted"
        measured = sync_round.measure_all(
            self.units, state.units, state.stats, self.rules, self.axes
        )
        me = self.axes.replica.index

        def start(u: int) -> Pending:
            weight = measured.weight_UR[u, me]
            return sync_round.start(self.units[u], state.units[u], weight, self.axes)

        def finish(u: int, pending: Pending) -> Finished:
            accept = measured.accept_U[u]
            done = sync_round.finish(
                self.units[u], state.units[u], pending, accept, self.rules, self.axes
            )
            state.units[u] = done.state  # at once, so that old and new never lie side by side
            self._heal(self.units[u], ~measured.verdict.is_finite_R[u, me])
            return done

        finished = start_ahead(len(self.units), start, finish, limit=self.rules.prefetch_units)
        return self._conclude(state, measured, finished, forced=forced)

    def _conclude(
        self, state: SyncState, measured: Measured, finished: list[Finished], *, forced: bool
    ) -> RoundEvent:
        if self.rules.excludes and self.rules.penalty is not None and not forced:
            alpha = self.rules.penalty.ema_alpha
            state.stats = update_stats(
                measured.norm_UR, measured.verdict, state.stats, ema_alpha=alpha
            )
        state.rounds += 1
        state.steps_since = 0
        names = [unit.name for unit in self.units]
        counts = dict(round=state.rounds, step=self.step, forced=forced)
        return describe(measured, finished, units=names, **counts)

    def _heal(self, unit: SyncUnit, is_bad: torch.Tensor) -> None:
        """Restarts the inner optimizer of a unit where this replica went non-finite."""
        for p in unit.params:
            for value in self.optimizer.state.get(p, {}).values():
                if isinstance(value, torch.Tensor):
                    held = local_shard(value)
                    held.copy_(heal(held, is_bad))
