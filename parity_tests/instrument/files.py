"""A trace folder as it lies on disk, put together: shards merged, events in program order.

Every rank wrote a file of its own. Sketches are additive, so the parts of a tensor are summed and
no tensor is ever gathered. The order is that of rank 0's file, with the events of other replicas
beside the same event of replica 0; between two rounds a replica may have made more steps.
"""

import json
import lzma
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from core_torch.errors import DataError

SCHEMA = "twinshard-trace/1"
SIGNS = 16  # numbers in a sketch
AGAIN = "record the trace again: twinshard parity record"


class UnreadableTrace(DataError):
    """A trace is missing, damaged or not whole."""


class Key(NamedTuple):
    """What an event is about; equal in two traces of one run."""

    moment: str  # "step" or "round"
    number: int  # of the step or round
    phase: str
    unit: str | None
    name: str
    replica: int | None  # None: what all replicas agree on
    again: int = 0  # of events that are equal in all of the above, how many came before

    def __str__(self) -> str:
        unit = "" if self.unit in (None, "", self.name) else f"{self.unit}: "
        unit = "" if self.unit and self.name.startswith(self.unit) else unit
        whose = "" if self.replica is None else f" of replica {self.replica}"
        times = f", time {self.again + 1}" if self.again else ""
        return f"{self.moment} {self.number}, {self.phase}, {unit}{self.name}{whose}{times}"


class Part(NamedTuple):
    """One line: where it stands, and the range of the tensor's flat index that it covers."""

    file: str
    line: int
    seq: int
    start: int = 0
    n: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """A tensor, as its sums and sketch over all shards, or a value."""

    key: Key
    step: int  # inner step; of a round, the writing replica's
    parts: tuple[Part, ...]
    value: dict[str, Any] | None = None  # None: a tensor
    shape: tuple[int, ...] = ()
    dtype: str = ""
    sum2: float = 0.0
    amax: float = 0.0
    bad: int = 0  # elements that are not finite
    sketch: np.ndarray | None = None  # [16] float64

    @property
    def norm(self) -> float:
        """L2 norm of what is finite."""
        return math.sqrt(self.sum2)

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def where(self) -> str:
        """File and line of the first part."""
        return f"{self.parts[0].file} line {self.parts[0].line}"


class Collective(NamedTuple):
    """One dispatch in the byte ledger."""

    rank: int
    step: int
    op: str
    axis: str
    bytes: int
    unit: str | None


@dataclass(frozen=True, slots=True)
class Trace:
    """All that a folder tells."""

    folder: Path
    meta: dict[str, Any]
    events: tuple[Event, ...]  # in program order
    by_key: dict[Key, Event]
    collectives: tuple[Collective, ...]
    places: frozenset[tuple[str, str | None]]  # phases and units that occur

    @property
    def name(self) -> str:
        """For tables: which core wrote it."""
        return str(self.meta.get("core") or self.folder.name)

    def taps(self, key: Key) -> bool:
        """Whether this trace writes events of this kind at all."""
        if key.phase not in self.meta["taps"]:
            return False
        return key.phase not in ("forward", "backward") or (key.phase, key.unit) in self.places


class _Line(NamedTuple):
    key: Key
    at: Part
    body: dict[str, Any]


def read_trace(folder: Path) -> Trace:
    """Reads a folder that a core, the reference or ``core_torch.taps.trace`` has written.

    Raises:
        UnreadableTrace: no such folder, a line that is none, a shard that is missing or told twice.
    """
    meta = _read_meta(folder)
    paths = _event_files(folder, meta)
    collectives: list[Collective] = []
    lines_of = [_read_lines(path, rank, collectives) for rank, path in paths.items()]
    told: dict[Key, list[_Line]] = {}
    for lines in lines_of:
        for line in lines:
            told.setdefault(line.key, []).append(line)
    order = program_order([[x.key for x in lines] for lines in lines_of], _beside)
    events = tuple(_merged(key, told[key]) for key in order)
    by_key = {event.key: event for event in events}
    meta["taps"] = list(meta.get("taps") or sorted({key.phase for key in by_key}))
    places = frozenset((key.phase, key.unit) for key in by_key)
    return Trace(folder, meta, events, by_key, tuple(collectives), places)


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnreadableTrace(
            f"{folder} is no trace: {error.strerror}",
            where=str(path),
            next="twinshard parity record --out FOLDER",
        ) from None
    except ValueError as error:
        raise UnreadableTrace(f"not JSON: {error}", where=str(path), next=AGAIN) from None
    if not isinstance(meta, dict) or meta.get("schema") != SCHEMA:
        told = meta.get("schema") if isinstance(meta, dict) else None
        raise UnreadableTrace(
            f"the schema is {told!r}, and {SCHEMA!r} is what can be read",
            where=str(path),
            next=AGAIN,
        )
    return meta


