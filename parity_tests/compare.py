"""Comparing what ranks hold with what the reference computed, shard by shard, field by field."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from parity_tests.cells import Cell
from parity_tests.core_runs import Shards
from parity_tests.harness import jax_bridge
from parity_tests.harness.tolerances import Tolerance
from parity_tests.harness.ulps import ErrorTable
from parity_tests.reference_runs import on_ranks

Allowed = Tolerance | Callable[[float, float], Tolerance]  # of the norms of start and update
VERDICTS = ("units", "finite", "flagged", "rearmed", "anomalous", "rollback")
NUMBERS = ("norm", "weight", "effective_replicas", "combined_norm", "clip")


class Comparer(NamedTuple):
    """Enters differences between one run's ranks and the reference in the table."""

    errors: ErrorTable
    cell: Cell
    mode: str  # "locked" or "free", the first word of each line of the table

    def shards(
        self,
        quantity: str,
        core: list[Shards],
        reference: Mapping[str, Any],
        allowed: Allowed,
        *,
        where: str,
        stacked: bool = True,
        since: list[Shards] | None = None,
    ) -> None:
        """Each rank's rows against those of the device in its place.

        Args:
            quantity: a line of the table.
            core: rows of all ranks.
            reference: arrays, [R, ...] if ``stacked``.
            allowed: a tolerance, or what it is for a start and an update of these norms.
            where: for the message.
            stacked: whether the reference has a replica axis.
            since: what to subtract from both, so that updates are compared.
        """
        arrays = on_ranks(self.cell, reference, axis=1 if stacked else 0)
        replicas = self.cell.replicas
        pairs = jax_bridge.paired(core, arrays, replicas=replicas, stacked=stacked)
        starts = jax_bridge.paired(since or core, arrays, replicas=replicas, stacked=stacked)
        for pair, start in zip(pairs, starts, strict=True):
            x, y, size = pair.core, pair.reference, 0.0
            if since is not None:
                with np.errstate(invalid="ignore"):
                    x, y = x - start.core, y - start.core
                size = norm(start.core)
            tolerance = allowed if isinstance(allowed, Tolerance) else allowed(size, norm(y))
            self.check(quantity, x, y, tolerance, where=f"{pair.where}, {where}")

    def check(
        self, quantity: str, x: np.ndarray, y: np.ndarray, tolerance: Tolerance, *, where: str
    ) -> None:
        """One pair of arrays."""
        where = f"{where}, {self.cell}"
        self.errors.check(f"{self.mode}: {quantity}", x, y, tolerance, where=where)

    def events(
        self, core: dict[str, Any], reference: dict[str, Any], tolerance: Tolerance, *, where: str
    ) -> None:
        """Two accounts of a round: verdicts exactly, numbers unit by unit within tolerance."""
        for key in VERDICTS:
            assert core[key] == reference[key], f"{key} {where}: {core[key]} {reference[key]}"
        for key in NUMBERS:
            x_U, y_U = (np.array(event[key], self.cell.dtype) for event in (core, reference))
            for unit, x, y in zip(core["units"], x_U, y_U, strict=True):
                x, y = np.atleast_1d(x), np.atleast_1d(y)
                self.check(f"event {key}", x, y, tolerance, where=f"{unit}, {where}")

    def statistics(
        self,
        core: Mapping[str, np.ndarray],
        reference: Mapping[str, np.ndarray],
        tolerance: Tolerance,
        *,
        where: str,
    ) -> None:
        """Counts exactly; spread in the unit of the mean, which it is a difference from."""
        for key in ("count_R", "flags_R"):
            np.testing.assert_array_equal(core[key], reference[key], err_msg=f"{key} {where}")
        x, y = (np.stack([s["mean_R"], np.sqrt(s["var_R"])], axis=1) for s in (core, reference))
        for u in range(len(x)):
            self.check("statistics", x[u], y[u], tolerance, where=f"unit {u}, {where}")


def norm(x: np.ndarray) -> float:
    """L2 norm of what is finite."""
    wide = x.astype(np.float64)
    return float(np.linalg.norm(wide[np.isfinite(wide)]))
