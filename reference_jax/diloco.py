"""Chapter 9. DiLoCo: the mean progress is a gradient, and an outer optimizer follows it.

You learn why pseudo-gradients are called gradients. (Douillard et al., arXiv:2311.08105)

    (R1..R3) of chapter `local_sgd` with w_n = 1 / N, the whole model as one unit, no clip
    (O1) b <- mu b + D
    (O2) a <- a - eta (D + mu b),   theta_n <- a

With eta = 1, mu = 0 this is Post Local SGD. The defaults eta = 0.7, mu = 0.9 overshoot on
purpose: the velocity remembers the direction in which all replicas moved, round after round.
Nobody can be left out: one replica with a NaN rejects the round and ends the run.

Who communicates: as in `local_sgd`; the velocity costs memory, not messages.
"""

import functools

import jax
import jax.numpy as jnp

from reference_jax.exchange import IN_FULL, Wire
from reference_jax.fsdp import TrainState
from reference_jax.local_sgd import (
    Round,
    SyncState,
    admit_all,
    conclude,
    pseudo_gradient,
    pseudo_norms,
)
from reference_jax.mesh import pretend_devices
from reference_jax.model import Units
from reference_jax.sync.outer import nesterov_step


@functools.partial(jax.jit, static_argnames=("units", "lr", "momentum", "wire"))
def diloco_round(
    state: TrainState,
    sync: SyncState,
    *,
    units: Units,
    lr: float = 0.7,
    momentum: float = 0.9,
    wire: Wire = IN_FULL,
) -> tuple[TrainState, SyncState, Round]:
    """One round of DiLoCo."""
    pseudo = pseudo_gradient(sync.anchor, state.params)
    measured = admit_all(pseudo_norms(pseudo, units=units))
    return conclude(state, sync, pseudo, measured, units=units, lr=lr, momentum=momentum, wire=wire)


def main() -> None:
    """The outer step alone: replicas that always propose the same progress, D = 2."""
    pretend_devices(1)
    for lr, momentum in ((1.0, 0.0), (0.7, 0.9), (0.8, 0.85)):
        anchor = velocity = jnp.zeros(())
        path = []
        for _ in range(4):
            anchor, velocity = nesterov_step(
                anchor, velocity, jnp.full((), 2.0), jnp.array(True), lr=lr, momentum=momentum
            )
            path.append(f"{anchor:9.4f}")
        print(f"lr {lr}, momentum {momentum:4}: anchor {' '.join(path)}")


if __name__ == "__main__":
    main()
