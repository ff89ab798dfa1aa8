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
from core_torch.report.style import LIGHT, Theme, drawing, new_figure, replica_line, save
from core_torch.report.summary import RoundFacts, round_facts, summary_of
from core_torch.report.text import counted, fixed, method_title, one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


def _draw_norms(axes: "Axes", events: Sequence[Round], theme: Theme) -> None:
    """One line per replica; crosses on anomalies, those without a finite norm at the top edge."""
    x = [event.round for event in events]
    marker = "o" if len(x) <= MARKED_POINTS else ""
    for replica in range(_replicas(events)):
        line = replica_line(theme, replica)
        norms = replica_norms(events, replica)
        drawn = [norm if math.isfinite(norm) and norm > 0 else math.nan for norm in norms]
        axes.plot(x, drawn, label=f"replica {replica}", marker=marker, markersize=4, **line)
        bad = [any(_column(event.anomalous_UN, replica)) for event in events]
        shown = [(r, n) for r, n, b in zip(x, drawn, bad, strict=True) if b and n == n]
        lost = [r for r, n, b in zip(x, drawn, bad, strict=True) if b and n != n]
        style: dict[str, Any] = {"linestyle": "", "marker": "X", "markersize": 8,
                                 "color": line["color"], "markeredgecolor": theme.paper}
        if shown:
            axes.plot(*zip(*shown, strict=True), **style)
        top = axes.get_xaxis_transform()
        axes.plot(lost, [0.97] * len(lost), transform=top, clip_on=False, **style)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.set_ylabel("norm\n(parameter units)")
