"""What computing and communicating cost: a model of six numbers, its calibration, its cache.

Compute
    seconds = flops / flops_per_second + bytes / bytes_per_second + operators x seconds_per_operator

A segment holds many operators, some bound by arithmetic and some by memory, one after the
other, so their times *add up*; the maximum of the two (the textbook roofline) is right for
one operator alone, and calibrated on one size it misses the next, where the mixture differs.

Link
    seconds = latency + wire bytes / bandwidth

Numbers only: the same inputs give the same result on every rank.
"""

import itertools
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from core_torch.data.atomic import write_atomic
from core_torch.errors import ConfigError
from core_torch.shard.program import Instruction, Op


class ComputeSample(NamedTuple):
    """One measured compute segment."""

    flops: float
    touched_bytes: float
    operators: float
    seconds: float


class LinkSample(NamedTuple):
    """One measured collective with nothing else on the link."""

    wire_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Rates of one rank; infinite where something costs nothing.

    Raises:
        ValueError: a rate that is not above 0, or a duration that is negative or not finite.
    """

    flops_per_second: float
    bytes_per_second: float  # of memory, read and written
    seconds_per_operator: float
    latency_seconds: float  # before the first byte of a collective arrives
    link_bytes_per_second: float  # each way at once
    compute_slowdown: float = 1.0  # compute takes this much longer while the link is busy
    profile: Mapping[str, float] = field(default_factory=dict, hash=False)  # see profile_key

    def __post_init__(self) -> None:
        rates = ("flops_per_second", "bytes_per_second", "link_bytes_per_second")
        wrong = [name for name in rates if not getattr(self, name) > 0]
        durations = ("seconds_per_operator", "latency_seconds")
        wrong += [name for name in durations if not 0 <= getattr(self, name) < math.inf]
        wrong += [] if 1 <= self.compute_slowdown < math.inf else ["compute_slowdown"]
        wrong += [key for key, value in self.profile.items() if not 0 <= value < math.inf]
        if wrong:
            raise ValueError(f"costs that cannot be: {', '.join(wrong)}")

    @classmethod
    def typical(cls) -> "Costs":
        """Round figures of one CPU core on a fast network; the same on every rank.

        Good enough to order plans. ``calibrate`` measures those of a machine.
        """
        return cls(
            flops_per_second=5e10,
            bytes_per_second=1e10,
            seconds_per_operator=2e-6,
            latency_seconds=2e-4,
            link_bytes_per_second=5e8,
        )

    def seconds_of(self, instruction: Instruction, program: str = "") -> float:
        """Seconds of the compute stream for ``instruction``: measured if the profile has it.

        For a start or a wait that is packing, unpacking and summing, not the transfer.
        """
        measured = self.profile.get(profile_key(program, instruction))
        if measured is not None:
            return measured
        return self.compute_seconds(
            instruction.flops, instruction.touched_bytes, instruction.operators
        )

    def compute_seconds(self, flops: float, touched_bytes: float, operators: float) -> float:
        """Seconds of work that no profile knows; the formula at the top of this file."""
        return (
            flops / self.flops_per_second
            + touched_bytes / self.bytes_per_second
            + operators * self.seconds_per_operator
        )

    def link_seconds(self, op: Op, payload_bytes: float, ranks: int) -> float:
        """Seconds for which a collective occupies the link; 0 among one rank."""
        if ranks == 1:
            return 0.0
        wire = wire_bytes(op, payload_bytes, ranks)
        return self.latency_seconds + wire / self.link_bytes_per_second


def profile_key(program: str, instruction: Instruction) -> str:
    """Name of an instruction in a profile: "backward wait reduce_scatter layers.0"."""
    return " ".join(
        word for word in (program, instruction.kind, instruction.op, instruction.name) if word
    )


def wire_bytes(op: Op, payload_bytes: float, ranks: int) -> float:
    """Bytes that each rank sends, and as many that it receives, for a payload.

    The payload is counted as in collectives.py. Our reduce-scatter is an all-to-all and a
    local sum; an all-reduce is a reduce-scatter and an all-gather.
    """
    once = (ranks - 1) / ranks * payload_bytes
    return 2 * once if op == "all_reduce" else once


def fit(
    compute: Sequence[ComputeSample], link: Sequence[LinkSample], *, compute_slowdown: float = 1.0
) -> Costs:
    """Calibrates the model: least squares of the relative error, no coefficient below 0.

    Relative, because a segment of 100 microseconds should be met as well as one of 100
    milliseconds. A column that the samples do not need gets the coefficient 0.

    Args:
        compute: segments of different mixtures, or the coefficients cannot be told apart.
        link: collectives of different sizes.
        compute_slowdown: see ``Costs``; measured apart.

    Raises:
        ValueError: no samples, or one that took no time.
    """
    arithmetic, memory, operator = _coefficients(
        [[s.flops, s.touched_bytes, s.operators] for s in compute], [s.seconds for s in compute]
    )
    latency, per_byte = _coefficients([[1, s.wire_bytes] for s in link], [s.seconds for s in link])
    return Costs(
        flops_per_second=_rate(arithmetic),
        bytes_per_second=_rate(memory),
        seconds_per_operator=operator,
        latency_seconds=latency,
        link_bytes_per_second=_rate(per_byte),
        compute_slowdown=compute_slowdown,
    )


def _rate(seconds_each: float) -> float:
    """Units per second."""
    return 1 / seconds_each if seconds_each > 0 else math.inf


def _coefficients(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Non-negative least squares, exact: the best of all sets of columns that may be used."""
    if not seconds or min(seconds) <= 0:
        raise ValueError("calibration needs samples, each of which took some time")
    table = np.asarray(rows, dtype=np.float64) / np.asarray(seconds)[:, None]
    columns = range(table.shape[1])
    scale = np.abs(table).max(axis=0)  # so that 1e9 FLOPs and 10 operators are comparable
    usable = [i for i in columns if scale[i] > 0]
    scale[scale == 0] = 1.0
    best, least = np.zeros(table.shape[1]), float(len(seconds))  # predicting 0: all is error
    for count in range(1, len(usable) + 1):
        for chosen in itertools.combinations(usable, count):
            part = (table / scale)[:, chosen]
            found = np.linalg.lstsq(part, np.ones(len(seconds)), rcond=None)[0]
            error = float(np.square(part @ found - 1).sum())
            if found.min() >= 0 and error < least * (1 - 1e-9):
                best, least = np.zeros(table.shape[1]), error
                best[list(chosen)] = found
    return [float(x) for x in best / scale]


