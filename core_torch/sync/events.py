"""What happened in a sync round, in plain numbers: a line of events.jsonl."""

import math
from dataclasses import dataclass

from core_torch.config import SyncConfig
from core_torch.errors import NonFinite
from core_torch.sync.meeting import Meeting
from core_torch.sync.methods import rules_of
from core_torch.sync.penalty import effective_replicas
from core_torch.sync.units import SyncUnit


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEvent:
    """One round. Lists run over units, then over replicas; norms are in parameter units."""

    round: int
    step: int  # inner step after which it was measured, on this replica
    forced: bool  # by ``finish()``, outside the rhythm
    empty: bool  # too few inner steps in all: nothing was exchanged
    steps: list[int]  # inner steps of each replica since its last round; 0: it was left out
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
    gap: list[float]  # staleness gap; 1 where the method has none
    rollback: list[bool]

    @property
    def anomalies(self) -> int:
        """Number of (unit, replica) pairs left out, but for replicas that had made no step."""
        if self.empty:
            return 0
        pairs = (pair for row in self.anomalous for pair in zip(row, self.steps, strict=True))
        return sum(is_out and steps > 0 for is_out, steps in pairs)

    def first_non_finite(self) -> tuple[str, int] | None:
        """Unit and replica of the first non-finite norm, if any."""
        for unit, row in zip(self.units, self.finite, strict=True):
            if not all(row):
                return unit, row.index(False)
        return None


def refuse_non_finite(event: RoundEvent | None, config: SyncConfig) -> None:
    """Stops on a non-finite pseudo-gradient where no penalty may leave it out.

    The round that found it has kept the anchor, so the last good weights are not lost.

    Raises:
        NonFinite: names unit, replica and round.
    """
    found = None if event is None or rules_of(config).excludes else event.first_non_finite()
    if event is None or found is None:
        return
    unit, replica = found
    raise NonFinite(
        f"pseudo-gradient of unit {unit!r} is not finite",
        where=f"replica {replica}, round {event.round} after inner step {event.step}",
        likely="that replica diverged since the last round",
        next="a lower learning rate, or method edit, whose penalty leaves bad replicas out",
    )


def describe(meeting: Meeting, units: list[SyncUnit]) -> RoundEvent:
    """Reads a round's decisions back to the host; on CUDA this waits for the round.

    Args:
        meeting: completed, or empty.
        units: of the engine.
    """
    measured, verdict = meeting.measured, meeting.measured.verdict
    places = range(len(meeting.members))
    done = [meeting.finished.get(i) for i in places]  # nothing where the round was empty
    return RoundEvent(
        round=meeting.number,
        step=meeting.step,
        forced=meeting.forced,
        empty=meeting.is_empty,
        steps=meeting.steps,
        units=[units[u].name for u in meeting.members],
        norm=measured.norm_UR.tolist(),
        finite=verdict.is_finite_R.tolist(),
        flagged=verdict.is_flagged_R.tolist(),
        rearmed=verdict.is_rearmed_R.tolist(),
        anomalous=verdict.is_anomaly_R.tolist(),
        weight=measured.weight_UR.tolist(),
        effective_replicas=effective_replicas(measured.weight_UR).tolist(),
        combined_norm=[math.nan if f is None else float(f.combined_norm) for f in done],
        clip=[1.0 if f is None else float(f.clip) for f in done],
        gap=[1.0 if f is None else float(f.gap) for f in done],
        rollback=[not accepted for accepted in measured.accept_U.tolist()],
    )
