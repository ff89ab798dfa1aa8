"""Traces of a run that never was, small enough to know what a comparison of them must find.

Two replicas make a few inner steps with a round after every second. Numbers are drawn, nothing is
trained; what matters is that updates add up, and that every phase occurs.
"""

import functools
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

UNITS: dict[str, dict[str, tuple[int, ...]]] = {
    "embedding": {"tok_embeddings.weight": (7, 4)},
    "layers.0": {"layers.0.attention.wq.weight": (4, 4), "layers.0.ffn_norm.weight": (4,)},
    "head": {"output.weight": (7, 4)},
}
SHAPES = {name: shape for unit in UNITS.values() for name, shape in unit.items()}
TAPS = (
    "init data forward backward grad clip optim sync.delta sync.vote sync.merge sync.clip "
    "sync.outer sync.params sync.end"
).split()
EPS = 2.0**-52


@dataclass
class Entry:
    """One event before it is cut into shards."""

    step: int
    phase: str
    unit: str | None
    name: str
    replica: int | None
    content: Any  # array or value
    round: int | None = None


@dataclass
class Recipe:
    """Which run, and how it differs from the one that has no noise.

    ``noise``: every float is off by about this many roundings.
    """

    steps: int = 4
    replicas: int = 2
    noise: float = 0.0
    taps: list[str] = field(default_factory=lambda: list(TAPS))
    seed: int = 1


def entries(recipe: Recipe) -> list[Entry]:
    """All events in program order."""
    noise = np.random.default_rng(99)
    found = [e for e in _run(recipe) if e.phase in recipe.taps]
    if recipe.noise:
        for entry in found:
            if entry.phase not in ("init", "data") and entry.name != "rate":
                entry.content = _blurred(entry.content, recipe.noise * EPS, noise)
    return found


def _blurred(content: Any, size: float, noise: np.random.Generator) -> Any:
    if isinstance(content, dict):
        return {
            k: x * (1 + size * noise.normal()) if isinstance(x, float) else x
            for k, x in content.items()
        }
    return content * (1 + size * noise.normal(size=content.shape))


def _run(recipe: Recipe) -> Iterator[Entry]:
    draw = np.random.default_rng(recipe.seed)
    replicas = range(recipe.replicas)
    for n in replicas:
        for unit, shapes in UNITS.items():
            for i, (name, shape) in enumerate(shapes.items()):
                start = np.random.default_rng([3, i]).normal(size=shape)
                yield Entry(0, "init", unit, name, n, start)
    for step in range(1, recipe.steps + 1):
        yield from _inner_step(draw, step, replicas)
        if step % 2 == 0:
            yield from _round(draw, step, replicas)


def _inner_step(draw: np.random.Generator, step: int, replicas: range) -> Iterator[Entry]:
    outputs = {"embedding": (4, 3, 4), "layers.0": (4, 3, 4), "head": (4, 3, 7)}
    for name in ("inputs.0", "targets.0"):
        for n in replicas:
            yield Entry(step, "data", None, name, n, draw.integers(0, 7, (4, 3)))
    for phase, name in (("forward", "output.0"), ("backward", "gradient.0")):
        units = list(outputs) if phase == "forward" else list(outputs)[::-1]
        for unit in units:
            for n in replicas:
                yield Entry(step, phase, unit, name, n, draw.normal(size=outputs[unit]))
        if phase == "forward":
            for n in replicas:
                yield Entry(step, "forward", None, "loss", n, {"loss": 2 + float(draw.normal())})
    yield from _of_parameters(draw, step, "grad", replicas, [""], 1.0)
    for n in replicas:
        clip = {"norm": 1 + abs(float(draw.normal())), "factor": 0.5}
        yield Entry(step, "clip", None, "gradient", n, clip)
    yield from _of_parameters(
        draw, step, "optim", replicas, ["/update", "/exp_avg", "/exp_avg_sq"], 0.01
    )
    for n in replicas:
        yield Entry(step, "optim", None, "rate", n, {"lr": 0.01 / step, "tokens": 24 * step})


def _of_parameters(
    draw: np.random.Generator,
    step: int,
    phase: str,
    replicas: Any,
    endings: list[str],
    size: float,
    round: int | None = None,
) -> Iterator[Entry]:
    for unit, shapes in UNITS.items():
        for name, shape in shapes.items():
            for ending in endings:
                for n in replicas:
                    x = size * draw.normal(size=shape)
                    yield Entry(step, phase, unit, name + ending, n, x, round)


