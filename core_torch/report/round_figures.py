"""What the sync rounds saw and decided, per replica: norms, weights, anomalies, clipping.

One figure per run. Norms are drawn for every method with rounds; weights and the decisions per
unit only where the penalty is at work (EDiT).
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core_torch.report.figures import MARKED_POINTS, Drawn, conditions
from core_torch.report.records import Round, Run
from core_torch.report.style import (
    LIGHT,
    Theme,
    drawing,
    label_decades,
    new_figure,
    replica_line,
    save,
)
from core_torch.report.summary import RoundFacts, round_facts, summary_of
from core_torch.report.text import counted, fixed, one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOG_FROM_RATIO = 8.0  # norms that differ more than this need a logarithmic axis
FEW_REPLICAS = 4  # up to here bands and thick lines stay legible
MANY_REPLICAS = 8  # from here the legend would hide the lines
NAMED_UNITS = 12  # up to here every row of the map has its name


def _column(rows_UN: Sequence[Sequence[Any]], replica: int) -> list[Any]:
    """A replica's values over the units; empty where a round had fewer replicas."""
    return [row[replica] for row in rows_UN if replica < len(row)]


def replica_norms(events: Sequence[Round], replica: int) -> list[float]:
    """L2 norm of a replica's whole pseudo-gradient in every round, over all units."""
    columns = [_column(event.norm_UN, replica) for event in events]
    return [math.hypot(*column) if column else math.nan for column in columns]


def _replicas(events: Sequence[Round]) -> int:
    return max(len(event.norm_UN[0]) for event in events)


def _spread(index: int, count: int) -> float:
    """Offset that keeps ``count`` marks of one round side by side."""
    return (index - (count - 1) / 2) * min(0.28, 0.8 / count)


def _line_sizes(rounds: int, replicas: int) -> dict[str, Any]:
    """Thinner lines where many overlap; points only where few."""
    return {
        "marker": "o" if rounds <= MARKED_POINTS else "",
        "markersize": 4,
        "linewidth": 2.0 if replicas <= FEW_REPLICAS else 1.2,
    }


def _draw_norms(axes: "Axes", events: Sequence[Round], theme: Theme) -> None:
    """One line per replica; crosses on anomalies, those without a finite norm at the top edge."""
    x = [event.round for event in events]
    count = _replicas(events)
    for replica in range(count):
        norms = [
            n if math.isfinite(n) and n > 0 else math.nan for n in replica_norms(events, replica)
        ]
        style = replica_line(theme, replica) | _line_sizes(len(x), count)
        axes.plot(x, norms, label=f"replica {replica}", **style)
    for index, event in enumerate(events):
        bad = [r for r in range(count) if any(_column(event.anomalous_UN, r))]
        for place, replica in enumerate(bad):
            norm = replica_norms(events[index : index + 1], replica)[0]
            mark = {"color": replica_line(theme, replica)["color"], "edgecolor": theme.paper}
            if math.isfinite(norm):
                axes.scatter(event.round, norm, marker="X", s=70, zorder=3, **mark)
            else:
                at = event.round + _spread(place, len(bad))
                top = axes.get_xaxis_transform()
                axes.scatter(at, 0.95, marker="X", s=70, transform=top, zorder=3, **mark)
    _scale_norms(axes, events)


def _scale_norms(axes: "Axes", events: Sequence[Round]) -> None:
    """Logarithmic where norms differ by an order of magnitude, else from zero."""
    norms = [n for r in range(_replicas(events)) for n in replica_norms(events, r)]
    found = [norm for norm in norms if math.isfinite(norm) and norm > 0]
    if found and max(found) > LOG_FROM_RATIO * min(found):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        label_decades(axes.yaxis, max(found) / min(found))
    elif found:
        axes.set_ylim(0, 1.15 * max(found))
    axes.set_ylabel("norm\n(parameter units)")


def _draw_weights(axes: "Axes", events: Sequence[Round], theme: Theme) -> None:
    """Mean weight of each replica over the units; for few replicas its range as a band."""
    x = [event.round for event in events]
    count = _replicas(events)
    for replica in range(count):
        style = replica_line(theme, replica) | _line_sizes(len(x), count)
        columns = [_column(event.weight_UN, replica) or [math.nan] for event in events]
        if count <= FEW_REPLICAS:
            lows, highs = [min(c) for c in columns], [max(c) for c in columns]
            axes.fill_between(x, lows, highs, color=style["color"], alpha=0.13, linewidth=0)
        axes.plot(x, [sum(c) / len(c) for c in columns], **style)
    axes.axhline(1 / count, color=theme.muted, linestyle=(0, (1, 2)), linewidth=1.2)
    if count <= FEW_REPLICAS:
        axes.set_ylim(-0.04, 1.04)
    axes.set_ylabel("weight\n(mean of units)")


