"""The core's side of the comparison: what all ranks of a run told, and ways to look at it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from parity_tests.cases import training
from parity_tests.checks import cells
from parity_tests.checks.cells import Cell
from parity_tests.checks.reference_runs import initial
from parity_tests.checks.trajectories import same
from parity_tests.harness.jax_bridge import assemble, stack
from parity_tests.harness.pool import RankPool
from parity_tests.harness.torch_bridge import Shard

Host = dict[str, np.ndarray]
Shards = dict[str, Shard]


class CoreRun:
    """A cell as the core ran it. All ranks must agree on the events."""

    def __init__(self, cell: Cell, ranks: Sequence[Any]) -> None:
        self.cell = cell
        self.ranks = [rank for rank in ranks if rank is not None]
        assert len(self.ranks) == cell.replicas * cell.shards
        first = self.ranks[0]
        self.error: str | None = first["error"]
        self.events: list[dict[str, Any]] = first["events"]
        for rank in self.ranks:
            assert rank["error"] == self.error, "ranks end for different reasons"
            assert same(self.told(rank), self.told(first)), "ranks tell of different rounds"
        self.steps = len(first["states"]) - 1  # completed

    def told(self, rank: Any) -> list[dict[str, Any]]:
        """Rounds without what each replica has for itself: by the clock, its own step."""
        own = {"step"} if self.cell.step_ns else set()
        return [{k: v for k, v in event.items() if k not in own} for event in rank["events"]]

    @property
    def leads(self) -> list[Any]:
        """The first rank of each replica."""
        return self.ranks[:: self.cell.shards]

    def parts(self, kind: str, index: int | Sequence[int], *keys: str) -> list[Shards]:
        """Each rank's rows of something: ``parts("states", 3, "exp_avg")``.

        By the clock each replica has an index of its own.
        """
        index_R = [index] * self.cell.replicas if isinstance(index, int) else index
        found = [rank[kind][index_R[i // self.cell.shards]] for i, rank in enumerate(self.ranks)]
        for key in keys:
            found = [x[key] for x in found]
        return found

    def whole(self, kind: str, index: int | Sequence[int], *keys: str) -> Host:
        """The same as [R, ...] arrays."""
        return stack(assemble(self.parts(kind, index, *keys), replicas=self.cell.replicas))

    def recorded(self, t: int, key: str) -> np.ndarray:
        """[R] of one field of the records of step ``t``."""
        return np.array([x["records"][t - 1][key] for x in self.leads], self.cell.dtype)

    def after_inner_step(self, t: int) -> tuple[str, int]:
        """Where the state between inner step ``t`` and the round behind it is, if any."""
        rounds = [k for k, event in enumerate(self.events) if event["step"] == t]
        return ("inner", rounds[0]) if rounds else ("states", t)

    def agreed(self, kind: str, index: int | Sequence[int], *keys: str) -> Host:
        """Anchor, velocity or D; all replicas must hold the same bits."""
        whole_R = self.whole(kind, index, *keys)
        for name, x_R in whole_R.items():
            assert all(x.tobytes() == x_R[0].tobytes() for x in x_R), f"{name} differs, {keys}"
        return {name: x_R[0] for name, x_R in whole_R.items()}

    def adam_steps(self, kind: str, index: int) -> Host:
        """[R] steps that AdamW has counted for each parameter; equal on all shards."""
        told = [rank[kind][index]["adam_step"] for rank in self.ranks]
        count = self.cell.shards
        assert all(x == told[i // count * count] for i, x in enumerate(told))
        leads = told[::count]
        return {k: np.array([x[k] for x in leads], self.cell.dtype) for k in leads[0]}

    def stats(self, kind: str, index: int) -> dict[str, np.ndarray]:
        """Norm statistics; the same on all ranks."""
        everyone = [rank[kind][index]["stats"] for rank in self.ranks]
        assert all(same(x, everyone[0]) for x in everyone), "ranks hold different statistics"
        first: dict[str, np.ndarray] = everyone[0]
        return first

    def seen(self, key: str) -> np.ndarray:
        """(rounds, U, R) or (rounds, U) of one field of the events."""
        return np.array([event[key] for event in self.events])


def arguments(cell: Cell) -> tuple[dict[str, Any], np.ndarray, Host]:
    """What ranks need to begin the cell."""
    return cells.core_changes(cell), cells.tokens_of(cell), initial(cell)


def launch(pool: RankPool, cell: Cell) -> CoreRun:
    """Runs the cell on the ranks."""
    run = pool.run(training.run, *arguments(cell), list(cell.faults), list(cell.step_ns))
    return CoreRun(cell, run)
