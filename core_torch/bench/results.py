"""Launches of the benchmark to one result: medians, the check of losses, the machine.

Standard library only.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core_torch.bench.plan import BASELINE, LOSS_TOLERANCE

Row = dict[str, Any]
FIELDS = (
    "variant",
    "step_ms",
    "peak_tensor_bytes",
    "collectives_forward",
    "collectives_backward",
    "bytes",
    "exposed_ms",
    "compile_s",
    "loss",
)


def merged(timed: Sequence[Sequence[Row]], memory: Sequence[Row]) -> list[Row]:
    """One row per variant out of the launches.

    Args:
        timed: rows of each timing launch, variants in the same order.
        memory: rows of the launch that watched memory.

    Times are medians over the launches of each one's median. The rest is the first launch's,
    the one whose compilers found an empty cache.
    """
    rows = []
    for launches, peak in zip(zip(*timed, strict=True), memory, strict=True):
        row = launches[0] | peak
        for name in ("step_ms", "exposed_ms"):
            row[name] = statistics.median(launch[name] for launch in launches)
        rows.append({name: row[name] for name in FIELDS})
    return rows


def unequal_losses(rows: Sequence[Row]) -> list[str]:
    """Variants whose loss is not that of the baseline, or of the first row without one."""
    by_name: dict[str, float] = {row["variant"]: row["loss"] for row in rows}
    want: Any = by_name.get(BASELINE, rows[0]["loss"])
    return [n for n, loss in by_name.items() if not abs(loss - want) <= LOSS_TOLERANCE * abs(want)]


def ratio(row: Row, rows: Sequence[Row], name: str) -> float | None:
    """A value of ``row`` against the baseline's; None where either is missing or zero."""
    base = next((other[name] for other in rows if other["variant"] == BASELINE), None)
    return row[name] / base if base and row[name] is not None else None


def processor_name() -> str | None:
    """What the processor calls itself, where Linux tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else None
