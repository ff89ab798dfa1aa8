"""Records of a run as JSON lines: written while training goes on, read back for a report.

Strict JSON: non-finite floats are the strings ``"nan"``, ``"inf"`` and ``"-inf"``. One line is
one write and one flush, so that a killed run loses at most its last line. Standard library
only, so the parent process never loads torch.

Shape suffixes
    U    units of the model
    N    replicas; always the last axis
"""

import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from core_torch.errors import DataError

_REPLICA_FILE = re.compile(r"^metrics-replica-(\d{4})\.jsonl$")
_UNREADABLE = (ValueError, TypeError, KeyError, OverflowError, RecursionError)


class Step(NamedTuple):
    """One inner step of one replica; a line of its metrics file."""

    step: int  # inner steps so far, 1-based
    tokens: int  # over all replicas
    loss: float  # nats per token, mean over the replica's shards
    grad_norm: float  # L2, before clipping
    lr: float
    seconds: float  # of this step
    replica_bytes: int  # payload this rank dispatched over the replica axis, cumulative
    shard_bytes: int  # the same over the shard axis
    validation_loss: float | None  # nats per token; None where not evaluated


class Round(NamedTuple):
    """One sync round of some or all units; a line of events.jsonl.

    Units may differ from one round to the next: Streaming DiLoCo exchanges a fragment at a time.
    """

    round: int
    step: int
    forced: bool  # by finish(), outside the interval
    units: list[str]
    norm_UN: list[list[float]]  # L2 of each replica's pseudo-gradient, parameter units
    finite_UN: list[list[bool]]
    flagged_UN: list[list[bool]]
    rearmed_UN: list[list[bool]]
    anomalous_UN: list[list[bool]]
    weight_UN: list[list[float]]
    effective_replicas_U: list[float]
    combined_norm_U: list[float]
    clip_U: list[float]  # factor on the combined pseudo-gradient; below 1 it was clipped
    rollback_U: list[bool]
    steps_N: list[int]  # inner steps of each replica since the last round that moved anything
    empty: bool  # numbered, but too few steps for an exchange: nothing moved
    gap_U: list[float]  # staleness gap; 1 where nothing is stale


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Everything that a run folder records."""

    folder: Path
    config: dict[str, Any]  # config.toml
    metrics: dict[int, list[Step]]  # by replica; empty before the first step
    events: list[Round]
    summary: dict[str, Any]  # summary.json; empty while the run goes on
    samples: dict[str, Any]  # samples.json: prompt, before, after; empty if there are none
    info: dict[str, Any]  # run.json: versions, command line
    outcome: dict[str, Any]  # outcome.json; empty while the run goes on

    def setting(self, path: str, default: Any = None) -> Any:
        """Value of a configuration field by its dotted path, ``default`` where it is not set."""
        value: Any = self.config
        for name in path.split("."):
            if not isinstance(value, dict) or name not in value:
                return default
            value = value[name]
        return value


def encode(value: Any) -> Any:
    """``value`` with non-finite floats as strings, mappings as dicts and sequences as lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {str(name): encode(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return value


def write_json(path: Path, value: Any) -> None:
    """Writes a strict JSON file in one rename, so that no reader meets half of it."""
    text = json.dumps(encode(value), allow_nan=False, indent=2) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def metrics_path(folder: Path, replica: int) -> Path:
    """Metrics file of a replica in a run folder."""
    name = "metrics.jsonl" if replica == 0 else f"metrics-replica-{replica:04d}.jsonl"
    return folder / name


def _drop_half_line(path: Path) -> None:
    """Cuts what a killed process left after the last newline, so that appending stays sound."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


class RecordWriter:
    """Appends one replica's records to its run folder; a context manager.

    Every replica computes the same events, so only replica 0 writes them; the others may call
    ``event`` all the same. A resumed run appends: see ``load_run`` for what then counts.

    Args:
        folder: run folder, created (0700) if missing.
        replica: index on the replica axis. One rank of the replica writes.
    """

    def __init__(self, folder: Path, replica: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        paths = [metrics_path(folder, replica)]
        if replica == 0:
            paths.append(folder / "events.jsonl")
        for path in paths:
            _drop_half_line(path)
        self._files = [path.open("a", encoding="utf-8", newline="\n") for path in paths]

    def step(self, record: Mapping[str, Any]) -> None:
        """Appends one inner step, a mapping with the fields of ``Step``."""
        self._append(0, record)

    def event(self, event: Mapping[str, Any]) -> None:
        """Appends one sync round; keys as in ``Round`` without the shape suffixes."""
        if len(self._files) > 1:
            self._append(1, event)

    def _append(self, index: int, record: Mapping[str, Any]) -> None:
        self._files[index].write(json.dumps(encode(record), allow_nan=False) + "\n")
        self._files[index].flush()

    def close(self) -> None:
        """Closes the files; calling it again is harmless."""
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _parse_json(text: str) -> dict[str, Any]:
    value = json.loads(text, parse_constant=_refuse_constant)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _parse_step(raw: dict[str, Any]) -> Step:
    validation = raw["validation_loss"]
    return Step(
        step=int(raw["step"]),
        tokens=int(raw["tokens"]),
        loss=float(raw["loss"]),
        grad_norm=float(raw["grad_norm"]),
        lr=float(raw["lr"]),
        seconds=float(raw["seconds"]),
        replica_bytes=int(raw["replica_bytes"]),
        shard_bytes=int(raw["shard_bytes"]),
        validation_loss=None if validation is None else float(validation),
    )


_T = TypeVar("_T")


def _parse_round(raw: dict[str, Any]) -> Round:
    older: dict[str, Any] = {"steps": [], "empty": False, "gap": [1.0] * len(raw["units"])}
    raw = older | raw  # runs of before there was A-EDiT lack these
    units = [str(unit) for unit in raw["units"]]
    replicas = len(raw["norm"][0]) if units else 0

    def row(name: str, kind: Callable[[Any], _T]) -> list[_T]:
        """One entry per unit."""
        if len(raw[name]) != len(units):
            raise ValueError(f"{name} has {len(raw[name])} entries for {len(units)} units")
        return [kind(value) for value in raw[name]]

    def grid(name: str, kind: Callable[[Any], _T]) -> list[list[_T]]:
        """One row per unit, one entry per replica."""
        rows = [[kind(value) for value in values] for values in row(name, list)]
        if not replicas or any(len(values) != replicas for values in rows):
            raise ValueError(f"{name} is not a table of units by replicas")
        return rows

    return Round(
        round=int(raw["round"]),
        step=int(raw["step"]),
        forced=bool(raw["forced"]),
        units=units,
        norm_UN=grid("norm", float),
        finite_UN=grid("finite", bool),
        flagged_UN=grid("flagged", bool),
        rearmed_UN=grid("rearmed", bool),
        anomalous_UN=grid("anomalous", bool),
        weight_UN=grid("weight", float),
        effective_replicas_U=row("effective_replicas", float),
        combined_norm_U=row("combined_norm", float),
        clip_U=row("clip", float),
        rollback_U=row("rollback", bool),
        steps_N=[int(count) for count in raw["steps"]],
        empty=bool(raw["empty"]),
        gap_U=row("gap", float),
    )


def _read_lines(path: Path, parse: Callable[[dict[str, Any]], _T]) -> list[_T]:
    """Records of a JSON lines file; an unreadable last line is what a kill leaves, and dropped."""
    if not path.is_file():
        return []
    lines = [line for line in path.read_bytes().split(b"\n") if line]
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(parse(_parse_json(line.decode("utf-8"))))
        except _UNREADABLE as error:
            if number == len(lines):
                break
            raise DataError(
                f"{path.name} holds a line that is no record: {type(error).__name__} {error}",
                where=f"{path}, line {number} of {len(lines)}",
                likely="the file was edited, or two runs wrote into one folder",
                next="restore the file, or report on another run",
            ) from error
    return records


def _drop_repeats(records: list[_T], index: Callable[[_T], int]) -> list[_T]:
    """What counts after resumes: a record replaces all earlier ones of its index and above.

    A resumed run starts at its last commit; what the lost part wrote after it, and a forced
    round at the end of a run that was then extended, did not happen.
    """
    kept: list[_T] = []
    for record in records:
        while kept and index(kept[-1]) >= index(record):
            kept.pop()
        kept.append(record)
    return kept


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where the file is missing."""
    if not path.is_file():
        return {}
    try:
        return _parse_json(path.read_text(encoding="utf-8"))
    except _UNREADABLE as error:
        raise DataError(f"{path.name} is not a JSON object: {error}", where=str(path)) from error


def _read_summary(path: Path) -> dict[str, Any]:
    """summary.json with its numbers as numbers."""
    raw = _read_json(path)
    try:
        numbers = {
            k: v if isinstance(v, int) else float(v)
            for k, v in raw.items()
            if k != "method" and v is not None
        }
    except _UNREADABLE as error:
        raise DataError(f"{path.name} holds what is no number: {error}", where=str(path)) from error
    return raw | numbers


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.toml"
    if not path.is_file():
        exists = "it has no config.toml" if folder.is_dir() else "there is no such folder"
        raise DataError(
            f"{folder} is no run: {exists}",
            likely="a mistyped path, or the folder above the runs",
            next=f"twinshard train --run {folder}",
        )
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except _UNREADABLE as error:
        raise DataError(f"config.toml cannot be read: {error}", where=str(path)) from error


def load_run(folder: Path) -> Run:
    """Reads a run folder, also of a run that is going on or was killed.

    A half-written last line is left out. Where a resumed run repeats steps or rounds, the
    later records count; replicas that it goes on without do not.

    Raises:
        DataError: no run folder, or a file in it that is not what Twinshard writes.
    """
    config = _read_config(folder)
    matches = [_REPLICA_FILE.match(path.name) for path in sorted(folder.iterdir())]
    replicas = [0, *(int(match[1]) for match in matches if match)]
    now = config.get("mesh", {}).get("replicas")  # a resume may have left fewer of them
    if isinstance(now, int):
        replicas = [n for n in replicas if n < now]
    metrics = {n: _read_lines(metrics_path(folder, n), _parse_step) for n in replicas}
    events = _read_lines(folder / "events.jsonl", _parse_round)
    return Run(
        folder=folder,
        config=config,
        metrics={n: _drop_repeats(s, lambda r: r.step) for n, s in metrics.items() if s},
        events=_drop_repeats(events, lambda r: r.round),
        summary=_read_summary(folder / "summary.json"),
        samples=_read_json(folder / "samples.json"),
        info=_read_json(folder / "run.json"),
        outcome=_read_json(folder / "outcome.json"),
    )
