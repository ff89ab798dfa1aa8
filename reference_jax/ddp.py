"""Chapter 6. Data parallel over replicas: synchronous training, and the warm-up of all others.

You learn the one line that turns N strangers into one run.

    (D1) g <- mean over shards and replicas of the ranks' gradients

The inner step is that of chapter `fsdp`; between (F4) and (F5) the gradients are averaged
over axis 0. All replicas then clip by the same norm and take the same step, so they stay
bit-identical, and the anchor can be taken from any of them without communication.

Who communicates: as in `fsdp`, and on the replica axis one all-reduce of the gradient's shard
in *every* step. That traffic is what local SGD divides by H.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from reference_jax.fsdp import Inner, StepReport, TrainState, example, gradients, local_step, update
from reference_jax.ledger import bytes_per_axis
from reference_jax.mesh import PER_REPLICA, pretend_devices
from reference_jax.model import Arrays, LlamaConfig


def average_over_replicas(grads: Arrays) -> Arrays:
    """(D1) every replica gets the mean over axis 0."""
    mean = {k: g.mean(axis=0) for k, g in grads.items()}
    return {
        k: jnp.broadcast_to(mean[k][None], g.shape, out_sharding=PER_REPLICA)
        for k, g in grads.items()
    }


@functools.partial(jax.jit, static_argnames=("config", "inner"))
def warmup_step(
    state: TrainState,
    inputs_RSBT: Array,
    targets_RSBT: Array,
    lr: float,
    *,
    config: LlamaConfig,
    inner: Inner,
    divisor_RS: Array | None = None,
    documents_RSBT: Array | None = None,
) -> tuple[TrainState, StepReport]:
    """One synchronous inner step; ``StepReport.grads`` are the averaged ones."""
    how: dict[str, Any] = {"config": config, "compute": inner.compute, "z_loss": inner.z_loss}
    how |= {"divisor_RS": divisor_RS, "documents_RSBT": documents_RSBT}
    loss_R, grads = gradients(state.params, inputs_RSBT, targets_RSBT, **how)
    grads = average_over_replicas(grads)
    state, norm_R = update(state, grads, lr, config=config, inner=inner)
    return state, StepReport(loss_R, norm_R, grads)


def main() -> None:
    """The same batch through a local and a synchronous step, and what each would send."""
    pretend_devices(4)
    mesh, config, state, tokens = example(2, 2)
    shard_bytes = sum(x.nbytes for x in state.params.values()) // mesh.size
    with jax.set_mesh(mesh):
        for name, step in {"local_step": local_step, "warmup_step": warmup_step}.items():
            lowered = step.lower(state, tokens, tokens, 0.01, config=config, inner=Inner())
            compiled = lowered.compile()
            _, seen = compiled(state, tokens, tokens, 0.01)
            print(f"{name}: gradient norms {seen.grad_norm_R}")
            print(f"    {bytes_per_axis(compiled, mesh)}")
    print(f"one shard of the parameters has {shard_bytes} bytes")


if __name__ == "__main__":
    main()
