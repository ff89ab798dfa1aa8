"""Runs in which stages of a pipeline hold different parameters, put together."""

from collections.abc import Sequence
from typing import Any

from parity_tests.cases import equalities
from parity_tests.checks.trajectories import Fault, Trajectory, Whole
from parity_tests.harness.jax_bridge import assemble
from parity_tests.harness.pool import RankPool


class Staged(Trajectory):
    """A run on a mesh with an axis pp; rank ``(n * pp + p) * shards + m``."""

    def __init__(self, ranks: Sequence[Any], replicas: int, pp: int) -> None:
        super().__init__(ranks, replicas)
        self.pp = pp

    def whole(self, what: str, step: int, replica: int = 0) -> Whole:
        """See ``Trajectory``; each parameter must be on one stage alone."""
        seen = [r["finished"] if step < 0 else r["history"][step] for r in self.ranks]
        shards, found = len(seen) // (self.replicas * self.pp), dict[str, Any]()
        for stage in range(self.pp):
            of_stage = [s[what] for k, s in enumerate(seen) if k // shards % self.pp == stage]
            held = assemble(of_stage, replicas=self.replicas)[replica]
            assert held and not held.keys() & found.keys()
            found |= held
        return dict(sorted(found.items(), key=lambda item: place_of(item[0])))


def place_of(name: str) -> tuple[int, int]:
    """Of a parameter in the order of the whole model; those of a block have the same."""
    ends = {"tok_embeddings": -1, "norm": 1, "output": 2}
    module, number, *_ = name.split(".")
    return (0, int(number)) if module == "layers" else (ends[module], 0)


def launch(
    pool: RankPool,
    changes: dict[str, Any],
    *,
    faults: Sequence[Fault] = (),
    step_ns: Sequence[int] = (),
    ranks: int = 4,
) -> Staged:
    """Runs ``changes`` of the tiny model, which name a mesh over all ranks."""
    mesh = changes["mesh"]
    told = pool.run(equalities.run, changes, None, list(faults), False, list(step_ns), ranks=ranks)
    return Staged(told, mesh.get("replicas", 1), mesh.get("pp", 1))
