"""Bytes over the replica axis: what the core's ranks dispatched against the reference's HLO.

The reference pads rows so that they divide, and sends the padding in rounds too; the core sends
the rows that a rank has. FSDP2 pads a gradient to the same size before it is reduced. So the
all-reduce of a synchronous step is equal as it is, and that of a round once each rank's missing
rows are added. Of the small messages the gathered norms are compared as well, U x R numbers in
both; the checksum by which the core proves that replicas are equal when they part has no
counterpart in a compiled program, because the reference compares bits on the host.
"""

import dataclasses
import functools
from collections import Counter
from typing import Any, NamedTuple

import jax
import numpy as np

from core_torch.collectives import Dispatch
from parity_tests.checks.cells import Cell
from parity_tests.checks.core_runs import CoreRun, launch
from parity_tests.checks.reference_runs import Locked, batch, initial
from parity_tests.harness.pool import RankPool
from reference_jax.ddp import warmup_step
from reference_jax.diloco import diloco_round
from reference_jax.edit import edit_round
from reference_jax.fsdp import TrainState, init_state, local_step, place, replicate
from reference_jax.ledger import bytes_per_axis
from reference_jax.local_sgd import take_anchor
from reference_jax.mesh import PER_REPLICA, put
from reference_jax.train import units_of

# One block, because the shipped steps are compiled for these cells only.
UNEVEN = Cell(method="edit", replicas=2, shards=2, dtype="float64", model="odd", blocks=1, steps=6)
WHOLE = dataclasses.replace(UNEVEN, method="diloco", replicas=4, shards=1, model="tiny")
UNEVEN_SIMPLE = dataclasses.replace(UNEVEN, sharding="simple_fsdp")
UNEVEN_COMPILED = dataclasses.replace(UNEVEN, sharding="simple_fsdp_aot")
WHOLE_SIMPLE = dataclasses.replace(WHOLE, sharding="simple_fsdp")
REPLICA_OPS = {"all_reduce": "all-reduce", "all_gather": "all-gather"}


class Programs(NamedTuple):
    """The shipped steps and rounds, compiled for a cell's mesh, and what they send."""

    state: TrainState
    tokens: list[jax.Array]
    steps: dict[str, Any]  # compiled
    replica_bytes: dict[str, dict[str, int]]  # program -> op -> bytes


def shipped(cell: Cell) -> Programs:
    """What ``local_step``, ``warmup_step`` and the method's round send, compiled as shipped."""
    return _shipped(dataclasses.replace(cell, sharding="fsdp2"))


@functools.cache
def _shipped(cell: Cell) -> Programs:
    locked = Locked(cell, cell.shards)
    config, mesh = locked.config, locked.mesh
    state = init_state(place(replicate(initial(cell), cell.replicas), mesh, axis=1), mesh)
    tokens = [put(x, mesh, PER_REPLICA) for x in batch(cell, 0, cell.shards)]
    numbers = {"config": config.model, "inner": config.inner}
    of = units_of(config)
    with jax.set_mesh(mesh):
        compiled = {
            "local": local_step.lower(state, *tokens, 0.01, **numbers).compile(),
            "synchronous": warmup_step.lower(state, *tokens, 0.01, **numbers).compile(),
        }
        sync = take_anchor(state.params, units=of)
        if cell.method == "edit":
            lowered = edit_round.lower(state, sync, units=of, penalty=config.penalty)
        else:
            lowered = diloco_round.lower(state, sync, units=of)
        compiled["round"] = lowered.compile()
    sent = {name: bytes_per_axis(program, mesh) for name, program in compiled.items()}
    assert all(set(axes) <= {"replica", "shard"} for axes in sent.values()), sent
    steps = {name: compiled[name] for name in ("local", "synchronous")}
    return Programs(
        state, tokens, steps, {name: axes.get("replica", {}) for name, axes in sent.items()}
    )


def check_ledger(pool: RankPool, cell: Cell) -> None:
    """A synchronous step, a local one, and a round, rank by rank."""
    run, expected = launch(pool, cell), shipped(cell).replica_bytes
    assert expected["local"] == {}
    for rank in range(len(run.ranks)):
        assert sent(run, rank, 1) == expected["synchronous"], f"synchronous step, rank {rank}"
        assert sent(run, rank, cell.warmup + 1) == {}, f"local step, rank {rank}"
        t = cell.warmup + cell.every
        in_round = sent(run, rank, t)
        assert run.events[0]["step"] == t
        in_round["all-reduce"] += missing_bytes(run, rank)
        assert in_round == expected["round"], f"round, rank {rank}"


def sent(run: CoreRun, rank: int, t: int) -> dict[str, int]:
    """Operation -> bytes that a rank dispatched over the replica axis in inner step ``t``."""
    told = run.ranks[rank]
    begin, end = (told["states"][step]["dispatches"] for step in (t - 1, t))
    total: Counter[str] = Counter()
    for dispatch in (Dispatch(*item) for item in told["trace"][begin:end]):
        if dispatch.axis == "replica" and dispatch.scope != "checksum":
            size = np.dtype(dispatch.dtype).itemsize
            total[REPLICA_OPS[dispatch.op]] += dispatch.numel * size
    return dict(total)


def missing_bytes(run: CoreRun, rank: int) -> int:
    """Bytes of the rows that the reference pads this rank's shards with."""
    padding = 0
    for part in run.ranks[rank]["states"][0]["theta"].values():
        rows = -(-part["shape"][0] // run.cell.shards)
        elements = int(np.prod(part["shape"][1:], dtype=np.int64))
        padding += (rows - len(part["rows"])) * elements * part["rows"].itemsize
    return padding
