"""The twin by hand computes what the chapters compute, and says aloud all that it sends."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from reference_jax import manual
from reference_jax.ddp import warmup_step
from reference_jax.diloco import diloco_round
from reference_jax.edit import Penalty, edit_round
from reference_jax.fsdp import Inner, TrainState, local_step
from reference_jax.ledger import bytes_per_axis, written_bytes
from reference_jax.local_sgd import SyncState
from reference_jax.mesh import PER_REPLICA, make_mesh, put
from reference_jax.model import Units, init_params, shapes, units, whole_model
from reference_jax.tests.cases import MODEL, batches_of

U = float(np.finfo(np.float64).eps)
INNER = Inner(max_norm=0.5)
PENALTY = Penalty(warmup_rounds=1, max_norm=0.05)
NUMBER = 8  # bytes of a float64
PADDED = {k: -(-rows // 2) * 2 * int(np.prod(rest)) for k, (rows, *rest) in shapes(MODEL).items()}
SHARD = sum(PADDED.values()) // 2 * NUMBER


def on(mesh: Mesh, tree: Any, specs: Any) -> Any:
    """Copies on a mesh; ``specs`` is a tree whose leaves may stand for dicts of arrays."""
    return jax.tree.map(
        lambda spec, part: jax.tree.map(lambda x: put(np.asarray(x), mesh, spec), part),
        specs,
        tree,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def assert_alike(ours: Any, theirs: Any) -> None:
    """Every array within 4 units in the last place of its own size."""
    sides = (jax.tree.leaves_with_path(tree) for tree in (ours, theirs))
    for (path, x), (also, y) in zip(*sides, strict=True):
        assert path == also
        a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b), err_msg=str(path))
        a, b = np.nan_to_num(a, posinf=1), np.nan_to_num(b, posinf=1)
        assert np.linalg.norm(a - b) <= 4 * U * np.linalg.norm(b), jax.tree_util.keystr(path)


def started(mesh: Mesh, of: Units) -> tuple[TrainState, SyncState, list[list[jax.Array]]]:
    """States, and the batches of four steps."""
    params = init_params(MODEL, seed=0, dtype=np.float64)
    batches = [[put(x, mesh, PER_REPLICA) for x in batches_of(2, 2)(t)] for t in range(4)]
    return *manual.start(MODEL, mesh=mesh, params=params, of=of), batches


@pytest.mark.parametrize("together", [False, True])
def test_three_steps_are_those_of_the_chapters(together: bool) -> None:
    mesh, auto = make_mesh(2, 2), manual.auto_mesh(2, 2)
    chapter = warmup_step if together else local_step
    state, _, batches = started(mesh, units(MODEL))
    for batch in batches[:3]:
        copies = on(auto, (state, batch), (manual.STATE, PER_REPLICA))
        ours = manual.inner_step(
            *(copies[0], *copies[1], 0.05), mesh=auto, config=MODEL, inner=INNER, together=together
        )
        with jax.set_mesh(mesh):
            theirs = chapter(state, *batch, 0.05, config=MODEL, inner=INNER)
        assert_alike(ours, theirs)
        assert np.asarray(theirs[1].grad_norm_R).min() > INNER.max_norm  # it was clipped
        state, _ = theirs


def faulty(state: TrainState, mesh: Mesh, factor: float) -> TrainState:
    """Replica 1 drifted ``factor`` times as far from nowhere, or went NaN."""
    factors = np.array([1, factor])
    spoilt = {
        k: np.asarray(x) * factors.reshape(2, *[1] * (x.ndim - 1)) for k, x in state.params.items()
    }
    return state._replace(params=on(mesh, spoilt, PER_REPLICA))


def rounds_of(method: str) -> tuple[Units, dict[str, Any], Callable[..., Any]]:
    """What the twin is told, and the chapter's own round."""
    told: dict[str, Any]
    if method == "diloco":
        told = {"penalty": None, "lr": 0.7, "momentum": 0.9}
        return whole_model(MODEL), told, functools.partial(diloco_round, units=whole_model(MODEL))
    told = {"penalty": PENALTY, "lr": 0.8, "momentum": 0.85}
    return units(MODEL), told, functools.partial(edit_round, units=units(MODEL), penalty=PENALTY)


