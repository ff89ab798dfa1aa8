"""Chapter 11. CO2: a whole round to send, at the price of using old news.

You learn what it costs to hide an exchange completely. (Sun et al., arXiv:2401.16265; the paper
could not be read here, so the exact form of the gap, and what is done at the first meeting, are
ours.)

    At meeting r = 0, 1, 2, ..., every H inner steps:
    (C1) d_r = a - theta_n and its norms G_n(r), as (R1, R2); start D_r = sum_n d_r / N
    (C2) take D_{r-1}, which had H inner steps to arrive; there is none at meeting 0
    (O5) gap = 1 + ||m|| / (mean_n G_n(r) + eps)
    (O4) m <- clamp(mu m + D_{r-1} / gap, -c, c),   a <- a - eta m
    (C3) theta_n <- a, at every meeting
    (C4) at the end of the run the D in flight is used at once, with the same G

The gap makes a stale gradient count less: ||m|| says how far the last step moved the anchor
under the feet of a D that was measured before it, in units of what a replica moves in a
round. The clip bounds what one stale step may do to one number.

(C3) holds at meeting 0 too, although nothing has arrived: if theta stayed where it is, its
progress would be counted twice, in D_0 and again inside d_1. So each progress enters a exactly
once, one meeting late, and for a round the replicas train on an anchor that does not know
their newest steps. That is the price.

CO2* gives the same numbers. It stores a and m cut over the replicas as well, 1 / N each, and
gathers them when a meeting needs them: memory paid for with an all-gather. Here that would be
another placement of the same arrays, ``PartitionSpec(("shard", "replica"))``, and no other line.

Who communicates: as in `local_sgd`; but (R3) may take as long as H inner steps do.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from reference_jax.exchange import IN_FULL, Wire
from reference_jax.fsdp import Inner, TrainState, example, local_step, norm_of
from reference_jax.local_sgd import (
    Measured,
    Round,
    SyncState,
    admit_all,
    on_all_replicas,
    pseudo_gradient,
    pseudo_norms,
    send,
    take_anchor,
)
from reference_jax.mesh import pretend_devices
from reference_jax.model import Units, whole_model
from reference_jax.streaming import Flight
from reference_jax.sync.outer import momentum_step, staleness_gap


class Co2(NamedTuple):
    """The numbers of (O4) and (O5)."""

    clip: float = 1.0  # c
    staleness: bool = True  # False: the gap is 1
    eps: float = 1e-6


USUAL = Co2()


def progress(measured: Measured) -> Array:
    """(U,) mean over the replicas of the norms that are finite."""
    is_finite_UR = measured.verdict.is_finite_R
    total_U = jnp.where(is_finite_UR, measured.norm_UR, 0.0).sum(axis=-1)
    return total_U / jnp.maximum(is_finite_UR.sum(axis=-1), 1)


def settle(
    sync: SyncState,
    flight: Flight,
    newest: Measured,
    *,
    units: Units,
    lr: float,
    momentum: float,
    rule: Co2,
) -> tuple[SyncState, Round]:
    """(O5, O4) what arrived moves the anchor.

    Args:
        sync: before.
        flight: D of an earlier meeting, or of this one at the end of a run.
        newest: measured at this meeting.
        units: what the exchange covered.
        lr: outer learning rate.
        momentum: outer momentum.
        rule: clip and gap.
    """
    anchors, velocities = dict(sync.anchor), dict(sync.velocity)
    norms, gaps = [], []
    for u, (_, names) in enumerate(units):
        norms.append(norm_of([flight.combined[name] for name in names]))
        gap = jnp.ones_like(norms[-1])
        if rule.staleness:
            speed = norm_of([sync.velocity[name] for name in names])
            gap = staleness_gap(speed, progress(newest)[u], eps=rule.eps)
        gaps.append(gap)
        for name in names:
            anchors[name], velocities[name] = momentum_step(
                sync.anchor[name],
                sync.velocity[name],
                flight.combined[name],
                flight.measured.accept_U[u],
                gap,
                lr=lr,
                momentum=momentum,
                clip=rule.clip,
            )
    ones_U = jnp.ones_like(jnp.stack(norms))
    done = Round(flight.measured, flight.combined, jnp.stack(norms), ones_U, jnp.stack(gaps))
    return sync._replace(anchor=anchors, velocity=velocities), done


def to_anchor(state: TrainState, sync: SyncState) -> TrainState:
    """(C3)"""
    agreed = {k: on_all_replicas(sync.anchor[k], like=x) for k, x in state.params.items()}
    return state._replace(params=agreed)


@functools.partial(jax.jit, static_argnames=("units", "lr", "momentum", "rule", "wire"))
def co2_meeting(
    state: TrainState,
    sync: SyncState,
    flight: Flight | None,
    *,
    units: Units,
    lr: float = 1.0,
    momentum: float = 0.5,
    rule: Co2 = USUAL,
    wire: Wire = IN_FULL,
) -> tuple[TrainState, SyncState, Flight, Round | None]:
    """(C1..C3) one meeting; ``flight`` is what the last one started, None at meeting 0."""
    pseudo = pseudo_gradient(sync.anchor, state.params)
    measured = admit_all(pseudo_norms(pseudo, units=units))
    combined, sync = send(sync, pseudo, measured, units=units, wire=wire)
    done = None
    if flight is not None:
        sync, done = settle(
            sync, flight, measured, units=units, lr=lr, momentum=momentum, rule=rule
        )
    return to_anchor(state, sync), sync, Flight(measured, combined), done


@functools.partial(jax.jit, static_argnames=("units", "lr", "momentum", "rule"))
def co2_drain(
    state: TrainState,
    sync: SyncState,
    flight: Flight,
    *,
    units: Units,
    lr: float = 1.0,
    momentum: float = 0.5,
    rule: Co2 = USUAL,
) -> tuple[TrainState, SyncState, Round]:
    """(C4) the last exchange, used at once."""
    sync, done = settle(
        sync, flight, flight.measured, units=units, lr=lr, momentum=momentum, rule=rule
    )
    return to_anchor(state, sync), sync, done


def main() -> None:
    """Four meetings: the anchor stands still at the first and is a round late ever after."""
    pretend_devices(2)
    mesh, config, state, tokens = example(2, 1)
    model = whole_model(config)
    flight = None
    with jax.set_mesh(mesh):
        sync = take_anchor(state.params, units=model)
        start = sync.anchor["output.weight"]
        for r in range(4):
            for _ in range(2):
                state, seen = local_step(state, tokens, tokens, 0.01, config=config, inner=Inner())
            state, sync, flight, done = co2_meeting(state, sync, flight, units=model)
            moved = jnp.sqrt(jnp.square(sync.anchor["output.weight"] - start).sum())
            used = f"used D_{r - 1} with gap {done.gap_U[0]:.2f}" if done else "nothing to use yet"
            norms = flight.measured.norm_UR[0].round(3)
            print(f"meeting {r}: sent d of norms {norms}; {used}; head moved {moved:.3f}", end="")
            print(f"; loss {seen.loss_R.mean():.3f}")
        state, sync, done = co2_drain(state, sync, flight, units=model)
    print(f"end: used D_3 at once, gap {done.gap_U[0]:.2f}")


if __name__ == "__main__":
    main()
