"""Two traces, event by event, and where they part.

The first is what is examined, the second the reference: its sizes are the yardstick. What one of
them does not tap is left out and counted; what else is missing on one side is a divergence.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from parity_tests.harness.tolerances import EXACT, Tolerance
from parity_tests.instrument.allowed import Allowed
from parity_tests.instrument.distances import INF, distance_of
from parity_tests.instrument.files import (
    Event,
    Key,
    Trace,
    UnreadableTrace,
    program_order,
    read_trace,
)

SAME_RUN = {  # of meta.json: what must be equal, or a difference says nothing
    "method": "they trained with different methods",
    "weights_hash": "they began with different weights",
    "data_hash": "they read different tokens",
    "config_hash": "they were configured differently",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One event in both traces, or in one that should be in both."""

    key: Key
    mine: Event | None
    theirs: Event | None
    ulps: float
    tolerance: Tolerance
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether it is near enough."""
        return self.ulps <= self.tolerance.value

    @property
    def share(self) -> float:
        """Part of the tolerance that is used up; above 1 it is a divergence."""
        if self.tolerance.value > 0:
            return self.ulps / self.tolerance.value
        return 0.0 if self.ulps == 0 else INF

    @property
    def step(self) -> int:
        """Inner step at or after which this was."""
        event = self.mine or self.theirs
        assert event is not None
        return event.step


@dataclass(frozen=True)
class Comparison:
    """All that was compared, in program order."""

    mine: Trace
    theirs: Trace
    findings: tuple[Finding, ...]
    skipped: dict[str, int]  # events by phase that only one of the traces taps
    unit: str  # dtype whose ulps the distances are in

    @property
    def ok(self) -> bool:
        """Whether nothing diverges, and something was compared."""
        return self.first is None

    @cached_property
    def first(self) -> int | None:
        """Place of the first divergence in ``findings``."""
        return next((i for i, found in enumerate(self.findings) if not found.ok), None)

    @cached_property
    def worst(self) -> Finding:
        """What uses most of its tolerance; where nothing is a divergence, the nearest to one."""
        return max(self.findings, key=lambda found: found.share)

    @property
    def notes(self) -> list[str]:
        """Reasons to expect a difference, from what the traces say of themselves."""
        mine, theirs = self.mine.meta, self.theirs.meta
        return [SAME_RUN[key] for key in SAME_RUN if _differs(key, mine, theirs)]


def _differs(key: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    x, y = mine.get(key), theirs.get(key)
    if not x or not y or x == y:
        return False
    settings = mine.get("config"), theirs.get("config")
    if key == "config_hash" and mine.get("core") == theirs.get("core") and all(settings):
        return not _agree(*settings)
    return True


def _agree(x: Any, y: Any) -> bool:
    """Equal but for fields that only one has: an older version of a core has fewer."""
    if isinstance(x, Mapping) and isinstance(y, Mapping):
        return all(_agree(x[key], y[key]) for key in x.keys() & y.keys())
    return bool(x == y)


def compare_folders(mine: Path, theirs: Path) -> Comparison:
    """Reads and compares two trace folders.

    Raises:
        UnreadableTrace: one cannot be read, or they have nothing in common.
    """
    return compare(read_trace(mine), read_trace(theirs))


def compare(mine: Trace, theirs: Trace) -> Comparison:
    """Every event that both tap, in the program order of ``mine``.

    Args:
        mine: what is examined.
        theirs: the reference.

    Raises:
        UnreadableTrace: they have no kind of event in common.
    """
    keys = program_order([[e.key for e in mine.events], [e.key for e in theirs.events]], wait=False)
    allowed = Allowed(theirs, [theirs.by_key[key] for key in keys if key in theirs.by_key])
    mesh = theirs.meta.get("mesh") or {}
    replicas = int(mesh.get("replicas", 1))
    findings: list[Finding] = []
    skipped: Counter[str] = Counter()
    for key in keys:
        if not (mine.taps(key) and theirs.taps(key)):
            skipped[key.phase] += 1
        else:
            pair = mine.by_key.get(key), theirs.by_key.get(key)
            findings.append(_judge(key, *pair, allowed, replicas))
    if not findings:
        raise UnreadableTrace(
            "the traces have no kind of event in common",
            where=f"{mine.folder} taps {mine.meta['taps']}, "
            f"{theirs.folder} taps {theirs.meta['taps']}",
            next="record both with the same taps",
        )
    return Comparison(mine, theirs, tuple(findings), dict(skipped), allowed.unit)


def _judge(
    key: Key, mine: Event | None, theirs: Event | None, allowed: Allowed, replicas: int
) -> Finding:
    if mine is None or theirs is None:
        lacks = "the reference" if theirs is None else "the examined trace"
        return Finding(key, mine, theirs, INF, EXACT, f"{lacks} has no such event")
    if key.moment == "round" and mine.step != theirs.step:
        detail = f"after inner step {mine.step}, in the reference after {theirs.step}"
        return Finding(key, mine, theirs, INF, EXACT, detail)
    worst: Finding | None = None
    eps = allowed.unit_of(theirs)
    usual = allowed.of(theirs)
    for apart in distance_of(mine, theirs, replicas=replicas, floor=allowed.floor_of(theirs)):
        tolerance = EXACT if apart.is_exact else usual
        found = Finding(key, mine, theirs, apart.relative / eps, tolerance, apart.detail)
        if worst is None or found.share > worst.share:
            worst = found
    return worst or Finding(key, mine, theirs, 0.0, EXACT)


def worst_by_phase(findings: Sequence[Finding]) -> dict[str, Finding]:
    """What uses most of its tolerance in each phase, in the order in which phases appear."""
    worst: dict[str, Finding] = {}
    for found in findings:
        if found.key.phase not in worst or found.share > worst[found.key.phase].share:
            worst[found.key.phase] = found
    return worst


def largest_before(comparison: Comparison, place: int) -> float:
    """The largest finite distance before an event, within its own step or round."""
    here = comparison.findings[place].key
    same = (here.moment, here.number)
    before = [
        found.ulps
        for found in comparison.findings[:place]
        if (found.key.moment, found.key.number) == same and math.isfinite(found.ulps)
    ]
    return max(before, default=0.0)
