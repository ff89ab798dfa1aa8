"""``twinshard parity run``: the core beside the reference over a matrix of cells. Needs JAX.

Free: both cores run by themselves, each writes a trace, and the traces are compared. Locked: each
phase of the reference gets what the core held before it, so nothing accumulates; that needs
rounds that are over when their step is, and the other methods run free.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from parity_tests.checks.cells import METHODS as AT_ONCE
from parity_tests.checks.cells import Cell
from parity_tests.checks.core_runs import launch
from parity_tests.checks.training import check_locked
from parity_tests.harness.pool import RankPool
from parity_tests.harness.tolerances import Tolerance
from parity_tests.harness.ulps import ErrorTable, ulps
from parity_tests.instrument.cells import dtype_of
from parity_tests.instrument.diff import compare
from parity_tests.instrument.files import Trace, read_trace
from parity_tests.instrument.recording import record_core, record_reference
from parity_tests.instrument.results import CellResult, PhaseRow, cell_result

Mode = Literal["free", "locked"]
PHASE_OF = {
    "loss": "forward",
    "gradient": "grad",
    "gradient norm": "clip",
    "AdamW update": "optim",
    "AdamW exp_avg": "optim",
    "AdamW exp_avg_sq": "optim",
    "combined": "sync.merge",
    "anchor update": "sync.outer",
    "velocity": "sync.outer",
    "healed moments": "sync.params",
    "statistics": "sync.end",
}


class References:
    """Traces of the reference by itself; cells that differ in shards or core share one.

    Args:
        folder: to write them into.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[Cell, Trace] = {}

    def of(self, cell: Cell) -> Trace:
        """The trace of a cell, made when it is first needed."""
        alone = cell.on_one_shard
        if alone not in self._made:
            place = self._folder / f"reference-{len(self._made)}"
            self._made[alone] = read_trace(record_reference(alone, place))
        return self._made[alone]


def run(
    pool: RankPool,
    cells: Sequence[Cell],
    *,
    mode: Mode = "free",
    tell: Callable[[CellResult], None] = lambda result: None,
) -> list[CellResult]:
    """Compares the cores on every cell.

    Args:
        pool: of ranks.
        cells: in any order.
        mode: see above.
        tell: called with each result as it comes.

    Raises:
        RanksFailed: a rank raised or did not answer.
    """
    results = []
    with tempfile.TemporaryDirectory(prefix="twinshard-parity-") as place:
        references = References(Path(place))
        for i, cell in enumerate(cells):
            if mode == "locked" and cell.method in AT_ONCE:
                result = locked(pool, cell)
            else:
                result = free(pool, cell, references, Path(place) / f"core-{i}")
            results.append(result)
            tell(result)
    return results


def free(
    pool: RankPool, cell: Cell, references: References, folder: Path, mutant: str | None = None
) -> CellResult:
    """Both cores by themselves.

    Args:
        pool: of ranks.
        cell: what to run.
        references: of the session.
        folder: for the core's trace.
        mutant: a fault to put into the core, see ``canary.py``.
    """
    mine = read_trace(record_core(pool, cell, folder, mutant=mutant))
    return cell_result(compare(mine, references.of(cell)), core=cell.sharding)


class Entry(NamedTuple):
    """One comparison of the locked mode."""

    quantity: str  # without the mode
    where: str
    ulps: float
    tolerance: Tolerance

    @property
    def phase(self) -> str:
        """Of a trace, in which this would be seen."""
        return PHASE_OF.get(self.quantity, "sync.vote")

    @property
    def share(self) -> float:
        """Part of the tolerance that is used up."""
        if self.tolerance.value > 0:
            return self.ulps / self.tolerance.value
        return 0.0 if self.ulps == 0 else np.inf


class Protocol(ErrorTable):
    """Takes down every comparison in its order, and lets the run go on."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []

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
        """As in ``ErrorTable``, without an assertion."""
        error = ulps(x, y, dtype=dtype)
        self.entries.append(Entry(quantity.split(": ", 1)[-1], where, error, tolerance))
        return error


def locked(pool: RankPool, cell: Cell) -> CellResult:
    """Each phase on the core's own inputs."""
    protocol, broken = Protocol(), ""
    try:
        check_locked(protocol, launch(pool, cell))
    except AssertionError as error:  # decisions and counts, which must be equal
        broken = str(error).partition("\n")[0]
    entries = protocol.entries
    over = [entry for entry in entries if entry.share > 1]
    shown = over[0] if over else max(entries, key=lambda entry: entry.share)
    ok = not over and not broken
    return CellResult(
        method=cell.method,
        mesh=f"{cell.replicas}x{cell.shards}",
        dtype=dtype_of(cell),
        model=cell.model,
        core=cell.sharding,
        worst_ulps=shown.ulps,
        tolerance_ulps=shown.tolerance.value,
        phase=shown.phase,
        tensor=shown.where.partition(",")[0],
        ok=ok,
        rows=tuple(rows_of(entries)),
        divergence=() if ok else tuple(filter(None, (broken, shown.where if over else ""))),
        compared=len(entries),
        mode="locked",
    )


def rows_of(entries: Sequence[Entry]) -> list[PhaseRow]:
    """One row for each phase, in program order."""
    counts = Counter(entry.phase for entry in entries)
    worst: dict[str, Entry] = {}
    for entry in entries:
        if entry.phase not in worst or entry.share > worst[entry.phase].share:
            worst[entry.phase] = entry
    return [
        PhaseRow(
            phase,
            counts[phase],
            entry.ulps,
            entry.tolerance.value,
            entry.tolerance.reason,
            f"{entry.quantity} {entry.where}",
            entry.share <= 1,
        )
        for phase, entry in worst.items()
    ]


def named(cells: Sequence[Cell], words: Sequence[str]) -> list[Cell]:
    """Those cells whose name holds every one of ``words``.

    A word that is a whole part of some cell's name must be one: ``edit`` is not A-EDiT.
    """
    parts = {cell: f"{cell}-{cell.sharding}-{dtype_of(cell)}".split("-") for cell in cells}
    known = {part for of_cell in parts.values() for part in of_cell}

    def holds(of_cell: list[str], word: str) -> bool:
        return word in of_cell if word in known else word in "-".join(of_cell)

    return [c for c, of_cell in parts.items() if all(holds(of_cell, word) for word in words)]
