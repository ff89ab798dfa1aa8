"""One self-contained page about one comparison or many: no script, nothing from elsewhere.

Everything that comes from a trace passes ``_text``, which strips control codes and escapes.
"""

import base64
import html
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from core_torch.report.figures import Drawn
from core_torch.report.page_style import STYLE
from core_torch.report.style import DARK, LIGHT, Theme
from core_torch.report.text import counted, method_title, sanitise
from parity_tests.instrument.charts import draw_growth, draw_heat, title_of
from parity_tests.instrument.results import CellResult, PhaseRow
from parity_tests.instrument.terminal import ulps_text
from parity_tests.instrument.verdict import advise_cells

POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'"
)
HEADINGS = ("method", "mesh", "dtype", "model", "core", "worst u", "allowed u", "phase", "tensor")
MOST_MAPS = 3  # heat maps on a page
MANY_CELLS = 12  # from here details are folded
OWN_STYLE = """
body { max-width: 68rem; }
main > figure { max-width: 50rem; }
.verdict { border-left: 4px solid #009e73; background: var(--soft); padding: 0.6rem 0.9rem; }
.verdict.bad { border-color: #d55e00; }
.verdict strong { font-size: 1.15rem; }
td.mark, th.mark { text-align: center; }
.good { color: #007a59; font-weight: 600; }
.bad td, .bad th, td.bad { color: #c04a00; font-weight: 600; }
@media (prefers-color-scheme: dark) { .good { color: #2fc49a; }
  .bad td, .bad th, td.bad { color: #ff8c42; } }
table.plain td, table.plain th { text-align: left; }
table.plain td.number, table.plain th.number { text-align: right; white-space: nowrap; }
table.plain { font-size: 0.88rem; }
"""
READING = """
<p class="note">u is the distance of two tensors in L2 norm over eps(dtype) times the norm of the
reference: ulps of the tensor's own size. Of bfloat16 compute u is in ulps of bfloat16. Events are
compared by sketches of sixteen signed sums, which estimate a distance to about a fifth. What is
allowed follows from eps, the number of steps and the sizes of the model and of what moved; no
tolerance was tuned. Shown is the event that uses most of its tolerance.</p>
"""
Row = tuple[Sequence[str], bool]  # cells, and whether all is well


def _text(value: object) -> str:
    return html.escape(sanitise(str(value)), quote=True)


def write_page(
    path: Path, cells: Sequence[CellResult], *, title: str = "Parity", lead: str = ""
) -> None:
    """Writes the page of these cells.

    Args:
        path: of the HTML file.
        cells: at least one, in the order to be shown.
        title: heading.
        lead: a sentence below it: what was compared with what.
    """
    path.write_text(render(cells, title=title, lead=lead), encoding="utf-8")


