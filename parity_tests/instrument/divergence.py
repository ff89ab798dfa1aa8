"""The first event over its tolerance, with all that helps to find its cause."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import deserialize

from parity_tests.instrument.diff import Comparison, Finding, largest_before
from parity_tests.instrument.files import Event, Trace

NEIGHBOURS = 3
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "BOOL": "?"}


@dataclass(frozen=True, slots=True)
class Element:
    """Where in a tensor two arrays are furthest apart."""

    index: tuple[int, ...]
    mine: float
    theirs: float
    differing: int  # elements that are not equal
    size: int

    def __str__(self) -> str:
        return (
            f"element {list(self.index)}: {self.mine:.17g} against {self.theirs:.17g}; "
            f"{self.differing} of {self.size} elements differ"
        )


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first divergence and what surrounds it."""

    found: Finding
    before: float  # u: the largest distance earlier in this step or round
    neighbours: tuple[Finding, ...]  # events around it, itself included, in program order
    element: Element | None  # where both traces hold the tensor itself

    @property
    def amplification(self) -> float:
        """How many times further apart than anything before in this step or round."""
        return self.found.ulps / self.before if self.before > 0 else math.inf

    def lines(self) -> list[str]:
        """The account, a fact a line."""
        found = self.found
        told = [f"first divergence: {found.key}"]
        if math.isfinite(found.ulps):
            told.append(f"{found.ulps:.3g} u, allowed {found.tolerance.value:.3g} u")
            told[-1] += f" = {found.tolerance.reason}"
        if found.detail:
            told.append(found.detail)
        if math.isfinite(found.ulps) and self.before > 0:
            told.append(
                f"{self.amplification:.3g} times what came before in this {found.key.moment} "
                f"(at most {self.before:.3g} u)"
            )
        elif self.before == 0:
            told.append(f"all before it in this {found.key.moment} is equal")
        sides = (("examined", found.mine), ("reference", found.theirs))
        told += [f"{side}: {event.where}" for side, event in sides if event is not None]
        if self.element is not None:
            told.append(str(self.element))
        return told


def first_divergence(comparison: Comparison) -> Divergence | None:
    """The first divergence; None if there is none."""
    place = comparison.first
    if place is None:
        return None
    found = comparison.findings[place]
    around = comparison.findings[max(0, place - NEIGHBOURS) : place + NEIGHBOURS + 1]
    element = None
    if found.mine is not None and found.theirs is not None:
        arrays = (
            array_of(comparison.mine, found.mine),
            array_of(comparison.theirs, found.theirs),
        )
        element = _furthest(*arrays)
    return Divergence(found, largest_before(comparison, place), around, element)


def array_of(trace: Trace, event: Event) -> np.ndarray | None:
    """The whole tensor of an event, if the trace was recorded with tensors."""
    if event.value is not None:
        return None
    parts = []
    for part in event.parts:
        rank = part.file.split(".")[1]
        path = trace.folder / f"tensors.{rank}.safetensors"
        held = _tensor(path, str(part.seq)) if path.exists() else None
        if held is None:
            return None
        parts.append(held.ravel())
    flat = np.concatenate(parts)
    return flat.reshape(event.shape) if flat.size == event.size else None


def _tensor(path: Path, name: str) -> np.ndarray | None:
    """One tensor of a file; bfloat16, which NumPy lacks, as float32."""
    held = dict(deserialize(path.read_bytes())).get(name)
    if held is None:
        return None
    if held["dtype"] == "BF16":
        bits = np.frombuffer(held["data"], "<u2").astype(np.uint32) << 16
        return bits.view(np.float32)
    kind = _DTYPES.get(held["dtype"])
    return None if kind is None else np.frombuffer(held["data"], kind)


def _furthest(mine: np.ndarray | None, theirs: np.ndarray | None) -> Element | None:
    if mine is None or theirs is None or mine.shape != theirs.shape or not mine.size:
        return None
    wide_mine, wide_theirs = mine.astype(np.float64), theirs.astype(np.float64)
    with np.errstate(invalid="ignore"):
        gap = np.abs(wide_mine - wide_theirs)
    is_same = (wide_mine == wide_theirs) | (np.isnan(wide_mine) & np.isnan(wide_theirs))
    gap = np.where(is_same, 0.0, np.where(np.isnan(gap), np.inf, gap))
    place = np.unravel_index(int(gap.argmax()), gap.shape)
    index = tuple(int(i) for i in place)
    differing = int((~is_same).sum())
    return Element(index, float(wide_mine[place]), float(wide_theirs[place]), differing, mine.size)
