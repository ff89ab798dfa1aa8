"""What a run came to: the numbers of summary.json, and what its rounds decided. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from core_torch.report.records import Round, Run, Step


class RoundFacts(NamedTuple):
    """Counts over all rounds of a run; a decision is one unit in one round."""

    rounds: int  # with an exchange
    empty: int  # numbered rounds without one, because too few steps had been made (A-EDiT)
    decisions: int
    anomalies: int  # (unit, replica) pairs left out; a replica that made no step is none
    non_finite: int  # those of them that were left out as NaN, infinite or too large
    rollbacks: int  # decisions that kept the anchor
    clipped: int  # decisions whose combined pseudo-gradient was clipped
    effective_replicas: float  # mean over the decisions that moved; nan if none did


def anomalies_of(event: Round) -> list[list[int]]:
    """For each unit the replicas that a round left out, without those that had made no step."""
    absent = {n for n, steps in enumerate(event.steps_N) if steps == 0}
    return [
        [n for n, left_out in enumerate(row) if left_out and n not in absent]
        for row in event.anomalous_UN
    ]


def round_facts(events: Sequence[Round]) -> RoundFacts:
    """Counts what the rounds decided."""
    empty = sum(event.empty for event in events)
    events = [event for event in events if not event.empty]
    moved = [
        effective
        for event in events
        for effective, rollback in zip(event.effective_replicas_U, event.rollback_U, strict=True)
        if not rollback
    ]
    return RoundFacts(
        rounds=len(events),
        empty=empty,
        decisions=sum(len(event.units) for event in events),
        anomalies=sum(len(row) for event in events for row in anomalies_of(event)),
        non_finite=sum(row.count(False) for event in events for row in event.finite_UN),
        rollbacks=sum(sum(event.rollback_U) for event in events),
        clipped=sum(beta < 1 for event in events for beta in event.clip_U),
        effective_replicas=sum(moved) / len(moved) if moved else math.nan,
    )


def tokens_seen(metrics: Mapping[int, Sequence[Step]]) -> int:
    """Tokens of all replicas up to the end of the records.

    A record's own count is exact while replicas keep step. Where they do not (A-EDiT) it is one
    replica's estimate between rounds, so the steps that each has made are counted instead.
    """
    ends = [steps[-1] for steps in metrics.values() if steps]
    if not ends:
        return 0
    if len({record.step for record in ends}) == 1:
        return ends[0].tokens
    first = next(steps[0] for steps in metrics.values() if steps)
    return sum(record.step for record in ends) * (first.tokens // first.step) // len(ends)


def mean_final_loss(metrics: Mapping[int, Sequence[Step]]) -> float | None:
    """Mean loss over the last 10 % of the steps (at least one) of all replicas, nats per token."""
    tails = [steps[-max(1, len(steps) // 10) :] for steps in metrics.values() if steps]
    losses = [record.loss for tail in tails for record in tail]
    return sum(losses) / len(losses) if losses else None


def perplexity(loss: float | None) -> float | None:
    """exp of a loss in nats per token; infinite where a float cannot hold it."""
    if loss is None:
        return None
    return math.exp(loss) if not loss > 700.0 else math.inf


def summarise(
    metrics: Mapping[int, Sequence[Step]],
    events: Sequence[Round],
    *,
    method: str,
    replicas: int,
    shards: int,
    validation_loss: float | None = None,
    vocabulary: int | None = None,
    parameters: int | None = None,
    replica_bytes: int | None = None,
) -> dict[str, Any]:
    """The content of summary.json.

    Args:
        metrics: inner steps by replica; may be empty.
        events: sync rounds, forced ones included.
        method: a row of the table of methods.
        replicas: size of the replica axis.
        shards: size of the shard axis.
        validation_loss: of the anchor on the held-out batches, nats per token.
        vocabulary: number of token ids.
        parameters: of one whole replica.
        replica_bytes: payload that rank 0 dispatched over the replica axis, with the forced round
            of ``finish()``; by default what the last inner step recorded, which lacks that round.

    Returns:
        JSON values; ``None`` where nothing is known. ``seconds`` is the sum over inner steps of
        the slowest replica and ``tokens_per_second`` counts the tokens of all replicas.
    """
    first = next(iter(metrics.values()), [])
    last = first[-1] if first else None
    seconds = max((sum(r.seconds for r in steps) for steps in metrics.values()), default=0.0)
    if replica_bytes is None and last is not None:
        replica_bytes = last.replica_bytes
    facts = round_facts(events)
    tokens = tokens_seen(metrics)
    return {
        "method": method,
        "loss": mean_final_loss(metrics),
        "validation_perplexity": perplexity(validation_loss),
        "vocabulary": vocabulary,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds if seconds > 0 else None,
        "replica_bytes": replica_bytes,
        "rounds": facts.rounds,
        "anomalies": facts.anomalies,
        "steps": last.step if last else 0,
        "seconds": seconds,
        "replicas": replicas,
        "shards": shards,
        "parameters": parameters,
    }


def _axis_size(run: Run, path: str, default: int) -> int:
    size = run.setting(path)
    return size if isinstance(size, int) else default


def summary_of(run: Run) -> dict[str, Any]:
    """summary.json of a run, or what its records say so far where it did not get that far."""
    losses = [r.validation_loss for r in run.metrics.get(0, []) if r.validation_loss is not None]
    so_far = summarise(
        run.metrics,
        run.events,
        method=str(run.setting("sync.method", "")),
        replicas=_axis_size(run, "mesh.replicas", max(1, len(run.metrics))),
        shards=_axis_size(run, "mesh.shards", 1),
        validation_loss=losses[-1] if losses else None,
        vocabulary=run.setting("model.vocabulary") or None,
    )
    return so_far | run.summary
