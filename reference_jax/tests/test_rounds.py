"""Rounds do what loops over plain NumPy arrays do, on one device and on many."""

import functools

import jax
import numpy as np
import pytest

from reference_jax.diloco import diloco_round
from reference_jax.edit import Penalty, edit_round
from reference_jax.fsdp import TrainState, place
from reference_jax.local_sgd import (
    Round,
    SyncState,
    is_due,
    post_local_sgd_round,
    replicas_are_equal,
    take_anchor,
)
from reference_jax.mesh import make_mesh
from reference_jax.tests.cases import TOY_MODEL, TOY_UNITS, Host, cut, draw, toy

NAN = float("nan")
PENALTY = Penalty(max_norm=0.5, warmup_rounds=10)


def edit_on(
    anchor: Host, params_R: Host, shards: int = 1, penalty: Penalty = PENALTY
) -> tuple[TrainState, SyncState, Round]:
    """One EDiT round of the pretend model."""
    mesh = make_mesh(len(params_R["gain"]), shards)
    state, sync = toy(anchor, params_R, mesh, units=2)
    with jax.set_mesh(mesh):
        after: tuple[TrainState, SyncState, Round] = edit_round(
            state, sync, units=TOY_UNITS, penalty=penalty
        )
    return after


def drifted(anchor: Host, replicas: int, seed: int = 1) -> Host:
    """Parameters [R, ...] near the anchor, each replica at another distance."""
    far = np.linspace(0.1, 2.0, replicas)
    noise = draw(seed, replicas=replicas)
    return {
        k: np.stack([a - f * d for f, d in zip(far, noise[k], strict=True)])
        for k, a in anchor.items()
    }


def edit_by_hand(anchor: Host, params_R: Host) -> tuple[Host, Host]:
    """Anchor and velocity after one EDiT round without anomalies, tensor by tensor."""
    anchors, velocities = {}, {}
    for (name,) in (names for _, names in TOY_UNITS):
        progress = [anchor[name] - x for x in params_R[name]]
        norms = [np.sqrt((d**2).sum()) for d in progress]
        weights = np.exp([-g for g in norms])
        combined = sum(w * d for w, d in zip(weights / weights.sum(), progress, strict=True))
        beta = min(1.0, 0.5 / (np.sqrt((combined**2).sum()) + 1e-6))
        velocities[name] = beta * combined
        anchors[name] = anchor[name] - 0.8 * (beta * combined + 0.85 * velocities[name])
    return anchors, velocities


