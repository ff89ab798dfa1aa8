"""``twinshard bench shard`` on each rank: all variants in one process, step by step in turn.

A machine's speed drifts. So the variants do not run one after the other: each round lets
every one of them make one step on the same batch, and the order rotates.
"""

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from core_torch.bench.estimate import compilation_of, estimated
from core_torch.bench.measure import Contestant, Timing, batch_of
from core_torch.bench.plan import MEMORY_STEPS, SIZES, WARM_UP, Size
from core_torch.bench.variants import BUILDERS, build_objective
from core_torch.collectives import gather_json
from core_torch.mesh import Mesh

# One function of the model is compiled for several variants, which is not what the limit
# on compilations per function is for.
_COMPILATIONS = 64

OnEvent = Callable[[dict[str, Any]], None]
Row = dict[str, Any]


class Field(NamedTuple):
    """One launch on this rank."""

    contestants: list[Contestant]
    size: Size
    mesh: Mesh
    emit: OnEvent
    seed: int = 0

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's tokens and targets of a step."""
        shape = (self.size.batch, self.size.sequence)
        rank = self.mesh.shard.index
        return batch_of(self.size.model.vocabulary, shape, seed=self.seed, step=step, rank=rank)

    def in_turn(self, step: int) -> list[Contestant]:
        """The contestants, another one first in each step."""
        first = step % len(self.contestants)
        return self.contestants[first:] + self.contestants[:first]


def measure(job: dict[str, Any], mesh: Mesh, emit: OnEvent) -> list[Row]:
    """Runs one phase, ``time``, ``memory`` or ``estimate``; rows are equal on all ranks."""
    size = SIZES[job["size"]]
    contestants = [
        Contestant(name, BUILDERS[name](build_objective(size.model, seed=0), mesh))
        for name in job["variants"]
    ]
    field = Field(contestants, size, mesh, emit)
    with torch.compiler.config.patch(recompile_limit=_COMPILATIONS):  # type: ignore[attr-defined]
        if job["phase"] == "memory":
            return measure_memory(field)
        if job["phase"] == "estimate":
            return measure_estimates(field, job["steps"], job["costs"])
        return measure_time(field, job["steps"])


def measure_time(field: Field, steps: int) -> list[Row]:
    """Rows of times, compile times, losses and collectives."""
    seen: dict[str, list[Timing]] = {entry.name: [] for entry in field.contestants}
    for step in range(WARM_UP + steps):
        batch = field.batch(step)
        for entry in field.in_turn(step):
            seen[entry.name].append(entry.step(*batch))
            field.emit({"event": "bench", "phase": "time", "variant": entry.name, "step": step})
    batch = field.batch(WARM_UP + steps)
    own = []
    for entry in field.contestants:
        forward, backward = entry.traffic(*batch)
        own.append({"timings": seen[entry.name], "forward": forward, "backward": backward})
    everyone = gather_json(own, device=field.mesh.device)
    return [
        {"variant": entry.name} | merged_times([rank[i] for rank in everyone])
        for i, entry in enumerate(field.contestants)
    ]


def merged_times(ranks: list[Row]) -> Row:
    """One variant's row out of those of all ranks: a step is over when the slowest has it.

    Collectives are those of the first rank; the others dispatch the same.
    """
    of_rank = [[Timing(*one) for one in rank["timings"]] for rank in ranks]
    steps = list(zip(*of_rank, strict=True))
    slowest = [max(one.seconds for one in step) for step in steps]
    blocked = [statistics.fmean(one.blocked for one in step) for step in steps]
    warm = statistics.median(slowest[WARM_UP:])
    (calls, size), (calls_back, size_back) = ranks[0]["forward"], ranks[0]["backward"]
    return {
        "step_ms": 1e3 * warm,
        "exposed_ms": 1e3 * statistics.median(blocked[WARM_UP:]),
        "compile_s": max(0.0, slowest[0] - warm),
        "loss": statistics.fmean(one.loss for one in steps[-1]),
        "collectives_forward": calls,
        "collectives_backward": calls_back,
        "bytes": size + size_back,
    }


def measure_estimates(field: Field, steps: int, costs: Row | None) -> list[Row]:
    """Rows of estimates, of the variants that have a timeline."""
    rows = []
    for entry in field.contestants:
        for step in range(WARM_UP + steps):
            compilation = compilation_of(entry)
            if compilation is not None and step == WARM_UP:
                compilation.timings = {}
            entry.step(*field.batch(step))
        rows.append(estimated(entry, field.mesh, costs))
        field.emit({"event": "bench", "phase": "estimate", "variant": entry.name, "step": 0})
    return [row for row in rows if row is not None]


def measure_memory(field: Field) -> list[Row]:
    """Rows with the highest growth over all steps and ranks."""
    own: list[list[int | None]] = []
    for entry in field.contestants:
        for step in range(WARM_UP):  # compiles, and leaves what stays allocated
            entry.step(*field.batch(step))
        own.append([entry.peak_bytes(*field.batch(step)) for step in range(MEMORY_STEPS)])
        field.emit({"event": "bench", "phase": "memory", "variant": entry.name, "step": 0})
    everyone = gather_json(own, device=field.mesh.device)
    rows = []
    for i, entry in enumerate(field.contestants):
        peaks = [peak for rank in everyone for peak in rank[i] if peak is not None]
        rows.append({"variant": entry.name, "peak_tensor_bytes": max(peaks, default=None)})
    return rows