def _draw_clip(figure: "Figure", axes: "Axes", events: Sequence[Round], theme: Theme) -> None:
    """Map of units by rounds with the clip factor as colour; names as many units as fit."""
    from matplotlib.colors import LinearSegmentedColormap

    units = events[-1].units
    rounds = [event.round for event in events]
    factors = [dict(zip(event.units, event.clip_U, strict=True)) for event in events]
    grid = [[factor.get(unit, math.nan) for factor in factors] for unit in units]
    edges_x = [rounds[0] - 0.5, *(number + 0.5 for number in rounds)]
    edges_y = [index - 0.5 for index in range(len(units) + 1)]
    colours = LinearSegmentedColormap.from_list("clip", theme.clipped)
    mesh = axes.pcolormesh(edges_x, edges_y, grid, cmap=colours, vmin=0, vmax=1)
    bar = figure.colorbar(mesh, ax=axes, pad=0.01, fraction=0.03, aspect=25, ticks=[0, 0.5, 1])
    bar.outline.set_visible(False)
    bar.set_label("clip factor")
    step = math.ceil(len(units) / NAMED_UNITS)
    axes.set_yticks(range(0, len(units), step))
    axes.set_yticklabels([one_line(unit, 18) for unit in units[::step]], size=9.5)
    axes.set_ylim(len(units) - 0.5, -0.5)
    axes.grid(False)


def _mark_anomalies(axes: "Axes", events: Sequence[Round], theme: Theme) -> None:
    """A cross for each (unit, replica) left out, and a square behind them for a rollback."""
    units = events[-1].units
    size = max(14.0, min(60.0, 3600.0 / max(len(events), 3 * len(units))))
    for event in events:
        rows = zip(event.units, event.anomalous_UN, event.rollback_U, strict=True)
        for unit, anomalous, rollback in rows:
            if unit not in units:
                continue
            y = units.index(unit)
            if rollback:
                axes.scatter(event.round, y, s=3 * size, marker="s", color=theme.ink, linewidth=0)
            bad = [replica for replica, left_out in enumerate(anomalous) if left_out]
            for place, replica in enumerate(bad):
                colour = replica_line(theme, replica)["color"]
                at = event.round + _spread(place, len(bad))
                mark = {"color": colour, "edgecolor": theme.paper, "linewidth": 0.7}
                axes.scatter(at, y, s=size, marker="X", **mark)


def _title(label: str, run: Run, has_weights: bool) -> str:
    facts = round_facts(run.events)
    title = f"{label}, {counted(facts.rounds, 'round')}: "
    norms = [n for r in range(_replicas(run.events)) for n in replica_norms(run.events, r)]
    finite = [norm for norm in norms if math.isfinite(norm)]
    if not has_weights:
        span = f"from {min(finite):.2g} to {max(finite):.2g}" if finite else "not finite"
        return title + f"pseudo-gradient norms {span}"
    title += counted(facts.anomalies, "anomaly")
    title += f", {counted(facts.rollbacks, 'rollback')}, "
    return title + f"{facts.clipped} of {counted(facts.decisions, 'unit update')} clipped"


def _caption(run: Run, facts: RoundFacts, has_weights: bool) -> str:
    every = run.setting("sync.every")
    caption = "Norm of each replica's pseudo-gradient (anchor minus local parameters), all units."
    if isinstance(every, int):
        caption += f" One round every {counted(every, 'inner step')}."
    if facts.anomalies:
        caption += (
            " Crosses, in the replica's colour: left out as an anomaly, at the upper edge where "
            "the norm was not finite."
        )
    if has_weights:
        caption += (
            " Weights: mean over the units; dotted: equal weights; with few replicas a band "
            "spans the units. Map: each unit's clip factor, 1 is unclipped."
        )
        if facts.rollbacks:
            caption += " Squares: rollbacks, every replica left out and the anchor kept."
        caption += f" Effective replicas on average: {fixed(facts.effective_replicas, 2)}."
    if any(event.forced for event in run.events):
        caption += " The last round was forced at the end of the run."
    return caption


def draw_rounds(run: Run, label: str, path: Path, theme: Theme = LIGHT) -> Drawn | None:
    """Norms, and for EDiT weights and decisions, of every round; None without rounds."""
    if not run.events:
        return None
    method = str(summary_of(run)["method"])
    has_weights = method == "edit"
    facts = round_facts(run.events)
    title = _title(label, run, has_weights)
    heights = [2.1]
    if has_weights:
        units = len(run.events[-1].units)
        heights += [1.6, min(3.2, max(1.3, 0.24 * units))]
    with drawing(theme):
        figure = new_figure(sum(heights) + 0.7, title, conditions(run), theme)
        panels = figure.subplots(len(heights), sharex=True, height_ratios=heights, squeeze=False)
        axes = [row[0] for row in panels]
        _draw_norms(axes[0], run.events, theme)
        if has_weights:
            _draw_weights(axes[1], run.events, theme)
            _draw_clip(figure, axes[2], run.events, theme)
            _mark_anomalies(axes[2], run.events, theme)
        if _replicas(run.events) <= MANY_REPLICAS:
            axes[0].legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2)
        axes[-1].set_xlabel("sync round")
        axes[-1].xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        first, last = run.events[0].round, run.events[-1].round
        axes[-1].set_xlim(first - 0.5, last + 0.5)
        save(figure, path)
    return Drawn(path, title, _caption(run, facts, has_weights), f"Charts per sync round. {title}.")
