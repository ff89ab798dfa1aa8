"""What a run came to: the numbers of summary.json, and what its rounds decided. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from core_torch.report.records import Round, Run, Step


class RoundFacts(NamedTuple):
    """Counts over all rounds of a run; a decision is one unit in one round."""

    rounds: int
    decisions: int
    anomalies: int  # (unit, replica) pairs left out
    non_finite: int  # those of them that were left out as NaN, infinite or too large
    rollbacks: int  # decisions that kept the anchor
    clipped: int  # decisions whose combined pseudo-gradient was clipped
    effective_replicas: float  # mean over the decisions that moved; nan if none did


def round_facts(events: Sequence[Round]) -> RoundFacts:
    """Counts what the rounds decided."""
    moved = [
        effective
        for event in events
        for effective, rollback in zip(event.effective_replicas_U, event.rollback_U, strict=True)
        if not rollback
    ]
    return RoundFacts(
        rounds=len(events),
        decisions=sum(len(event.units) for event in events),
        anomalies=sum(sum(row) for event in events for row in event.anomalous_UN),
        non_finite=sum(row.count(False) for event in events for row in event.finite_UN),
        rollbacks=sum(sum(event.rollback_U) for event in events),
        clipped=sum(beta < 1 for event in events for beta in event.clip_U),
        effective_replicas=sum(moved) / len(moved) if moved else math.nan,
    )


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
    tokens = last.tokens if last else 0
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
