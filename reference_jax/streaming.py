"""Chapter 10. Streaming DiLoCo: a part of the model at a time, used some steps later.

You learn how to make the peak of the traffic small and to hide what is left. (Douillard et al.,
arXiv:2501.18512)

    P fragments; unit i of the model belongs to fragment i mod P (strided, so that each has
    early and late layers)
    (L4) fragment p is due after inner step t > W when t - W - p H / P is a multiple of H
    (R1..R3) of fragment p alone are measured and sent right then, with w_n = 1 / N
    (O6) after inner step t + delay: (O1, O2) on a_p, b_p with that D, and
         theta_n <- mix theta_n + (1 - mix) a_p

Each fragment runs DiLoCo with the same H; only the starting points differ, so every H / P steps
a P-th of the model travels. While it does, the replicas go on training. Of what they learn in
those ``delay`` steps theta keeps the share ``mix``, and the next d = a - theta reports it; with
mix = 0 it is overwritten. With P = 1, delay = 0 and mix = 0 this *is* DiLoCo; mix = 1 never
tells the replicas what the others found.

In JAX, "in flight" is nothing but a value that is not used yet: ``start`` gives a D, and some
steps later ``land`` takes it. Whoever runs the two programs is free to do the sum in between.

Who communicates: as in `diloco`, per fragment. Between ``start`` and ``land`` nobody waits.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from reference_jax.exchange import IN_FULL, Wire
from reference_jax.fsdp import Inner, TrainState, example, local_step
from reference_jax.local_sgd import (
    Measured,
    Round,
    SyncState,
    admit_all,
    apply,
    pseudo_gradient,
    pseudo_norms,
    send,
    take_anchor,
)
from reference_jax.mesh import pretend_devices
from reference_jax.model import Arrays, Units, units


class Streaming(NamedTuple):
    """The numbers of (L4) and (O6)."""

    fragments: int = 2  # P
    delay: int = 1  # inner steps from start to use
    mix: float = 0.5


class Flight(NamedTuple):
    """An exchange that has started and is not used yet."""

    measured: Measured
    combined: Arrays  # D


def fragments(of: Units, count: int) -> Units:
    """The units of a model dealt to ``count`` fragments.

    Raises:
        ValueError: a fragment would be empty.
    """
    if not 0 < count <= len(of):
        raise ValueError(f"{len(of)} units do not fill {count} fragments")
    dealt = [[names for _, names in of[p::count]] for p in range(count)]
    return tuple((f"fragment.{p}", sum(names, ())) for p, names in enumerate(dealt))


def fragment_due(step: int, *, warmup: int, every: int, count: int) -> int | None:
    """(L4) the fragment whose exchange starts after inner step ``step``, counted from 1.

    Raises:
        ValueError: ``every`` is not a multiple of ``count``.
    """
    if every % count:
        raise ValueError(f"{count} fragments need an interval that is a multiple, not {every}")
    turn, rest = divmod(step - warmup, every // count)
    return turn % count if turn > 0 and rest == 0 else None


@functools.partial(jax.jit, static_argnames=("units", "wire"))
def start(
    state: TrainState, sync: SyncState, *, units: Units, wire: Wire = IN_FULL
) -> tuple[Flight, SyncState]:
    """(R1..R3) of some fragments; moves no parameter."""
    of_units = [name for _, names in units for name in names]
    params = {name: state.params[name] for name in of_units}
    pseudo = pseudo_gradient(sync.anchor, params)
    measured = admit_all(pseudo_norms(pseudo, units=units))
    combined, sync = send(sync, pseudo, measured, units=units, wire=wire)
    return Flight(measured, combined), sync


@functools.partial(jax.jit, static_argnames=("units", "lr", "momentum", "mix"))
def land(
    state: TrainState,
    sync: SyncState,
    flight: Flight,
    *,
    units: Units,
    lr: float = 0.7,
    momentum: float = 0.9,
    mix: float = 0.5,
) -> tuple[TrainState, SyncState, Round]:
    """(O6) what the exchange found, used; ``units`` as given to ``start``."""
    return apply(state, sync, *flight, units=units, lr=lr, momentum=momentum, keep=mix)


def main() -> None:
    """Two fragments, H = 4, used one step after they were sent."""
    pretend_devices(2)
    mesh, config, state, tokens = example(2, 1)
    parts = fragments(units(config), 2)
    flights: list[tuple[int, int, Flight]] = []
    with jax.set_mesh(mesh):
        sync = take_anchor(state.params, units=parts)
        for t in range(1, 10):
            state, _ = local_step(state, tokens, tokens, 0.01, config=config, inner=Inner())
            said = []
            if flights and flights[0][0] == t:
                _, p, flight = flights.pop(0)
                state, sync, done = land(state, sync, flight, units=(parts[p],))
                said.append(f"fragment {p} lands, ||D|| {done.combined_norm_U[0]:.3f}")
            due = fragment_due(t, warmup=0, every=4, count=2)
            if due is not None:
                flight, sync = start(state, sync, units=(parts[due],))
                flights.append((t + 1, due, flight))
                size = sum(x.size for x in flight.combined.values())
                said.append(f"fragment {due} starts, {size} numbers")
            apart = [jnp.ptp(state.params[n[0]], axis=0).max() for _, n in parts]
            spread = "  ".join(f"{x:.4f}" for x in apart)
            print(f"after step {t}: replicas differ by {spread}  {'; '.join(said)}")


if __name__ == "__main__":
    main()