def _event_files(folder: Path, meta: dict[str, Any]) -> dict[int, Path]:
    """The file of every rank, by rank; none may be missing."""
    found: dict[int, Path] = {}
    for path in folder.glob("events.*.jsonl*"):
        rank, _, ending = path.name.removeprefix("events.").partition(".")
        if rank.isdecimal() and ending in ("jsonl", "jsonl.xz"):
            if int(rank) in found:
                raise UnreadableTrace(
                    f"rank {rank} has two files", where=str(path), next="remove one"
                )
            found[int(rank)] = path
    mesh = meta.get("mesh") or {}
    ranks = int(mesh.get("replicas", 1)) * int(mesh.get("shards", 1))
    # One file may hold what all replicas did, if one process computed it.
    expected = range(max(ranks, len(found)) if len(found) > 1 or ranks == 1 else 1)
    for missing in (number for number in expected if number not in found):
        raise UnreadableTrace(
            f"rank {missing} has no file",
            where=str(folder / f"events.{missing}.jsonl"),
            next=AGAIN,
        )
    return dict(sorted(found.items()))


def _read_lines(path: Path, rank: int, collectives: list[Collective]) -> list[_Line]:
    """Events of one rank; its dispatches go to ``collectives``."""
    lines: list[_Line] = []
    seen: dict[Key, int] = {}
    for number, text in _texts(path):
        try:
            body = json.loads(text)
            if body.get("kind") == "collective":
                step, op, axis, size = (body[k] for k in ("step", "op", "axis", "bytes"))
                collectives.append(Collective(rank, step, op, axis, size, body.get("unit")))
                continue
            line = _parse(body, path.name, number)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            missing = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise UnreadableTrace(
                f"this line is no event: {missing}",
                where=f"{path} line {number}",
                likely="the recording was stopped while it wrote",
                next=AGAIN,
            ) from None
        again = seen[line.key] = seen.get(line.key, -1) + 1
        lines.append(line._replace(key=line.key._replace(again=again)))
    return lines


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of every line."""
    try:
        raw = path.read_bytes()
        text = (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode("utf-8")
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise UnreadableTrace(f"cannot be read: {error}", where=str(path), next=AGAIN) from None
    yield from ((i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip())


def _parse(body: dict[str, Any], file: str, number: int) -> _Line:
    """A line's key, and the line checked as far as later code relies on it."""
    phase = body["phase"]
    is_round = phase.startswith("sync.")
    count = body["round"] if is_round else body["step"]
    if not isinstance(count, int) or not isinstance(body["step"], int):
        raise ValueError(f"{'round' if is_round else 'step'} must be a whole number")
    moment = "round" if is_round else "step"
    key = Key(moment, count, phase, body.get("unit"), body["name"], body.get("replica"))
    if "value" in body:
        return _Line(key, Part(file, number, body["seq"]), body)
    shard = body["shard"]
    if len(body["sk"]) != SIGNS:
        raise ValueError(f"a sketch has {SIGNS} numbers, not {len(body['sk'])}")
    return _Line(key, Part(file, number, body["seq"], shard["start"], shard["n"]), body)