def _round(draw: np.random.Generator, step: int, replicas: range) -> Iterator[Entry]:
    number = step // 2
    yield from _of_parameters(draw, step, "sync.delta", replicas, [""], 0.02, number)
    for unit in UNITS:
        for n in replicas:
            vote = {"norm": 0.1 + abs(float(draw.normal())), "finite": True, "anomalous": False}
            vote |= {"weight": 1 / len(replicas), "steps": 2}
            yield Entry(step, "sync.vote", unit, "vote", n, vote, number)
    yield from _of_parameters(draw, step, "sync.merge", [None], [""], 0.02, number)
    for unit in UNITS:
        outer = {"norm": 0.1, "clip": 1.0, "gap": None, "rollback": False}
        yield Entry(step, "sync.clip", unit, "outer", None, outer, number)
    endings = ["/anchor", "/velocity"]
    yield from _of_parameters(draw, step, "sync.outer", [None], endings, 0.02, number)
    yield from _of_parameters(draw, step, "sync.params", replicas, [""], 0.02, number)
    ended = {"forced": False, "empty": False}
    yield Entry(step, "sync.end", None, "round", None, ended, number)


def write_trace(
    folder: Path,
    told: list[Entry],
    *,
    replicas: int = 2,
    shards: int = 1,
    tensors: bool = False,
    packed: bool = False,
    **meta: Any,
) -> Path:
    """Writes a folder as ranks of this mesh would.

    Args:
        folder: to be made.
        told: in program order.
        replicas: of the mesh.
        shards: of the mesh; rows are cut into as many parts, the last perhaps empty.
        tensors: also write the arrays.
        packed: compress the events.
        **meta: fields of meta.json, over the usual ones.
    """
    folder.mkdir(parents=True)
    usual = {
        "schema": "twinshard-trace/1",
        "core": "core_torch",
        "method": "edit",
        "mesh": {"replicas": replicas, "shards": shards},
        "dtype": "float64",
        "compute": "same",
        "model": {"name": "tiny", "layers": 1, "width": 16},
        "taps": TAPS,
    }
    (folder / "meta.json").write_text(json.dumps(usual | meta))
    for rank in range(replicas * shards):
        lines: list[dict[str, Any]] = []
        arrays: dict[str, np.ndarray] = {}
        for entry in told:
            if _is_written_by(entry, rank, shards):
                line, array = _line(entry, len(lines), rank % shards, shards)
                lines.append(line)
                if array is not None:
                    arrays[str(line["seq"])] = array
        text = "".join(json.dumps(line) + "\n" for line in lines)
        path = folder / f"events.{rank}.jsonl"
        if packed:
            path.with_suffix(".jsonl.xz").write_bytes(lzma.compress(text.encode()))
        else:
            path.write_text(text)
        if tensors:
            save_file(arrays, folder / f"tensors.{rank}.safetensors")
    return folder


def _is_written_by(entry: Entry, rank: int, shards: int) -> bool:
    replica, shard = divmod(rank, shards)
    if isinstance(entry.content, dict) and shard > 0:
        return False
    owner = 0 if entry.replica is None or entry.phase == "sync.vote" else entry.replica
    return owner == replica


def _line(
    entry: Entry, seq: int, shard: int, shards: int
) -> tuple[dict[str, Any], np.ndarray | None]:
    line: dict[str, Any] = {"seq": seq, "step": entry.step, "round": entry.round}
    line |= {"phase": entry.phase, "unit": entry.unit, "name": entry.name, "replica": entry.replica}
    if isinstance(entry.content, dict):
        return line | {"value": entry.content}, None
    whole: np.ndarray = entry.content
    rows = -(-len(whole) // shards)
    part = whole[shard * rows : (shard + 1) * rows]
    start = min(shard * rows, len(whole)) * (whole.size // len(whole))
    finite = np.where(np.isfinite(part), part, 0).astype(np.float64).ravel()
    line |= {
        "shape": list(whole.shape),
        "dtype": whole.dtype.name,
        "shard": {"axis": 0, "start": start, "n": part.size},
        "sum2": float(finite @ finite),
        "amax": float(np.abs(finite).max(initial=0)),
        "bad": int((~np.isfinite(part)).sum()),
        "sk": (signs(start, part.size) @ finite).tolist(),
    }
    return line, part


@functools.cache
def signs(start: int, count: int) -> np.ndarray:
    """[16, count] of +1 and -1, by the written definition, in whole numbers of any size."""
    columns = []
    for i in range(start, start + count):
        z = (i + 1) * 0x9E3779B97F4A7C15 % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        z ^= z >> 31
        columns.append([-1.0 if z >> k & 1 else 1.0 for k in range(16)])
    return np.array(columns).reshape(count, 16).T
