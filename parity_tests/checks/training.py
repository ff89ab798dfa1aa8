"""The comparisons of the two cores, as functions that raise AssertionError where they differ.

Pytest's tests call them, and so do the mutant tests, which expect them to fail.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from parity_tests.cases import training
from parity_tests.checks import cells
from parity_tests.checks.cells import Cell
from parity_tests.checks.compare import Comparer, norm
from parity_tests.checks.core_runs import CoreRun, arguments, launch
from parity_tests.checks.reference_runs import Locked, batch, initial, logits_of, model_of, trace
from parity_tests.harness import tolerances
from parity_tests.harness.jax_bridge import assemble, stack
from parity_tests.harness.pool import RankPool
from parity_tests.harness.tolerances import EXACT, OPTIMIZER, STATE, Tolerance
from parity_tests.harness.ulps import ErrorTable, ulps
from reference_jax.fsdp import replicate, to_host
from reference_jax.model import Arrays
from reference_jax.train import Host, Record

MOMENTS = ("exp_avg", "exp_avg_sq")


def model_tolerance(cell: Cell) -> Tolerance:
    """For logits and losses from equal parameters."""
    computed = cell.dtype if cell.compute == "same" else cell.compute
    return tolerances.model(computed, layers=cell.layers, width=cell.width)


def gradient_tolerance(cell: Cell) -> Tolerance:
    """For gradients from equal parameters."""
    computed = cell.dtype if cell.compute == "same" else cell.compute
    return tolerances.model(computed, layers=cell.layers, width=cell.width, passes=2)


def check_forward(pool: RankPool, errors: ErrorTable, cell: Cell) -> None:
    """Logits, loss and every gradient of a first step, averaged over shards and over all."""
    told = [x for x in pool.run(training.forward, *arguments(cell)) if x is not None]
    compare, allowed = Comparer(errors, cell, "first step"), model_tolerance(cell)
    check_logits(compare, np.concatenate([x["logits"] for x in told]))
    reference = Locked(cell, shards_of_reference(cell))
    for phase in ("local", "synchronous"):
        loss_R, grads = first_gradients(reference, phase)
        losses = np.array([x["loss"] for x in told]).reshape(cell.replicas, -1)
        mean_R = losses.mean(axis=1, dtype=cell.dtype)
        compare.check("loss", mean_R, loss_R, allowed, where=phase)
        parts = [x[phase] for x in told]
        if cell.compute == "same":
            compare.shards("gradient", parts, grads, gradient_tolerance(cell), where=phase)
        else:
            check_mixed(compare, stack(assemble(parts, replicas=cell.replicas)), grads, phase)


def first_gradients(reference: Locked, phase: str) -> tuple[np.ndarray, Arrays]:
    """[R] loss and gradients of a first step."""
    params_R = replicate(reference.start, reference.cell.replicas)
    return reference.gradients(params_R, 1, synchronous=phase == "synchronous")


def check_mixed(compare: Comparer, core_R: Host, grads: Arrays, phase: str) -> None:
    """Gradients of a narrow forward, by tensor: in u, and next to those of a wide forward."""
    cell, config = compare.cell, model_of(compare.cell)
    reference_R = to_host(grads, config, axis=1)
    compare.tensors("gradient", core_R, reference_R, gradient_tolerance(cell), where=phase)
    _, exact = first_gradients(Locked(dataclasses.replace(cell, compute="same"), 1), phase)
    for name, exact_R in to_host(exact, config, axis=1).items():
        for x, y, truth in zip(core_R[name], reference_R[name], exact_R, strict=True):
            assert_as_accurate(x, y, truth, cell.compute, f"{name}, {phase}")


def assert_as_accurate(
    core: np.ndarray, reference: np.ndarray, truth: np.ndarray, dtype: str, where: str
) -> None:
    """Neither core is much further from the truth than the other, in u of ``dtype``."""
    one, two = (ulps(x.astype(truth.dtype), truth, dtype=dtype) for x in (core, reference))
    is_fair = tolerances.as_accurate(one, two) and tolerances.as_accurate(two, one)
    assert is_fair, f"{where}: the core is {one:.3g} u from the truth, the reference {two:.3g} u"


def check_logits(compare: Comparer, mine: np.ndarray) -> None:
    """Logits [ranks x B, T, V] of the first micro-batch.

    In float32 also against the same weights in float64: neither core may be much further off.
    """
    cell, model = compare.cell, model_of(compare.cell)
    tokens = batch(cell, 0, cell.shards)[0].reshape(-1, cells.SEQUENCE)
    params = initial(cell)
    computed = cell.dtype if cell.compute == "same" else cell.compute
    narrow = {k: jnp.asarray(v, computed) for k, v in params.items()}
    theirs = np.array(logits_of(narrow, tokens, config=model))
    compare.check("logits", mine, theirs, model_tolerance(cell), where="all ranks")
    if computed == "float32":
        wide = {k: v.astype(np.float64) for k, v in params.items()}
        truth = np.array(logits_of(wide, tokens, config=model))
        assert_as_accurate(mine, theirs, truth, computed, f"logits, {cell}")


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
    wide = compare.in_the_parameters_dtype
    synchronous = cell.method == "synchronous" or t <= cell.warmup
    theta_R = run.whole("begun", t - 1)
    loss_R, grads = reference.gradients(theta_R, t, synchronous=synchronous)
    compare.check("loss", run.recorded(t, "loss"), loss_R, model_tolerance(cell), where=where)
    parts = run.parts("grads", t - 1)
    compare.shards("gradient", parts, grads, gradient_tolerance(cell), where=where)

    moments = [run.whole("states", t - 1, key) for key in MOMENTS]
    state = reference.state(theta_R, moments, run.adam_steps("states", t - 1))
    lr = float(run.leads[0]["records"][t - 1]["lr"])
    new, norm_R = reference.update(state, run.whole("grads", t - 1), lr)
    wide.check("gradient norm", run.recorded(t, "grad_norm"), norm_R, STATE, where=where)
    at = run.after_inner_step(t)
    allowed = partial(tolerances.of_update, OPTIMIZER)
    begun = run.parts("begun", t - 1)
    theta = run.parts(*at, "theta")
    wide.shards(
        "AdamW update", theta, new.params, allowed, where=where, since=begun, is_update=True
    )
    for key in MOMENTS:
        parts = run.parts(*at, key)
        wide.shards(f"AdamW {key}", parts, getattr(new, key), OPTIMIZER, where=where)
    for name, steps_R in run.adam_steps(*at).items():
        np.testing.assert_array_equal(steps_R, np.array(new.step[name]), err_msg=f"{name} {where}")


def locked_round(compare: Comparer, run: CoreRun, reference: Locked, k: int) -> None:
    """Round ``k``, counted from 0, from the core's state right before it."""
    event, compare = run.events[k], compare.in_the_parameters_dtype
    t, where = event["step"], f"round {k + 1} after step {event['step']}"
    theta_R = run.whole("inner", k, "theta")
    moments = [run.whole("inner", k, key) for key in MOMENTS]
    state = reference.state(theta_R, moments, run.adam_steps("inner", k))
    anchor, velocity = (run.agreed("inner", k, key) for key in ("anchor", "velocity"))
    before = run.stats("inner", k)
    sync = reference.sync(anchor, velocity, before)
    state, sync, told, combined = reference.round(state, sync, forced=event["forced"])
    compare.events(event, told, STATE, where=where)
    parts = run.parts("combined", k)
    compare.shards("combined", parts, combined, STATE, where=where, stacked=False)
    compare.shards(
        "anchor update",
        run.parts("states", t, "anchor"),
        sync.anchor,
        partial(tolerances.of_update, STATE),
        where=where,
        stacked=False,
        since=run.parts("inner", k, "anchor"),
        is_update=True,
    )
    velocities = run.parts("states", t, "velocity")
    compare.shards("velocity", velocities, sync.velocity, STATE, where=where, stacked=False)
    after = run.stats("states", t)
    compare.statistics(after, sync.stats._asdict(), STATE, where=where)
    for key in MOMENTS:
        parts = run.parts("states", t, key)
        compare.shards("healed moments", parts, getattr(state, key), EXACT, where=where)
    assert_same(run.adam_steps("states", t), state.step, f"steps of AdamW, {where}")
    assert_on_anchor(run, t)


