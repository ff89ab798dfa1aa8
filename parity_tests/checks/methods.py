"""The methods whose exchanges are used late, go by the clock, are coded, or lie in a forward.

Runs are compared freely, step by step: inner steps, every round, and what is kept between them.
By the clock a record of the reference is a tick in which some replicas step. A replica that has
made its last step before a round waits there in the reference, while the core's snapshot of that
step holds the round already; such a pair of states belongs to no common moment and is passed over.
"""

from typing import Any

import jax
import numpy as np

from parity_tests.checks.cells import Cell
from parity_tests.checks.compare import Comparer
from parity_tests.checks.core_runs import CoreRun, Host, launch
from parity_tests.checks.reference_runs import Locked, batch, trace
from parity_tests.checks.training import (
    MOMENTS,
    free_tolerance,
    gradient_tolerance,
    model_tolerance,
    moved_so_far,
    one_replica,
)
from parity_tests.harness.pool import RankPool
from parity_tests.harness.tolerances import STATE, Tolerance
from parity_tests.harness.ulps import ErrorTable
from reference_jax.edit import round_in_forward
from reference_jax.mesh import PER_REPLICA, put
from reference_jax.train import Record, units_of

COUNTS = ("round", "step", "forced", "empty", "steps")


def check_method(pool: RankPool, errors: ErrorTable, cell: Cell) -> CoreRun:
    """The core's whole trajectory against that of the reference."""
    run, reference = launch(pool, cell), trace(cell)
    assert run.error is None and reference.error is None
    compare = Comparer(errors, cell, "free")
    records = reference.records
    for i, record in enumerate(records):
        after = records[i + 1] if i + 1 < len(records) else None
        check_inner(compare, run, record)
        check_states(compare, run, record, together(record, after))
    check_rounds(compare, run, records)
    for n, lead in enumerate(run.leads):
        assert len(lead["records"]) == records[-1].steps_R[n], f"steps of replica {n}, {cell}"
    return run


def together(record: Record, after: Record | None) -> np.ndarray:
    """[R] replicas whose states after this record are states of one moment in both cores."""
    if record.rounds or after is None:
        return np.ones(len(record.steps_R), bool)
    return after.is_active_R


def check_inner(compare: Comparer, run: CoreRun, record: Record) -> None:
    """Loss, gradient norm, gradients and learning rate of the replicas that made a step."""
    where, scalar = f"tick {record.step}", tolerance_at(run, record)
    place_R = [max(int(t), 1) for t in record.steps_R]
    grads = run.whole("grads", [t - 1 for t in place_R])
    for n in np.flatnonzero(record.is_active_R).tolist():
        line = run.leads[n]["records"][place_R[n] - 1]
        assert line["lr"] == record.lr, f"lr of replica {n}, {where}, {run.cell}"
        for key in ("loss", "grad_norm"):
            told, expected = np.array(line[key], run.cell.dtype), getattr(record, f"{key}_R")[n]
            compare.check(key, told, expected, scalar, where=f"replica {n}, {where}")
        mine, theirs = of_replica(grads, n), of_replica(record.grads, n)
        compare.tensors("gradient", mine, theirs, scalar, where=f"replica {n}, {where}")


def of_replica(arrays: Host, n: int) -> Host:
    """The rows of replica n, with a leading axis of length 1."""
    return {name: x_R[n : n + 1] for name, x_R in arrays.items()}


def tolerance_at(run: CoreRun, record: Record) -> Tolerance:
    """For numbers that are no updates."""
    t = int(record.steps_R.max())
    return free_tolerance(run.cell, t)(*moved_so_far(run, int(record.steps_R.min())))


