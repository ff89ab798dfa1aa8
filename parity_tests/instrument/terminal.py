"""Results in the terminal: a table of cells; of one comparison also its phases and rounds."""

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from core_torch.report.text import counted, method_title
from parity_tests.instrument.results import CellResult
from parity_tests.instrument.verdict import advise_cells

SHORT = {"float64": "f64", "float32": "f32", "bfloat16": "bf16"}
MOST_LOG_ROWS = 12
GOOD, BAD = "green", "bold red"


def ulps_text(ulps: float) -> str:
    """A distance as people read it."""
    if not math.isfinite(ulps):
        return "∞"
    return f"{ulps:.0f}" if 100 <= ulps < 1e5 else f"{ulps:.2g}" if ulps else "0"


def print_cells(cells: Sequence[CellResult], console: Console | None = None) -> None:
    """The table of cells, and of those that differ the first divergence.

    Args:
        cells: in the order to be shown.
        console: to print on; None: standard output.
    """
    console = console or Console()
    console.print(cells_table(cells))
    failed = [cell for cell in cells if not cell.ok]
    for cell in failed:
        console.print(account(cell))
    good = len(cells) - len(failed)
    compared = sum(cell.compared for cell in cells)
    console.print(Text(f"\n{good} of {len(cells)} agree; {counted(compared, 'event')} compared"))
    if failed and len(cells) > 1:
        console.print(Text(f"What to try next: {advise_cells(cells)}", style="bold"))


def cells_table(cells: Sequence[CellResult]) -> Table:
    """One row for each cell; the tensor where it differs."""
    headings = ("", "method", "mesh", "dtype", "model", "core", "u / allowed", "where")
    shown = _table(headings, numbers=(6,))
    shown.padding = (0, 1, 0, 0)
    for column in shown.columns[:-1]:
        column.no_wrap = True
    for cell in cells:
        style = GOOD if cell.ok else BAD
        mark = "=" if cell.ok else "≠"
        apart = f"{ulps_text(cell.worst_ulps)} / {ulps_text(cell.tolerance_ulps)}"
        where = cell.phase if cell.ok else f"{cell.phase} {cell.tensor}"
        dtype = SHORT.get(cell.dtype, cell.dtype)
        words = (method_title(cell.method), cell.mesh, dtype, cell.model, cell.core)
        shown.add_row(
            Text(mark, style=style), *map(Text, words), Text(apart, style=style), Text(where)
        )
    return shown


def account(cell: CellResult) -> Text:
    """The first divergence of a cell, its neighbours, and what to try next."""
    title = f"\n{cell.method} {cell.mesh} {cell.dtype} {cell.model} {cell.core}\n"
    told = Text(title, style="bold")
    for line in cell.divergence:
        told.append(f"  {line}\n", style="")
    for event, ulps, allowed, ok in cell.neighbours:
        mark = " " if ok else "≠"
        line = f"  {mark} {ulps_text(ulps):>8} of {ulps_text(allowed):>8} u  {event}\n"
        told.append(line, style="" if ok else BAD)
    told.append(f"  {cell.advice}", style="bold")
    return told


def print_comparison(cell: CellResult, console: Console | None = None) -> None:
    """One comparison in full: phases, rounds, bytes, verdict."""
    console = console or Console()
    console.print(phases_table(cell))
    for phase, count in cell.skipped:
        console.print(Text(f"{counted(count, 'event')} of {phase} only in one trace, left out"))
    if cell.log:
        console.print(log_table(cell))
    if cell.ledger.rows:
        console.print(ledger_table(cell))
    print_cells([cell], console)


def phases_table(cell: CellResult) -> Table:
    """The worst event of each phase, its tolerance and the reason for that."""
    shown = _table(
        ("phase", "events", "worst u", "allowed u", "allowed because"), numbers=(1, 2, 3)
    )
    for row in cell.rows:
        worst = Text(ulps_text(row.worst_ulps), style=GOOD if row.ok else BAD)
        allowed = ulps_text(row.tolerance_ulps)
        shown.add_row(row.phase, str(row.events), worst, allowed, Text(row.reason))
    return shown


def log_table(cell: CellResult) -> Table:
    """Rows of the event log that differ; without any, the last ones."""
    differing = [row for row in cell.log if not row.ok]
    rows = differing[:MOST_LOG_ROWS] or cell.log[-MOST_LOG_ROWS:]
    shown = _table(("round", "unit", "what", "examined", "reference"), numbers=(0,))
    shown.title = f"rounds: {len(differing)} of {len(cell.log)} values differ"
    shown.title_justify = "left"
    for row in rows:
        style = "" if row.ok else BAD
        cells = (str(row.round), row.unit, row.what, row.mine, row.theirs)
        shown.add_row(*(Text(text, style=style) for text in cells))
    return shown


def ledger_table(cell: CellResult) -> Table:
    """Bytes of all steps, by axis."""
    shown = _table(("axis", "examined", "reference", ""), numbers=(1, 2))
    shown.title = "bytes that rank 0 sent"
    shown.title_justify = "left"
    for axis in dict.fromkeys(row.axis for row in cell.ledger.rows):
        rows = [row for row in cell.ledger.rows if row.axis == axis]
        mine, theirs = sum(row.mine for row in rows), sum(row.theirs for row in rows)
        unequal = [row.step for row in rows if not row.ok]
        told = (
            "equal in every step" if not unequal else f"differ in {counted(len(unequal), 'step')}"
        )
        told = told if cell.ledger.comparable else "the meshes differ"
        shown.add_row(axis, f"{mine:,}", f"{theirs:,}", told)
    return shown


def _table(headings: Sequence[str], *, numbers: Sequence[int]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for place, heading in enumerate(headings):
        shown.add_column(heading, justify="right" if place in numbers else "left")
    return shown
