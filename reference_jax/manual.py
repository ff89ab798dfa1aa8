"""Chapter 18. By hand: the inner step and the round, with every message on a line of its own.

You learn that nothing is hidden in the types of the other chapters. This is their twin: the
program of *one* rank, written out under ``jax.shard_map``, which holds rows of one replica and
sees nobody else unless a line below says ``jax.lax``.

    (F2)  all_gather(w_m, "shard")      FSDP2's all_gather_single      CountedAllGather
    (F4)  psum_scatter, by autodiff     FSDP2's reduce_scatter_single  CountedReduceScatter
    (D1)  psum(grads, "replica")        all_reduce in FSDP2's hook     shard/fsdp2.py, replica_mean
    (F5)  psum([loss, square], "shard") all_reduce of two numbers      train.py
    (R2)  psum(squares_U, "shard")      all_reduce of U numbers        sync_round.py, gather_norms
    (R2)  all_gather(norm_U, "replica") all_gather of U numbers        sync_round.py, gather_norms
    (R3)  psum(d of a unit, "replica")  all_reduce, waited for later   sync_round.py, start
    (R4)  psum(square, "shard")         all_reduce of one number       sync_round.py, finish
          line here                     in torch                       in core_torch

(F4) is not in this file. ``all_gather`` is linear, and its transpose is ``psum_scatter``: whoever
differentiates a loss of gathered parameters has written FSDP. A *sum* over ranks, so divide by M.

A test asserts that the numbers are those of chapters `fsdp`, `ddp`, `diloco` and `edit` up to a few
units in the last place. Explicit sharding is young; this file does without it, on a mesh of
the old kind, and is what must hold if a version of JAX changes its mind about types.

Who communicates: the seven lines of the table, counted by ``ledger.written``. Local step: 0 bytes
over the replica axis. Round: one shard and U numbers.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import axis_index, axis_size
from jax.sharding import Mesh

from reference_jax.adamw import adamw_update
from reference_jax.edit import Penalty, measure_all
from reference_jax.fsdp import (
    Inner,
    StepReport,
    TrainState,
    init_state,
    place,
    rank_loss,
    replicate,
    unpad,
)
from reference_jax.ledger import written_bytes
from reference_jax.local_sgd import Round, SyncState, admit_all
from reference_jax.mesh import AGREED, AXES, EVERYWHERE, ONE_EACH, PER_REPLICA, pretend_devices, put
from reference_jax.model import (
    Arrays,
    LlamaConfig,
    Units,
    init_params,
    shapes,
    units,
    whole_model,
    wide,
)
from reference_jax.sync.outer import heal, nesterov_step
from reference_jax.sync.penalty import clip_coefficient, init_stats, update_stats, weigh

# Where the fields lie.
STATE = TrainState._make((PER_REPLICA, PER_REPLICA, PER_REPLICA, ONE_EACH))
SYNC = SyncState._make((AGREED, AGREED, EVERYWHERE, PER_REPLICA))
REPORT = StepReport._make((ONE_EACH, ONE_EACH, PER_REPLICA))
ROUND = Round._make((EVERYWHERE, AGREED, EVERYWHERE, EVERYWHERE, EVERYWHERE))


def auto_mesh(replicas: int, shards: int) -> Mesh:
    """A mesh whose axes are not in the types of arrays; inside ``shard_map`` they are manual."""
    return Mesh(np.array(jax.devices()[: replicas * shards]).reshape(replicas, shards), AXES)


def on_ranks(program: Callable[..., Any], mesh: Mesh, *, takes: Any, gives: Any) -> Any:
    """``program`` on every rank. No replication types: we send, JAX shall not."""
    return jax.shard_map(program, mesh=mesh, in_specs=takes, out_specs=gives, check_vma=False)


def mine(tree: Any) -> Any:
    """Of arrays [1, ...] that are spread over the replicas, what this one holds."""
    return jax.tree.map(lambda x: x[0], tree)


def of_all(tree: Any) -> Any:
    """The inverse of ``mine``."""
    return jax.tree.map(lambda x: x[None], tree)


def square_of(arrays: Arrays, names: tuple[str, ...]) -> Array:
    """() sum of squares of this rank's rows; the padding is 0."""
    return jnp.stack([jnp.square(wide(arrays[name])).sum() for name in names]).sum()


def gather(shard: Array, *, rows: int) -> Array:
    """(F2) this rank's rows -> all rows."""
    return unpad(jax.lax.all_gather(shard, "shard", tiled=True), rows=rows, axis=0)


def zero_padding(shard: Array, *, rows: int) -> Array:
    """Writes 0 into this rank's rows that lie beyond the tensor."""
    position = axis_index("shard") * len(shard) + jnp.arange(len(shard))
    return jnp.where((position < rows).reshape(-1, *[1] * (shard.ndim - 1)), shard, 0)


