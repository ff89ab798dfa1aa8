"""How a trace looks on the disk: one line of events.0.jsonl, and meta.json.

No chapter: what the reference writes about itself, in the format of both programs.
"""

import dataclasses
import hashlib
import json
import os
import platform
from importlib.metadata import version
from typing import Any, NamedTuple, TextIO

import jax
import numpy as np

from reference_jax.methods import TrainConfig
from reference_jax.model import shapes
from reference_jax.record import Host
from reference_jax.sketch import sketch

SCHEMA = "twinshard-trace/1"
PHASES = "init data forward backward grad clip optim".split()
ROUND_PHASES = [f"sync.{name}" for name in "delta vote merge clip outer params end".split()]


class Place(NamedTuple):
    """Where in the run a line belongs."""

    step: int
    phase: str
    round: int | None = None


class Lines:
    """Writes the lines of a trace. ``unit`` None: of the whole model; ``replica`` None: of all."""

    def __init__(self, file: TextIO) -> None:
        self.file, self.seq = file, 0

    def tensor(
        self, place: Place, unit: str | None, name: str, replica: int | None, x: np.ndarray
    ) -> None:
        """A whole tensor, as its sketch."""
        shard = {"axis": 0, "start": 0, "n": x.size}
        told = {"shape": list(x.shape), "dtype": x.dtype.name, "shard": shard}
        self._write(place, unit, name, replica, told | sketch(x, 0)._asdict())

    def value(
        self, place: Place, unit: str | None, name: str, replica: int | None, **value: Any
    ) -> None:
        """Some plain numbers."""
        self._write(place, unit, name, replica, {"value": value})

    def _write(
        self, place: Place, unit: str | None, name: str, replica: int | None, told: dict[str, Any]
    ) -> None:
        where = {"seq": self.seq, "step": place.step, "round": place.round, "phase": place.phase}
        line = where | {"unit": unit, "name": name, "replica": replica} | plain(told)
        self.file.write(json.dumps(line, allow_nan=False) + "\n")
        self.seq += 1


def plain(value: Any) -> Any:
    """What JSON can hold: non-finite floats become strings, all that has fields an object."""
    if isinstance(value, float | np.floating):
        return float(value) if np.isfinite(value) else str(float(value))
    if isinstance(value, np.integer | np.bool_):
        return value.item()
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value


def about(config: TrainConfig, begun: Host, *, tokens: int) -> dict[str, Any]:
    """The content of meta.json.

    Args:
        config: of the run.
        begun: parameters [R, ...] before the first step of the trace.
        tokens: of all replicas, in a step.
    """
    settings, weights = plain(config), hashlib.sha256()
    for name in shapes(config.model):
        weights.update(name.encode() + np.ascontiguousarray(begun[name][0]).tobytes())
    packages = ("jax", "jaxlib", "flax", "numpy")
    widths = (config.model.vocabulary, config.model.hidden, tokens)
    return {
        "schema": SCHEMA,
        "core": "reference_jax",
        "versions": {"python": platform.python_version()} | {k: version(k) for k in packages},
        "method": config.method,
        "mesh": {"replicas": config.replicas, "shards": config.shards},
        "dtype": next(iter(begun.values())).dtype.name,
        "compute": config.inner.compute or "same",
        "config": settings,
        "config_hash": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest(),
        "weights_hash": weights.hexdigest(),
        "data_hash": "",
        "model": {"layers": config.model.layers, "width": max(widths)},
        "taps": PHASES if config.method == "synchronous" else PHASES + ROUND_PHASES,
        "flags": {"xla": os.environ.get("XLA_FLAGS", ""), "backend": jax.default_backend()},
    }
