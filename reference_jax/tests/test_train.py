"""Whole runs: placement does not matter, padding stays zero, events tell what happened."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference_jax.edit import Penalty, edit_round, round_in_forward, straight_through
from reference_jax.fsdp import (
    Inner,
    TrainState,
    local_rows,
    local_step,
    pad,
    place,
    replicate,
)
from reference_jax.local_sgd import NonFinite, SyncState
from reference_jax.mesh import PER_REPLICA, put
from reference_jax.model import shapes, units
from reference_jax.tests.cases import MODEL, Host, batches_of
from reference_jax.train import Batches, Record, Run, TrainConfig, run_round, train

CONFIG = TrainConfig(
    model=MODEL,
    method="edit",
    replicas=2,
    shards=2,
    steps=8,
    every=2,
    warmup=2,
    lr=0.05,
    penalty=Penalty(max_norm=0.2),
)


def as_one_shard(batches: Batches) -> Batches:
    """The same sequences for one rank per replica."""

    def joined(step: int) -> tuple[np.ndarray, np.ndarray]:
        inputs, targets = (x.reshape(len(x), 1, -1, x.shape[-1]) for x in batches(step))
        return inputs, targets

    return joined


def sicken(step: int, params_R: Host) -> Host:
    """Replica 1 goes NaN before the round after step 6, all do before that after step 8."""
    for x_R in params_R.values():
        if step == 6:
            x_R[1] = np.nan
        if step == 8:
            x_R[:] = np.inf
    return params_R


def equal_replicas() -> Host:
    """The same random parameters on two replicas."""
    rng = np.random.default_rng(0)
    params = {k: 0.3 * rng.normal(size=shape) for k, shape in shapes(MODEL).items()}
    return replicate(params, 2)


def with_nan_in_replica_1(run: Run) -> TrainState:
    """The state of a run after replica 1 lost all its parameters; padding untouched."""
    params_R = run.host(run.state.params)
    for x_R in params_R.values():
        x_R[1] = np.nan
    return run.state._replace(params=place(params_R, run.mesh, axis=1))


def run_of(config: TrainConfig, batches: Batches) -> list[Record]:
    return list(train(config, batches, dtype="float64", perturb=sicken))


@pytest.fixture(scope="module")
def split() -> list[Record]:
    """EDiT on 2 x 2 with faults."""
    return run_of(CONFIG, batches_of(2, 2))


def test_a_run_on_two_shards_is_the_run_on_one(split: list[Record]) -> None:
    whole = run_of(dataclasses.replace(CONFIG, shards=1), as_one_shard(batches_of(2, 2)))
    start = split[0].inner_params
    for one, two in zip(whole, split, strict=True):
        np.testing.assert_allclose(one.loss_R, two.loss_R, rtol=1e-13)
        np.testing.assert_allclose(one.grad_norm_R, two.grad_norm_R, rtol=1e-12)
        for name, x in one.params.items():
            moved, also = x - start[name], two.params[name] - start[name]
            np.testing.assert_allclose(moved, also, rtol=1e-11, atol=1e-13)
            np.testing.assert_array_equal(one.counts[name], two.counts[name])
        assert (one.event is None) == (two.event is None)
        if one.event and two.event:
            for key in ("finite", "flagged", "rearmed", "anomalous", "rollback", "units"):
                assert one.event[key] == two.event[key]


def test_a_run_on_four_shards_is_the_run_on_one() -> None:
    config = dataclasses.replace(
        CONFIG, method="synchronous", replicas=1, shards=4, steps=4, warmup=0
    )
    four = run_of(config, batches_of(1, 4, batch=1))
    one = run_of(dataclasses.replace(config, shards=1), as_one_shard(batches_of(1, 4, batch=1)))
    for name, x in one[-1].params.items():
        moved, also = (y[-1].params[name] - y[0].params[name] for y in (one, four))
        np.testing.assert_allclose(moved, also, rtol=1e-11, atol=1e-14, err_msg=name)
        assert x.shape == (1, *one[0].grads[name].shape[1:])


def test_events_tell_what_happened(split: list[Record]) -> None:
    events = {record.step: record.event for record in split if record.event}
    assert list(events) == [4, 6, 8] and [e["round"] for e in events.values()] == [1, 2, 3]
    assert max(events[4]["clip"]) < 1 and not any(map(any, events[4]["anomalous"]))
    assert events[6]["anomalous"] == [[False, True]] * 3
    assert events[6]["weight"] == [[1.0, 0.0]] * 3 and events[6]["rollback"] == [False] * 3
    assert events[8]["rollback"] == [True] * 3
    for name, x in split[7].params.items():
        np.testing.assert_array_equal(x[0], split[5].params[name][0])  # back to the anchor
    assert split[5].counts["norm.weight"].tolist() == [6, 0]
    assert split[6].counts["norm.weight"].tolist() == [7, 1]
    assert [r.tokens for r in split[:2]] == [48, 96]


def test_replicas_are_equal_until_the_warm_up_ends(split: list[Record]) -> None:
    for record in split[:3]:
        x = record.params["output.weight"]
        assert np.array_equal(x[0], x[1]) == (record.step <= 2)


def test_padding_stays_zero_even_when_a_replica_is_nan() -> None:
    run = Run(CONFIG, equal_replicas())
    batches = batches_of(2, 2)
    for step in range(3):
        run.inner_step(*batches(step), lr=0.1)
    run.state = with_nan_in_replica_1(run)
    run.inner_step(*batches(3), lr=0.1)
    padded = {k: shape[0] for k, shape in shapes(MODEL).items() if shape[0] % 2}
    assert {"output.weight", "layers.0.feed_forward.w1.weight"} <= set(padded)
    for arrays in (run.state.params, run.state.exp_avg, run.state.exp_avg_sq):
        for name, rows in padded.items():
            stored_R = np.asarray(arrays[name])
            assert stored_R.shape[1] == rows + 1 and not stored_R[:, rows:].any()
            assert np.isnan(stored_R[1, :rows]).all() and np.isfinite(stored_R[0]).all()


def test_accumulated_micro_batches_are_one_batch() -> None:
    config = dataclasses.replace(
        CONFIG, method="synchronous", replicas=1, shards=1, steps=2, warmup=0
    )
    small = batches_of(1, 1, batch=2)

    def large(step: int) -> tuple[np.ndarray, np.ndarray]:
        (a, b), (c, d) = small(2 * step), small(2 * step + 1)
        return np.concatenate([a, c], axis=2), np.concatenate([b, d], axis=2)

    in_parts = run_of(dataclasses.replace(config, accumulate=2), small)
    at_once = run_of(config, large)
    for name, x in in_parts[-1].params.items():
        np.testing.assert_array_equal(x, at_once[-1].params[name])


def test_a_round_inside_the_forward_is_the_round_before_it() -> None:
    run = Run(dataclasses.replace(CONFIG, warmup=0), equal_replicas())
    batch = [put(x, run.mesh, PER_REPLICA) for x in batches_of(2, 2)(0)]
    of, scalars = {"units": units(MODEL), "penalty": CONFIG.penalty}, {"inner": Inner()}
    step = functools.partial(local_step, config=MODEL, inner=Inner())

    def in_turn(state: TrainState, sync: SyncState) -> Any:
        agreed, sync, done = edit_round(state, sync, **of)
        after, seen = step(agreed, *batch, 0.1)
        return after, sync, done, seen

    assert run.sync is not None
    with jax.set_mesh(run.mesh):
        state, _ = step(run.state, *batch, 0.1)
        two_programs, one_program = (f(state, run.sync) for f in (in_turn, jax.jit(in_turn)))
        inside = round_in_forward(state, run.sync, *batch, 0.1, config=MODEL, **of, **scalars)
    assert float(inside[2].clip_U.min()) < 1
    for x, y in zip(jax.tree.leaves(one_program), jax.tree.leaves(inside), strict=True):
        np.testing.assert_array_equal(x, y)
    for name, start in state.params.items():
        moved, alike = (np.asarray(s[0].params[name]) - start for s in (two_programs, inside))
        np.testing.assert_allclose(moved, alike, rtol=1e-11, atol=1e-14, err_msg=name)


def test_straight_through_hands_the_gradient_on_and_differentiates_no_round() -> None:
    def loss(theta: jax.Array) -> jax.Array:
        value = jax.lax.stop_gradient(jnp.sqrt(theta) * jnp.nan_to_num(theta / theta, nan=3.0))
        return jnp.square(straight_through(theta, value) + 1.0)

    # At 0 the slope of the round would be infinite. The loss is taken at 0 * 3 + 1.
    assert jax.value_and_grad(loss)(0.0) == (1.0, 2.0)


@pytest.mark.parametrize("method", ["post_local_sgd", "diloco"])
def test_a_method_that_leaves_nobody_out_stops_at_a_nan(method: str) -> None:
    config = dataclasses.replace(CONFIG, method=method, warmup=0)
    run = Run(config, equal_replicas())
    assert run.sync is not None
    with jax.set_mesh(run.mesh), pytest.raises(NonFinite, match="replica 1 .* unit model"):
        run_round(with_nan_in_replica_1(run), run.sync, config)


def test_replicas_that_start_different_are_refused() -> None:
    params_R = equal_replicas()
    params_R["norm.weight"][1] += 1e-12
    with pytest.raises(ValueError, match="hold different parameters"):
        Run(dataclasses.replace(CONFIG, warmup=0), params_R)


def test_a_last_step_without_a_round_is_followed_by_a_forced_one() -> None:
    config = dataclasses.replace(CONFIG, method="diloco", steps=3, every=2, warmup=0)
    records = list(train(config, batches_of(2, 2), dtype="float64"))
    assert [r.event and r.event["forced"] for r in records] == [None, False, True]


def test_bfloat16_compute_keeps_float32_masters() -> None:
    inner = Inner(compute="bfloat16")
    config = dataclasses.replace(
        CONFIG, method="synchronous", replicas=1, shards=1, steps=3, warmup=0, inner=inner
    )
    batches = batches_of(1, 1, batch=4)
    narrow = list(train(config, batches, dtype="float32"))
    wide = run_of(dataclasses.replace(config, inner=Inner()), batches)
    for name, x in narrow[-1].params.items():
        held = (x, narrow[-1].exp_avg[name], narrow[-1].counts[name], narrow[-1].grads[name])
        assert {y.dtype.name for y in held} == {"float32"}
    for rounded, exact in zip(narrow, wide, strict=True):
        assert rounded.loss_R.dtype == np.float32
        assert 0 < abs(rounded.loss_R - exact.loss_R)[0] < 0.05


@pytest.mark.parametrize("rows", [3, 7, 8, 257])
def test_shards_get_the_rows_that_fsdp2_gives_them(rows: int) -> None:
    padded = pad(np.arange(1.0, rows + 1), shards=4, axis=0).reshape(4, -1)
    for m in range(4):
        mine = np.arange(1.0, rows + 1)[local_rows(rows, shards=4, shard=m)]
        np.testing.assert_array_equal(padded[m][: len(mine)], mine)
        assert not padded[m][len(mine) :].any()
