"""The comparisons of the two cores, as functions that raise AssertionError where they differ.

Pytest's tests call them, and so do the mutant tests, which expect them to fail.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from parity_tests import cells
from parity_tests.cases import training
from parity_tests.cells import Cell
from parity_tests.compare import Comparer
from parity_tests.core_runs import CoreRun, arguments, launch
from parity_tests.harness import tolerances
from parity_tests.harness.pool import RankPool
from parity_tests.harness.tolerances import EXACT, OPTIMIZER, STATE, Tolerance
from parity_tests.harness.ulps import ErrorTable
from parity_tests.reference_runs import Locked, batch, inject, initial, logits_of, model_of, trace
from reference_jax.train import Host, Record

MOMENTS = ("exp_avg", "exp_avg_sq")


def model_tolerance(cell: Cell) -> Tolerance:
    """For logits, losses and gradients from equal parameters."""
    return tolerances.model(cell.dtype, layers=cell.layers, width=cell.width)


def check_forward(pool: RankPool, errors: ErrorTable, cell: Cell) -> None:
    """Logits, loss and every gradient of a first step, averaged over shards and over all."""
    told = [x for x in pool.run(training.forward, *arguments(cell)) if x is not None]
    compare, allowed = Comparer(errors, cell, "first step"), model_tolerance(cell)
    inputs, _ = batch(cell, 0, cell.shards)
    flat = inputs.reshape(-1, cells.SEQUENCE)
    logits = np.array(logits_of(initial(cell), flat, config=model_of(cell)))
    mine = np.concatenate([x["logits"] for x in told])
    compare.check("logits", mine, logits, allowed, where="all ranks")
    params_R = {k: np.stack([v] * cell.replicas) for k, v in initial(cell).items()}
    locked = Locked(cell, shards_of_reference(cell))
    for phase in ("local", "synchronous"):
        loss_R, grads = locked.gradients(params_R, 1, synchronous=phase == "synchronous")
        if cell.accumulate == 1:
            losses = np.array([x["loss"] for x in told]).reshape(cell.replicas, -1)
            compare.check("loss", losses.mean(axis=1), loss_R, allowed, where="first step")
        compare.shards("gradient", [x[phase] for x in told], grads, allowed, where=phase)


def shards_of_reference(cell: Cell) -> int:
    """S of the reference's mesh in locked comparisons: the odd model lives on shards as well."""
    return cell.shards if cell.model == "odd" else 1


def check_training(
    pool: RankPool, errors: ErrorTable, cell: Cell, *, locked: bool = True, free: bool = True
) -> CoreRun:
    """A whole run: each phase on the core's own inputs, and both cores by themselves."""
    run = launch(pool, cell)
    if free:
        check_free(errors, run)
    if locked:
        check_locked(errors, run)
    return run


def check_locked(errors: ErrorTable, run: CoreRun) -> None:
    """Each phase of each step, computed by the reference from what the core held before it."""
    cell, compare = run.cell, Comparer(errors, run.cell, "locked")
    reference = Locked(cell, shards_of_reference(cell))
    rounds = 0
    for t in range(1, run.steps + 1):
        locked_step(compare, run, reference, t)
        while rounds < len(run.events) and run.events[rounds]["step"] == t:
            locked_round(compare, run, reference, rounds)
            rounds += 1
    assert rounds == len(run.events)


def locked_step(compare: Comparer, run: CoreRun, reference: Locked, t: int) -> None:
    """Gradient, then clip and AdamW of inner step ``t``."""
    cell, where = run.cell, f"step {t}"
    theta_R = run.whole("states", t - 1, "theta")
    inject(theta_R, cell.faults, t - 1)
    synchronous = cell.method == "synchronous" or t <= cell.warmup
    loss_R, grads = reference.gradients(theta_R, t, synchronous=synchronous)
    records = [rank["records"][t - 1] for rank in run.leads]
    mine = np.array([record["loss"] for record in records], cell.dtype)
    compare.check("loss", mine, loss_R, model_tolerance(cell), where=where)
    core_grads = run.parts("grads", t - 1)
    compare.shards("gradient", core_grads, grads, model_tolerance(cell), where=where)

    moments = [run.whole("states", t - 1, key) for key in MOMENTS]
    state = reference.state(theta_R, *moments, run.adam_steps("states", t - 1))
    new, norm_R = reference.update(state, run.whole("grads", t - 1), records[0]["lr"])
    mine = np.array([record["grad_norm"] for record in records], cell.dtype)
    compare.check("gradient norm", mine, norm_R, STATE, where=where)
    kind, index = after_inner_step(run, t)
    before = run.parts("states", t - 1, "theta")
    for part, whole in zip(before, split_like(run, theta_R), strict=True):
        part.update(whole)
    allowed = partial(tolerances.of_update, OPTIMIZER)
    theta = run.parts(kind, index, "theta")
    compare.shards("AdamW update", theta, new.params, allowed, where=where, since=before)
    for key in MOMENTS:
        parts = run.parts(kind, index, key)
        compare.shards(f"AdamW {key}", parts, getattr(new, key), OPTIMIZER, where=where)
    for name, steps_R in run.adam_steps(kind, index).items():
        np.testing.assert_array_equal(steps_R, new.step[name], err_msg=f"{name} {where}")
