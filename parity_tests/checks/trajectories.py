"""What all ranks told about one run, put together, and comparisons of two runs."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from parity_tests.cases import equalities
from parity_tests.harness import tolerances
from parity_tests.harness.jax_bridge import assemble
from parity_tests.harness.pool import RankPool
from parity_tests.harness.ulps import ErrorTable

Fault = equalities.Fault
Whole = dict[str, np.ndarray]

QUIET = "tok_embeddings.weight"  # its last element: no gradient, no loss; see equalities.py
LOUD = "layers.0.attention.wq.weight"
IN_EVERY_UNIT = (QUIET, LOUD, "layers.1.attention.wq.weight", "output.weight")
UNITS = ["embedding", "layers.0", "layers.1", "head"]

# Rounds after steps 4, 6, 8, 10, 12 and, forced, 13; thresholds so low that all parts act.
PENALTY: dict[str, Any] = {
    "warmup_rounds": 2,
    "temperature": 0.01,
    "max_norm": 0.2,
    "ema_alpha": 0.5,
}
STORMY: dict[str, dict[str, Any]] = {
    "sync": {"every": 2, "warmup": 2, "penalty": PENALTY},
    "train": {"steps": 13},
}
NO_PENALTY: dict[str, Any] = {"exclude": False, "weigh": False, "clip": False}


def storm(flagged: Sequence[int], infected: Sequence[int], everyone: Sequence[int]) -> list[Fault]:
    """Faults for the rounds after steps 8, 10 and 12: a flag, a NaN, a rollback of a unit.

    Args:
        flagged: replicas whose embedding makes a large, finite step.
        infected: replicas that meet a NaN in loss and gradient.
        everyone: all replicas; 1e30 in each embedding leaves that unit nobody to follow.
    """
    faults = [(7, n, QUIET, 20.0) for n in flagged]
    faults += [(9, n, LOUD, float("nan")) for n in infected]
    return faults + [(11, n, QUIET, 1e30) for n in everyone]


class Trajectory:
    """A run as its ranks tell it. All ranks must agree on the events."""

    def __init__(self, ranks: Sequence[Any], replicas: int) -> None:
        self.ranks = [rank for rank in ranks if rank is not None]
        self.replicas = replicas
        first = self.ranks[0]
        self.events: list[dict[str, Any]] = [*first["events"]]
        self.events += [first["forced"]] if first.get("forced") else []
        assert all(repr(rank["events"]) == repr(first["events"]) for rank in self.ranks)
        assert all(repr(rank.get("forced")) == repr(first.get("forced")) for rank in self.ranks)
        self.steps = len(first["history"]) - 1

    def rank(self, replica: int, shard: int = 0) -> Any:
        """What rank (replica, shard) told."""
        return self.ranks[replica * (len(self.ranks) // self.replicas) + shard]

    def whole(self, what: str, step: int, replica: int = 0) -> Whole:
        """Whole tensors of a replica after ``step`` inner steps; -1 is after ``finish``."""
        seen = [r["finished"] if step < 0 else r["history"][step] for r in self.ranks]
        return assemble([s[what] for s in seen], replicas=self.replicas)[replica]

    def stats(self, step: int) -> dict[str, np.ndarray]:
        """Norm statistics (U, R) after ``step`` inner steps; the same on all ranks."""
        everyone = [rank["history"][step]["stats"] for rank in self.ranks]
        assert all(same(x, everyone[0]) for x in everyone)
        return everyone[0]

    def seen(self, key: str) -> np.ndarray:
        """(rounds, U, R) or (rounds, U) of one field of the events."""
        return np.array([event[key] for event in self.events])


def launch(
    pool: RankPool,
    replicas: int,
    shards: int,
    changes: dict[str, Any],
    *,
    identities: Sequence[int] | None = None,
    faults: Sequence[Fault] = (),
    observed: bool = False,
) -> Trajectory:
    """Runs ``changes`` of the tiny model on a mesh of this shape."""
    changes = changes | {"mesh": {"replicas": replicas, "shards": shards}}
    given = None if identities is None else list(identities)
    ranks = pool.run(equalities.run, changes, given, list(faults), observed)
    return Trajectory(ranks, replicas)


def same(x: Any, y: Any) -> bool:
    """Equality to the last bit of nested plain data."""
    if isinstance(x, np.ndarray):
        equal_kind = x.dtype == y.dtype and x.shape == y.shape
        return bool(equal_kind and x.tobytes() == y.tobytes())
    if isinstance(x, dict):
        return list(x) == list(y) and all(same(x[k], y[k]) for k in x)
    if isinstance(x, list | tuple):
        return len(x) == len(y) and all(map(same, x, y))
    return bool(repr(x) == repr(y))  # NaN is itself


def assert_storm(run: Trajectory, *, unequal: bool = True) -> None:
    """The penalty's parts have all acted in ``run``, or a comparison of it proves little."""
    anomalous, finite, weight = run.seen("anomalous"), run.seen("finite"), run.seen("weight")
    assert len(run.events) >= 4 and run.events[-1]["forced"]
    assert run.seen("clip").min() < 1
    assert (run.seen("flagged") & anomalous).any() and (~finite & anomalous).any()
    assert run.seen("rollback").any() and not run.seen("rollback").all()
    np.testing.assert_allclose(weight.sum(-1), ~run.seen("rollback"), rtol=0, atol=1e-15)
    if unequal:
        least = np.where(weight > 0, weight, np.inf).min(-1)
        assert (weight.max(-1) > 2 * least).any()


