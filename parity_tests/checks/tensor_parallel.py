"""Runs under tensor parallelism put together from their ranks' pieces, and compared."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from parity_tests.cases.equalities import VOCABULARY
from parity_tests.checks.trajectories import Whole, check, same
from parity_tests.harness import tolerances
from parity_tests.harness.ulps import ErrorTable

SERIES = ("losses", "grad_norms", "validation", "norm", "weight", "combined_norm")


def changes_of(
    replicas: int, shards: int, tp: int, *, steps: int = 6, **more: dict[str, Any]
) -> dict[str, Any]:
    """A run of the tiny model whose replicas see the same rows on every mesh.

    Rounds, if there are any, after steps 3 and 5 and at the end.
    """
    changes: dict[str, Any] = {
        "mesh": {"replicas": replicas, "shards": shards, "tp": tp},
        "model": {"hidden": 28},  # over two and four ranks; 61 tokens stay uneven
        "data": {"batch": 4 // shards},
        "train": {"steps": steps},
        "sync": {"every": 2, "warmup": 1},
    }
    for section, values in more.items():
        changes[section] = changes.get(section, {}) | values
    return changes


class PiecedRun:
    """What the ranks of a run told, by (replica, shard, slice of tp)."""

    def __init__(self, ranks: Sequence[Any]) -> None:
        self.ranks = {rank["place"]: rank for rank in ranks if rank is not None}
        self.replicas, self.shards, self.slices = (
            1 + max(place[axis] for place in self.ranks) for axis in range(3)
        )
        self.first = self.ranks[0, 0, 0]

    def assert_ranks_agree(self) -> None:
        """Every rank of a replica tells the same series; every replica the same rounds."""
        for (n, _, _), rank in self.ranks.items():
            lead = self.ranks[n, 0, 0]
            assert all(same(rank[key], lead[key]) for key in SERIES)
            assert all(same(rank[key], self.first[key]) for key in SERIES[3:])

    def whole(self, when: str, kind: str, replica: int = 0) -> Whole:
        """Whole tensors; what ranks of tp hold in copies must be equal to the last bit."""
        found: Whole = {}
        for name, dim in self.first["cut"].items():
            columns = [
                np.concatenate(
                    [self.ranks[replica, m, t][when][kind][name] for m in range(self.shards)]
                )
                for t in range(self.slices)
            ]
            if dim is None:
                assert all(same(column, columns[0]) for column in columns), name
            found[name] = columns[0] if dim is None else np.concatenate(columns, axis=dim)
        return found

    def kinds(self, when: str) -> list[str]:
        """Kinds of tensors that the ranks told."""
        return list(self.first[when])


def assert_as_alone(errors: ErrorTable, quantity: str, run: PiecedRun, alone: PiecedRun) -> None:
    """Losses, norms, weights and parameters are those of one process for each replica."""
    run.assert_ranks_agree()
    steps = len(alone.first["losses"])
    for n in range(run.replicas):
        mine, theirs = run.ranks[n, 0, 0], alone.ranks[n, 0, 0]
        for key in SERIES:
            told, wanted = (np.array(rank[key], np.float64) for rank in (mine, theirs))
            errors.check(f"{quantity}, {key}", told, wanted, of_series(steps), where=f"replica {n}")
        start = alone.whole("before", "theta", n)
        assert same(run.whole("before", "theta", n), start), "initial weights"
        x, y = (r.whole("after", "theta", n) for r in (run, alone))
        check(errors, f"{quantity}, theta", x, y, start, steps)


def of_series(steps: int) -> tolerances.Tolerance:
    """For one number a step, computed from parameters that have come apart by then."""
    return tolerances.free_running(
        "float64", steps=steps, layers=2, width=VOCABULARY, params=1.0, update=1.0
    )


def assert_same_state(x: PiecedRun, y: PiecedRun, when: str = "saved") -> None:
    """Every tensor of both runs is the same to the last bit, however it is cut."""
    assert x.kinds(when) == y.kinds(when)
    for n in range(x.replicas):
        for kind in x.kinds(when):
            assert same(x.whole(when, kind, n), y.whole(when, kind, n)), (kind, n)
