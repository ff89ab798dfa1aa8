"""Six steps of EDiT, in loops over replicas, units and numbers that know nothing of arrays.

An oracle of another kind: no JAX and no vectors, so a mistake in an axis, a broadcast or a mask
of the chapters has nothing to agree with.
"""

import math
from typing import Any

import jax
import numpy as np

from reference_jax.adamw import adamw_update
from reference_jax.edit import Penalty, edit_round
from reference_jax.fsdp import TrainState, init_state, place, replicate
from reference_jax.mesh import make_mesh
from reference_jax.tests.cases import TOY_SHAPES, TOY_UNITS, Host, cut, draw, toy

NAN = float("nan")
REPLICAS, STEPS, LR = 3, 6, 0.1
PENALTY = Penalty(
    max_norm=0.3, warmup_rounds=2, rearm_after=2, ema_alpha=0.4, z_threshold=2.0, temperature=0.5
)
BETA1, BETA2, EPS, DECAY = 0.9, 0.95, 1e-8, 0.1


def shove(step: int, n: int) -> float:
    """What a fault adds to every number of a replica's matrix right before a round."""
    if n == 1 and step in (4, 5):
        return 5.0  # far above what it used to be: flagged, and re-armed the second time
    return NAN if (n, step) == (2, 6) else 0.0


