"""Chapter 8. Local SGD: replicas drift, then meet. The plumbing of every sync round.

You learn what a round is, and the simplest one: Post Local SGD averages the parameters.

    s = completed inner steps, W = warm-up, H = interval
    (L1) s < W    synchronous steps (chapter `ddp`); replicas stay bit-identical
    (L2) s = W    anchor a <- theta, velocity b <- 0
    (L3) s > W    local steps (chapter `fsdp`); a round when s - W is a multiple of H

    (R1) d_n = a - theta_n               the pseudo-gradient: the optimizer goes against it
    (R2) G_n = ||d_n|| over the shards   gathered, so that all decide alike: weights w_n
    (R3) D = sum_n w_n d_n               the one large message (chapter `exchange`)
    (R4) b <- mu b + beta D,  a <- a - eta (beta D + mu b),  theta_n <- a
    Post Local SGD: w_n = 1 / N, beta = 1, eta = 1, mu = 0, so theta_n <- mean theta

The mean is a sum of d_n / N, as the core computes it. The moments of the inner optimizer are
never averaged and never reset, except (O3): where a replica's own norm is not finite they
become 0, or it would stay bad for ever.

Who communicates: shard axis: two numbers per tensor, for the norms. Replica axis: N numbers per
unit, and (R3), one all-reduce of a shard. Between rounds nothing at all.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from reference_jax.exchange import IN_FULL, Wire, exchange, nothing_owed
from reference_jax.fsdp import Inner, TrainState, example, local_step, norm_of
from reference_jax.ledger import bytes_per_axis
from reference_jax.mesh import AGREED, EVERYWHERE, ONE_EACH, PER_REPLICA, pretend_devices, reshard
from reference_jax.model import Arrays, Units, whole_model
from reference_jax.sync.outer import heal, mix, nesterov_step
from reference_jax.sync.penalty import (
    NormStats,
    Verdict,
    clip_coefficient,
    finite_norms,
    init_stats,
    uniform_weights,
)


class NonFinite(ArithmeticError):
    """A replica went non-finite under a method that cannot leave it out."""


class SyncState(NamedTuple):
    """What replicas agree on, without a replica axis; and what each of them owes."""

    anchor: Arrays  # [rows@shard, ...], padded
    velocity: Arrays  # same
    stats: NormStats  # (U, R), on every device
    owed: Arrays = {}  # [R@replica, rows@shard, ...], padded; empty if nothing is coded


class Measured(NamedTuple):
    """What a round decided before any parameter moved."""

    norm_UR: Array
    verdict: Verdict  # fields (U, R)
    weight_UR: Array
    accept_U: Array  # False: the anchor stays (rollback)


class Round(NamedTuple):
    """What a round did."""

    measured: Measured
    combined: Arrays  # D, before clipping; [rows@shard, ...], padded
    combined_norm_U: Array
    clip_U: Array  # beta
    gap_U: Array  # of chapter `co2`; 1 in all others


def is_due(step: int, *, warmup: int, every: int) -> bool:
    """(L3) whether a round follows inner step ``step``, counted from 1."""
    return step > warmup and (step - warmup) % every == 0


def replicas_are_equal(params: Arrays) -> bool:
    """Whether all replicas hold the same bits; reads them to the host."""
    hosts = [np.asarray(x) for x in params.values()]
    return all(np.array_equal(x[n], x[0]) for x in hosts for n in range(len(x)))


@functools.partial(jax.jit, static_argnames=("units", "wire"))
def take_anchor(params: Arrays, *, units: Units, wire: Wire = IN_FULL) -> SyncState:
    """(L2) without communication: every device keeps the shard it has.

    ``shard_map`` drops the replica axis on the caller's word that replicas are equal;
    ``check_vma=False`` is that word. Ask ``replicas_are_equal`` first.
    """
    drop = jax.shard_map(
        lambda x_R: x_R[0], in_specs=PER_REPLICA, out_specs=AGREED, check_vma=False
    )
    anchor = {k: drop(x) for k, x in params.items()}
    like = next(iter(params.values()))
    stats = init_stats((len(units), like.shape[0]), dtype=like.dtype)
    stats = jax.tree.map(lambda x: reshard(x, EVERYWHERE), stats)
    velocity = {k: jnp.zeros_like(a) for k, a in anchor.items()}
    return SyncState(anchor, velocity, stats, nothing_owed(params, wire))


def pseudo_gradient(anchor: Arrays, params: Arrays) -> Arrays:
    """(R1) [R@replica, rows@shard, ...]"""
    return {k: anchor[k][None] - x for k, x in params.items()}


def pseudo_norms(pseudo: Arrays, *, units: Units) -> Array:
    """(R2) (U, R) norms on every device; padding is 0 and adds nothing."""
    per_unit = [jax.vmap(norm_of)([pseudo[name] for name in names]) for _, names in units]
    return reshard(jnp.stack(per_unit), EVERYWHERE)


def admit_all(norm_UR: Array) -> Measured:
    """Equal weights for everybody; one non-finite norm rejects its unit's round."""
    is_finite_UR = finite_norms(norm_UR)
    nobody_UR = jnp.zeros_like(is_finite_UR)
    verdict = Verdict(is_finite_UR, nobody_UR, nobody_UR, nobody_UR)
    weight_UR = uniform_weights(nobody_UR, dtype=norm_UR.dtype)
    return Measured(norm_UR, verdict, weight_UR, is_finite_UR.all(axis=-1))