def assert_same(core: Host, reference: Mapping[str, Any], where: str) -> None:
    """Equal numbers under equal names."""
    assert core.keys() == reference.keys(), where
    for name, x in core.items():
        np.testing.assert_array_equal(x, np.array(reference[name]), err_msg=f"{name}, {where}")


def assert_on_anchor(run: CoreRun, t: int) -> None:
    """After a round, and when the anchor is taken, every replica holds it to the last bit."""
    anchor, theta_R = run.agreed("states", t, "anchor"), run.whole("states", t, "theta")
    for name, x_R in theta_R.items():
        assert all(x.tobytes() == anchor[name].tobytes() for x in x_R), f"{name}, step {t}"


def check_free(errors: ErrorTable, run: CoreRun) -> None:
    """The core's whole trajectory against that of the reference, which knew nothing of it."""
    cell, reference = run.cell, trace(run.cell)
    compare = Comparer(errors, cell, "free")
    assert run.error == reference.error, f"{run.error}, {reference.error}, {cell}"
    assert run.steps == len(reference.records), f"{run.steps} steps, {cell}"
    assert [e["step"] for e in run.events] == [r.step for r in reference.records if r.event]
    for record in reference.records:
        free_step(compare, run, record)


def free_tolerance(cell: Cell, t: int) -> Callable[[float, float], Tolerance]:
    """For updates since the start, ``t`` steps ago."""

    def allowed(params: float, update: float) -> Tolerance:
        return tolerances.free_running(
            cell.dtype,
            steps=t,
            layers=cell.layers,
            width=cell.width,
            params=params,
            update=update or 1.0,
        )

    return allowed


