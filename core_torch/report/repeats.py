"""Runs that differ in their seeds only: what they have in common, mean and spread of the results.

One run says little about a method: two seeds of one method may lie further apart than two
methods. So runs of equal settings are read as one experiment that was repeated.
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from core_torch.report.figures import Drawn, shared_conditions
from core_torch.report.records import Run
from core_torch.report.style import LIGHT, Theme, drawing, method_line, new_figure, save
from core_torch.report.summary import summary_of
from core_torch.report.table import run_labels, text_table
from core_torch.report.text import MISSING, counted, fixed, human_bytes

SEEDS = ("run", "train.seed", "data.seed")  # settings in which repeats may differ


class Spread(NamedTuple):
    """A result over repeats; non-finite and missing ones are left out of mean and deviation."""

    values: tuple[float, ...]  # of the runs that have one, in their order

    @property
    def mean(self) -> float:
        """Mean; nan of nothing."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def deviation(self) -> float:
        """Standard deviation of a sample, with n - 1; nan of fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else math.nan

    def shown(self, decimals: int) -> str:
        """``1.234 ± 0.005``, the deviation only where there is one."""
        if not self.values:
            return MISSING
        spread = "" if math.isnan(self.deviation) else f" ± {fixed(self.deviation, decimals)}"
        return fixed(self.mean, decimals) + spread


class Repeated(NamedTuple):
    """One experiment with its repeats, formatted; the order of the columns."""

    method: str
    runs: str
    loss: str
    validation_loss: str
    tokens_per_second: str
    sent: str


HEADINGS = Repeated(
    method="method",
    runs="runs",
    loss="loss",
    validation_loss="validation loss",
    tokens_per_second="tokens per s",
    sent="sent per rank",
)


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Settings by dotted path, values as TOML writes them."""
    flat: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = json.dumps(value, ensure_ascii=False, default=str)
    return flat


def repeats(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs in groups that differ in seeds and folder only, both in the order given.

    Of two runs with equal seeds too, the second begins a group of its own: something that no
    setting tells must have been different.
    """
    groups: dict[tuple[str, int], list[Run]] = {}
    seen: Counter[str] = Counter()
    for run in runs:
        flat = flatten(run.config)
        settings = json.dumps({k: v for k, v in flat.items() if k not in SEEDS}, sort_keys=True)
        seeds = json.dumps([settings, *(flat.get(name) for name in SEEDS[1:])])
        groups.setdefault((settings, seen[seeds]), []).append(run)
        seen[seeds] += 1
    return list(groups.values())


def has_repeats(runs: Sequence[Run]) -> bool:
    """Whether any experiment was run more than once."""
    return any(len(group) > 1 for group in repeats(runs))


def spread_of(runs: Sequence[Run], name: str) -> Spread:
    """Spread of an entry of the summaries, or of "validation_loss" (nats per token)."""
    values = []
    for run in runs:
        summary = summary_of(run)
        value = summary.get(name)
        if name == "validation_loss" and summary["validation_perplexity"] is not None:
            value = math.log(summary["validation_perplexity"])
        if value is not None and math.isfinite(value):
            values.append(float(value))
    return Spread(tuple(values))


def repeated_rows(runs: Sequence[Run]) -> list[Repeated]:
    """A row for each experiment."""
    groups = repeats(runs)
    labels = run_labels([group[0] for group in groups])
    return [
        Repeated(
            method=label,
            runs=str(len(group)),
            loss=spread_of(group, "loss").shown(3),
            validation_loss=spread_of(group, "validation_loss").shown(3),
            tokens_per_second=fixed(spread_of(group, "tokens_per_second").mean, 0),
            sent=human_bytes(spread_of(group, "replica_bytes").mean),
        )
        for label, group in zip(labels, groups, strict=True)
    ]


def repeated_table(runs: Sequence[Run]) -> Table:
    """``repeated_rows`` for the terminal."""
    return text_table(HEADINGS, repeated_rows(runs))


def draw_spread(runs: Sequence[Run], path: Path, theme: Theme = LIGHT) -> Drawn | None:
    """Validation loss of every run, by experiment; None without repeats or results."""
    groups = [group for group in repeats(runs) if spread_of(group, "validation_loss").values]
    if not groups or not has_repeats(runs):
        return None
    spreads = [spread_of(group, "validation_loss") for group in groups]
    means = [spread.mean for spread in spreads]
    seeds = max(len(group) for group in groups)
    title = f"Validation loss, means over {counted(seeds, 'seed')}: "
    title += f"{fixed(min(means), 3)} to {fixed(max(means), 3)}"
    firsts = [group[0] for group in groups]
    with drawing(theme):
        figure = new_figure(0.75 + 0.36 * len(groups), title, shared_conditions(firsts), theme)
        axes = figure.subplots()
        for place, (run, spread) in enumerate(zip(firsts, spreads, strict=True)):
            colour = method_line(theme, str(summary_of(run)["method"]), 0)["color"]
            if len(spread.values) > 1:
                low, high = spread.mean - spread.deviation, spread.mean + spread.deviation
                axes.plot([low, high], [place, place], color=colour, linewidth=7, alpha=0.25)
            axes.scatter(spread.values, [place] * len(spread.values), color=colour, s=26, zorder=3)
            axes.plot([spread.mean] * 2, [place - 0.3, place + 0.3], color=colour, linewidth=2.2)
        axes.set_yticks(range(len(groups)), run_labels(firsts))
        axes.set_ylim(len(groups) - 0.5, -0.5)
        axes.set_xlabel("loss of the final anchor on held-out text (nats per token)")
        axes.grid(axis="y", visible=False)
        save(figure, path)
    caption = (
        "Dots: one run each, with its own initial weights and order of the data. Lines: means. "
        "Bars: one standard deviation of the sample to each side."
    )
    return Drawn(path, title, caption, f"Dot plot of validation losses by method. {title}.")
