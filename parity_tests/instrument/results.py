"""One comparison as plain data: a line of the table, and what the page draws of it.

``CellResult`` is what a matrix, the canary and the golden traces hand to ``print_cells`` and
``write_page``. It holds no arrays and no traces, so many fit into one page.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from parity_tests.instrument.allowed import parameter_of
from parity_tests.instrument.diff import Comparison, Finding, worst_by_phase
from parity_tests.instrument.divergence import first_divergence
from parity_tests.instrument.logs import Ledger, LogRow, event_log, ledger
from parity_tests.instrument.verdict import advise

GROUPS = {  # lines of the growth figure
    "forward": "model",
    "backward": "model",
    "grad": "model",
    "optim": "AdamW",
    "sync.delta": "rounds",
    "sync.merge": "rounds",
    "sync.outer": "rounds",
    "sync.params": "rounds",
}

OF_PARAMETERS = ("grad", "optim", "sync.delta", "sync.merge", "sync.outer", "sync.params")


class PhaseRow(NamedTuple):
    """The worst event of a phase."""

    phase: str
    events: int  # compared
    worst_ulps: float
    tolerance_ulps: float
    reason: str
    what: str
    ok: bool


class GrowthPoint(NamedTuple):
    """The worst event of a group of phases in one step."""

    group: str
    step: int
    ulps: float
    tolerance: float


class HeatMap(NamedTuple):
    """Of each parameter in each step, the largest share of a tolerance; NaN: not recorded."""

    names: tuple[str, ...]
    steps: tuple[int, ...]
    shares: tuple[tuple[float, ...], ...]  # [names][steps]; above 1 is a divergence


@dataclass(frozen=True, kw_only=True, slots=True)
class CellResult:
    """One comparison. The first ten fields are what JSON files tell."""

    method: str
    mesh: str  # "2x2": replicas x shards
    dtype: str  # "float64", "float32", "bfloat16" (compute)
    model: str
    core: str  # what was examined
    worst_ulps: float
    tolerance_ulps: float
    phase: str  # of the first divergence, or of the event nearest to its tolerance
    tensor: str
    ok: bool
    rows: tuple[PhaseRow, ...] = ()
    growth: tuple[GrowthPoint, ...] = ()
    heat: HeatMap = HeatMap((), (), ())
    log: tuple[LogRow, ...] = ()
    ledger: Ledger = Ledger((), comparable=False)
    divergence: tuple[str, ...] = ()  # lines
    neighbours: tuple[tuple[str, float, float, bool], ...] = ()  # event, u, allowed, ok
    advice: str = ""
    compared: int = 0
    skipped: tuple[tuple[str, int], ...] = ()  # events by phase that only one side taps
    mode: str = "free"
    note: str = ""  # what else to say of the cell

    def as_json(self) -> dict[str, Any]:
        """Plain data; a distance that is infinite is the word "inf"."""
        fields = ("method", "mesh", "dtype", "model", "core")
        numbers = {name: finite(getattr(self, name)) for name in ("worst_ulps", "tolerance_ulps")}
        return (
            {name: getattr(self, name) for name in fields}
            | numbers
            | {"phase": self.phase, "tensor": self.tensor, "ok": self.ok, "mode": self.mode}
        )


def finite(x: float) -> float | str:
    """A float as JSON can hold it."""
    return x if math.isfinite(x) else str(x)


def cell_result(comparison: Comparison, **told: Any) -> CellResult:
    """A comparison, condensed.

    Args:
        comparison: what to tell of.
        **told: fields that the traces do not know or tell otherwise: core, model, mode, note.
    """
    first = first_divergence(comparison)
    chosen = comparison.worst if first is None else first.found
    meta = comparison.mine.meta
    mesh = meta.get("mesh") or {}
    result = CellResult(
        method=str(meta.get("method") or "–"),
        mesh=f"{mesh.get('replicas', 1)}x{mesh.get('shards', 1)}",
        dtype=comparison.unit,
        model=str((meta.get("model") or {}).get("name") or "–"),
        core=comparison.mine.name,
        worst_ulps=chosen.ulps,
        tolerance_ulps=chosen.tolerance.value,
        phase=chosen.key.phase,
        tensor=tensor_of(chosen),
        ok=comparison.ok,
        rows=tuple(phase_rows(comparison.findings)),
        growth=tuple(growth_of(comparison.findings)),
        heat=heat_of(comparison.findings),
        log=tuple(event_log(comparison)),
        ledger=ledger(comparison),
        divergence=() if first is None else tuple(first.lines()),
        neighbours=()
        if first is None
        else tuple((str(f.key), f.ulps, f.tolerance.value, f.ok) for f in first.neighbours),
        advice=advise(comparison, first),
        compared=len(comparison.findings),
        skipped=tuple(sorted(comparison.skipped.items())),
    )
    return replace(result, **told)


def tensor_of(found: Finding) -> str:
    """What an event is about, with its unit where the name does not say it."""
    name, unit = found.key.name, found.key.unit
    return name if unit is None or name.startswith(unit) else f"{unit}: {name}"


def phase_rows(findings: Sequence[Finding]) -> list[PhaseRow]:
    """One row for each phase, in program order."""
    counts: dict[str, int] = {}
    failed: set[str] = set()
    for found in findings:
        counts[found.key.phase] = counts.get(found.key.phase, 0) + 1
        failed |= set() if found.ok else {found.key.phase}
    return [
        PhaseRow(
            phase,
            counts[phase],
            worst.ulps,
            worst.tolerance.value,
            worst.tolerance.reason,
            str(worst.key),
            phase not in failed,
        )
        for phase, worst in worst_by_phase(findings).items()
    ]


def growth_of(findings: Sequence[Finding]) -> list[GrowthPoint]:
    """The worst event of each group in each step."""
    worst: dict[tuple[str, int], Finding] = {}
    for found in findings:
        group = GROUPS.get(found.key.phase)
        if group is None or found.tolerance.value == 0:
            continue
        place = group, found.step
        if place not in worst or found.share > worst[place].share:
            worst[place] = found
    return [
        GrowthPoint(group, step, found.ulps, found.tolerance.value)
        for (group, step), found in sorted(worst.items())
    ]


def heat_of(findings: Sequence[Finding]) -> HeatMap:
    """Gradients, updates, moments and what rounds do to parameters; the worst of all replicas."""
    worst: dict[tuple[str, int], float] = {}
    for found in findings:
        event = found.mine or found.theirs
        if found.key.phase in OF_PARAMETERS and event is not None and event.value is None:
            place = parameter_of(found.key), found.step
            worst[place] = max(worst.get(place, 0.0), found.share)
    names = tuple(dict.fromkeys(name for name, _ in worst))
    steps = tuple(sorted({step for _, step in worst}))
    rows = (tuple(worst.get((name, step), math.nan) for step in steps) for name in names)
    return HeatMap(names, steps, tuple(rows))
