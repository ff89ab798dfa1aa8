"""How far two values are apart, and the table of the worst case of every quantity.

The unit is u = ||x - y|| / (eps(dtype) ||y||) with L2 norms over a whole tensor: ulps of the
tensor's own size. A per-element relative error would judge the elements that cancelled to
nearly nothing; an absolute one would pass a tensor of small numbers unseen.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from parity_tests.harness.tolerances import EPS, Tolerance


def ulps(x: np.ndarray, y: np.ndarray, *, dtype: str = "") -> float:
    """Distance of ``x`` from ``y`` in u; 0 if equal, infinite if they cannot be compared.

    NaN and infinities must stand at the same places with the same sign; the rest is measured.

    Args:
        x: any shape.
        y: the same shape; its norm is the yardstick. If that is 0, only zeros are near it.
        dtype: whose eps is the unit; that of ``x`` and ``y`` if empty.

    Raises:
        ValueError: the shapes, or (without ``dtype``) the dtypes, differ.
    """
    if x.shape != y.shape or (not dtype and x.dtype != y.dtype):
        raise ValueError(f"{x.dtype}{x.shape} against {y.dtype}{y.shape}")
    eps = EPS[dtype or x.dtype.name]
    wide_x, wide_y = x.astype(np.float64, copy=False), y.astype(np.float64, copy=False)
    if (usual := _of_usual_size(wide_x.ravel(), wide_y.ravel())) is not None:
        return usual / eps
    finite = np.isfinite(wide_y)
    if not np.array_equal(wide_x[~finite], wide_y[~finite], equal_nan=True):
        return float("inf")
    # Divided by the largest value first, so that squares neither overflow nor vanish.
    largest = np.abs(wide_y[finite]).max(initial=0.0)
    scale = largest if largest > 0 else 1.0
    distance = float(np.linalg.norm((wide_x[finite] - wide_y[finite]) / scale))
    size = float(np.linalg.norm(wide_y[finite] / scale))
    if distance == 0:
        return 0.0
    return distance / (eps * size) if size > 0 and np.isfinite(distance) else float("inf")


def _of_usual_size(x: np.ndarray, y: np.ndarray) -> float | None:
    """Relative distance, or None if a square overflows, vanishes, or is not a number.

    Most comparisons end here, and there are a hundred thousand of them.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        gap = x - y
        distance, size = float(gap @ gap), float(y @ y)
    if not (1e-280 < size < math.inf and distance < math.inf):
        return None
    if 0 < distance < 1e-280 or (distance == 0 and gap.any()):
        return None
    return math.sqrt(distance / size)


def element_steps(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Per element, how many representable numbers lie between ``x`` and ``y``, as int64.

    For results that should agree but for the rounding of single operations. Both zeros are
    the same number; finite values only.
    """
    if x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError(f"{x.dtype}{x.shape} against {y.dtype}{y.shape}")
    steps: np.ndarray = np.abs(_ordinal(x) - _ordinal(y))
    return steps


def _ordinal(x: np.ndarray) -> np.ndarray:
    """Integers in the order of the floats: adjacent floats have adjacent integers."""
    bits = np.dtype(f"int{8 * x.dtype.itemsize}")
    raw = np.ascontiguousarray(x).view(bits).astype(np.int64)
    return np.where(raw < 0, np.int64(np.iinfo(bits).min) - raw, raw)


class Row(NamedTuple):
    """One measured difference."""

    quantity: str
    dtype: str
    error: float  # u
    tolerance: float  # u
    reason: str  # where the tolerance comes from


@dataclass(slots=True)
class ErrorTable:
    """Every comparison of a session; keeps the worst of each (quantity, dtype)."""

    worst: dict[tuple[str, str], Row] = field(default_factory=dict)
    counts: dict[tuple[str, str], int] = field(default_factory=dict)

    def check(
        self,
        quantity: str,
        x: np.ndarray,
        y: np.ndarray,
        tolerance: Tolerance,
        *,
        dtype: str = "",
        where: str = "",
    ) -> float:
        """Enters the distance of ``x`` from ``y`` and asserts that it is within tolerance.

        Args:
            quantity: what is compared, a line of the table: "gradient", "anchor".
            x: of the core.
            y: of the reference.
            tolerance: from ``tolerances``.
            dtype: see ``ulps``; also names the line.
            where: the case, for the message: a parameter's name, a rank, a step.

        Returns:
            The distance in u.

        Raises:
            AssertionError: it exceeds the tolerance.
        """
        error = ulps(x, y, dtype=dtype)
        self._enter(Row(quantity, dtype or x.dtype.name, error, tolerance.value, tolerance.reason))
        assert error <= tolerance.value, (
            f"{quantity} {where}: {error:.3g} u exceeds {tolerance.value:.3g} u "
            f"({tolerance.reason})"
        )
        return error

    def _enter(self, row: Row, count: int = 1) -> None:
        key = row.quantity, row.dtype
        self.counts[key] = self.counts.get(key, 0) + count
        if key not in self.worst or _share(row) > _share(self.worst[key]):
            self.worst[key] = row

    def as_lists(self) -> list[list[Any]]:
        """Rows and counts as plain data, to be sent to another process."""
        return [[*row, self.counts[key]] for key, row in self.worst.items()]

    def merge(self, rows: list[list[Any]]) -> None:
        """Enters what ``as_lists`` of another process's table gave."""
        for *row, count in rows:
            self._enter(Row(*row), count)

    def lines(self) -> list[str]:
        """The table as text, a line for each quantity and dtype."""
        if not self.worst:
            return []
        head = ("quantity", "dtype", "compared", "worst u", "allowed u", "allowed because")
        rows = [
            (
                r.quantity,
                r.dtype,
                str(self.counts[key]),
                f"{r.error:.3g}",
                f"{r.tolerance:.4g}",
                r.reason,
            )
            for key, r in sorted(self.worst.items())
        ]
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        return [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in [head, *rows]
        ]


def _share(row: Row) -> float:
    """How much of its tolerance a row has used; of two exact rows the first stays."""
    return row.error / row.tolerance if row.tolerance > 0 else row.error


def mismatches(x: np.ndarray, y: np.ndarray) -> tuple[float, int]:
    """Share of elements that differ, and the largest difference in representable numbers.

    The test for bfloat16 operations, where a norm hides a wrong order of casts.
    """
    steps = element_steps(x, y)
    return float((steps > 0).mean()) if steps.size else 0.0, int(steps.max(initial=0))
