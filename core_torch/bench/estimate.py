"""Estimates beside measurements: does the timeline foretell what a step takes?

Costs that one run has measured, on its size and link, predict another. What is compared is
the program, forward and backward, without AdamW and without what autograd does around it.
"""

import math
import statistics
from dataclasses import asdict
from typing import Any

from core_torch.bench.measure import Contestant
from core_torch.mesh import Mesh
from core_torch.shard.calibrate import costs_of_run
from core_torch.shard.compile import Compilation
from core_torch.shard.cost import Costs
from core_torch.shard.schedule import timeline_of

Row = dict[str, Any]


def estimated(entry: Contestant, mesh: Mesh, given: Row | None) -> Row | None:
    """Measured and estimated seconds of a variant that has run timed; None for one without.

    Args:
        entry: after some steps with ``Compilation.timings``.
        mesh: to agree over.
        given: costs of another run; None: only this run's own.
    """
    compilation = compilation_of(entry)
    if compilation is None or not compilation.timings:
        return None
    own = costs_of_run(compilation, mesh.shard, mesh.device)
    steps = zip(*(compilation.timings[name] for name in ("forward", "backward")), strict=True)
    measured = statistics.median(sum(forward) + sum(backward) for forward, backward in steps)
    row: Row = {"variant": entry.name, "program_ms": 1e3 * measured}
    numbers = {k: v for k, v in asdict(own).items() if k != "profile"}
    row["costs"] = {k: v if math.isfinite(v) else str(v) for k, v in numbers.items()}
    wanted = {k: float(v) for k, v in (given or {}).items()}
    other = Costs(**wanted) if wanted else None  # type: ignore[arg-type]
    for name, costs in (("own", own), ("given", other)):
        if costs is not None:
            found = timeline_of(
                compilation.program("forward"),
                compilation.program("backward"),
                compilation.carried,
                costs,
            )
            row[f"estimate_{name}_ms"] = 1e3 * found.seconds
            row["estimate_peak_bytes"] = found.peak_bytes
    return row


def compilation_of(entry: Contestant) -> Compilation | None:
    """The compilation of a SimpleFSDP variant."""
    found = getattr(entry.module, "compilation", None)
    return found if isinstance(found, Compilation) else None