@pytest.mark.parametrize("method", ["edit", "diloco"])
def test_rounds_are_those_of_the_chapters_with_a_replica_too_far_off_and_one_that_is_nan(
    method: str,
) -> None:
    mesh, auto = make_mesh(2, 2), manual.auto_mesh(2, 2)
    of, told, chapter = rounds_of(method)
    state, sync, batches = started(mesh, of)
    left_out = []
    for batch, factor in zip(batches, (1.0, 1.0, 9.0, np.nan), strict=True):
        with jax.set_mesh(mesh):
            state, _ = local_step(state, *batch, 0.05, config=MODEL, inner=INNER)
        state = faulty(state, mesh, factor)
        copies = on(auto, (state, sync), (manual.STATE, manual.SYNC))
        ours = manual.sync_round(*copies, mesh=auto, units=of, **told)
        with jax.set_mesh(mesh):
            theirs = chapter(state, sync)
        assert_alike(ours, theirs)
        state, sync, done = theirs
        left_out.append(np.asarray(done.measured.verdict.is_anomaly_R)[:, 1].any())
        assert np.isfinite(factor) == bool(np.asarray(state.step["norm.weight"])[1])  # healed
    if method == "edit":
        assert left_out == [False, False, True, True]


def programs(auto: Mesh) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Name, program and arguments of all that the twin can do on 2 x 2."""
    for name, together in (("local", False), ("synchronous", True)):
        state, _, batches = started(auto, units(MODEL))
        given = {"config": MODEL, "inner": INNER, "together": together}
        step = functools.partial(manual.inner_step, mesh=auto, **given)
        yield name, step, (state, *batches[0], 0.05)
    for method in ("edit", "diloco"):
        of, told, _ = rounds_of(method)
        twin = functools.partial(manual.sync_round, mesh=auto, units=of, **told)
        yield method, twin, started(auto, of)[:2]


def test_the_twin_says_what_it_sends_and_a_local_step_says_nothing_to_other_replicas() -> None:
    auto = manual.auto_mesh(2, 2)
    sent = {name: written_bytes(f, *args) for name, f, args in programs(auto)}
    step = {"all-gather": 2 * SHARD, "reduce-scatter": 2 * SHARD, "all-reduce": 2 * NUMBER}
    count = {"edit": len(units(MODEL)), "diloco": 1}
    assert sent["local"] == {"shard": step}
    assert sent["synchronous"] == {"shard": step, "replica": {"all-reduce": SHARD}}
    for method, of in count.items():
        assert sent[method] == {
            "shard": {"all-reduce": 2 * of * NUMBER},  # norms of d, and of D
            "replica": {"all-gather": 2 * of * NUMBER, "all-reduce": SHARD},
        }


def test_compiled_programs_send_over_the_replica_axis_what_is_written() -> None:
    auto = manual.auto_mesh(2, 2)
    for name, program, args in programs(auto):
        if name in ("synchronous", "diloco"):
            continue  # of the same lines
        compiled = jax.jit(program).lower(*args).compile()
        said = written_bytes(program, *args)
        assert bytes_per_axis(compiled, auto).get("replica") == said.get("replica")


def test_the_twin_needs_no_types_that_carry_a_placement() -> None:
    auto = manual.auto_mesh(2, 2)
    assert set(auto.axis_types) == {AxisType.Auto}
    for _, program, args in programs(auto):
        names = [e.primitive.name for e in inner_equations(program, args)]
        assert names.count("shard_map") == 1
        assert not {*names} & {"reshard", "sharding_constraint", "mesh_cast"}


def inner_equations(program: Any, args: tuple[Any, ...]) -> list[Any]:
    """All equations of the jaxpr, those of inner ones included."""
    queue, found = [jax.make_jaxpr(program)(*args).jaxpr], []
    while queue:
        for equation in queue.pop().eqns:
            found.append(equation)
            parts = jax.tree.leaves(list(equation.params.values()))
            queue += [getattr(x, "jaxpr", x) for x in parts if hasattr(x, "eqns")]
    return found
