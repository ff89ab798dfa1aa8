"""What the sync rounds saw and decided, per replica: norms, weights, anomalies, clipping.

One figure per run, made of panels over one axis of rounds. Norms are drawn for every method with
rounds; weights and the decisions per unit only where the penalty is at work (EDiT, A-EDiT);
steps where replicas may differ in them (A-EDiT); the staleness gap where there is one (CO2).
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core_torch.report.advice import WITH_PENALTY
from core_torch.report.curves import keeps_step
from core_torch.report.figures import MARKED_POINTS, Drawn, conditions
from core_torch.report.records import Round, Run
from core_torch.report.style import (
    DASHES,
    LIGHT,
    Theme,
    drawing,
    label_decades,
    new_figure,
    replica_line,
    save,
)
from core_torch.report.summary import RoundFacts, anomalies_of, round_facts, summary_of
from core_torch.report.text import counted, fixed, one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STREAMING = "streaming_diloco"
LOG_FROM_RATIO = 8.0  # norms that differ more than this need a logarithmic axis
FEW_REPLICAS = 4  # up to here bands and thick lines stay legible
MANY_REPLICAS = 8  # from here the legend would hide the lines
NAMED_UNITS = 12  # up to here every row of the map has its name


def _column(rows_UN: Sequence[Sequence[Any]], replica: int) -> list[Any]:
    """A replica's values over the units; empty where a round had fewer replicas."""
    return [row[replica] for row in rows_UN if replica < len(row)]


def replica_norms(events: Sequence[Round], replica: int) -> list[float]:
    """L2 norm of a replica's whole pseudo-gradient in every round, over its units."""
    columns = [_column(event.norm_UN, replica) for event in events]
    return [math.hypot(*column) if column else math.nan for column in columns]


def norm_series(events: Sequence[Round], replica: int) -> dict[str, list[tuple[int, float]]]:
    """What can be joined by a line: (round, norm) of a replica, by name.

    One line "" over all units; where rounds cover different units, one line for each unit.
    """
    if len({tuple(event.units) for event in events}) <= 1:
        norms = replica_norms(events, replica)
        return {"": [(event.round, norm) for event, norm in zip(events, norms, strict=True)]}
    series: dict[str, list[tuple[int, float]]] = {}
    for event in events:
        for unit, row in zip(event.units, event.norm_UN, strict=True):
            series.setdefault(unit, []).extend((event.round, n) for n in row[replica : replica + 1])
    return series


def _replicas(events: Sequence[Round]) -> int:
    return max((len(row) for event in events for row in event.norm_UN), default=0)


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
    """Lines per replica; crosses on anomalies, those without a finite norm at the top edge."""
    count = _replicas(events)
    drawn: list[float] = []
    for replica in range(count):
        for index, points in enumerate(norm_series(events, replica).values()):
            norms = [n if math.isfinite(n) and n > 0 else math.nan for _, n in points]
            style = replica_line(theme, replica) | _line_sizes(len(points), count)
            if index:
                style["linestyle"] = DASHES[index % len(DASHES)]
            label = "" if index else f"replica {replica}"
            axes.plot([number for number, _ in points], norms, label=label, **style)
            drawn += norms
    for event in events:
        bad = sorted({replica for row in anomalies_of(event) for replica in row})
        for place, replica in enumerate(bad):
            norm = replica_norms([event], replica)[0]
            mark = {"color": replica_line(theme, replica)["color"], "edgecolor": theme.paper}
            if math.isfinite(norm):
                axes.scatter(event.round, norm, marker="X", s=70, zorder=3, **mark)
            else:
                at = event.round + _spread(place, len(bad))
                top = axes.get_xaxis_transform()
                axes.scatter(at, 0.95, marker="X", s=70, transform=top, zorder=3, **mark)
    _scale_norms(axes, [norm for norm in drawn if not math.isnan(norm)])


def _scale_norms(axes: "Axes", norms: Sequence[float]) -> None:
    """Logarithmic where norms differ by an order of magnitude, else from zero."""
    if norms and max(norms) > LOG_FROM_RATIO * min(norms):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        label_decades(axes.yaxis, max(norms) / min(norms))
    elif norms:
        axes.set_ylim(0, 1.15 * max(norms))
    axes.set_ylabel("norm\n(parameter units)")


def _draw_steps(axes: "Axes", events: Sequence[Round], theme: Theme) -> None:
    """Inner steps that each replica brought to a round; hollow where the round was empty."""
    count = _replicas(events)
    for replica in range(count):
        points = [(e.round, e.steps_N[replica], e.empty) for e in events if e.steps_N]
        style = replica_line(theme, replica) | _line_sizes(len(points), count) | {"marker": ""}
        colour = style["color"]
        axes.plot([r for r, _, _ in points], [n for _, n, _ in points], **style)
        for is_empty, fill in ((False, colour), (True, theme.paper)):
            chosen = [(r, n) for r, n, empty in points if empty == is_empty]
            if chosen:
                x, y = zip(*chosen, strict=True)
                axes.scatter(x, y, color=fill, edgecolor=colour, s=18, zorder=3)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("inner steps")


def _draw_gap(axes: "Axes", events: Sequence[Round], theme: Theme) -> None:
    """By how much a round damped the progress of the round before it."""
    gaps = [max(event.gap_U) for event in events]
    marker = "o" if len(gaps) <= MARKED_POINTS else ""
    rounds = [event.round for event in events]
    axes.plot(rounds, gaps, color=theme.ink, marker=marker, markersize=4)
    axes.set_ylim(0, 1.15 * max(gaps))
    axes.set_ylabel("staleness\ngap")


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


