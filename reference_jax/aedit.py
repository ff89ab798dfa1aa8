"""Chapter 14. A-EDiT: EDiT by the clock, so that nobody waits for a slow replica's steps.

You learn how replicas that make different numbers of steps stay one run. (Cheng et al.,
arXiv:2412.07210)

    (V2) replica n enters the next round when T has passed on its clock, or when by (V1) the run
         has seen tokens enough
    (V1) tokens = agreed at the last numbered round + N * own tokens since
         Learning rate and end of the run go by this estimate. At equal speeds it is the truth.
    (V4) the round gathers steps and tokens of all; agreed += sum of the tokens
    (V5) fewer than ``min_total_steps`` steps in all: the round is numbered but empty. Nothing
         moves, time starts again, steps count on
    else a round of chapter `edit`, in which a replica without steps is *absent* (weight 0,
         statistics as they were); and with rho > 0:
    (P8) w_n <- (1 - rho) w_n + rho steps_n / sum of steps, over those who are let in

The penalty sees norms, not speed: a slow replica is helped by the clock, a sick one by (P1..P3).

Here time goes in *ticks*. In each, every replica computes a step, and ``only`` throws away the
result of those that have reached their round: the same program for all, as SPMD wants it, at the
price of work for the bin. All that step in a tick have made as many steps since the round, so
(V1) gives them one learning rate. (Without waste: ``jax.lax.while_loop`` inside ``shard_map``,
in which each replica loops as often as its clock lets it. That is legal, because what happens
inside the loop involves only the shards of that replica, which all loop equally often.)

Who communicates: as in `edit`; steps and tokens travel with the norms. Between rounds nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from reference_jax.clock import TimeTrigger, VirtualClock
from reference_jax.edit import Penalty, edit_round
from reference_jax.fsdp import Inner, TrainState, example, local_step
from reference_jax.local_sgd import take_anchor
from reference_jax.mesh import EVERYWHERE, ONE_EACH, pretend_devices, put
from reference_jax.model import units


class Timed(NamedTuple):
    """The numbers of a run by the clock."""

    interval_ns: int = 600 * 10**9  # T
    step_ns: tuple[int, ...] = ()  # c_n, one for each replica
    min_total_steps: int = 100
    step_weight: float = 0.0  # rho


class Pace:
    """(V1..V5) the counters of all replicas: whole numbers, so nothing drifts.

    Args:
        timed: of the run.
        tokens: that one replica trains on in a step.
        agreed: tokens of all replicas when they part.
        total: the run ends when all have seen this many.

    Raises:
        ValueError: an interval or a cost that is not positive.
    """

    def __init__(self, timed: Timed, *, tokens: int, agreed: int, total: int) -> None:
        if min(timed.interval_ns, *timed.step_ns) <= 0:
            raise ValueError("an interval and every step must take time")
        self.timed, self.tokens, self.agreed, self.total = timed, tokens, agreed, total
        self.clocks = [VirtualClock() for _ in timed.step_ns]
        self.triggers = [TimeTrigger(timed.interval_ns, clock) for clock in self.clocks]
        self.steps = [0 for _ in timed.step_ns]  # since the last round that was not empty
        self.local = [0 for _ in timed.step_ns]  # tokens since the last numbered round

    def estimate(self, n: int) -> int:
        """(V1) by replica n, of the tokens that all have seen."""
        return self.agreed + len(self.clocks) * self.local[n]

    def is_active(self) -> list[bool]:
        """(V2) which replicas make another step before the next round."""
        return [
            not trigger.is_over() and self.estimate(n) < self.total
            for n, trigger in enumerate(self.triggers)
        ]

    def stepped(self, n: int) -> None:
        """Replica n has made a step."""
        self.clocks[n].advance(self.timed.step_ns[n])
        self.steps[n] += 1
        self.local[n] += self.tokens

    def meet(self) -> tuple[list[int], bool]:
        """(V4, V5) counts of a numbered round: steps of each replica, and whether it is empty."""
        steps = list(self.steps)
        is_empty = sum(steps) < self.timed.min_total_steps
        self.agreed += sum(self.local)
        self.local = [0 for _ in steps]
        self.steps = list(steps) if is_empty else [0 for _ in steps]
        for trigger in self.triggers:
            trigger.restart()
        return steps, is_empty


@jax.jit
def only(is_active_R: Array, new: TrainState, old: TrainState) -> TrainState:
    """``new`` where a replica is active, ``old`` where it has stopped."""
    kept: TrainState = jax.tree.map(
        lambda x_R, y_R: jax.vmap(jnp.where)(is_active_R, x_R, y_R), new, old
    )
    return kept


def main() -> None:
    """Replica 0 is three times as fast: it makes more steps, and nobody waits for them."""
    pretend_devices(2)
    mesh, config, state, tokens = example(2, 1)
    names, timed = units(config), Timed(interval_ns=60, step_ns=(10, 30), min_total_steps=1)
    pace = Pace(timed, tokens=1, agreed=0, total=16)
    with jax.set_mesh(mesh):
        sync = take_anchor(state.params, units=names)
        while pace.agreed < pace.total:
            while any(active := pace.is_active()):
                new, seen = local_step(state, tokens, tokens, 0.01, config=config, inner=Inner())
                state = only(put(np.array(active), mesh, ONE_EACH), new, state)
                for n in range(2):
                    if active[n]:
                        pace.stepped(n)
                times = [clock() for clock in pace.clocks]
                who = ["steps" if x else "waits" for x in active]
                print(f"replicas {who}, loss {seen.loss_R}, clocks {times}")
            steps, _ = pace.meet()
            steps_R = put(np.array(steps), mesh, EVERYWHERE)
            state, sync, done = edit_round(
                state, sync, units=names, penalty=Penalty(), steps_R=steps_R, share=0.5
            )
            weights = np.asarray(done.measured.weight_UR[1]).round(3)
            print(f"    round after {steps} steps, weights of block 0 {weights}", end="")
            print(f", {pace.agreed} tokens agreed")


if __name__ == "__main__":
    main()
