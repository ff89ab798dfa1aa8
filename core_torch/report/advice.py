"""What to try next: suggestions that follow from a run's own numbers. Pure."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from core_torch.report.records import Run
from core_torch.report.summary import round_facts, summary_of
from core_torch.report.table import run_labels
from core_torch.report.text import MISSING

FEW_ROUNDS = 4
OFTEN = 0.5  # share of decisions
FELL = 0.5  # of the learning rate's peak; below it the velocity remembers larger steps
FAR = 0.5  # nats per token between training loss and the anchor's; text seen once gives far less
WITH_PENALTY = ("edit", "aedit")
WITHOUT_MOMENTUM = ("synchronous", "post_local_sgd")


class Hint(NamedTuple):
    """An observation with its consequence, and the setting to change."""

    text: str
    setting: str


def suggestions(runs: Sequence[Run]) -> list[Hint]:
    """Hints for the next run, those about missing comparisons first; never empty."""
    summaries = [summary_of(run) for run in runs]
    methods = {str(summary["method"]) for summary in summaries}
    hints = []
    if "synchronous" not in methods:
        text = "No synchronous run to compare with: train one on the same mesh, model and length."
        hints.append(Hint(text, "--sync.method synchronous"))
    if methods == {"synchronous"} and summaries[0]["replicas"] > 1:
        text = "Only synchronous runs: the same training with rounds sends a fraction of the bytes."
        hints.append(Hint(text, "--sync.method edit"))
    for run, label in zip(runs, run_labels(runs), strict=True):
        hints += _hints_of(run, label)
    if not hints:
        text = "Nothing stands out. See how far apart rounds can be before the loss suffers."
        every = run_interval(runs)
        hints.append(Hint(text, f"--sync.every {2 * every}" if every else "--sync.every"))
    return hints


def run_interval(runs: Sequence[Run]) -> int:
    """Longest interval between rounds among the runs, inner steps; 0 without rounds."""
    found = [run.setting("sync.every") for run in runs if run.events]
    return max((every for every in found if isinstance(every, int)), default=0)


def _hints_of(run: Run, label: str) -> list[Hint]:
    """Hints from the rounds of one run."""
    facts = round_facts(run.events)
    summary = summary_of(run)
    hints = []
    every = run.setting("sync.every")
    if isinstance(every, int) and 0 < facts.rounds < FEW_ROUNDS:
        steps = max(1, summary["steps"] // 10)
        text = f"{label} met only {facts.rounds} times; the outer optimizer needs more rounds."
        hints.append(Hint(text, f"--sync.every {min(every, steps)} or more --train.steps"))
    if facts.non_finite:
        text = (
            f"{label} left out {facts.non_finite} non-finite contributions. Look for the replica "
            "in its figure; a lower learning rate or a tighter clip may keep it finite."
        )
        hints.append(Hint(text, "--optim.lr, --optim.max_norm"))
    elif facts.anomalies > 0.1 * max(1, facts.decisions):
        text = f"{label} left replicas out often; the threshold may be too strict for this data."
        hints.append(Hint(text, "--sync.penalty.z_threshold"))
    if facts.decisions and facts.clipped > OFTEN * facts.decisions:
        text = f"{label} clipped most of its updates, so the threshold sets the pace."
        hints.append(Hint(text, "--sync.penalty.max_norm, --sync.outer.lr"))
    hints += _overshoot(run, label)
    few = facts.effective_replicas < OFTEN * summary["replicas"]
    if few and summary["method"] in WITH_PENALTY:
        text = (
            f"In {label} few replicas decided alone: {facts.effective_replicas:.2f} effective of "
            f"{summary['replicas']}. Weights that do not depend on scale spread more evenly."
        )
        hints.append(Hint(text, "--sync.penalty.temperature_unit median"))
    if summary["validation_perplexity"] is None:
        text = f"{label} has no validation perplexity ({MISSING} in the table): it did not finish."
        hints.append(Hint(text, "--resume auto"))
    return hints


def _overshoot(run: Run, label: str) -> list[Hint]:
    """A hint where the outer momentum seems to outlive a falling learning rate."""
    summary, steps = summary_of(run), run.metrics.get(0, [])
    perplexity = summary["validation_perplexity"]
    without = summary["method"] in WITHOUT_MOMENTUM or run.setting("sync.outer.momentum") == 0
    if without or not steps or not perplexity or summary["loss"] is None:
        return []
    fell = steps[-1].lr < FELL * max(record.lr for record in steps)
    anchor_loss = math.log(perplexity)
    if not fell or not anchor_loss - summary["loss"] > FAR:
        return []
    text = (
        f"{label} ended with training loss {summary['loss']:.2f}, but its anchor has "
        f"{anchor_loss:.2f} on held-out text. The outer momentum may have outlived the falling "
        "learning rate and carried the anchor past the replicas: try less of it, or more rounds. "
        "(Text that was seen many times gives the same picture.)"
    )
    return [Hint(text, "--sync.outer.momentum 0.3")]