def _draw_decisions(figure: "Figure", axes: "Axes", events: Sequence[Round], theme: Theme) -> None:
    """The map of units with everything that was decided about them."""
    _draw_clip(figure, axes, events, theme)
    _mark_anomalies(axes, events, theme)


def _mark_anomalies(axes: "Axes", events: Sequence[Round], theme: Theme) -> None:
    """A cross for each (unit, replica) left out, and a square behind them for a rollback."""
    units = events[-1].units
    size = max(14.0, min(60.0, 3600.0 / max(len(events), 3 * len(units))))
    for event in events:
        rows = zip(event.units, anomalies_of(event), event.rollback_U, strict=True)
        for unit, bad, rollback in rows:
            if unit not in units:
                continue
            y = units.index(unit)
            if rollback:
                axes.scatter(event.round, y, s=3 * size, marker="s", color=theme.ink, linewidth=0)
            for place, replica in enumerate(bad):
                colour = replica_line(theme, replica)["color"]
                at = event.round + _spread(place, len(bad))
                mark = {"color": colour, "edgecolor": theme.paper, "linewidth": 0.7}
                axes.scatter(at, y, s=size, marker="X", **mark)


def _title(label: str, events: Sequence[Round], has_weights: bool) -> str:
    facts = round_facts(events)
    title = f"{label}, {counted(facts.rounds, 'round')}"
    title += f" and {counted(facts.empty, 'empty one')}: " if facts.empty else ": "
    moved = [event for event in events if not event.empty]
    series = [norm_series(moved, replica) for replica in range(_replicas(moved))]
    norms = [norm for lines in series for points in lines.values() for _, norm in points]
    finite = [norm for norm in norms if math.isfinite(norm)]
    if not has_weights:
        span = f"from {min(finite):.2g} to {max(finite):.2g}" if finite else "not finite"
        return title + f"pseudo-gradient norms {span}"
    title += counted(facts.anomalies, "anomaly")
    title += f", {counted(facts.rollbacks, 'rollback')}, "
    return title + f"{facts.clipped} of {counted(facts.decisions, 'unit update')} clipped"


def _caption(run: Run, facts: RoundFacts, has_weights: bool) -> str:
    units = {tuple(event.units) for event in run.events}
    caption = "Norm of each replica's pseudo-gradient (anchor minus local parameters)"
    if len(units) > 1:
        names = list(norm_series(run.events, 0))
        caption += f", a line for each of {', '.join(names[:4])}, the first one solid."
    else:
        caption += ", all units."
    caption += _rhythm(run)
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
    if _has_gap(run.events):
        caption += " Staleness gap: what the round before measured was divided by it."
    if _has_steps(run):
        caption += " Inner steps: since the last round that moved anything"
        caption += "; hollow where a round was empty." if facts.empty else "."
    if any(event.forced for event in run.events):
        caption += " The last round was forced at the end of the run."
    return caption


def _rhythm(run: Run) -> str:
    """How often rounds came, as the configuration says it."""
    every = run.setting("sync.every")
    what = "A round of each fragment" if run.setting("sync.method") == STREAMING else "One round"
    if isinstance(every, int):
        return f" {what} every {counted(every, 'inner step')}."
    return f" {what} every {one_line(every, 20)}." if every else ""


def _has_gap(events: Sequence[Round]) -> bool:
    return any(gap != 1.0 for event in events for gap in event.gap_U)


def _has_steps(run: Run) -> bool:
    return not keeps_step(run) or str(summary_of(run)["method"]) == "aedit"


def draw_rounds(run: Run, label: str, path: Path, theme: Theme = LIGHT) -> Drawn | None:
    """What every round saw, in panels; None without rounds."""
    if not run.events:
        return None
    events = run.events
    moved = [event for event in events if not event.empty]
    has_weights = str(summary_of(run)["method"]) in WITH_PENALTY and bool(moved)
    title = _title(label, events, has_weights)
    panels: list[tuple[float, Callable[[Axes], None]]] = []
    panels.append((2.1, lambda axes: _draw_norms(axes, moved, theme)))
    if _has_gap(events):
        panels.append((1.1, lambda axes: _draw_gap(axes, moved, theme)))
    if _has_steps(run):
        panels.append((1.4, lambda axes: _draw_steps(axes, events, theme)))
    with drawing(theme):
        if has_weights:
            panels.append((1.6, lambda axes: _draw_weights(axes, moved, theme)))
            height = min(3.2, max(1.3, 0.24 * len(moved[-1].units)))
            panels.append((height, lambda axes: _draw_decisions(figure, axes, moved, theme)))
        heights = [height for height, _ in panels]
        figure = new_figure(sum(heights) + 0.7, title, conditions(run), theme)
        grid = figure.subplots(len(heights), sharex=True, height_ratios=heights, squeeze=False)
        all_axes = [row[0] for row in grid]
        for axes, (_, draw) in zip(all_axes, panels, strict=True):
            draw(axes)
        if 0 < _replicas(moved) <= MANY_REPLICAS:
            all_axes[0].legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2)
        last = all_axes[-1]
        last.set_xlabel("sync round")
        last.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        last.set_xlim(events[0].round - 0.5, events[-1].round + 0.5)
        save(figure, path)
    caption = _caption(run, round_facts(events), has_weights)
    return Drawn(path, title, caption, f"Charts per sync round. {title}.")
