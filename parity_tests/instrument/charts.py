"""Two figures: how errors grow with the steps, and which parameter is off in which step."""

import math
from collections.abc import Sequence
from pathlib import Path

from core_torch.report.figures import Drawn
from core_torch.report.style import LIGHT, Theme, drawing, method_line, new_figure, save
from core_torch.report.text import counted, method_title, one_line
from parity_tests.instrument.results import CellResult, GrowthPoint
from parity_tests.instrument.terminal import ulps_text

FLOOR = 0.1  # u; equal numbers are drawn here, because a logarithm has no zero
CEILING = 1e17  # u; what is infinitely far apart is drawn here
GROUPS = (("model", "forward, backward, grad"), ("AdamW", "updates and moments"), ("rounds", ""))
FEW_CELLS = 9
LEAST, MOST = 1e-3, 1e3  # shares of a tolerance between which the map has colours
LABEL = 34  # characters of a parameter's name that fit beside the map


def title_of(cell: CellResult) -> str:
    """A cell on one line."""
    return f"{method_title(cell.method)} {cell.mesh} {cell.dtype} {cell.model} {cell.core}"


def decade(value: float, place: float = 0) -> str:
    """A power of ten as a label, without a formula: 10³."""
    digits = str(round(math.log10(value)))
    return "10" + digits.translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def draw_growth(cells: Sequence[CellResult], path: Path, theme: Theme = LIGHT) -> Drawn | None:
    """Distance over steps for each group of phases, beside the model of the tolerances.

    Returns:
        None if no cell has any step.
    """
    groups = [(g, note) for g, note in GROUPS if any(p.group == g for c in cells for p in c.growth)]
    if not groups:
        return None
    worst = max((p for c in cells for p in c.growth), key=lambda p: p.ulps / p.tolerance)
    share = 100 * worst.ulps / worst.tolerance
    title = "Errors grow, if at all, within the square-root model: at most " + (
        f"{share:.0f} % of it"
    )
    if share > 100:
        title = f"Errors leave the square-root model: {ulps_text(worst.ulps / worst.tolerance)} "
        title += f"times what it allows ({worst.group}, step {worst.step})"
    with drawing(theme):
        figure = new_figure(1.5 + 1.55 * len(groups), title, "", theme)
        panels = figure.subplots(len(groups), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (group, note) in zip(panels, groups, strict=True):
            _growth_panel(axes, cells, group, theme)
            axes.set_title(f"{group}: {note}" if note else group, loc="left", fontsize=10.5)
            axes.set_ylabel("u")
        panels[-1].set_xlabel("inner step")
        handles, labels = panels[0].get_legend_handles_labels()
        named = dict(zip(labels, handles, strict=True))
        if len(named) <= FEW_CELLS + 1:
            panels[0].legend(
                named.values(), named, loc="lower right", ncols=3, bbox_to_anchor=(1, 1.12)
            )
        save(figure, path)
    caption = (
        "Full: of each step the event that uses most of its tolerance, in ulps of its own size. "
        "Dashed: what is allowed, 4 √t (r + √(L K)) after the first update; r falls as parameters "
        f"move away from their start. Equal numbers are drawn at {FLOOR:g} u."
    )
    return Drawn(path, title, caption, f"Line chart of distances over steps. {title}.")


def _growth_panel(axes: "object", cells: Sequence[CellResult], group: str, theme: Theme) -> None:
    from matplotlib.axes import Axes
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    assert isinstance(axes, Axes)
    seen: dict[str, int] = {}
    for cell in cells:
        points = [p for p in cell.growth if p.group == group]
        if not points:
            continue
        repeat = seen[cell.method] = seen.get(cell.method, -1) + 1
        colour = method_line(theme, cell.method, 0)["color"]
        steps = [p.step for p in points]
        label = method_title(cell.method) if repeat == 0 else None
        width = 2.0 if len(cells) <= FEW_CELLS else 1.0
        marker = "o" if len(points) <= 20 else ""
        drawn = [min(max(p.ulps, FLOOR), CEILING) for p in points]
        axes.plot(
            steps, drawn, color=colour, label=label, linewidth=width, marker=marker, markersize=3
        )
        _allowed(axes, points, colour if len(cells) > 1 else theme.muted)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=6))
    axes.yaxis.set_major_formatter(decade)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.02, y=0.12)


def _allowed(axes: "object", points: Sequence[GrowthPoint], colour: str) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    steps, allowed = [p.step for p in points], [p.tolerance for p in points]
    axes.plot(steps, allowed, color=colour, linestyle=(0, (4, 2)), linewidth=1.0, alpha=0.7)


def draw_heat(cell: CellResult, path: Path, theme: Theme = LIGHT) -> Drawn | None:
    """What every parameter used of its tolerance in every step.

    Returns:
        None if the traces told of no parameters.
    """
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.ticker import MaxNLocator

    names, steps = cell.heat.names, cell.heat.steps
    if not names or not steps:
        return None
    values = [[math.log10(min(max(x, LEAST), MOST)) for x in row] for row in cell.heat.shares]
    largest = max(x for row in cell.heat.shares for x in row if not math.isnan(x))
    title = f"Parameter × step: at most {100 * largest:.0f} % of what is allowed"
    if largest > 1:
        title = f"Parameter × step: up to {ulps_text(largest)} times what is allowed"
    with drawing(theme):
        figure = new_figure(1.1 + 0.2 * len(names), title, title_of(cell), theme)
        axes = figure.subplots()
        blue, orange = theme.methods["diloco"], theme.methods["edit"]
        middle = -math.log10(LEAST) / (math.log10(MOST) - math.log10(LEAST))
        shades = [(0.0, theme.paper), (middle, blue), (middle, orange), (1.0, theme.ink)]
        colours = LinearSegmentedColormap.from_list("share", shades)
        edges = [step - 0.5 for step in steps] + [steps[-1] + 0.5]
        rows = [i - 0.5 for i in range(len(names) + 1)]
        norm = Normalize(math.log10(LEAST), math.log10(MOST))
        mesh = axes.pcolormesh(edges, rows, values, cmap=colours, norm=norm)
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.set_yticks(range(len(names)), [one_line(name, LABEL) for name in names], fontsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("inner step")
        ticks = [math.log10(LEAST), 0.0, math.log10(MOST)]
        bar = figure.colorbar(mesh, ax=axes, pad=0.02, ticks=ticks)
        bar.ax.set_yticklabels([f"{LEAST:g}", "allowed", f"×{MOST:g}"], fontsize=8)
        save(figure, path)
    caption = (
        f"{counted(len(names), 'parameter')} in the order of the forward. Of each step the event "
        "of that parameter (gradient, update, moments, rounds) that used most of its tolerance; "
        "what is orange or darker diverged. A fault in one place begins as one such field."
    )
    return Drawn(path, title, caption, f"Heat map of shares of tolerances. {title}.")
