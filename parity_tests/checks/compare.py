"""Comparing what ranks hold with what the reference computed, shard by shard, field by field."""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from parity_tests.checks.cells import Cell
from parity_tests.checks.core_runs import Host, Shards
from parity_tests.checks.reference_runs import on_ranks
from parity_tests.harness import jax_bridge
from parity_tests.harness.names import same_names
from parity_tests.harness.tolerances import Tolerance
from parity_tests.harness.ulps import ErrorTable

Allowed = Tolerance | Callable[[float, float], Tolerance]  # of the norms of start and update
VERDICTS = ("units", "finite", "flagged", "rearmed", "anomalous", "rollback")
NUMBERS = ("norm", "weight", "effective_replicas", "combined_norm", "clip")


class Comparer(NamedTuple):
    """Enters differences between one run's ranks and the reference in the table."""

    errors: ErrorTable
    cell: Cell
    mode: str  # "locked" or "free", the first word of each line of the table

    @property
    def in_the_parameters_dtype(self) -> "Comparer":
        """For what is computed in it although the model computes in another."""
        return self._replace(cell=replace(self.cell, compute="same"))

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
        is_update: bool = False,
    ) -> None:
        """Each rank's rows against those of the device in its place.

        Args:
            quantity: a line of the table.
            core: rows of all ranks.
            reference: arrays, [R, ...] if ``stacked``.
            allowed: a tolerance, or what it is for a start and an update of these norms.
            where: for the message.
            stacked: whether the reference has a replica axis.
            since: where an update began, or what a pseudo-gradient was subtracted from.
            is_update: ``since`` has yet to be subtracted.
        """
        cell = self.cell
        arrays = on_ranks(cell, reference, axis=1 if stacked else 0)
        pairs = jax_bridge.paired(core, arrays, replicas=cell.replicas, stacked=stacked)
        for name, of_name in itertools.groupby(pairs, lambda pair: pair.where.split()[0]):
            rows = [Rows(pair.where, pair.core, pair.reference, 0.0) for pair in of_name]
            if since is not None:
                starts = [rank[name]["rows"] for rank in since]
                rows = [r.since(x, is_update) for r, x in zip(rows, starts, strict=True)]
            for n in range(cell.replicas):
                group = rows[n * cell.shards : (n + 1) * cell.shards]
                self._tensor(quantity, group, allowed, where)

    def tensors(
        self,
        quantity: str,
        core_R: Host,
        reference_R: Host,
        allowed: Allowed,
        *,
        where: str,
        since_R: Host | None = None,
        is_update: bool = False,
    ) -> None:
        """The same for whole [R, ...] tensors on the host."""
        for name in same_names(core_R, reference_R):
            pairs = zip(core_R[name], reference_R[name], strict=True)
            for n, (x, y) in enumerate(pairs):
                row = Rows(f"{name} of replica {n}", x, y, 0.0)
                if since_R is not None:
                    row = row.since(since_R[name][n], is_update)
                self._tensor(quantity, [row], allowed, where)

    def _tensor(self, quantity: str, rows: list["Rows"], allowed: Allowed, where: str) -> None:
        """The shards of one tensor of one replica.

        A shard in which the tensor happens to be small is measured as if it were as large as
        the tensor is elsewhere: what cancelled in it was of that size.
        """
        whole = math.hypot(*(norm(r.reference) for r in rows))
        elements = sum(r.reference.size for r in rows)
        for r in rows:
            own, share = norm(r.reference), r.reference.size / elements
            usual = max(own, whole * math.sqrt(share))
            tolerance = allowed if isinstance(allowed, Tolerance) else allowed(r.start, usual)
            if 0 < own < usual:
                tolerance = tolerance._replace(value=tolerance.value * usual / own)
            self.check(quantity, r.core, r.reference, tolerance, where=f"{r.where}, {where}")

    def check(
        self, quantity: str, x: np.ndarray, y: np.ndarray, tolerance: Tolerance, *, where: str
    ) -> None:
        """One pair of arrays, in ulps of the dtype that the cell computes in."""
        where, dtype = f"{where}, {self.cell}", self.cell.compute
        unit = "" if dtype == "same" else dtype
        self.errors.check(f"{self.mode}: {quantity}", x, y, tolerance, dtype=unit, where=where)

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


class Rows(NamedTuple):
    """The same rows of a tensor in both cores, and the norm of what they began as."""

    where: str
    core: np.ndarray
    reference: np.ndarray
    start: float

    def since(self, begun: np.ndarray, is_update: bool) -> "Rows":
        """These rows with the size of ``begun``, which is subtracted from an update."""
        if not is_update:
            return self._replace(start=norm(begun))
        with np.errstate(invalid="ignore"):
            return Rows(self.where, self.core - begun, self.reference - begun, norm(begun))


def norm(x: np.ndarray) -> float:
    """L2 norm of what is finite."""
    wide = x.astype(np.float64, copy=False).ravel()
    square = float(wide @ wide)
    if not math.isfinite(square):
        return float(np.linalg.norm(wide[np.isfinite(wide)]))
    return math.sqrt(square)