class Naive:
    """One run: for every replica, unit and tensor a flat list of Python numbers."""

    def __init__(self, anchor: Host) -> None:
        self.anchor = {k: x.ravel().tolist() for k, x in anchor.items()}
        self.velocity = {k: [0.0] * len(x) for k, x in self.anchor.items()}
        self.params = [{k: list(x) for k, x in self.anchor.items()} for _ in range(REPLICAS)]
        self.mean_of = [{k: [0.0] * len(x) for k, x in self.anchor.items()} for _ in range(3)]
        self.square_of = [{k: [0.0] * len(x) for k, x in self.anchor.items()} for _ in range(3)]
        self.taken = [{k: 0 for k in self.anchor} for _ in range(REPLICAS)]
        # per unit and replica: mean, variance, count, flags in a row
        self.stats = [[[0.0, 0.0, 0, 0] for _ in range(REPLICAS)] for _ in TOY_UNITS]

    def step(self, grads_R: Host) -> None:
        """AdamW, number by number."""
        for n in range(REPLICAS):
            for name, x in self.params[n].items():
                self.taken[n][name] += 1
                t, decay = self.taken[n][name], DECAY if len(TOY_SHAPES[name]) >= 2 else 0.0
                for i, g in enumerate(grads_R[name][n].ravel().tolist()):
                    m = BETA1 * self.mean_of[n][name][i] + (1 - BETA1) * g
                    v = BETA2 * self.square_of[n][name][i] + (1 - BETA2) * g * g
                    self.mean_of[n][name][i], self.square_of[n][name][i] = m, v
                    root = math.sqrt(v / (1 - BETA2**t)) + EPS
                    x[i] = x[i] * (1 - LR * decay) - LR * m / (1 - BETA1**t) / root

    def round(self, step: int) -> list[list[bool]]:
        """Who was left out, [unit][replica]."""
        for n in range(REPLICAS):
            self.params[n]["matrix"] = [x + shove(step, n) for x in self.params[n]["matrix"]]
        return [self.round_of(u, names) for u, (_, names) in enumerate(TOY_UNITS)]

    def round_of(self, u: int, names: tuple[str, ...]) -> list[bool]:
        """One unit."""
        norms, out = [], []
        for n in range(REPLICAS):
            total = 0.0
            for name in names:
                for a, x in zip(self.anchor[name], self.params[n][name], strict=True):
                    total += (a - x) ** 2
            norms.append(math.sqrt(total))
        for n in range(REPLICAS):
            out.append(self.judge(u, n, norms))
        total, weights = 0.0, []
        for n in range(REPLICAS):
            weights.append(0.0 if out[n] else math.exp(-norms[n] / PENALTY.temperature))
            total += weights[n]
        self.merge(names, [w / total for w in weights])
        for n in range(REPLICAS):
            for name in names:
                self.params[n][name] = list(self.anchor[name])
                if math.isnan(norms[n]):
                    self.mean_of[n][name] = [0.0] * len(self.anchor[name])
                    self.square_of[n][name] = [0.0] * len(self.anchor[name])
                    self.taken[n][name] = 0
        return out

    def judge(self, u: int, n: int, norms: list[float]) -> bool:
        """Whether replica n is left out; its statistics learn from it."""
        mean, var, count, flags = self.stats[u][n]
        if math.isnan(norms[n]):
            return True
        if count >= PENALTY.warmup_rounds:
            is_far = norms[n] - mean > PENALTY.z_threshold * (math.sqrt(var) + PENALTY.eps)
        else:
            usual = sorted(x for x in norms if not math.isnan(x))
            middle = (usual[(len(usual) - 1) // 2] + usual[len(usual) // 2]) / 2
            is_far = norms[n] > PENALTY.spike_ratio * middle
        if is_far and flags + 1 < PENALTY.rearm_after:
            self.stats[u][n][3] += 1
            return True
        if is_far:
            self.stats[u][n] = [norms[n], 0.0, 1, 0]
            return False
        alpha = max(1 / (count + 1), PENALTY.ema_alpha)
        off = norms[n] - mean
        self.stats[u][n] = [mean + alpha * off, (1 - alpha) * (var + alpha * off**2), count + 1, 0]
        return False

    def merge(self, names: tuple[str, ...], weights: list[float]) -> None:
        """The weighed sum, clipped, and the outer step."""
        combined, total = {}, 0.0
        for name in names:
            combined[name] = [0.0] * len(self.anchor[name])
            for i, a in enumerate(self.anchor[name]):
                for n in range(REPLICAS):
                    if weights[n] > 0:
                        combined[name][i] += weights[n] * (a - self.params[n][name][i])
                total += combined[name][i] ** 2
        beta = min(1.0, PENALTY.max_norm / (math.sqrt(total) + PENALTY.eps))
        for name in names:
            for i, d in enumerate(combined[name]):
                self.velocity[name][i] = 0.85 * self.velocity[name][i] + beta * d
                self.anchor[name][i] -= 0.8 * (beta * d + 0.85 * self.velocity[name][i])


@jax.jit
def adamw_of_all(state: TrainState, grads: dict[str, jax.Array]) -> TrainState:
    """The inner step of the chapters on given gradients, without clipping."""
    new: dict[str, Any] = {}
    for k, x in state.params.items():
        scalars = {"lr": LR, "beta1": BETA1, "beta2": BETA2, "eps": EPS}
        decay = DECAY if len(TOY_SHAPES[k]) >= 2 else 0.0
        step = jax.vmap(lambda *held, d=decay, s=scalars: adamw_update(*held, weight_decay=d, **s))
        new[k] = step(x, grads[k], state.exp_avg[k], state.exp_avg_sq[k], state.step[k])
    return TrainState(*({k: v[i] for k, v in new.items()} for i in range(4)))


def test_six_steps_of_edit_with_faults_are_those_of_the_loops() -> None:
    mesh, anchor = make_mesh(REPLICAS, 2), draw(0)
    naive = Naive(anchor)
    _, sync = toy(anchor, replicate(anchor, REPLICAS), mesh, units=2)
    state = init_state(place(replicate(anchor, REPLICAS), mesh, axis=1), mesh)
    left_out = []
    for t in range(1, STEPS + 1):
        grads_R = draw(t, replicas=REPLICAS)
        naive.step(grads_R)
        with jax.set_mesh(mesh):
            state = adamw_of_all(state, place(grads_R, mesh, axis=1))
        assert_held(cut(state.params, axis=1), naive.params)
        shoves = np.array([shove(t, n) for n in range(REPLICAS)]).reshape(-1, 1, 1)
        params_R = cut(state.params, axis=1)
        params_R["matrix"] = params_R["matrix"] + shoves
        state = state._replace(params=place(params_R, mesh, axis=1))
        left_out.append(naive.round(t))
        with jax.set_mesh(mesh):
            state, sync, done = edit_round(state, sync, units=TOY_UNITS, penalty=PENALTY)
        assert np.asarray(done.measured.verdict.is_anomaly_R).tolist() == left_out[-1]
        for tree, lists in ((sync.anchor, naive.anchor), (sync.velocity, naive.velocity)):
            assert_held({k: x[None] for k, x in cut(tree, axis=0).items()}, [lists])
        assert_held(cut(state.exp_avg, axis=1), naive.mean_of)
        assert_held(cut(state.exp_avg_sq, axis=1), naive.square_of)
        stats = np.stack([np.asarray(x, np.float64) for x in sync.stats], axis=-1)
        np.testing.assert_allclose(stats, naive.stats, rtol=1e-12, atol=1e-15)
        counts = {k: np.asarray(x).tolist() for k, x in state.step.items()}
        assert counts == {k: [taken[k] for taken in naive.taken] for k in counts}
    # Too far at step 4 (and accepted at step 5, as far again), NaN at step 6.
    assert [who[0] for who in left_out[3:]] == [
        [False, True, False],
        [False] * 3,
        [False, False, True],
    ]


def assert_held(arrays_R: Host, lists: list[dict[str, list[float]]]) -> None:
    """[R, ...] arrays against one dict of lists for each replica."""
    for k, x_R in arrays_R.items():
        flat = [held[k] for held in lists]
        np.testing.assert_allclose(
            x_R.reshape(len(flat), -1), flat, rtol=1e-12, atol=1e-14, err_msg=k
        )
