"""``twinshard parity canary``: known faults, put into the running core, and where each is found.

A comparison that has never failed proves nothing. Each fault of ``BIRDS`` is patched into a
shipped function inside the ranks; then the comparison of ``matrix.py``, which knows nothing of
it, must fail, and its first divergence must lie in the phase and the unit where the fault acts.
Before them, each cell runs without a fault and must pass. Needs JAX.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from parity_tests.checks.cells import Cell
from parity_tests.harness.pool import RankPool
from parity_tests.instrument.cells import cell_of
from parity_tests.instrument.diff import Comparison, compare
from parity_tests.instrument.divergence import first_divergence
from parity_tests.instrument.files import read_trace
from parity_tests.instrument.matrix import References
from parity_tests.instrument.recording import record_core
from parity_tests.instrument.results import CellResult, cell_result


def _cell(
    method: str, mesh: tuple[int, int], model: str, core: str = "fsdp2", **changes: Any
) -> Cell:
    """Seven steps: two synchronous, then rounds after every second one and a forced one."""
    cell = cell_of((method, mesh, "float64", model, core), steps=7)
    return replace(cell, every=2, **changes)


CELLS: dict[str, Cell] = {
    "edit": _cell("edit", (2, 2), "gqa"),  # two micro-batches, scaled rotary frequencies
    "streaming": _cell(
        "streaming_diloco",
        (2, 2),
        "tiny",
        sync=(("streaming", (("fragments", 2), ("delay", 1), ("mix", 0.25))),),
    ),
    "co2": _cell("co2", (2, 2), "tiny"),
    "aedit": _cell(
        "aedit", (4, 1), "tiny", sync=(("timed", (("min_total_steps", 1), ("step_weight", 0.5))),)
    ),
    "int8": _cell("edit", (4, 1), "tiny", sync=(("wire", "int8"),)),
    "eager": _cell("diloco", (1, 4), "odd", "simple_fsdp"),
    "compiled": _cell("synchronous", (1, 4), "tied", "simple_fsdp_aot"),
}


class Bird(NamedTuple):
    """Where a fault acts, which is where it must be found."""

    cell: str
    phase: str
    unit: str | None = None  # None: the event has none, or the fault acts in all units


_in = partial(Bird, "edit")
BIRDS: dict[str, Bird] = {
    "one micro-batch for all": _in("data"),
    "rotary pairs halves": _in("forward", "layers.0"),
    "rotary frequencies in float32": _in("forward", "layers.0"),
    "rotary scaling ignored": _in("forward", "layers.0"),
    "RMSNorm without eps": _in("forward", "layers.0"),
    "attention sees the future": _in("forward", "layers.0"),
    "attention scale off by 1e-6": _in("forward", "layers.0"),
    "gate and value exchanged": _in("forward", "layers.0"),
    "micro-batches summed": _in("backward"),
    "synchronous gradients summed": _in("grad"),
    "gradient norm of one shard": _in("forward"),  # the same message carries the loss
    "gradient clip without 1e-6": _in("clip"),
    "learning rate of the step before": _in("optim"),
    "no weight decay": _in("optim"),
    "second moment not corrected": _in("optim"),
    "eps under the root": _in("optim"),
    "gains decay": _in("optim"),
    "pseudo-gradient of the wrong sign": _in("sync.merge", "embedding"),  # taps subtract too
    "a round one step early": _in("sync.delta", "embedding"),
    "norms of one shard": _in("sync.vote", "embedding"),
    "larger steps weigh more": _in("sync.vote", "embedding"),
    "plain mean in place of the penalty": _in("sync.vote", "embedding"),
    "norm for the clip of one shard": _in("sync.clip", "embedding"),
    "clipped but not scaled": _in("sync.outer"),
    "the outer step climbs": _in("sync.outer", "embedding"),
    "outer momentum dropped": _in("sync.outer", "embedding"),
    "stale velocity": _in("sync.outer", "embedding"),
    "parameters not replaced": _in("sync.params", "embedding"),
    "a forced round moves the statistics": _in("sync.end"),
    "mixed the other way round": Bird("streaming", "sync.params", "fragment.1"),
    "the fragment after the one that is due": Bird("streaming", "sync.delta"),
    "no staleness gap": Bird("co2", "sync.clip", "model"),
    "weights without steps": Bird("aedit", "sync.vote", "embedding"),
    "the residual is never sent": Bird("int8", "sync.merge", "embedding"),
    "codes are added without weights": Bird("int8", "sync.merge", "embedding"),
    "padding kept, rows cut": Bird("eager", "forward", "embedding"),
    "gradients of the shards summed": Bird("eager", "grad"),
    "one use of a tied weight dropped": Bird("compiled", "grad", "embedding"),
}


class Found(NamedTuple):
    """A fault, and what the comparison said of it."""

    name: str  # of the fault; of the cell where there is none
    expected: Bird | None  # None: no fault, the cell must pass
    caught: bool
    phase: str  # of the first divergence; "" where there is none
    unit: str
    result: CellResult

    @property
    def ok(self) -> bool:
        """Whether it was caught where it acts; or, without a fault, nothing was seen."""
        if self.expected is None:
            return not self.caught
        at_unit = self.expected.unit is None or self.expected.unit == self.unit
        return self.caught and self.phase == self.expected.phase and at_unit

    def as_json(self) -> dict[str, Any]:
        """A line of the file."""
        line = {"name": self.name, "caught": self.caught, "phase": self.phase, "unit": self.unit}
        return line | {"localised": self.ok}


def run(
    pool: RankPool,
    names: Sequence[str] = tuple(BIRDS),
    *,
    tell: Callable[[Found], None] = lambda found: None,
) -> list[Found]:
    """Each cell that is needed without a fault, then every fault of ``names``.

    Raises:
        KeyError: there is no such fault.
        RanksFailed: a rank raised or did not answer.
    """
    results = []
    cells = list(dict.fromkeys(BIRDS[name].cell for name in names))
    asked: list[tuple[str, str | None]] = [(cell, None) for cell in cells]
    asked += [(BIRDS[name].cell, name) for name in names]
    with tempfile.TemporaryDirectory(prefix="twinshard-canary-") as place:
        references = References(Path(place))
        for i, (cell, name) in enumerate(asked):
            folder = Path(place) / f"core-{i}"
            mine = read_trace(record_core(pool, CELLS[cell], folder, mutant=name))
            found = found_in(compare(mine, references.of(CELLS[cell])), cell, name)
            results.append(found)
            tell(found)
    return results


def found_in(comparison: Comparison, cell: str, name: str | None) -> Found:
    """What a comparison says of the fault ``name`` in a cell; None: of a sound core."""
    first = first_divergence(comparison)
    core = CELLS[cell].sharding
    key = None if first is None else first.found.key
    return Found(
        name or f"no fault: {cell}",
        None if name is None else BIRDS[name],
        key is not None,
        "" if key is None else key.phase,
        "" if key is None else key.unit or "",
        cell_result(comparison, core=core, note=name or "no fault"),
    )