def step_of_rank(
    state: TrainState,
    inputs_BT: Array,
    targets_BT: Array,
    lr: Array,
    *,
    config: LlamaConfig,
    inner: Inner,
    together: bool,
) -> tuple[TrainState, StepReport]:
    """(F2..F6) an inner step; ``together`` with the other replicas (D1), or alone."""
    rows = {name: shape[0] for name, shape in shapes(config).items()}

    def loss_of_shards(shards: Arrays) -> Array:
        full = {k: gather(shards[k], rows=rows[k]) for k in rows}
        return rank_loss(
            full, inputs_BT, targets_BT, config=config, compute=inner.compute, z_loss=inner.z_loss
        )

    loss, sums = jax.value_and_grad(loss_of_shards)(state.params)  # backward: psum_scatter
    grads = {k: g / axis_size("shard") for k, g in sums.items()}
    if together:
        sums = jax.lax.psum(grads, "replica")
        grads = {k: g / axis_size("replica") for k, g in sums.items()}
    both = jax.lax.psum(jnp.stack([loss, square_of(grads, tuple(rows))]), "shard")
    loss, norm = both[0] / axis_size("shard"), jnp.sqrt(both[1])
    new: dict[str, tuple[Array, ...]] = {}
    for k in rows:
        grad = grads[k]
        if inner.max_norm > 0:
            factor = clip_coefficient(norm, max_norm=inner.max_norm, eps=1e-6).astype(grad.dtype)
            grad = zero_padding(grad * factor, rows=rows[k])
        new[k] = adamw_update(
            *(state.params[k], grad, state.exp_avg[k], state.exp_avg_sq[k], state.step[k]),
            lr=lr,
            beta1=inner.beta1,
            beta2=inner.beta2,
            eps=inner.eps,
            weight_decay=inner.weight_decay if grad.ndim >= 2 else 0.0,
        )
    fields = ({k: v[i] for k, v in new.items()} for i in range(4))
    return TrainState(*fields), StepReport(loss, norm, grads)


@functools.partial(jax.jit, static_argnames=("mesh", "config", "inner", "together"))
def inner_step(
    state: TrainState,
    inputs_RSBT: Array,
    targets_RSBT: Array,
    lr: float,
    *,
    mesh: Mesh,
    config: LlamaConfig,
    inner: Inner,
    together: bool = False,
) -> tuple[TrainState, StepReport]:
    """Twin of ``fsdp.local_step``, or, ``together``, of ``ddp.warmup_step``."""

    def program(state: TrainState, inputs: Array, targets: Array, lr: Array) -> Any:
        held, batch = mine(state), (inputs[0, 0], targets[0, 0])
        return of_all(step_of_rank(held, *batch, lr, config=config, inner=inner, together=together))

    takes = (STATE, PER_REPLICA, PER_REPLICA, EVERYWHERE)
    ranks = on_ranks(program, mesh, takes=takes, gives=(STATE, REPORT))
    after: tuple[TrainState, StepReport] = ranks(state, inputs_RSBT, targets_RSBT, jnp.asarray(lr))
    return after


def round_of_rank(
    state: TrainState,
    sync: SyncState,
    *,
    units: Units,
    penalty: Penalty | None,
    lr: float,
    momentum: float,
) -> tuple[TrainState, SyncState, Round]:
    """(R1..R4) a round that is used at once; without a penalty everybody weighs the same."""
    anchor, velocity, stats, _ = sync
    params, (avg, avg_sq, step) = dict(state.params), (dict(x) for x in state[1:])
    d = {k: anchor[k] - x for k, x in params.items()}  # (R1)
    squares_U = jnp.stack([square_of(d, names) for _, names in units])
    norm_U = jnp.sqrt(jax.lax.psum(squares_U, "shard"))  # (R2)
    norm_UR = jax.lax.all_gather(norm_U, "replica", axis=1)
    measured = measure_all(norm_UR, stats, penalty) if penalty else admit_all(norm_UR)
    me = axis_index("replica")
    anchor, velocity, combined = dict(anchor), dict(velocity), Arrays()
    norms, betas = [], []
    for u, (_, names) in enumerate(units):
        weighed = {k: weigh(d[k], measured.weight_UR[u, me]) for k in names}
        combined |= jax.lax.psum(weighed, "replica")  # (R3)
        norms.append(jnp.sqrt(jax.lax.psum(square_of(combined, names), "shard")))
        beta = jnp.ones_like(norms[u])
        if penalty and penalty.clip:
            beta = clip_coefficient(norms[u], max_norm=penalty.max_norm, eps=penalty.eps)
        betas.append(beta)
        is_bad = ~measured.verdict.is_finite_R[u, me]
        for k in names:  # (R4)
            step_of_unit = (anchor[k], velocity[k], beta * combined[k], measured.accept_U[u])
            anchor[k], velocity[k] = nesterov_step(*step_of_unit, lr=lr, momentum=momentum)
            params[k] = anchor[k]
            for moment in (avg, avg_sq, step):
                moment[k] = heal(moment[k], is_bad)
    if penalty and penalty.exclude:
        stats = update_stats(norm_UR, measured.verdict, stats, ema_alpha=penalty.ema_alpha)
    norm_of_U, beta_U = jnp.stack(norms), jnp.stack(betas)
    done = Round(measured, combined, norm_of_U, beta_U, jnp.ones_like(norm_of_U))
    return TrainState(params, avg, avg_sq, step), SyncState(anchor, velocity, stats), done