def hardware_key(*, threads: int, versions: Mapping[str, str], network: str) -> str:
    """What a calibration is valid for, as one line of text.

    Args:
        threads: of compute, per rank.
        versions: of the libraries that make or run kernels.
        network: name of the link, such as "loopback" or "1gbit,1ms".
    """
    numbers = [f"{name} {version}" for name, version in sorted(versions.items())]
    machine = [platform.machine(), _processor(), f"{os.cpu_count()} cores", f"{threads} threads"]
    return "; ".join([*machine, *numbers, network])


def _processor() -> str:
    """Model name of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def save(path: Path, key: str, costs: Costs) -> None:
    """Enters ``costs`` under ``key`` into the JSON cache at ``path``; other keys stay.

    Raises:
        DataError: the file cannot be written.
    """
    numbers = {k: v for k, v in asdict(costs).items() if k != "profile"}
    # JSON has no infinity; float() reads the text again.
    entry = {k: v if math.isfinite(v) else str(v) for k, v in numbers.items()}
    cache = {**_read(path), key: {**entry, "profile": dict(costs.profile)}}
    write_atomic(path, [json.dumps(cache, indent=1, sort_keys=True).encode()])


def load(path: Path, key: str) -> Costs | None:
    """Costs under ``key``; None where a measurement is due: no such file, key or numbers."""
    entry: Any = _read(path).get(key)
    try:
        profile = {str(name): float(value) for name, value in entry["profile"].items()}
        names = [f.name for f in fields(Costs) if f.name != "profile"]
        return Costs(**{name: float(entry[name]) for name in names}, profile=profile)
    except (TypeError, KeyError, AttributeError, ValueError):
        return None  # a cache may be thrown away at any time, so a damaged one is no error


def read_costs(path: Path) -> Costs:
    """Costs that ``twinshard bench shard --costs`` has written.

    Raises:
        ConfigError: no such file, or no costs in it.
    """
    found = load(path, "costs")
    if found is None:
        raise ConfigError(
            f"{path} does not hold measured costs", next=f"twinshard bench shard --costs {path}"
        )
    return found


def _read(path: Path) -> dict[str, Any]:
    """The whole cache; empty if there is none that can be read."""
    try:
        cache = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cache if isinstance(cache, dict) else {}