def render(cells: Sequence[CellResult], *, title: str, lead: str) -> str:
    """The page as text, which refers to nothing outside itself."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        f"<title>{_text(title)}</title><style>{STYLE}{OWN_STYLE}</style></head><body>",
        f'<header><h1>{_text(title)}</h1><p class="lead">{_text(lead)}</p></header><main>',
        _verdict(cells),
        "<h2>Cells</h2>" if len(cells) > 1 else "<h2>Result</h2>",
        _cells(cells),
        READING,
        *(_divergence(cell) for cell in cells if not cell.ok),
        "<h2>Worst distance of each phase</h2>",
        _phases_by_method(cells) if len(cells) > 1 else _phases(cells[0]),
        _figures(cells),
        _details(cells),
        "</main></body></html>\n",
    ]
    return "\n".join(parts)


def _verdict(cells: Sequence[CellResult]) -> str:
    failed = [cell for cell in cells if not cell.ok]
    events = counted(sum(cell.compared for cell in cells), "event")
    if not failed:
        said = "They agree." if len(cells) == 1 else f"All {len(cells)} cells agree."
        return f'<p class="verdict"><strong>{said}</strong> {events} compared.</p>'
    said = "They differ." if len(cells) == 1 else f"{len(failed)} of {len(cells)} cells differ."
    advice = failed[0].advice if len(cells) == 1 else advise_cells(cells)
    return (
        f'<p class="verdict bad"><strong>{said}</strong> {events} compared. '
        f"What to try next: {_text(advice)}</p>"
    )


def _table(headings: Sequence[str], rows: Sequence[Row], *, numbers: Sequence[int] = ()) -> str:
    """A table of text; rows in which something differs stand out."""

    def cells_of(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=number' if i in numbers else ''}>{_text(cell)}</{tag}>"
            for i, cell in enumerate(cells)
        )

    body = "".join(
        f"<tr{'' if ok else ' class=bad'}>{cells_of('td', cells)}</tr>" for cells, ok in rows
    )
    head = f"<thead><tr>{cells_of('th', headings)}</tr></thead>"
    return f'<div class="scroll"><table class="plain">{head}<tbody>{body}</tbody></table></div>'


def _cells(cells: Sequence[CellResult]) -> str:
    rows: list[Row] = [
        (
            (
                "=" if cell.ok else "≠",
                method_title(cell.method),
                cell.mesh,
                cell.dtype,
                cell.model,
                cell.core,
                ulps_text(cell.worst_ulps),
                ulps_text(cell.tolerance_ulps),
                cell.phase,
                cell.tensor,
            ),
            cell.ok,
        )
        for cell in cells
    ]
    return _table(("", *HEADINGS), rows, numbers=(6, 7))


def _divergence(cell: CellResult) -> str:
    lines = "".join(f"<li>{_text(line)}</li>" for line in cell.divergence)
    rows: list[Row] = [
        ((event, ulps_text(ulps), ulps_text(allowed)), ok)
        for event, ulps, allowed, ok in cell.neighbours
    ]
    around = _table(("in program order", "u", "allowed u"), rows, numbers=(1, 2)) if rows else ""
    return (
        f"<h2>First divergence: {_text(title_of(cell))}</h2><ul>{lines}</ul>{around}"
        f"<p><strong>What to try next.</strong> {_text(cell.advice)}</p>"
    )


def _phases(cell: CellResult) -> str:
    rows: list[Row] = [
        (
            (
                row.phase,
                str(row.events),
                ulps_text(row.worst_ulps),
                ulps_text(row.tolerance_ulps),
                row.reason,
                row.what,
            ),
            row.ok,
        )
        for row in cell.rows
    ]
    headings = ("phase", "events", "worst u", "allowed u", "allowed because", "worst event")
    return _table(headings, rows, numbers=(1, 2, 3))


def _phases_by_method(cells: Sequence[CellResult]) -> str:
    """For each dtype a table phase x method: worst u / allowed u over the cells."""
    parts = []
    for dtype in dict.fromkeys(cell.dtype for cell in cells):
        mine = [cell for cell in cells if cell.dtype == dtype]
        methods = list(dict.fromkeys(cell.method for cell in mine))
        rows: list[Row] = []
        for phase in dict.fromkeys(row.phase for cell in mine for row in cell.rows):
            found = [_worst(mine, method, phase) for method in methods]
            told = [
                f"{ulps_text(row.worst_ulps)} / {ulps_text(row.tolerance_ulps)}" if row else "–"
                for row in found
            ]
            rows.append(((phase, *told), all(row.ok for row in found if row)))
        headings = ("phase", *map(method_title, methods))
        table = _table(headings, rows, numbers=range(1, len(headings)))
        parts.append(f"<h3>{_text(dtype)}: worst u / allowed u</h3>{table}")
    return "".join(parts)


def _worst(cells: Sequence[CellResult], method: str, phase: str) -> PhaseRow | None:
    """Of a method's cells, what used most of its tolerance in a phase."""
    rows = [row for cell in cells if cell.method == method for row in cell.rows]
    return max((row for row in rows if row.phase == phase), key=_share, default=None)