@functools.partial(jax.jit, static_argnames=("mesh", "units", "penalty", "lr", "momentum"))
def sync_round(
    state: TrainState,
    sync: SyncState,
    *,
    mesh: Mesh,
    units: Units,
    penalty: Penalty | None,
    lr: float,
    momentum: float,
) -> tuple[TrainState, SyncState, Round]:
    """Twin of ``edit.edit_round``, or, without a penalty, of ``diloco.diloco_round``."""

    def program(state: TrainState, sync: SyncState) -> Any:
        outer = {"lr": lr, "momentum": momentum}
        after, sync, done = round_of_rank(mine(state), sync, units=units, penalty=penalty, **outer)
        return of_all(after), sync, done

    ranks = on_ranks(program, mesh, takes=(STATE, SYNC), gives=(STATE, SYNC, ROUND))
    after: tuple[TrainState, SyncState, Round] = ranks(state, sync)
    return after


def start(
    config: LlamaConfig, *, mesh: Mesh, params: dict[str, Any], of: Units
) -> tuple[TrainState, SyncState]:
    """(L2) equal replicas of unpadded host parameters, and the anchor that they part from."""
    replicas = mesh.devices.shape[0]
    host = {k: np.asarray(params[k]) for k in shapes(config)}
    state = init_state(place(replicate(host, replicas), mesh, axis=1), mesh)
    zeros = {k: np.zeros_like(x) for k, x in host.items()}
    dtype = next(iter(host.values())).dtype
    stats = init_stats((len(of), replicas), dtype=dtype)
    stats = jax.tree.map(lambda x: put(np.asarray(x), mesh, EVERYWHERE), stats)
    anchor, velocity = place(host, mesh, axis=0), place(zeros, mesh, axis=0)
    return state, SyncState(anchor, velocity, stats)


def main() -> None:
    """What each program writes down to be sent; then two local steps and a round of EDiT."""
    pretend_devices(4)
    mesh = auto_mesh(2, 2)
    config = LlamaConfig(vocabulary=257, dim=16, layers=1, heads=2, kv_heads=1, hidden=27)
    names = units(config)
    params = init_params(config, seed=0, dtype=jnp.float32)
    state, sync = start(config, mesh=mesh, params=params, of=names)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 2, 2, 8))
    batch = [put(tokens, mesh, PER_REPLICA)] * 2
    step = functools.partial(inner_step, mesh=mesh, config=config, inner=Inner())
    edit = functools.partial(
        sync_round, mesh=mesh, units=names, penalty=Penalty(), lr=0.8, momentum=0.85
    )
    diloco = functools.partial(
        sync_round, mesh=mesh, units=whole_model(config), penalty=None, lr=0.7, momentum=0.9
    )
    print("The gradient of a loss of a gathered parameter, as one of two ranks computes it:")
    derived = jax.grad(lambda shard: gather(shard, rows=4).sum())
    print(jax.make_jaxpr(derived, axis_env=[("shard", 2)])(np.ones(2, np.float32)))
    shard_bytes = sum(x.nbytes for x in sync.anchor.values()) // 2
    print(f"A shard has {shard_bytes} bytes. What a rank of 2 x 2 says that it sends:")
    together = functools.partial(step, together=True)
    for what, sent in {
        "local step": written_bytes(step, state, *batch, 0.01),
        "synchronous step": written_bytes(together, state, *batch, 0.01),
        "round of DiLoCo": written_bytes(diloco, state, sync),
        "round of EDiT": written_bytes(edit, state, sync),
    }.items():
        print(f"{what:17} {sent}")
    for t in range(2):
        state, seen = step(state, *batch, 0.01)
        print(f"step {t + 1}: losses {seen.loss_R}, gradient norms {seen.grad_norm_R}")
    state, sync, done = edit(state, sync)
    norm_UR, weight_UR = done.measured.norm_UR, done.measured.weight_UR
    for u, (unit, _) in enumerate(names):
        norms, weights = (np.asarray(x[u]).round(3) for x in (norm_UR, weight_UR))
        print(f"{unit:10} norms {norms}  weights {weights}  ||D|| {done.combined_norm_U[u]:.3f}")


if __name__ == "__main__":
    main()
