"""Curves from records: where a step lies on the axis of tokens, the mean of replicas, smoothing.

Pure; standard library only. Drawn in figures.py.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from core_torch.report.records import Run
from core_torch.report.summary import tokens_seen


class Point(NamedTuple):
    """One point of a run's curve."""

    tokens: float  # seen by all replicas
    loss: float  # nats per token, mean over the replicas at this point; nan if none is finite
    replica_bytes: int  # payload that a rank had sent over the replica axis


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Centred moving mean over ``width`` values, narrower at both ends; skips non-finite values.

    Returns:
        As many values; nan where a window holds nothing finite.
    """
    finite = [math.isfinite(value) for value in values]
    sums, counts = [0.0], [0]
    for value, keep in zip(values, finite, strict=True):
        sums.append(sums[-1] + (value if keep else 0.0))
        counts.append(counts[-1] + keep)
    smoothed = []
    for index in range(len(values)):
        low, high = max(0, index - width // 2), min(len(values), index + width // 2 + 1)
        count = counts[high] - counts[low]
        smoothed.append((sums[high] - sums[low]) / count if count else math.nan)
    return smoothed


def window(steps: int) -> int:
    """Width of the smoothing window: 4 % of the steps."""
    return max(1, round(0.04 * steps))


def keeps_step(run: Run) -> bool:
    """Whether every replica made as many steps as the others; only A-EDiT lets them differ."""
    return len({steps[-1].step for steps in run.metrics.values() if steps}) <= 1


def token_axis(run: Run, replica: int) -> list[float]:
    """Tokens of all replicas at each record of one replica.

    While replicas keep step this is the record's own count. Otherwise a record holds an
    estimate, as if the others had been as fast as this replica, and the next round corrects it:
    the count jumps, up or back. Here the steps between two rounds share what was really seen
    between them, so that curves of fast and slow replicas lie side by side.
    """
    records = run.metrics.get(replica, [])
    tokens = [record.tokens for record in records]
    if not records or keeps_step(run):
        return [float(count) for count in tokens]
    per_step = records[0].tokens // records[0].step
    jumps = [i for i in range(1, len(tokens)) if tokens[i] - tokens[i - 1] != per_step]
    axis: list[float] = []
    for first, end in zip([0, *jumps], [*jumps, len(tokens)], strict=True):
        begin = tokens[first] - per_step
        seen = (tokens[end] - per_step if end < len(tokens) else tokens_seen(run.metrics)) - begin
        estimated = tokens[end - 1] - begin
        scale = seen / estimated if seen > 0 else 1.0
        axis += [begin + scale * (count - begin) for count in tokens[first:end]]
    return axis


def mean_curve(run: Run) -> list[Point]:
    """The run's loss over all replicas, by tokens.

    Replicas that keep step give one point per step, their mean; others give all their points in
    order of tokens, which smoothing turns into a mean over the tokens near by.
    """
    if keeps_step(run):
        losses: dict[int, list[float]] = {}
        for steps in run.metrics.values():
            for record in steps:
                if math.isfinite(record.loss):
                    losses.setdefault(record.step, []).append(record.loss)
        return [
            Point(record.tokens, _mean(losses.get(record.step, [])), record.replica_bytes)
            for record in run.metrics.get(0, [])
        ]
    points = [
        Point(tokens, record.loss, record.replica_bytes)
        for replica, steps in run.metrics.items()
        for tokens, record in zip(token_axis(run, replica), steps, strict=True)
    ]
    return sorted(points, key=lambda point: point.tokens)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