def _share(row: PhaseRow) -> float:
    return row.worst_ulps / row.tolerance_ulps if row.tolerance_ulps else row.worst_ulps


def _figures(cells: Sequence[CellResult]) -> str:
    """Growth over all cells; maps of those that differ, or else of the one nearest to that."""
    nearest = max(cells, key=lambda cell: cell.worst_ulps / max(cell.tolerance_ulps, 1e-300))
    chosen = [cell for cell in cells if not cell.ok][:MOST_MAPS] or [nearest]
    drawings: list[Callable[[Path, Theme], Drawn | None]]
    drawings = [lambda path, theme: draw_growth(cells, path, theme)]
    drawings += [lambda path, theme, c=cell: draw_heat(c, path, theme) for cell in chosen]  # type: ignore[misc]
    told = []
    with tempfile.TemporaryDirectory(prefix="twinshard-figures-") as folder:
        for i, draw in enumerate(drawings):
            light, dark = (Path(folder) / f"{i}-{theme.name}.png" for theme in (LIGHT, DARK))
            drawn = draw(light, LIGHT)
            if drawn is not None:
                draw(dark, DARK)
                told.append(_figure(drawn, dark))
    return f"<h2>Figures</h2>{''.join(told)}" if told else ""


def _figure(drawn: Drawn, dark: Path) -> str:
    def image(path: Path) -> str:
        encoded = base64.b64encode(path.read_bytes()).decode("ascii")
        return f"data:image/png;base64,{encoded}"

    return (
        "<figure><picture>"
        f'<source media="(prefers-color-scheme: dark)" srcset="{image(dark)}">'
        f'<img src="{image(drawn.path)}" alt="{_text(drawn.alternative)}">'
        f"</picture><figcaption>{_text(drawn.caption)}</figcaption></figure>"
    )


def _details(cells: Sequence[CellResult]) -> str:
    """Phases, rounds and bytes of every cell; folded where there are many."""
    parts = []
    for cell in cells:
        inside = "" if len(cells) == 1 else _phases(cell)
        inside += _log(cell) + _ledger(cell)
        skipped = ", ".join(f"{count} of {phase}" for phase, count in cell.skipped)
        if skipped:
            inside += f'<p class="note">Only one side taps these events: {_text(skipped)}.</p>'
        if cell.note:
            inside += f'<p class="note">{_text(cell.note)}</p>'
        if len(cells) == 1:
            parts.append(inside)
        else:
            is_open = " open" if not cell.ok and len(cells) < MANY_CELLS else ""
            told = f"{'=' if cell.ok else '≠'} {title_of(cell)}"
            summary = f"<summary>{_text(told)}</summary>"
            parts.append(f"<details{is_open}>{summary}{inside}</details>")
    heading = "<h2>Every cell</h2>" if len(cells) > 1 else ""
    return heading + "".join(parts)


def _log(cell: CellResult) -> str:
    if not cell.log:
        return ""
    rows: list[Row] = [
        ((str(row.round), row.unit, row.what, row.mine, row.theirs), row.ok) for row in cell.log
    ]
    differing = sum(not row.ok for row in cell.log)
    title = f"<h3>Rounds side by side: {differing} of {len(rows)} values differ</h3>"
    headings = ("round", "unit", "what", "examined", "reference")
    return title + _table(headings, rows, numbers=(0,))


def _ledger(cell: CellResult) -> str:
    if not cell.ledger.rows:
        return ""
    rows: list[Row] = [
        (
            (str(row.step), row.axis, f"{row.mine:,}", f"{row.theirs:,}"),
            row.ok or not cell.ledger.comparable,
        )
        for row in cell.ledger.rows
    ]
    note = "" if cell.ledger.comparable else ", on meshes of different shape"
    title = f"<h3>Bytes that rank 0 handed to collectives{note}</h3>"
    return title + _table(("step", "axis", "examined", "reference"), rows, numbers=(0, 2, 3))
