"""The comparison of runs as rows of text, for the terminal and for the page alike."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from core_torch.report.records import Run
from core_torch.report.summary import summary_of
from core_torch.report.text import MISSING, fixed, human_bytes, method_title, one_line

NEAR = 1.1  # runs that end at a round may see a little more than was planned


class Row(NamedTuple):
    """One run, formatted; the order of the columns."""

    method: str
    loss: str
    perplexity: str
    tokens_per_second: str
    sent: str
    against: str
    rounds: str
    anomalies: str


HEADINGS = Row(
    method="method",
    loss="loss",
    perplexity="validation perplexity",
    tokens_per_second="tokens per s",
    sent="sent per rank",
    against="against sync",
    rounds="rounds",
    anomalies="anomalies",
)


def run_labels(runs: Sequence[Run]) -> list[str]:
    """One label per run: its method, and its folder's name where two runs share a method."""
    methods = [str(summary_of(run)["method"]) for run in runs]
    return [
        method_title(method)
        + (f" ({one_line(run.folder.name, 30)})" if methods.count(method) > 1 else "")
        for run, method in zip(runs, methods, strict=True)
    ]


def _comparable(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Bytes per token compare between runs of equal mesh and model and about equal length."""
    names = ("replicas", "shards", "parameters")
    few, many = sorted((one["tokens"], other["tokens"]))
    return [one[n] for n in names] == [other[n] for n in names] and many <= NEAR * few


def byte_factor(summary: dict[str, Any], summaries: Sequence[dict[str, Any]]) -> str:
    """Bytes per token over the replica axis against a synchronous run that compares."""
    sent = summary["replica_bytes"]
    if summary["method"] == "synchronous":
        return "baseline"
    for other in summaries:
        if other["method"] != "synchronous" or not _comparable(other, summary):
            continue
        if other["replica_bytes"] and sent:
            ratio = other["replica_bytes"] / sent * (summary["tokens"] / other["tokens"])
            factor, word = (ratio, "less") if ratio >= 1 else (1 / ratio, "more")
            return f"{factor:.{0 if factor >= 99.5 else 1}f}× {word}"
    return MISSING


def comparison_rows(runs: Sequence[Run]) -> list[Row]:
    """The table's rows, in the order of ``runs``."""
    summaries = [summary_of(run) for run in runs]
    return [
        Row(
            method=label,
            loss=fixed(summary["loss"], 3),
            perplexity=fixed(summary["validation_perplexity"], 2),
            tokens_per_second=fixed(summary["tokens_per_second"], 0),
            sent=human_bytes(summary["replica_bytes"]),
            against=byte_factor(summary, summaries),
            rounds=fixed(summary["rounds"], 0),
            anomalies=fixed(summary["anomalies"], 0),
        )
        for label, summary in zip(run_labels(runs), summaries, strict=True)
    ]


def text_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table for the terminal. Cells are plain text: nothing in them is taken for markup."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 0, 0, 1))
    for column, heading in enumerate(headings):
        # Headings break between words only; with short cells all fits into 80 characters.
        words = [*heading.split(), *(row[column] for row in rows)]
        justify: Literal["left", "right"] = "right" if column else "left"
        table.add_column(heading, justify=justify, width=max(map(len, words)))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def comparison_table(runs: Sequence[Run]) -> Table:
    """``comparison_rows`` for the terminal."""
    return text_table(HEADINGS, comparison_rows(runs))
