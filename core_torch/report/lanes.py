"""An estimated timeline as people read it: blocks of compute by unit, and what hides behind them.

Collectives are named by what they carry, compute by the bucket that was gathered for it last.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from core_torch.shard.timeline import Timeline, Transfer

_SAME_INSTANT = 1e-9  # seconds


class Block(NamedTuple):
    """Compute without a pause, for one unit. Seconds since the start of the step."""

    program: str
    unit: str
    begin: float
    end: float


class Wait(NamedTuple):
    """The compute stream stands still for a collective."""

    program: str
    name: str
    op: str
    begin: float
    end: float


class Overlap(NamedTuple):
    """A unit's compute that runs while a collective does."""

    unit: str
    seconds: float


def blocks_of(timeline: Timeline, owners: Mapping[str, str]) -> list[Block]:
    """Compute in order of time. ``owners``: unit of every parameter."""
    gathers = {(t.program, t.name, t.awaited) for t in timeline.transfers if t.op == "all_gather"}
    blocks: list[Block] = []
    unit = ""
    for span in timeline.spans:
        if span.kind == "wait" and (span.program, span.name, span.begin) in gathers:
            unit = owners.get(span.name, span.name)
        begin = span.begin + span.blocked
        if span.end <= begin:
            continue
        last = blocks[-1] if blocks else None
        joins = last is not None and begin - last.end < _SAME_INSTANT
        if last and joins and (last.program, last.unit) == (span.program, unit):
            blocks[-1] = last._replace(end=span.end)
        else:
            blocks.append(Block(span.program, unit, begin, span.end))
    return blocks


def waits_of(timeline: Timeline) -> list[Wait]:
    """Exposed communication in order of time."""
    return [
        Wait(t.program, t.name, t.op, t.awaited, t.awaited + t.exposed)
        for t in sorted(timeline.transfers, key=lambda t: t.awaited)
        if t.exposed > 0
    ]


def overlaps(transfer: Transfer, blocks: Sequence[Block]) -> list[Overlap]:
    """What is computed while ``transfer`` is on the link, by unit, in order of time."""
    found: dict[str, float] = {}
    for block in blocks:
        shared = min(block.end, transfer.end) - max(block.begin, transfer.begin)
        if shared > _SAME_INSTANT:
            found[block.unit] = found.get(block.unit, 0.0) + shared
    return [Overlap(unit, seconds) for unit, seconds in found.items()]


def collectives(timeline: Timeline, program: str) -> int:
    """How many a pass over the model needs. ``program``: "forward" or "backward"."""
    return sum(t.program == program for t in timeline.transfers)


def facts(timeline: Timeline, owners: Mapping[str, str]) -> dict[str, Any]:
    """A timeline as JSON."""
    blocks = blocks_of(timeline, owners)
    return {
        "collectives_forward": collectives(timeline, "forward"),
        "collectives_backward": collectives(timeline, "backward"),
        "bytes": sum(t.payload_bytes for t in timeline.transfers),
        "wire_bytes": sum(t.wire_bytes for t in timeline.transfers),
        "seconds": timeline.seconds,
        "compute_seconds": timeline.compute_seconds,
        "link_seconds": timeline.link_seconds,
        "exposed_seconds": timeline.exposed_seconds,
        "peak_bytes": timeline.peak_bytes,
        "transfers": [
            {**t._asdict(), "overlaps": [o._asdict() for o in overlaps(t, blocks)]}
            for t in timeline.transfers
        ],
    }