def free_step(compare: Comparer, run: CoreRun, record: Record) -> None:
    """Everything that both cores hold after one inner step, and the round behind it."""
    cell, t = run.cell, record.step
    where, allowed = f"step {t}", free_tolerance(cell, t)
    for lead in run.leads:
        line = lead["records"][t - 1]
        assert (line["step"], line["tokens"], line["lr"]) == (t, record.tokens, record.lr), where
    scalar = allowed(*moved_so_far(run, t))
    compare.check("loss", run.recorded(t, "loss"), record.loss_R, scalar, where=where)
    norms = run.recorded(t, "grad_norm")
    compare.check("gradient norm", norms, record.grad_norm_R, scalar, where=where)
    compare.tensors("gradient", run.whole("grads", t - 1), record.grads, scalar, where=where)
    start_R = run.whole("states", 0, "theta")
    sides = [(run.whole("states", t, "theta"), record.params)]
    if record.event is not None:
        sides.append((run.whole(*run.after_inner_step(t), "theta"), record.inner_params))
    for theta_R, params_R in sides:
        compare.tensors(
            "update", theta_R, params_R, allowed, where=where, since_R=start_R, is_update=True
        )
    for key in MOMENTS:
        moment_R = run.whole("states", t, key)
        compare.tensors(f"AdamW {key}", moment_R, getattr(record, key), scalar, where=where)
    assert_same(run.adam_steps("states", t), record.counts, f"steps of AdamW, {where}")
    if record.anchor is not None:
        free_outer(compare, run, record, scalar)
    else:
        assert "anchor" not in run.leads[0]["states"][t], f"anchor too early, {where}"


def free_outer(compare: Comparer, run: CoreRun, record: Record, scalar: Tolerance) -> None:
    """Anchor, velocity, statistics and the event of a step."""
    t, where, allowed = record.step, f"step {record.step}", free_tolerance(run.cell, record.step)
    start = one_replica({k: x_R[0] for k, x_R in run.whole("states", 0, "theta").items()})

    def outer(quantity: str, core: Host, reference: Host | None, *, is_update: bool) -> None:
        assert reference is not None
        sides = one_replica(core), one_replica(reference)
        compare.tensors(quantity, *sides, allowed, where=where, since_R=start, is_update=is_update)

    assert record.stats is not None
    outer("anchor update", run.agreed("states", t, "anchor"), record.anchor, is_update=True)
    outer("velocity", run.agreed("states", t, "velocity"), record.velocity, is_update=False)
    compare.statistics(run.stats("states", t), record.stats, scalar, where=where)
    if record.event is None:
        return
    k = record.event["round"] - 1
    event = run.events[k]
    for key in ("round", "step", "forced"):
        assert event[key] == record.event[key], f"{key}, {where}"
    compare.events(event, record.event, scalar, where=where)
    outer("combined", run.agreed("combined", k), record.combined, is_update=False)


def one_replica(arrays: Host) -> Host:
    """With a leading axis of length 1."""
    return {name: x[None] for name, x in arrays.items()}


def moved_so_far(run: CoreRun, t: int) -> tuple[float, float]:
    """Norms of all parameters at the start, and of what they moved by then."""
    begin, now = run.whole("states", 0, "theta"), run.whole("states", t, "theta")
    moved = np.concatenate([(now[k] - begin[k]).ravel() for k in begin])
    return norm(np.concatenate([x.ravel() for x in begin.values()])), norm(moved)
