"""Which cells ``twinshard parity run`` compares: method x mesh x dtype x model x core.

``covering`` holds every pair of choices in few cells; ``product`` holds all. Cells that differ in
shards or in the core's sharding only share one trace of the reference. Needs neither core.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from core_torch.config import METHODS
from parity_tests.checks.cells import MESHES, MODELS, SECOND, Cell

DTYPES = ("float64", "float32", "bfloat16")  # the last: bfloat16 compute, float32 parameters
CORES = ("fsdp2", "simple_fsdp", "simple_fsdp_aot")  # the last: compiled, aot_eager
PACES = (SECOND, 2 * SECOND, 3 * SECOND, 9 * SECOND)  # of a step of replicas 0 to 3, by the clock
# The least for an exchange by the clock, so that unequal replicas meet in non-empty rounds.
BY_THE_CLOCK: tuple[tuple[str, Any], ...] = (("timed", (("min_total_steps", 1),)),)

Choice = tuple[Any, ...]  # one value of each factor
FACTORS: tuple[Sequence[Any], ...] = (METHODS, MESHES, DTYPES, tuple(MODELS), CORES)


def cell_of(choice: Choice, *, steps: int = 16) -> Cell:
    """The comparison of one choice of method, mesh, dtype, model and core."""
    method, (replicas, shards), dtype, model, core = choice
    is_mixed, is_timed = dtype == "bfloat16", method == "aedit"
    return Cell(
        method=method,
        replicas=replicas,
        shards=shards,
        dtype="float32" if is_mixed else dtype,
        compute="bfloat16" if is_mixed else "same",
        model=model,
        steps=steps,
        sync=BY_THE_CLOCK if is_timed else (),
        step_ns=PACES[:replicas] if is_timed else (),
        sharding=core,
    )


def dtype_of(cell: Cell) -> str:
    """What the cell computes in."""
    return cell.dtype if cell.compute == "same" else cell.compute


def covering(factors: Sequence[Sequence[Any]] = FACTORS) -> list[Choice]:
    """Choices that hold every pair of values of two factors; the same ones each time.

    A cell is needed for each pair of the two largest factors. Each takes the values of the other
    factors that bring in most pairs not seen yet, and, among equals, pairs that were seen least;
    cells for what is left then follow.
    """
    seen = dict.fromkeys(_pairs_of_all(factors), 0)
    large = sorted(range(len(factors)), key=lambda i: -len(factors[i]))[:2]
    wanted = [
        dict(zip(large, x, strict=True)) for x in itertools.product(*(factors[i] for i in large))
    ]
    chosen: list[Choice] = []
    while wanted or not all(seen.values()):
        left = [pair for pair, count in seen.items() if count == 0]
        fixed = wanted.pop(0) if wanted else dict(min(left, key=repr))
        chosen.append(_best(factors, fixed, seen))
        for pair in _pairs(chosen[-1]):
            seen[pair] += 1
    return chosen


def product() -> list[Choice]:
    """Every choice there is."""
    return list(itertools.product(*FACTORS))


def _best(factors: Sequence[Sequence[Any]], fixed: dict[int, Any], seen: dict[Any, int]) -> Choice:
    """The choice with the ``fixed`` values that holds most new pairs, then the rarest."""
    options = [[fixed[i]] if i in fixed else values for i, values in enumerate(factors)]

    def worth(choice: Choice) -> tuple[int, int]:
        counts = [seen[pair] for pair in _pairs(choice)]
        return counts.count(0), -sum(counts)

    return max(itertools.product(*options), key=worth)


def _pairs(choice: Choice) -> Iterator[tuple[Any, Any]]:
    return itertools.combinations(enumerate(choice), 2)


def _pairs_of_all(factors: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, Any]]:
    for (i, xs), (j, ys) in itertools.combinations(enumerate(factors), 2):
        yield from itertools.product(((i, x) for x in xs), ((j, y) for y in ys))
