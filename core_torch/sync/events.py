"""What happened in a sync round, in plain numbers: a line of events.jsonl."""

from dataclasses import dataclass
from typing import Any

from core_torch.sync.penalty import effective_replicas
from core_torch.sync.sync_round import Finished, Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEvent:
    """One round. Lists run over units, then over replicas; norms are in parameter units."""

    round: int
    step: int  # inner step after which it ran
    forced: bool  # by ``finish()``, outside the rhythm
    units: list[str]
    norm: list[list[float]]
    finite: list[list[bool]]
    flagged: list[list[bool]]
    rearmed: list[list[bool]]
    anomalous: list[list[bool]]
    weight: list[list[float]]
    effective_replicas: list[float]
    combined_norm: list[float]
    clip: list[float]
    rollback: list[bool]

    @property
    def anomalies(self) -> int:
        """Number of (unit, replica) pairs left out."""
        return sum(sum(row) for row in self.anomalous)

    def first_non_finite(self) -> tuple[str, int] | None:
        """Unit and replica of the first non-finite norm, if any."""
        for unit, row in zip(self.units, self.finite, strict=True):
            if not all(row):
                return unit, row.index(False)
        return None


def describe(
    measured: Measured, finished: list[Finished], *, units: list[str], **counts: Any
) -> RoundEvent:
    """Reads a round's decisions back to the host; on CUDA this waits for the round.

    Args:
        measured: decisions of all units.
        finished: each unit's result.
        units: their names.
        **counts: ``round``, ``step`` and ``forced`` of the event.
    """
    verdict = measured.verdict
    return RoundEvent(
        units=units,
        norm=measured.norm_UR.tolist(),
        finite=verdict.is_finite_R.tolist(),
        flagged=verdict.is_flagged_R.tolist(),
        rearmed=verdict.is_rearmed_R.tolist(),
        anomalous=verdict.is_anomaly_R.tolist(),
        weight=measured.weight_UR.tolist(),
        effective_replicas=effective_replicas(measured.weight_UR).tolist(),
        combined_norm=[float(f.combined_norm) for f in finished],
        clip=[float(f.clip) for f in finished],
        rollback=[not accepted for accepted in measured.accept_U.tolist()],
        **counts,
    )