def assert_same_decisions(x: Trajectory, y: Trajectory, order: Sequence[int] | None = None) -> None:
    """Equal verdicts, and norms, weights and clips that differ by rounding only.

    Args:
        x: a run.
        y: another.
        order: replica n of ``x`` is replica ``order[n]`` of ``y``.
    """
    order = list(order or range(x.replicas))
    for key in ("step", "forced", "rollback", "units"):
        assert (x.seen(key) == y.seen(key)).all(), key
    for key in ("finite", "flagged", "rearmed", "anomalous"):
        np.testing.assert_array_equal(x.seen(key), y.seen(key)[..., order], err_msg=key)
    for key in ("norm", "weight"):  # a weight moves by the norm's rounding / temperature
        theirs = y.seen(key)[..., order]
        np.testing.assert_allclose(x.seen(key), theirs, rtol=1e-9, err_msg=key)
    for key in ("combined_norm", "clip"):
        np.testing.assert_allclose(x.seen(key), y.seen(key), rtol=1e-9, err_msg=key)


STATE = ("theta", "anchor", "velocity", "exp_avg", "exp_avg_sq", "adam_step")


def assert_bitwise(x: Trajectory, y: Trajectory, replicas: dict[int, int]) -> None:
    """The whole state of some replicas is the same to the last bit, step by step.

    Args:
        x: a run.
        y: another, with as many shards and steps.
        replicas: replica of ``x`` -> its counterpart in ``y``.
    """
    shards = len(x.ranks) // x.replicas
    assert x.steps == y.steps and shards == len(y.ranks) // y.replicas
    for mine, theirs in ((n, replicas[n]) for n in replicas):
        for m in range(shards):
            a, b = x.rank(mine, m), y.rank(theirs, m)
            states = [a["finished"], *a["history"]], [b["finished"], *b["history"]]
            for step, (one, two) in enumerate(zip(*states, strict=True)):
                for key in STATE:
                    where = f"{key} of replica {mine}, shard {m}, state {step - 1}"
                    assert same(one.get(key), two.get(key)), where


def assert_close(
    errors: ErrorTable,
    quantity: str,
    x: Trajectory,
    y: Trajectory,
    *,
    what: str = "theta",
    replica: int = 0,
) -> None:
    """Updates since step 0 agree after each step, within the derived tolerance.

    Args:
        errors: table that keeps the worst.
        quantity: line of the table.
        x: a run.
        y: another.
        what: "theta" or "anchor".
        replica: whose.
    """
    begin = y.whole("theta", 0)
    assert same(x.whole("theta", 0), begin)
    for step in [*range(1, x.steps + 1), -1]:
        if what in x.rank(replica)["history"][step]:
            mine, theirs = (run.whole(what, step, replica) for run in (x, y))
            count = x.steps if step < 0 else step
            check(errors, f"{quantity}, {what}", mine, theirs, begin, count)


def check(errors: ErrorTable, quantity: str, x: Whole, y: Whole, begin: Whole, steps: int) -> None:
    """Updates ``x - begin`` and ``y - begin`` of so many steps agree tensor by tensor."""
    for name, start in begin.items():
        mine, theirs = x[name] - start, y[name] - start
        tolerance = tolerances.free_running(
            "float64",
            steps=steps,
            layers=2,
            width=equalities.VOCABULARY,
            params=float(np.linalg.norm(start)),
            update=float(np.linalg.norm(theirs[np.isfinite(theirs)])),
        )
        errors.check(quantity, mine, theirs, tolerance, where=f"{name} after step {steps}")


def differences(x: Whole, y: Whole) -> Iterator[float]:
    """Relative distance of each tensor."""
    for name in x:
        yield float(np.linalg.norm(x[name] - y[name]) / np.linalg.norm(y[name]))
