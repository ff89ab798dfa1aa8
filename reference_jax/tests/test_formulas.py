"""AdamW, Nesterov and the schedules are the rules that everybody means by these names."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
import pytest

from reference_jax.adamw import adamw_update
from reference_jax.schedules import learning_rate
from reference_jax.sync.outer import heal, mix, momentum_step, nesterov_step, staleness_gap

RNG = np.random.default_rng(0)
YES = jnp.array(True)


def test_adamw_takes_the_steps_of_optax() -> None:
    param = jnp.asarray(RNG.normal(size=(4, 3)))
    scalars = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    oracle = optax.adamw(0.01, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    theirs, state = param, oracle.init(param)
    mine, mean, square, step = param, jnp.zeros((4, 3)), jnp.zeros((4, 3)), jnp.zeros(())
    for _ in range(5):
        grad = jnp.asarray(RNG.normal(size=(4, 3)))
        mine, mean, square, step = adamw_update(mine, grad, mean, square, step, **scalars)
        change, state = oracle.update(grad, state, theirs)
        theirs = optax.apply_updates(theirs, change)
        np.testing.assert_allclose(mine - param, theirs - param, rtol=1e-13, atol=1e-16)
    assert step == 5


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.8, 0.85), (1.0, 0.0)])
def test_the_outer_step_is_nesterov_of_optax(lr: float, momentum: float) -> None:
    anchor = theirs = jnp.asarray(RNG.normal(size=6))
    velocity = jnp.zeros(6)
    oracle = optax.sgd(lr, momentum=momentum or None, nesterov=momentum > 0)
    state = oracle.init(theirs)
    for _ in range(4):
        grad = jnp.asarray(RNG.normal(size=6))
        anchor, velocity = nesterov_step(anchor, velocity, grad, YES, lr=lr, momentum=momentum)
        change, state = oracle.update(grad, state)
        theirs = optax.apply_updates(theirs, change)
        np.testing.assert_allclose(anchor, theirs, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(
    ("lr", "momentum", "path"),
    [
        (0.7, 0.9, [-2.66, -6.454, -11.2686, -17.00174]),
        (0.8, 0.85, [-2.96, -7.076, -12.1746, -18.10841]),
    ],
)
def test_a_constant_pseudo_gradient_gives_the_golden_anchors(
    lr: float, momentum: float, path: list[float]
) -> None:
    anchor = velocity = jnp.zeros(())
    for expected in path:
        anchor, velocity = nesterov_step(
            anchor, velocity, jnp.array(2.0), YES, lr=lr, momentum=momentum
        )
        assert float(anchor) == pytest.approx(expected, rel=1e-12)


def test_the_momentum_step_without_gap_and_clip_is_momentum_of_optax() -> None:
    anchor = theirs = jnp.asarray(RNG.normal(size=6))
    velocity, one = jnp.zeros(6), jnp.ones(())
    oracle = optax.sgd(0.7, momentum=0.9)
    state = oracle.init(theirs)
    for _ in range(4):
        grad = jnp.asarray(RNG.normal(size=6))
        anchor, velocity = momentum_step(
            anchor, velocity, grad, YES, one, lr=0.7, momentum=0.9, clip=1e9
        )
        change, state = oracle.update(grad, state)
        theirs = optax.apply_updates(theirs, change)
        np.testing.assert_allclose(anchor, theirs, rtol=1e-13, atol=1e-15)


def test_a_stale_gradient_is_divided_by_the_gap_and_the_velocity_clipped() -> None:
    start, grad = jnp.array([0.0, 1.0, -1.0]), jnp.array([0.5, 4.0, jnp.nan])
    gap = staleness_gap(jnp.array(3.0), jnp.array(2.5), eps=0.5)
    scalars = {"lr": 0.5, "momentum": 0.5, "clip": 1.0}
    anchor, velocity = momentum_step(jnp.zeros(3), start, grad, YES, gap, **scalars)
    assert gap == 2.0 and velocity[:2].tolist() == [0.25, 1.0]
    assert anchor[:2].tolist() == [-0.125, -0.5] and jnp.isnan(anchor[2])
    kept = momentum_step(start, start, grad, ~YES, gap, **scalars)
    for x in kept:
        np.testing.assert_array_equal(x, start)


def test_mixing_is_exact_at_both_ends() -> None:
    local, anchor = jnp.array([jnp.nan, 0.1]), jnp.array([0.7, 0.3])
    np.testing.assert_array_equal(mix(local, anchor, alpha=0.0), anchor)
    np.testing.assert_array_equal(mix(anchor, local, alpha=1.0), anchor)
    np.testing.assert_allclose(mix(local, anchor, alpha=0.25)[1], 0.25)


def test_a_rejected_outer_step_changes_nothing_even_if_the_pseudo_gradient_is_nan() -> None:
    anchor, velocity = nesterov_step(
        jnp.array(3.0), jnp.array(2.0), jnp.array(jnp.nan), jnp.array(False), lr=0.7, momentum=0.9
    )
    assert [float(anchor), float(velocity)] == [3.0, 2.0]


def test_healing_zeroes_the_moments_of_sick_replicas_only() -> None:
    healed = jax.vmap(heal)(jnp.array([[1.0, 2.0], [jnp.nan, 4.0]]), jnp.array([False, True]))
    assert healed.tolist() == [[1.0, 2.0], [0.0, 0.0]]


def test_the_learning_rate_rises_stays_and_falls() -> None:
    rate = functools.partial(
        learning_rate,
        peak=2.0,
        shape="wsd",
        warmup_tokens=10,
        total_tokens=110,
        final_ratio=0.5,
        decay_share=0.5,
    )
    assert [rate(t) for t in (5, 10, 60, 85, 110, 500)] == [1.0, 2.0, 2.0, 1.5, 1.0, 1.0]