def _merged(key: Key, lines: list[_Line]) -> Event:
    """The event that these lines, one of each shard, tell together."""
    first = lines[0]
    parts = tuple(line.at for line in sorted(lines, key=lambda line: line.at.start))
    if "value" in first.body:
        if len(lines) > 1:
            _refuse(key, lines[1].at, f"{lines[0].at.file} tells the same value")
        return Event(key, first.body["step"], parts, value=first.body["value"])
    shape, dtype = tuple(first.body["shape"]), first.body["dtype"]
    covered = 0
    for line in lines:
        if tuple(line.body["shape"]) != shape or line.body["dtype"] != dtype:
            _refuse(key, line.at, "its shape or dtype is not that of the first part")
    for part in parts:
        if part.n and part.start != covered:
            how = "missing" if part.start > covered else "told twice"
            ends = sorted((covered, part.start))
            _refuse(key, part, f"elements {ends[0]} to {ends[1] - 1} are {how}")
        covered += part.n
    if covered != math.prod(shape):
        _refuse(key, parts[-1], f"only {covered} of {math.prod(shape)} elements are told")
    return Event(
        key,
        first.body["step"],
        tuple(part for part in parts if part.n) or parts[:1],
        shape=shape,
        dtype=dtype,
        sum2=sum(float(line.body["sum2"]) for line in lines),
        amax=max(float(line.body["amax"]) for line in lines),
        bad=sum(int(line.body["bad"]) for line in lines),
        sketch=np.array([line.body["sk"] for line in lines], np.float64).sum(axis=0),
    )


def _refuse(key: Key, at: Part, what: str) -> None:
    raise UnreadableTrace(
        f"{key}: {what}",
        where=f"{at.file} line {at.line}",
        likely="a rank's file is missing, or from another recording",
        next=AGAIN,
    )


def _beside(key: Key) -> Key:
    """What events of different replicas have in common."""
    return key._replace(replica=None)


def program_order(
    sequences: Sequence[Sequence[Key]],
    common: Callable[[Key], Key] = lambda key: key,
    *,
    wait: bool = True,
) -> list[Key]:
    """One order of the keys of several sequences, that of the first with the others beside it.

    Args:
        sequences: each in its own order, which is kept but for rounds: all that comes before a
            round in one sequence stands before that round.
        common: keys of which this is equal stand together.
        wait: false where the sequences are not of one run: then the first keeps its rounds where
            they are, wherever the others have theirs.
    """
    order: dict[Key, None] = {}
    others = [_Others(keys, common) for keys in sequences[1:]]
    was_round = False
    for key in sequences[0]:
        if wait and key.moment == "round" and not was_round:
            for other in others:
                order.update(dict.fromkeys(other.until_round(key.number)))
        was_round = key.moment == "round"
        order[key] = None
        for other in others:
            order.update(dict.fromkeys(other.until(common(key))))
    for other in others:
        order.update(dict.fromkeys(other.rest()))
    return list(order)


class _Others:
    """A sequence that is read along with another."""

    def __init__(self, keys: Sequence[Key], common: Callable[[Key], Key]) -> None:
        self._keys, self._at = keys, 0
        self._last = {common(key): i for i, key in enumerate(keys)}
        self._rounds = [i for i, key in enumerate(keys) if key.moment == "round"]
        self._met = {keys[i].number for i in self._rounds}

    def _take(self, end: int) -> Sequence[Key]:
        begin, self._at = self._at, max(self._at, end)
        return self._keys[begin : self._at]

    def _next_round(self) -> int:
        place = bisect_left(self._rounds, self._at)
        return self._rounds[place] if place < len(self._rounds) else len(self._keys)

    def until_round(self, number: int) -> Sequence[Key]:
        """All before the next round, if this sequence tells of round ``number`` at all."""
        return self._take(self._next_round()) if number in self._met else ()

    def until(self, wanted: Key) -> Sequence[Key]:
        """All up to ``wanted``; nothing if it is not there, or a step beyond the next round."""
        found = self._last.get(wanted, -1)
        if wanted.moment == "step" and found >= self._next_round():
            return ()
        return self._take(found + 1)

    def rest(self) -> Sequence[Key]:
        """What is left."""
        return self._take(len(self._keys))
