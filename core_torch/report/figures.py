"""Loss figures: against tokens, and against what the replicas had to send each other.

Each drawing function writes one PNG and returns a ``Drawn`` with its title, caption and a text
for readers who cannot see it. Titles state numbers of the run; they claim nothing about the
method. Rounds are drawn in round_figures.py.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from core_torch.report.curves import keeps_step, mean_curve, smooth, token_axis, window
from core_torch.report.records import Run
from core_torch.report.style import (
    LIGHT,
    Theme,
    drawing,
    label_decades,
    method_line,
    new_figure,
    save,
)
from core_torch.report.summary import summary_of
from core_torch.report.table import run_labels
from core_torch.report.text import counted, fixed, human_bytes, human_count, model_title, tick

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKED_POINTS = 25  # up to here single points get a marker
FEW_RUNS = 4  # up to here a title has room for each, and a legend for one column
LOG_FROM_RATIO = 8.0  # bytes that differ more than this need a logarithmic axis


class Drawn(NamedTuple):
    """A figure on disk and the words that go with it."""

    path: Path
    title: str
    caption: str
    alternative: str


def _non_finite_losses(runs: Sequence[Run]) -> int:
    records = [r for run in runs for steps in run.metrics.values() for r in steps]
    return sum(not math.isfinite(record.loss) for record in records)


def conditions(run: Run) -> str:
    """Mesh, length and model of a run in one line; leaves out what the run does not tell."""
    summary = summary_of(run)
    parts = [
        f"{counted(summary['replicas'], 'replica')} × {counted(summary['shards'], 'shard')}",
        _steps_of(run, summary["steps"]),
        f"{human_count(summary['tokens'])} tokens",
    ]
    if summary["parameters"]:
        parts.append(f"{human_count(summary['parameters'])} parameters")
    layers, dim = run.setting("model.layers"), run.setting("model.dim")
    if layers and dim:
        parts.append(model_title(run.setting("model.kind", "llama"), layers, dim))
    if summary["vocabulary"]:
        parts.append(f"vocabulary {summary['vocabulary']}")
    return " · ".join(parts)


def _steps_of(run: Run, steps: int) -> str:
    """``200 steps``, or ``90 to 210 steps`` where replicas differ."""
    ends = sorted({records[-1].step for records in run.metrics.values() if records})
    return f"{ends[0]:,} to {ends[-1]:,} steps" if len(ends) > 1 else counted(steps, "step")


def shared_conditions(runs: Sequence[Run]) -> str:
    """Conditions of all runs: one line where they agree, else a part for those that do."""
    found: dict[str, list[str]] = {}
    for label, run in zip(run_labels(runs), runs, strict=True):
        found.setdefault(conditions(run), []).append(label)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{', '.join(labels)}: {text}" for text, labels in found.items())


def _lines(runs: Sequence[Run], theme: Theme) -> list[tuple[Run, str, dict[str, Any]]]:
    """Each run with its label and line style, the second of a method in another dash."""
    seen: dict[str, int] = {}
    lines = []
    for run, label in zip(runs, run_labels(runs), strict=True):
        method = str(summary_of(run)["method"])
        lines.append((run, label, method_line(theme, method, seen.get(method, 0))))
        seen[method] = seen.get(method, 0) + 1
    return lines


def _frame_losses(axes: "Axes", runs: Sequence[Run]) -> bool:
    """Leaves the first plunge above the frame, so that the rest can be told apart.

    Returns:
        Whether anything was left out.
    """
    finite: list[float] = []
    heights: list[float] = []
    for run in runs:
        losses = [point.loss for point in mean_curve(run)]
        smoothed = [v for v in smooth(losses, window(len(losses))) if math.isfinite(v)]
        heights += smoothed[len(smoothed) // 10 :][:1]
        finite += [r.loss for s in run.metrics.values() for r in s if math.isfinite(r.loss)]
    if not heights:
        return False
    low, high = min(finite), max(heights)
    margin = 0.06 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)
    return max(finite) > high + margin


def _span(values: Sequence[float], decimals: int) -> str:
    low, high = fixed(min(values), decimals), fixed(max(values), decimals)
    return low if low == high else f"{low} to {high}"


def _each(runs: Sequence[Run], texts: Sequence[str]) -> str:
    pairs = zip(run_labels(runs), texts, strict=True)
    return ", ".join(f"{name} {text}".replace(" ", "\N{NO-BREAK SPACE}") for name, text in pairs)


def draw_loss_by_tokens(runs: Sequence[Run], path: Path, theme: Theme = LIGHT) -> Drawn:
    """Training loss against tokens over all replicas; runs without steps are left out."""
    runs = [run for run in runs if run.metrics.get(0)]
    finals = [summary_of(run)["loss"] for run in runs]
    title = "Training loss at the end: " + _each(runs, [fixed(loss, 2) for loss in finals])
    if len(runs) > FEW_RUNS:
        title = f"Training loss at the end of {len(runs)} runs: {_span(finals, 2)}"
    has_validation = False
    with drawing(theme):
        figure = new_figure(3.6, title, shared_conditions(runs), theme)
        axes = figure.subplots()
        for run, label, line in _lines(runs, theme):
            for replica, steps in run.metrics.items():
                losses = [r.loss for r in steps]
                thin = {"color": line["color"], "alpha": 0.18, "linewidth": 0.8}
                axes.plot(token_axis(run, replica), losses, **thin)
            curve = mean_curve(run)
            smoothed = smooth([point.loss for point in curve], window(len(curve)))
            marker = "o" if len(curve) <= MARKED_POINTS else ""
            x = [point.tokens for point in curve]
            axes.plot(x, smoothed, label=label, marker=marker, **line)
            pairs = zip(token_axis(run, 0), run.metrics[0], strict=True)
            points = [(x, r.validation_loss) for x, r in pairs if r.validation_loss is not None]
            if points:
                has_validation = True
                axes.plot(
                    *zip(*points, strict=True),
                    "o",
                    color=line["color"],
                    markersize=5,
                    markerfacecolor=theme.paper,
                    markeredgewidth=1.6,
                )
        cut = _frame_losses(axes, runs)
        axes.set(xlabel="tokens seen by all replicas together", ylabel="loss (nats per token)")
        axes.xaxis.set_major_formatter(lambda value, _: tick(human_count(value)))
        axes.margins(x=0.02)
        axes.legend(loc="upper right", ncols=1 if len(runs) <= FEW_RUNS else 2)
        save(figure, path)
    caption = _loss_caption(runs, cut)
    if has_validation:
        caption += " Rings: loss of the anchor on held-out text."
    return Drawn(path, title, caption, f"Line chart of loss against tokens. {title}.")


def _loss_caption(runs: Sequence[Run], cut: bool) -> str:
    caption = (
        "Thin: every inner step of every replica. Thick: mean over replicas, smoothed over 4 % "
        "of the steps. Numbers in the title: mean over the last 10 % of the steps."
    )
    if cut:
        caption += " The first steps lie above the frame."
    vocabularies = {summary_of(run)["vocabulary"] for run in runs}
    if len(vocabularies) == 1 and (vocabulary := vocabularies.pop()):
        caption += f" A uniform guess over {vocabulary} tokens scores {math.log(vocabulary):.2f}."
    if not all(keeps_step(run) for run in runs):
        caption += (
            " Where replicas make different numbers of steps, those between two rounds share "
            "the tokens that all saw between them."
        )
    if missing := _non_finite_losses(runs):
        caption += f" {counted(missing, 'loss')} not finite, left out of the curves."
    return caption


def draw_loss_by_bytes(runs: Sequence[Run], path: Path, theme: Theme = LIGHT) -> Drawn | None:
    """Smoothed loss against bytes over the replica axis; None when no run sent any."""
    runs = [run for run in runs if any(r.replica_bytes for r in run.metrics.get(0, []))]
    if not runs:
        return None
    sent = [summary_of(run)["replica_bytes"] for run in runs]
    title = "Sent per rank over the replica axis: " + _each(runs, [human_bytes(b) for b in sent])
    if len(runs) > FEW_RUNS:
        title = (
            f"Sent per rank over the replica axis by {len(runs)} runs: "
            f"{human_bytes(min(sent))} to {human_bytes(max(sent))}"
        )
    least = min(r.replica_bytes for run in runs for r in run.metrics[0] if r.replica_bytes)
    logarithmic = max(sent) > LOG_FROM_RATIO * min(sent)
    with drawing(theme):
        figure = new_figure(3.6, title, shared_conditions(runs), theme)
        axes = figure.subplots()
        for run, label, line in _lines(runs, theme):
            curve = mean_curve(run)
            smoothed = smooth([point.loss for point in curve], window(len(curve)))
            pairs = zip(curve, smoothed, strict=True)
            drawn = [(p.replica_bytes, loss) for p, loss in pairs if p.replica_bytes > 0]
            x, y = zip(*drawn, strict=True)
            axes.plot(x, y, label=label, drawstyle="steps-post", **line)
            axes.plot(x[-1:], y[-1:], "o", color=line["color"], markersize=7)
        _frame_losses(axes, runs)
        if logarithmic:
            axes.set_xscale("log")
            label_decades(axes.xaxis, max(sent) / max(1, least))
        scale = ", logarithmic" if logarithmic else ""
        axes.set(
            xlabel=f"sent per rank over the replica axis (bytes{scale})",
            ylabel="loss (nats per token)",
        )
        axes.xaxis.set_major_formatter(lambda value, _: tick(human_bytes(value)))
        axes.legend(loc="best")
        save(figure, path)
    caption = (
        "Loss that a run had reached by the time a rank had handed this many bytes to collectives "
        "over the replica axis; further left is cheaper, lower is better. Methods with rounds move "
        "in stairs: they learn between rounds without sending. Dots: end of the run. What was "
        "learnt before the first exchange is not drawn."
    )
    return Drawn(path, title, caption, f"Line chart of loss against bytes sent. {title}.")