def check_states(
    compare: Comparer, run: CoreRun, record: Record, is_together_R: np.ndarray
) -> None:
    """Parameters, moments, anchors, velocities, statistics and residuals."""
    where, scalar = f"tick {record.step}", tolerance_at(run, record)
    allowed = free_tolerance(run.cell, int(record.steps_R.max()))
    index_R = [int(t) for t in record.steps_R]
    start_R = run.whole("states", 0, "theta")
    for n in np.flatnonzero(is_together_R).tolist():
        at, start = f"replica {n}, {where}", of_replica(start_R, n)
        mine = of_replica(run.whole("states", index_R, "theta"), n)
        theirs = of_replica(record.params, n)
        compare.tensors("update", mine, theirs, allowed, where=at, since_R=start, is_update=True)
        for key in MOMENTS:
            mine = of_replica(run.whole("states", index_R, key), n)
            theirs = of_replica(getattr(record, key), n)
            compare.tensors(f"AdamW {key}", mine, theirs, scalar, where=at)
    if record.anchor is None or not is_together_R.all():
        return
    start = of_replica(start_R, 0)
    for key in ("anchor", "velocity"):
        mine = one_replica(run.agreed("states", index_R, key))
        theirs, is_update = one_replica(getattr(record, key)), key == "anchor"
        compare.tensors(key, mine, theirs, allowed, where=where, since_R=start, is_update=is_update)
    assert record.stats is not None
    everyone = [
        rank["states"][index_R[i // run.cell.shards]]["stats"] for i, rank in enumerate(run.ranks)
    ]
    compare.statistics(everyone[0], record.stats, scalar, where=where)
    if record.owed:
        check_owed(compare, run, record, index_R)


def check_owed(compare: Comparer, run: CoreRun, record: Record, index_R: list[int]) -> None:
    """What coding has left out: about a 256th of the pseudo-gradient that it was cut from."""
    states = [rank["states"][index_R[i // run.cell.shards]] for i, rank in enumerate(run.ranks)]
    if not all(state["residual"] for state in states):
        return
    usual = free_tolerance(run.cell, int(record.steps_R.max()))

    def allowed(params: float, left: float) -> Tolerance:
        tolerance = usual(params, 256 * left)
        return tolerance._replace(value=256 * tolerance.value)

    mine, start_R = run.whole("states", index_R, "residual"), run.whole("states", 0, "theta")
    assert record.owed is not None
    where = f"tick {record.step}"
    compare.tensors("residual", mine, record.owed, allowed, where=where, since_R=start_R)


def check_rounds(compare: Comparer, run: CoreRun, records: list[Record]) -> None:
    """Every round that both told, in order; by the clock without the replica's own step."""
    expected = [(record, told.event) for record in records for told in record.rounds]
    assert len(run.events) == len(expected), run.cell
    for mine, (record, theirs) in zip(run.events, expected, strict=True):
        where = f"round {theirs['round']}"
        for key in COUNTS if not run.cell.step_ns else [k for k in COUNTS if k != "step"]:
            assert mine[key] == theirs[key], f"{key}, {where}, {run.cell}"
        scalar = tolerance_at(run, record)
        compare.events(mine, theirs, scalar, where=where)
        gap, other = (np.array(event["gap"], run.cell.dtype) for event in (mine, theirs))
        compare.check("event gap", gap, other, scalar, where=where)


def check_layerwise(pool: RankPool, errors: ErrorTable, cell: Cell) -> CoreRun:
    """Each forward of the core that carried a round, against the reference's on the same inputs."""
    run, compare = launch(pool, cell), Comparer(errors, cell, "locked")
    inside = [event for event in run.events if event["step"] < run.steps]
    assert len(inside) >= 3
    for event in inside:
        check_forward_with_round(compare, run, Locked(cell, 1), event)
    return run


def check_forward_with_round(
    compare: Comparer, run: CoreRun, reference: Locked, event: dict[str, Any]
) -> None:
    """Inner step ``t + 1``, whose forward performs the round that was due after step ``t``."""
    cell, t = run.cell, event["step"]
    where = f"step {t + 1}"
    moments = [run.whole("states", t, key) for key in MOMENTS]
    state = reference.state(run.whole("states", t, "theta"), moments, run.adam_steps("states", t))
    anchor, velocity = (run.agreed("states", t, key) for key in ("anchor", "velocity"))
    sync = reference.sync(anchor, velocity, run.stats("states", t))
    tokens = [put(x, reference.mesh, PER_REPLICA) for x in batch(cell, t, 1)]
    lr = float(run.leads[0]["records"][t]["lr"])
    with jax.set_mesh(reference.mesh):
        new, after, _, seen = round_in_forward(
            state,
            sync,
            *tokens,
            lr,
            config=reference.config.model,
            inner=reference.config.inner,
            units=units_of(reference.config),
            penalty=reference.config.penalty,
        )
    loss, allowed = run.recorded(t + 1, "loss"), model_tolerance(cell)
    compare.check("loss", loss, np.array(seen.loss_R), allowed, where=where)
    allowed = gradient_tolerance(cell)
    compare.shards("gradient", run.parts("grads", t), seen.grads, allowed, where=where)
    parts = run.parts("states", t + 1, "anchor")
    compare.shards("anchor", parts, after.anchor, STATE, where=where, stacked=False)
    parts = run.parts("states", t + 1, "velocity")
    compare.shards("velocity", parts, after.velocity, STATE, where=where, stacked=False)
    stats = run.stats("states", t + 1)
    compare.statistics(stats, after.stats._asdict(), STATE, where=where)
    for name, steps_R in run.adam_steps("states", t + 1).items():
        np.testing.assert_array_equal(steps_R, np.array(new.step[name]), err_msg=f"{name} {where}")
