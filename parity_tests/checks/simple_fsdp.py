"""SimpleFSDP against chapter `simple_fsdp`: gradients, and every message on the shard axis.

XLA on CPU spells a reduce-scatter as an all-reduce, so messages are compared by logical
operation with what the chapter's jaxpr says: how many of each size, forward and backward.

What both send must be equal, with three differences that are decisions of the core:

compiled    the unit that the forward ends with is kept, not gathered again
eager       a tied table is read twice: gathered and scattered once more than by the chapter
FSDP2       gathers an untied embedding again, which no gradient needs
"""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from core_torch.collectives import Dispatch
from core_torch.shard.simple_fsdp import Mode
from parity_tests.cases import simple_fsdp as cases
from parity_tests.checks import cells
from parity_tests.checks.cells import Cell
from parity_tests.checks.compare import Comparer
from parity_tests.checks.reference_runs import batch, initial, model_of
from parity_tests.checks.training import model_tolerance
from parity_tests.harness.pool import RankPool
from parity_tests.harness.ulps import ErrorTable
from reference_jax.fsdp import rank_loss, replicate
from reference_jax.mesh import PER_REPLICA, make_mesh, put
from reference_jax.model import Arrays, shapes
from reference_jax.simple_fsdp import (
    Wrapping,
    gradients,
    losses,
    manual_buckets,
    store,
    traffic,
)

OPERATION = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
}
Sent = Counter[tuple[str, int]]  # (operation, bytes) -> calls
Program = Callable[..., Any]


class Placed(NamedTuple):
    """A cell in one mode."""

    cell: Cell
    mode: Mode

    def __str__(self) -> str:
        return f"{self.mode}-{self.cell.replicas}x{self.cell.shards}-{self.cell.model}"


def _placed(mode: Mode, mesh: tuple[int, int], model: str, blocks: int) -> Placed:
    r, s = mesh
    cell = Cell(method="diloco", replicas=r, shards=s, dtype="float64", model=model, blocks=blocks)
    return Placed(cell, mode)


PLACED = [
    _placed("fully_shard", (1, 4), "odd", 2),
    _placed("hybrid_shard", (2, 2), "tied", 1),
    _placed("replicate", (1, 4), "tiny", 1),
]


class Reference:
    """The chapter on a cell's mesh.

    Args:
        placed: the comparison.
        by_unit: one bucket per unit; else each parameter travels by itself.
    """

    def __init__(self, placed: Placed, *, by_unit: bool) -> None:
        cell, mode = placed
        self.config = model_of(cell)
        buckets = manual_buckets(self.config) if by_unit else None
        self.how = Wrapping(mode=mode, buckets=buckets)
        self.mesh = make_mesh(cell.replicas, cell.shards)
        host_R = replicate(initial(cell), cell.replicas)
        sides = [put(side, self.mesh, PER_REPLICA) for side in batch(cell, 0, cell.shards)]
        self.held = (store(host_R, self.mesh, self.how), *sides)

    def _bound(self, program: Program) -> Program:
        rows = {name: shape[0] for name, shape in shapes(self.config).items()}
        loss = functools.partial(rank_loss, config=self.config, compute=None)
        return functools.partial(program, loss, rows=rows, how=self.how)

    def gradients(self) -> tuple[np.ndarray, Arrays]:
        """[R, S] losses and gradients."""
        with jax.set_mesh(self.mesh):
            loss_RS, grads = jax.jit(self._bound(gradients))(*self.held)
        return np.array(loss_RS), grads

    def messages(self) -> tuple[Sent, Sent]:
        """Of forward and backward."""
        with jax.set_mesh(self.mesh):
            forward, both = (
                traffic(self._bound(program), *self.held) for program in (losses, gradients)
            )
        return forward, both - forward


@functools.cache
def reference_gradients(placed: Placed) -> tuple[np.ndarray, Arrays]:
    """Compiled once for all ways in which the core does it."""
    return Reference(placed, by_unit=True).gradients()


def launch(pool: RankPool, placed: Placed, how: str) -> list[Any]:
    """What each rank tells of its step."""
    cell = placed.cell
    sides = [np.asarray(side) for side in batch(cell, 0, cell.shards)]
    return pool.run(cases.step, cells.core_changes(cell), sides, initial(cell), placed.mode, how)


def check_step(pool: RankPool, errors: ErrorTable, placed: Placed, how: str) -> None:
    """Losses, gradients and messages of every rank."""
    cell, told = placed.cell, launch(pool, placed, how)
    loss_RS, grads = reference_gradients(placed)
    compare, allowed = Comparer(errors, cell, placed.mode), model_tolerance(cell)
    mine_RS = np.array([x["loss"] for x in told]).reshape(loss_RS.shape)
    compare.check("loss", mine_RS, loss_RS, allowed, where=how)
    compare.shards("gradient", [x["grads"] for x in told], grads, allowed, where=how)
    expected = expected_messages(placed, how)
    for rank, x in enumerate(told):
        for phase, wanted in zip(("forward", "backward"), expected, strict=True):
            assert counted(x[phase]) == wanted, f"{phase} on rank {rank}, {how}, {placed}"


def counted(trace: list[Any]) -> Sent:
    """Dispatches of the core in the words of the chapter."""
    sent: Sent = Counter()
    for dispatch in (Dispatch(*item) for item in trace):
        size = dispatch.numel * np.dtype(dispatch.dtype).itemsize
        sent[OPERATION[dispatch.op], size] += 1
    return sent


def expected_messages(placed: Placed, how: str) -> tuple[Sent, Sent]:
    """What the chapter sends in forward and backward, and the differences named above."""
    by_unit = how in ("manual", "fsdp2")
    forward, backward = Reference(placed, by_unit=by_unit).messages()
    if placed.mode == "replicate":
        return forward, backward
    table, units = "tok_embeddings.weight", manual_buckets(model_of(placed.cell))
    is_tied = model_of(placed.cell).tied
    if how == "fsdp2":
        backward += padded(placed.cell, [] if is_tied else [table], together=True)
    elif how == "eager":
        twice = padded(placed.cell, [table] if is_tied else [], together=False)
        forward, backward = forward + twice, backward + scattered(placed.cell, twice)
    else:
        last = units[0] if is_tied else units[-1]  # a tied table is the head
        backward -= padded(placed.cell, list(last), together=by_unit)
    return forward, backward


def padded(cell: Cell, names: list[str], *, together: bool) -> Sent:
    """Gathers of these parameters, rows rounded up: one in all, or one each."""
    sizes = []
    for name in names:
        rows, *rest = shapes(model_of(cell))[name]
        count = -(-rows // cell.shards) * cell.shards * int(np.prod(rest, dtype=np.int64))
        sizes.append(count * np.dtype(cell.dtype).itemsize)
    return Counter(("all-gather", x) for x in ([sum(sizes)] if together and sizes else sizes))


def scattered(cell: Cell, gathers: Sent) -> Sent:
    """What comes back of these gathers: a scatter each, and on a hybrid mesh an all-reduce."""
    sent: Sent = Counter()
    for (_, size), calls in gathers.items():
        sent["reduce-scatter", size] += calls
        if cell.replicas > 1:
            sent["all-reduce", size // cell.shards] += calls
    return sent