def send(
    sync: SyncState, pseudo: Arrays, measured: Measured, *, units: Units, wire: Wire = IN_FULL
) -> tuple[Arrays, SyncState]:
    """(R3) D, and the state that remembers what is owed."""
    weight_UR = measured.weight_UR
    combined, owed = exchange(pseudo, sync.owed, weight_UR, units=units, wire=wire)
    return combined, sync._replace(owed=owed)


def apply(
    state: TrainState,
    sync: SyncState,
    measured: Measured,
    combined: Arrays,
    *,
    units: Units,
    lr: float,
    momentum: float,
    clip: tuple[float, float] | None = None,
    keep: float = 0.0,
) -> tuple[TrainState, SyncState, Round]:
    """(R4, O3) what D does to the units it is of; leaves the statistics alone.

    Args:
        state: parameters and moments of all replicas.
        sync: anchor, velocity and statistics.
        measured: decisions.
        combined: D.
        units: what the exchange covered.
        lr: outer learning rate.
        momentum: outer momentum.
        clip: largest norm of D and the eps beside it; None does not clip.
        keep: share of its own value that a parameter keeps (chapter `streaming`).
    """
    norms, betas = [], []
    params, anchors, velocities = dict(state.params), dict(sync.anchor), dict(sync.velocity)
    moments = [dict(state.exp_avg), dict(state.exp_avg_sq), dict(state.step)]
    for u, (_, names) in enumerate(units):
        norm = norm_of([combined[name] for name in names])
        beta = jnp.ones_like(norm)
        if clip is not None:
            beta = clip_coefficient(norm, max_norm=clip[0], eps=clip[1])
        is_bad_R = reshard(~measured.verdict.is_finite_R[u], ONE_EACH)
        norms.append(norm)
        betas.append(beta)
        for name in names:
            anchors[name], velocities[name] = nesterov_step(
                sync.anchor[name],
                sync.velocity[name],
                beta * combined[name],
                measured.accept_U[u],
                lr=lr,
                momentum=momentum,
            )
            agreed_R = on_all_replicas(anchors[name], like=params[name])
            params[name] = mix(params[name], agreed_R, alpha=keep)
            for moment in moments:
                moment[name] = jax.vmap(heal)(moment[name], is_bad_R)
    ones_U = jnp.ones_like(jnp.stack(norms))
    done = Round(measured, combined, jnp.stack(norms), jnp.stack(betas), ones_U)
    sync = sync._replace(anchor=anchors, velocity=velocities)
    return TrainState(params, *moments), sync, done


def on_all_replicas(anchor: Array, *, like: Array) -> Array:
    """[R@replica, rows@shard, ...] the same rows on every replica, without communication."""
    return jnp.broadcast_to(anchor[None], like.shape, out_sharding=PER_REPLICA)


def conclude(
    state: TrainState,
    sync: SyncState,
    pseudo: Arrays,
    measured: Measured,
    *,
    units: Units,
    lr: float,
    momentum: float,
    clip: tuple[float, float] | None = None,
    wire: Wire = IN_FULL,
) -> tuple[TrainState, SyncState, Round]:
    """(R3, R4, O3) all of a round after its decisions: ``send``, and ``apply`` at once."""
    combined, sync = send(sync, pseudo, measured, units=units, wire=wire)
    return apply(state, sync, measured, combined, units=units, lr=lr, momentum=momentum, clip=clip)


@functools.partial(jax.jit, static_argnames=("units", "wire"))
def post_local_sgd_round(
    state: TrainState, sync: SyncState, *, units: Units, wire: Wire = IN_FULL
) -> tuple[TrainState, SyncState, Round]:
    """A round of Post Local SGD: every replica gets the mean."""
    pseudo = pseudo_gradient(sync.anchor, state.params)
    measured = admit_all(pseudo_norms(pseudo, units=units))
    return conclude(state, sync, pseudo, measured, units=units, lr=1.0, momentum=0.0, wire=wire)


def main() -> None:
    """Two local steps apart, one round together, and what it sent."""
    pretend_devices(4)
    mesh, config, state, tokens = example(2, 2)
    units = whole_model(config)
    with jax.set_mesh(mesh):
        sync = take_anchor(state.params, units=units)
        for _ in range(2):
            state, _ = local_step(state, tokens, tokens, 0.01, config=config, inner=Inner())
        print("replicas equal after local steps:", replicas_are_equal(state.params))
        compiled = post_local_sgd_round.lower(state, sync, units=units).compile()
        state, sync, done = compiled(state, sync)
    print("replicas equal after the round:  ", replicas_are_equal(state.params))
    print("norms of a - theta", done.measured.norm_UR, " weights", done.measured.weight_UR)
    print(f"||D|| {done.combined_norm_U}: smaller than the norms, as the replicas disagree")
    shard_bytes = sum(x.nbytes for x in sync.anchor.values()) // 2
    print(f"sent {bytes_per_axis(compiled, mesh)}; a shard has {shard_bytes} bytes")


if __name__ == "__main__":
    main()
