"""Chapter 9. EDiT: unit by unit, with a penalty on suspicious replicas.

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
exchange can run while earlier units compute. The core arranges that with hooks. Here
``round_then_step`` puts round and step into one program; the data dependencies say when each
unit is needed, and the compiler is free to overlap (and to fuse across the seam, so the last bit
may differ; the rounds of single units, one after the other, equal the round of all bit for bit).

Who communicates: as in `local_sgd`, per unit; one small message carries all the norms.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np
from jax import Array

from reference_jax.fsdp import Inner, StepReport, TrainState, example, local_step
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
from reference_jax.model import LlamaConfig, Units, units
from reference_jax.sync.penalty import (
    NormStats,
    effective_replicas,
    judge,
    mixing_weights,
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


def measure_all(norm_UR: Array, stats: NormStats, penalty: Penalty) -> Measured:
    """(P1..P3, P5) every decision of a round, from numbers that every device holds."""
    measured = admit_all(norm_UR)
    if penalty.exclude:
        verdict = judge(
            norm_UR,
            stats,
            z_threshold=penalty.z_threshold,
            warmup_rounds=penalty.warmup_rounds,
            spike_ratio=penalty.spike_ratio,
            rearm_after=penalty.rearm_after,
            eps=penalty.eps,
        )
        equal_UR = uniform_weights(verdict.is_anomaly_R, dtype=norm_UR.dtype)
        accept_U = ~verdict.is_anomaly_R.all(axis=-1)
        measured = Measured(norm_UR, verdict, equal_UR, accept_U)
    if penalty.weigh:
        weight_UR = mixing_weights(
            norm_UR,
            measured.verdict.is_anomaly_R,
            temperature=penalty.temperature,
            relative=penalty.temperature_unit == "median",
        )
        measured = measured._replace(weight_UR=weight_UR)
    return measured


@functools.partial(jax.jit, static_argnames=("units", "penalty", "lr", "momentum", "forced"))
def edit_round(
    state: TrainState,
    sync: SyncState,
    *,
    units: Units,
    penalty: Penalty,
    lr: float = 0.8,
    momentum: float = 0.85,
    forced: bool = False,
) -> tuple[TrainState, SyncState, Round]:
    """One round of EDiT over all units; a forced one leaves the statistics alone."""
    pseudo = pseudo_gradient(sync.anchor, state.params)
    measured = measure_all(pseudo_norms(pseudo, units=units), sync.stats, penalty)
    clip = (penalty.max_norm, penalty.eps) if penalty.clip else None
    state, sync, done = conclude(
        state, sync, pseudo, measured, units=units, lr=lr, momentum=momentum, clip=clip
    )
    if penalty.exclude and not forced:
        alpha = penalty.ema_alpha
        stats = update_stats(measured.norm_UR, measured.verdict, sync.stats, ema_alpha=alpha)
        sync = sync._replace(stats=stats)
    return state, sync, done


@functools.partial(jax.jit, static_argnames=("config", "inner", "units", "penalty"))
def round_then_step(
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
    """A round and the next inner step as one program, whose compiler may overlap them."""
    state, sync, done = edit_round(state, sync, units=units, penalty=penalty)
    state, seen = local_step(state, inputs_RSBT, targets_RSBT, lr, config=config, inner=inner)
    return state, sync, done, seen


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
        norms, weights = measured.norm_UR[u].round(3), measured.weight_UR[u].round(3)
        print(f"{unit:10} norms {norms}  weights {weights}  effective {share_U[u]:.2f}")
        print(f"{'':10} ||D|| {done.combined_norm_U[u]:.3f}  beta {done.clip_U[u]:.3f}")
    print("steps of the healed replica:", state.step["norm.weight"])


if __name__ == "__main__":
    main()
