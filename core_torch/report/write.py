"""Puts a report together: figures, numbers and the page in one folder."""

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from core_torch.errors import DataError
from core_torch.report.figures import Drawn, draw_loss_by_bytes, draw_loss_by_tokens
from core_torch.report.html import render_page
from core_torch.report.records import Run, load_run, write_json
from core_torch.report.repeats import draw_spread, has_repeats, repeats
from core_torch.report.round_figures import draw_rounds
from core_torch.report.style import DARK, LIGHT, Theme
from core_torch.report.summary import summary_of
from core_torch.report.table import run_labels

Draw = Callable[[Path, Theme], Drawn | None]


def _drawings(runs: Sequence[Run]) -> dict[str, Draw]:
    """Every figure of a report by file name; a drawing may turn out to have nothing to show.

    Of repeats with other seeds only the first is drawn in curves and rounds.
    """
    found: dict[str, Draw] = {}
    if has_repeats(runs):
        everything = runs
        found["seeds.png"] = lambda path, theme: draw_spread(everything, path, theme)
        runs = [group[0] for group in repeats(runs)]
    if any(run.metrics.get(0) for run in runs):
        found["loss-by-tokens.png"] = lambda path, theme: draw_loss_by_tokens(runs, path, theme)
        found["loss-by-bytes.png"] = lambda path, theme: draw_loss_by_bytes(runs, path, theme)
    for index, (run, label) in enumerate(zip(runs, run_labels(runs), strict=True), start=1):
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", run.folder.name).strip("-")[:40] or "run"

        def draw(path: Path, theme: Theme, run: Run = run, label: str = label) -> Drawn | None:
            return draw_rounds(run, label, path, theme)

        found[f"rounds-{index}-{name}.png"] = draw
    return found


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Writes report.html, its figures as PNG and report.json (one summary per run) into ``out``.

    Args:
        runs: run folders, finished or not; the order of table and legends.
        out: folder of the report, created if missing.

    Returns:
        The page's path. It needs no other file.

    Raises:
        DataError: no runs, or a folder that is none.
    """
    if not runs:
        raise DataError("a report needs at least one run", next="twinshard report runs/default")
    loaded = [load_run(Path(folder)) for folder in runs]
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="twinshard-report-") as scratch:
        figures = []
        for name, draw in _drawings(loaded).items():
            drawn, dark = draw(out / name, LIGHT), draw(Path(scratch) / name, DARK)
            if drawn and dark:
                figures.append((drawn, dark.path))
        page = out / "report.html"
        page.write_text(render_page(loaded, figures), encoding="utf-8")
    entries = [{"run": str(run.folder), **summary_of(run)} for run in loaded]
    write_json(out / "report.json", entries)
    return page
