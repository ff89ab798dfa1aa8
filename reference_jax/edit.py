"""Chapter 12. EDiT: unit by unit, with a penalty on suspicious replicas.

You learn how a round survives a sick replica. (Cheng et al., arXiv:2412.07210)

    for each unit (embedding, block, head) by itself:
    (R1, R2) d_n and G_n as in chapter `local_sgd`
    (P1..P3) leave out replica n if G_n is not finite or far above what it used to be
    (P5) w_n = softmax(-G_n / T) over the others: a smaller step counts more
    (R3, P6) D = sum_n w_n d_n, where weight 0 gives 0 even for NaN
    (P7) beta = min(1, phi / (||D|| + eps))
    (R4) Nesterov on beta D with eta = 0.8, mu = 0.85
    (P4) the statistics learn from the accepted norms
    all left out: a rollback; theta <- a, and nothing else changes but the flags in a row

Unit by unit serves overlap: unit u is needed only where the next forward reaches it, so its
exchange can run while earlier units compute. The core arranges that with hooks: the round that is
due after step t runs inside the forward of step t + 1. ``round_in_forward`` is that step as one
program: the data dependencies say when each unit is needed, and the compiler is free to overlap.
What happens to the gradient then?

    (R5) the forward of step t + 1 reads a, not theta; the gradient is that of the loss at a, and
         is handed to theta as it is (*straight through*): the round itself is not differentiated
    (R6) AdamW then starts from a

So the numbers are those of a round right after step t, followed by step t + 1: bit for bit if a
compiler sees both as one program, and else up to the last bit, which is the compiler's.

Who communicates: as in `local_sgd`, per unit; one small message carries all the norms.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from reference_jax.exchange import IN_FULL, Wire
from reference_jax.fsdp import (
    Inner,
    StepReport,
    TrainState,
    example,
    gather,
    local_step,
    rank_loss,
    scatter,
    update,
)
from reference_jax.local_sgd import (
    Measured,
    Round,
    SyncState,
    admit_all,
    conclude,
    pseudo_gradient,
    pseudo_norms,
    take_anchor,
)
from reference_jax.mesh import ONE_EACH, pretend_devices, put
from reference_jax.model import Arrays, LlamaConfig, Units, shapes, units
from reference_jax.sync.penalty import (
    NormStats,
    effective_replicas,
    finite_norms,
    judge,
    mixing_weights,
    step_weights,
    uniform_weights,
    update_stats,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Penalty:
    """The scalars of (P1)..(P7); norms are L2, in parameter units, one per unit."""

    exclude: bool = True
    weigh: bool = True
    clip: bool = True
    z_threshold: float = 3.0
    ema_alpha: float = 0.02
    warmup_rounds: int = 20
    spike_ratio: float = 100.0
    rearm_after: int = 3
    temperature: float = 1.0
    temperature_unit: Literal["parameter", "median"] = "parameter"
    max_norm: float = 10.0
    eps: float = 1e-6


def measure_all(
    norm_UR: Array,
    stats: NormStats,
    penalty: Penalty,
    *,
    steps_R: Array | None = None,
    share: float = 0.0,
) -> Measured:
    """(P1..P3, P5, P8) every decision of a round, from numbers that every device holds.

    Args:
        norm_UR: of the pseudo-gradients.
        stats: of earlier rounds.
        penalty: which of its parts are on, and their scalars.
        steps_R: inner steps since the last round where replicas differ (chapter `aedit`): one
            that made none is left out like an anomaly. None: all made the same.
        share: of a weight that goes by steps.
    """
    verdict = admit_all(norm_UR).verdict
    # The norm of an absent replica is 0 and must not enter a median.
    seen_UR = norm_UR if steps_R is None else jnp.where(steps_R == 0, jnp.inf, norm_UR)
    if penalty.exclude:
        verdict = judge(
            seen_UR,
            stats,
            z_threshold=penalty.z_threshold,
            warmup_rounds=penalty.warmup_rounds,
            spike_ratio=penalty.spike_ratio,
            rearm_after=penalty.rearm_after,
            eps=penalty.eps,
        )
    if steps_R is not None:
        out_UR = verdict.is_anomaly_R | (steps_R == 0)
        verdict = verdict._replace(is_finite_R=finite_norms(norm_UR), is_anomaly_R=out_UR)
    out_UR = verdict.is_anomaly_R
    if penalty.weigh:
        is_relative = penalty.temperature_unit == "median"
        weight_UR = mixing_weights(
            norm_UR, out_UR, temperature=penalty.temperature, relative=is_relative
        )
    else:
        weight_UR = uniform_weights(out_UR, dtype=norm_UR.dtype)
    if steps_R is not None and share > 0:
        weight_UR = step_weights(weight_UR, steps_R, out_UR, share=share)
    accept_U = ~out_UR.all(axis=-1)
    if not penalty.exclude:
        accept_U = accept_U & verdict.is_finite_R.all(axis=-1)
    return Measured(norm_UR, verdict, weight_UR, accept_U)


@functools.partial(
    jax.jit, static_argnames=("units", "penalty", "lr", "momentum", "forced", "wire", "share")
)
def edit_round(
    state: TrainState,
    sync: SyncState,
    *,
    units: Units,
    penalty: Penalty,
    lr: float = 0.8,
    momentum: float = 0.85,
    forced: bool = False,
    wire: Wire = IN_FULL,
    steps_R: Array | None = None,
    share: float = 0.0,
) -> tuple[TrainState, SyncState, Round]:
    """One round of EDiT over all units; a forced one leaves the statistics alone."""
    pseudo = pseudo_gradient(sync.anchor, state.params)
    norm_UR = pseudo_norms(pseudo, units=units)
    measured = measure_all(norm_UR, sync.stats, penalty, steps_R=steps_R, share=share)
    clip = (penalty.max_norm, penalty.eps) if penalty.clip else None
    outer = {"lr": lr, "momentum": momentum}
    state, sync, done = conclude(
        state, sync, pseudo, measured, units=units, clip=clip, wire=wire, **outer
    )
    if penalty.exclude and not forced:
        alpha = penalty.ema_alpha
        stats = update_stats(norm_UR, measured.verdict, sync.stats, ema_alpha=alpha)
        sync = sync._replace(stats=stats)
    return state, sync, done


@jax.custom_vjp
def straight_through(theta: Array, value: Array) -> Array:
    """(R5) ``value`` on the way forward; on the way back ``theta`` gets its gradient, unchanged."""
    return value


straight_through.defvjp(
    lambda theta, value: (value, None), lambda _, gradient: (gradient, jnp.zeros_like(gradient))
)


@functools.partial(jax.jit, static_argnames=("config", "inner", "units", "penalty"))
def round_in_forward(
    state: TrainState,
    sync: SyncState,
    inputs_RSBT: Array,
    targets_RSBT: Array,
    lr: float,
    *,
    config: LlamaConfig,
    inner: Inner,
    units: Units,
    penalty: Penalty,
) -> tuple[TrainState, SyncState, Round, StepReport]:
    """(R5, R6) an inner step whose forward performs the round that was due before it."""
    agreed, after, done = edit_round(state, sync, units=units, penalty=penalty)

    def loss_of_one_rank(
        theta: Arrays, value: Arrays, inputs_BT: Array, targets_BT: Array
    ) -> Array:
        read = {k: straight_through(theta[k], value[k]) for k in theta}
        return rank_loss(
            read, inputs_BT, targets_BT, config=config, compute=inner.compute, z_loss=inner.z_loss
        )

    def gathered(params: Arrays) -> Arrays:
        return {k: gather(x, rows=shapes(config)[k][0]) for k, x in params.items()}

    # Nothing reads the elements of theta any more, so no compiler will gather it.
    of_all = jax.vmap(jax.vmap(jax.value_and_grad(loss_of_one_rank)))
    loss_RS, grads_RS = of_all(
        gathered(state.params), gathered(agreed.params), inputs_RSBT, targets_RSBT
    )
    grads = {k: scatter(g) for k, g in grads_RS.items()}
    new, norm_R = update(agreed, grads, lr, config=config, inner=inner)
    return new, after, done, StepReport(loss_RS.mean(axis=1), norm_R, grads)


def main() -> None:
    """A round of three replicas, one of which went NaN."""
    pretend_devices(3)
    mesh, config, state, tokens = example(3, 1)
    names = units(config)
    with jax.set_mesh(mesh):
        sync = take_anchor(state.params, units=names)
        for _ in range(2):
            state, _ = local_step(state, tokens, tokens, 0.03, config=config, inner=Inner())
        scale = jax.jit(jax.vmap(lambda params, f: {k: x * f for k, x in params.items()}))
        factor_R = put(np.array([1, 1, np.nan], np.float32), mesh, ONE_EACH)
        state = state._replace(params=scale(state.params, factor_R))
        penalty = dataclasses.replace(Penalty(), max_norm=1.0)
        state, sync, done = edit_round(state, sync, units=names, penalty=penalty)
    measured = done.measured
    share_U = effective_replicas(measured.weight_UR)
    for u, (unit, _) in enumerate(names):
        of_unit = (measured.norm_UR[u], measured.weight_UR[u])
        norms, weights = (np.asarray(x).round(3) for x in of_unit)
        print(f"{unit:10} norms {norms}  weights {weights}  effective {share_U[u]:.2f}")
        print(f"{'':10} ||D|| {done.combined_norm_U[u]:.3f}  beta {done.clip_U[u]:.3f}")
    print("anchor, a global array without a replica axis:", jax.typeof(sync.anchor["norm.weight"]))
    print("steps of the healed replica:", state.step["norm.weight"])


if __name__ == "__main__":
    main()