@pytest.mark.parametrize("shards", [1, 2])
def test_an_edit_round_is_the_loop_by_hand_and_padding_stays_zero(shards: int) -> None:
    anchor = draw(0)
    params_R = drifted(anchor, 3)
    state, sync, done = edit_on(anchor, params_R, shards)
    anchors, velocities = edit_by_hand(anchor, params_R)
    for name in anchor:
        change = cut(sync.anchor, axis=0)[name] - anchor[name]
        np.testing.assert_allclose(change, anchors[name] - anchor[name], rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(cut(sync.velocity, axis=0)[name], velocities[name], rtol=1e-12)
        for stored in (sync.anchor, sync.velocity, done.combined):
            assert not np.asarray(stored[name])[len(anchor[name]) :].any()
    assert replicas_are_equal(state.params)
    assert float(done.clip_U[0]) < 1 and float(np.ptp(done.measured.weight_UR[0])) > 0.3


@pytest.mark.parametrize("shards", [2, 4])
def test_shards_of_uneven_sizes_change_nothing(shards: int) -> None:
    anchor = draw(0)
    params_R = drifted(anchor, 2)
    whole, split = (edit_on(anchor, params_R, m)[1] for m in (1, shards))
    for name in anchor:
        a, b = (cut(sync.anchor, axis=0)[name] - anchor[name] for sync in (whole, split))
        np.testing.assert_allclose(a, b, rtol=1e-14, atol=1e-15)


def test_units_one_after_the_other_are_all_units_at_once_bit_for_bit() -> None:
    anchor, mesh = draw(0), make_mesh(2, 2)
    params_R = drifted(anchor, 2)
    _, at_once, _ = edit_on(anchor, params_R, shards=2)
    state, sync = toy(anchor, params_R, mesh, units=1)
    for u, unit in enumerate(TOY_UNITS):
        with jax.set_mesh(mesh):
            state, after, _ = edit_round(state, sync, units=(unit,), penalty=PENALTY)
        sync = after._replace(stats=sync.stats)
        for of_unit, of_all in zip(after.stats, at_once.stats, strict=True):
            np.testing.assert_array_equal(np.asarray(of_unit)[0], np.asarray(of_all)[u])
    for name in anchor:
        np.testing.assert_array_equal(sync.anchor[name], at_once.anchor[name])
        np.testing.assert_array_equal(np.asarray(state.params[name])[0], at_once.anchor[name])


def test_post_local_sgd_is_the_mean_and_diloco_is_nesterov_on_it() -> None:
    anchor, mesh = draw(0), make_mesh(2, 2)
    velocity = {k: np.zeros_like(a) for k, a in anchor.items()}
    by_hand = dict(anchor)
    with jax.set_mesh(mesh):
        for r in range(3):
            params_R = drifted(by_hand, 2, seed=r)
            state, sync = toy(by_hand, params_R, mesh, units=1, velocity=velocity)
            state, _, _ = post_local_sgd_round(state, sync, units=TOY_MODEL)
            for name, x in cut(state.params, axis=1).items():
                np.testing.assert_allclose(x[1], params_R[name].mean(0), rtol=1e-13, atol=1e-14)
            state, sync = toy(by_hand, params_R, mesh, units=1, velocity=velocity)
            state, sync, _ = diloco_round(state, sync, units=TOY_MODEL)
            for name, a in by_hand.items():
                step = a - params_R[name].mean(0)
                velocity[name] = 0.9 * velocity[name] + step
                by_hand[name] = a - 0.7 * (step + 0.9 * velocity[name])
                new = cut(sync.anchor, axis=0)[name]
                np.testing.assert_allclose(new - a, by_hand[name] - a, rtol=1e-12, atol=1e-14)


def test_without_penalty_edit_is_diloco_bit_for_bit() -> None:
    anchor, mesh = draw(0), make_mesh(2, 1)
    params_R = drifted(anchor, 2)
    off = Penalty(exclude=False, weigh=False, clip=False)
    state, sync = toy(anchor, params_R, mesh, units=1)
    with jax.set_mesh(mesh):
        _, plain, _ = diloco_round(state, sync, units=TOY_MODEL, lr=0.8, momentum=0.85)
    _, edit, _ = edit_on(anchor, params_R, penalty=off)
    for name in anchor:
        np.testing.assert_array_equal(plain.anchor[name], edit.anchor[name])


def test_one_replica_that_averages_keeps_its_parameters_up_to_rounding() -> None:
    anchor, mesh = draw(0), make_mesh(1, 2)
    params_R = drifted(anchor, 1)
    state, sync = toy(anchor, params_R, mesh, units=1)
    with jax.set_mesh(mesh):
        state, _, _ = post_local_sgd_round(state, sync, units=TOY_MODEL)
    for name, x in cut(state.params, axis=1).items():
        np.testing.assert_allclose(x, params_R[name], rtol=0, atol=1e-15)


def test_a_round_after_each_sgd_step_is_synchronous_sgd() -> None:
    theta, mesh = draw(0), make_mesh(4, 1)
    grads_R = draw(3, replicas=4)
    params_R = {k: theta[k] - 0.1 * g for k, g in grads_R.items()}
    state, sync = toy(theta, params_R, mesh, units=1)
    with jax.set_mesh(mesh):
        state, _, _ = post_local_sgd_round(state, sync, units=TOY_MODEL)
    for name, x in cut(state.params, axis=1).items():
        synchronous = theta[name] - 0.1 * grads_R[name].mean(axis=0)
        np.testing.assert_allclose(x[0], synchronous, rtol=1e-13, atol=1e-15)


def test_equal_replicas_are_one_replica_bit_for_bit() -> None:
    anchor = draw(0)
    one_R = drifted(anchor, 1)
    four_R = {k: np.repeat(x, 4, axis=0) for k, x in one_R.items()}
    (_, one, _), (_, four, _) = edit_on(anchor, one_R), edit_on(anchor, four_R)
    for name in anchor:
        np.testing.assert_array_equal(one.anchor[name], four.anchor[name])


@pytest.mark.parametrize("bad", [NAN, float("inf"), 1e30])
def test_a_faulty_replica_is_as_good_as_absent(bad: float) -> None:
    anchor = draw(0)
    two_R = drifted(anchor, 2)
    three_R = {k: np.concatenate([x, np.full_like(x[:1], bad)]) for k, x in two_R.items()}
    (_, without, _), (state, among, done) = edit_on(anchor, two_R), edit_on(anchor, three_R)
    for name in anchor:
        np.testing.assert_array_equal(without.anchor[name], among.anchor[name])
        moment_R = np.asarray(state.exp_avg[name])
        assert not moment_R[2].any() and moment_R[0].all()
        assert state.step[name].tolist() == [5, 5, 0]
    assert np.asarray(done.measured.weight_UR)[:, 2].tolist() == [0, 0]
    assert among.stats.count_R.tolist() == [[1, 1, 0], [1, 1, 0]]


def test_when_all_are_faulty_parameters_return_to_the_anchor_and_nothing_else_changes() -> None:
    anchor = draw(0)
    params_R = {k: np.full_like(v, NAN) for k, v in drifted(anchor, 2).items()}
    state, sync, done = edit_on(anchor, params_R, shards=2)
    for name, a in anchor.items():
        np.testing.assert_array_equal(cut(sync.anchor, axis=0)[name], a)
        np.testing.assert_array_equal(cut(state.params, axis=1)[name], [a, a])
        assert not np.asarray(sync.velocity[name]).any()
    assert not np.asarray(sync.stats.count_R).any() and not done.measured.accept_U.any()


def test_the_order_of_replicas_does_not_matter() -> None:
    anchor = draw(0)
    params_R = drifted(anchor, 4)
    turned_R = {k: x[[2, 0, 3, 1]] for k, x in params_R.items()}
    (_, here, done), (_, there, _) = edit_on(anchor, params_R), edit_on(anchor, turned_R)
    for name in anchor:
        np.testing.assert_allclose(here.anchor[name], there.anchor[name], rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(done.measured.weight_UR.sum(axis=-1), 1, rtol=1e-15)


def test_the_penalty_of_the_golden_example() -> None:
    anchor = {"w": np.array([1, 2, -1, 0.5])}
    rows = [[0.9, 1.8, -1.1, 0.4], [0.8, 2.1, -0.9, 0.6], [1, 1.7, -1.2, 0.45]]
    golden = {
        10.0: (1.0, [0.84717864, 1.81070227, -1.09223818, 0.47694045]),
        0.1: (0.56660334, [0.91341091, 1.89274327, -1.05226246, 0.48693438]),
    }
    mesh, units = make_mesh(3, 1), (("u", ("w",)),)
    for phi, (beta, expected) in golden.items():
        like_state, like = toy(draw(0), drifted(draw(0), 3), mesh, units=1)
        params = place({"w": np.array(rows)}, mesh, axis=1)
        state = TrainState(params, params, params, {"w": like_state.step["gain"]})
        sync = SyncState(
            place(anchor, mesh, axis=0), place({"w": np.zeros(4)}, mesh, axis=0), like.stats
        )
        with jax.set_mesh(mesh):
            _, sync, done = edit_round(state, sync, units=units, penalty=Penalty(max_norm=phi))
        measured = done.measured
        close = functools.partial(np.testing.assert_allclose, rtol=0, atol=6e-9)
        close(np.asarray(measured.norm_UR)[0], [0.26457513, 0.26457513, 0.36400549])
        close(np.asarray(measured.weight_UR)[0], [0.34419226, 0.34419226, 0.31161549])
        close(done.combined["w"], [0.10325768, 0.12790387, 0.0623231, 0.01558077])
        close(np.asarray(done.clip_U)[0], beta)
        close(sync.anchor["w"], expected)


def test_a_forced_round_leaves_the_statistics_alone() -> None:
    anchor, mesh = draw(0), make_mesh(2, 1)
    state, sync = toy(anchor, drifted(anchor, 2), mesh, units=2)
    with jax.set_mesh(mesh):
        _, after, _ = edit_round(state, sync, units=TOY_UNITS, penalty=PENALTY, forced=True)
    assert not np.asarray(after.stats.count_R).any()


def test_the_anchor_is_the_parameters_and_a_round_is_due_every_h_steps_after_w() -> None:
    mesh = make_mesh(2, 2)
    theta = draw(0)
    params = place({k: np.stack([v, v]) for k, v in theta.items()}, mesh, axis=1)
    with jax.set_mesh(mesh):
        sync = take_anchor(params, units=TOY_UNITS)
    for name, a in cut(sync.anchor, axis=0).items():
        np.testing.assert_array_equal(a, theta[name])
    assert [t for t in range(12) if is_due(t, warmup=2, every=3)] == [5, 8, 11]
