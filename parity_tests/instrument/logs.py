"""Rounds and bytes of two traces, side by side."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from parity_tests.instrument.diff import Comparison, Finding
from parity_tests.instrument.files import Event, Trace

FIELDS = {  # of a round's values: what a reader wants to see of each
    "vote": ("norm", "weight", "anomalous", "flagged", "rearmed", "finite", "steps"),
    "outer": ("norm", "clip", "gap", "rollback"),
    "round": ("forced", "empty"),
    "statistics": ("mean", "var", "count", "flags"),
}


class LogRow(NamedTuple):
    """One value of a round in both traces."""

    round: int
    unit: str
    what: str  # "vote of replica 1"
    mine: str
    theirs: str
    ok: bool


class LedgerRow(NamedTuple):
    """Bytes that rank 0 handed to collectives over one axis in one step."""

    step: int
    axis: str
    mine: int
    theirs: int

    @property
    def ok(self) -> bool:
        """Whether both sent as much."""
        return self.mine == self.theirs


class Ledger(NamedTuple):
    """Both byte ledgers, where both traces have one."""

    rows: tuple[LedgerRow, ...]
    comparable: bool  # on meshes of different shape, ranks send different amounts


def event_log(comparison: Comparison) -> list[LogRow]:
    """Every value of every round, in order."""
    return list(_rows(comparison))


def _rows(comparison: Comparison) -> Iterator[LogRow]:
    for found in comparison.findings:
        event = found.mine or found.theirs
        assert event is not None
        if found.key.moment != "round" or event.value is None:
            continue
        whose = "" if found.key.replica is None else f" of replica {found.key.replica}"
        what = f"{found.key.name}{whose}"
        mine, theirs = (_told(found, side) for side in (found.mine, found.theirs))
        yield LogRow(found.key.number, found.key.unit or "", what, mine, theirs, found.ok)


def _told(found: Finding, event: Event | None) -> str:
    if event is None or event.value is None:
        return "no such event"
    fields = FIELDS.get(found.key.name, tuple(event.value))
    told = [_field(name, event.value[name]) for name in fields if name in event.value]
    return ", ".join(text for text in told if text)


def _field(name: str, value: Any) -> str:
    """``norm 0.0123``; of switches only those that are on, but ``finite`` if it is off."""
    if isinstance(value, bool):
        return ("" if value else "not finite") if name == "finite" else (name if value else "")
    return f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"


def ledger(comparison: Comparison) -> Ledger:
    """Bytes by step and axis; empty unless both traces have dispatches."""
    mine, theirs = _bytes(comparison.mine), _bytes(comparison.theirs)
    is_same_mesh = comparison.mine.meta.get("mesh") == comparison.theirs.meta.get("mesh")
    if not mine or not theirs:
        return Ledger((), is_same_mesh)
    axes = {axis for _, axis in mine} & {axis for _, axis in theirs}
    places = sorted(key for key in {*mine, *theirs} if key[1] in axes)
    rows = (LedgerRow(*place, mine.get(place, 0), theirs.get(place, 0)) for place in places)
    return Ledger(tuple(rows), is_same_mesh)


def _bytes(trace: Trace) -> dict[tuple[int, str], int]:
    """Bytes by step and axis of rank 0."""
    total: dict[tuple[int, str], int] = defaultdict(int)
    for sent in trace.collectives:
        if sent.rank == 0:
            total[sent.step, sent.axis] += sent.bytes
    return dict(total)
