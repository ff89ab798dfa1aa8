"""How far an event may be off, from ``harness/tolerances.py`` and from the reference's sizes.

Both cores ran by themselves. Until the first update they hold equal numbers, and the model's
tolerance holds; after it, a rounding of the parameters is as large as they are against what they
have moved. That distance is known at every event, because the sketches of updates add up.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from parity_tests.harness import tolerances
from parity_tests.harness.tolerances import EPS, EXACT, OPTIMIZER, Tolerance
from parity_tests.instrument.distances import sketch_norm
from parity_tests.instrument.files import Event, Key, Trace

UPDATES = ("sync.delta", "sync.merge", "sync.outer", "sync.params")


class Sizes(NamedTuple):
    """What the tolerance of an event depends on."""

    step: int
    start: float  # L2 norm of the replica's parameters at the start
    moved: float  # of what they have moved since
    slope: float  # of the parameter's updates so far, or of all: see ``tolerances.adamw_slope``


Moved = dict[tuple[int | None, str], np.ndarray]  # sketch of what a parameter has moved by


def parameter_of(key: Key) -> str:
    """The parameter that an event is about: ``a.weight`` of ``a.weight/exp_avg``."""
    return key.name.partition("/")[0]


def is_update(key: Key) -> bool:
    """Whether an event is a difference of parameters, which inherits their rounding."""
    return key.phase in UPDATES or (key.phase == "optim" and key.name.endswith("/update"))


def optimizer_of(config: dict[str, Any]) -> tuple[float, float]:
    """beta1 and eps of AdamW as either core writes them down; eps 0 if it is not told."""
    optim = config.get("inner") or config.get("optim") or {}
    return float(optim.get("beta1", 0.0)), float(optim.get("eps", 0.0))


def is_inherited(key: Key) -> bool:
    """Whether an event is an update, or a number of a round, which is made of updates."""
    return is_update(key) or key.phase.startswith("sync.")


class Allowed:
    """Tolerances of all events of one trace, the reference, in u of ``dtype``.

    Args:
        reference: its sizes are used.
        order: all its events, in the order in which they will be judged.
    """

    def __init__(self, reference: Trace, order: Iterable[Event]) -> None:
        meta = reference.meta
        self.dtype = str(meta.get("dtype") or "float64")
        compute = str(meta.get("compute") or "same")
        self.unit = self.dtype if compute == "same" else compute
        model = meta.get("model") or {}
        self._layers, self._width = int(model.get("layers", 1)), int(model.get("width", 1))
        self._optim = optimizer_of(meta.get("config") or {})
        self._by_key = reference.by_key
        self._slopes: dict[str, float] = {}  # of a parameter's updates, the largest so far
        self._start: dict[tuple[int | None, str], float] = {}
        self._known: dict[int | None, tuple[float, float]] = {}  # sizes, until something moves
        self._seen: dict[Key, Sizes] = dict(self._sizes(order))

    def _sizes(self, order: Iterable[Event]) -> Iterable[tuple[Key, Sizes]]:
        """What the tolerance of every event depends on."""
        moved: Moved = {}
        waiting: list[Key] = []  # moments of an optimizer step, judged by the whole step
        step = 1
        for event in order:
            key = event.key
            if key.phase != "optim" and waiting:
                yield from ((k, self._size(moved, k, step)) for k in waiting)
                waiting = []
            step = max(step, key.number if key.moment == "step" else event.step)
            if key.phase == "init" and event.sketch is not None:
                self._start[key.replica, key.name] = event.norm
                self._known.clear()
            if (
                key.phase in ("optim", "sync.params")
                and is_update(key)
                and event.sketch is not None
            ):
                at = key.replica, parameter_of(key)
                moved[at] = moved.get(at, 0.0) + event.sketch
                self._known.clear()
                if key.phase == "optim":
                    steepest = max(self._slopes.get(at[1], 1.0), self._slope(event))
                    self._slopes[at[1]] = steepest
            if key.phase == "optim":
                waiting.append(key)
            else:
                yield key, self._size(moved, key, step)
        yield from ((k, self._size(moved, k, step)) for k in waiting)

    def _size(self, moved: Moved, key: Key, step: int) -> Sizes:
        slope = max(self._slopes.values(), default=1.0)
        if is_update(key):
            slope = self._slopes.get(parameter_of(key), slope)
        return Sizes(step, *self._of_replica(moved, key.replica), slope)

    def _slope(self, update: Event) -> float:
        """Of an AdamW update; 1 where the trace does not tell its numbers."""
        key, (beta1, eps) = update.key, self._optim
        mean = self._by_key.get(key._replace(name=f"{parameter_of(key)}/exp_avg"))
        rate = self._by_key.get(key._replace(unit=None, name="rate"))
        if eps == 0 or mean is None or rate is None or rate.value is None or update.norm == 0:
            return 1.0
        corrected = mean.norm / (1 - beta1**key.number)
        lr = float(rate.value["lr"])
        return tolerances.adamw_slope(mean=corrected, update=update.norm, lr=lr, eps=eps)

    def _of_replica(self, moved: Moved, replica: int | None) -> tuple[float, float]:
        """Norms of a replica's parameters at the start, and of what they moved; None: of all."""
        if replica not in self._known:
            starts = [x for (n, _), x in self._start.items() if replica in (n, None)]
            moves = [sketch_norm(x) for (n, _), x in moved.items() if replica in (n, None)]
            self._known[replica] = math.hypot(*starts), math.hypot(*moves)
        return self._known[replica]

    def unit_of(self, event: Event) -> float:
        """eps of the dtype whose ulps an event is measured in."""
        if event.key.phase == "init" or event.key.name == "rate":
            return EPS[self.dtype if event.key.phase == "init" else "float64"]
        return EPS[self.unit]

    def floor_of(self, event: Event) -> float:
        """One rounding of the parameter that an event is an update of; 0 if it is none.

        A single replica that is put on its own mean has an update of roundings, or none.
        """
        return EPS[self.dtype] * self._params(event.key) if is_update(event.key) else 0.0

    def _params(self, key: Key) -> float:
        """Norm at the start of the parameter that an event is about; of all if it is not told."""
        whose = [key.replica] if key.replica is not None else [0, None]
        sizes = [self._start.get((n, parameter_of(key))) for n in whose]
        return next((x for x in sizes if x is not None), self._seen[key].start)

    def of(self, event: Event) -> Tolerance:
        """The tolerance of an event of the reference, with its reason."""
        key = event.key
        if key.phase == "data":
            return EXACT
        if key.phase == "init":
            return tolerances.sums(self.dtype, terms=event.size)
        if key.name == "rate":
            return OPTIMIZER
        step, start, moved, slope = self._seen[key]
        if self.unit == "bfloat16":
            apart = 1 + slope * moved / start if start > 0 else 1.0  # see Sizes
            return tolerances.free_running_mixed(
                steps=step,
                layers=self._layers,
                passes=1 if key.phase == "forward" and step == 1 else 2,
                slope=slope if is_inherited(key) else apart,
            )
        if is_update(key):
            params = self._params(key)
            return self._free(step, params, max(event.norm, self.floor_of(event)) or params)
        if moved == 0:
            return tolerances.model(self.unit, layers=self._layers, width=self._width)
        return self._free(step, start, moved)

    def _free(self, steps: int, params: float, update: float) -> Tolerance:
        return tolerances.free_running(
            self.dtype,
            steps=steps,
            layers=self._layers,
            width=self._width,
            params=params,
            update=update or 1.0,
        )
