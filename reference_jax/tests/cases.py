"""Small inputs of the tests: a pretend model of two tensors, and a tiny real one."""

import jax
import numpy as np
from jax.sharding import Mesh

from reference_jax.data import batch_of_all
from reference_jax.fsdp import TrainState, init_state, place
from reference_jax.local_sgd import SyncState
from reference_jax.mesh import EVERYWHERE, make_mesh, put
from reference_jax.model import LlamaConfig
from reference_jax.sync.penalty import init_stats
from reference_jax.train import Batches

Host = dict[str, np.ndarray]

# Odd sizes on purpose: 7 rows on 2 or 4 shards, and 3 rows on 4 shards, leave ranks with less.
TOY_SHAPES = {"matrix": (7, 5), "gain": (3,)}
TOY_UNITS = (("first", ("matrix",)), ("second", ("gain",)))
TOY_MODEL = (("model", ("matrix", "gain")),)

MODEL = LlamaConfig(
    vocabulary=29, dim=8, layers=1, heads=2, kv_heads=1, hidden=11, rope_theta=100.0, init_std=0.3
)


def draw(seed: int, *, replicas: int = 0, scale: float = 1.0) -> Host:
    """Random tensors of the pretend model, [R, ...] if ``replicas``."""
    rng = np.random.default_rng(seed)
    lead = (replicas,) if replicas else ()
    return {k: scale * rng.normal(size=(*lead, *shape)) for k, shape in TOY_SHAPES.items()}


def toy(
    anchor: Host, params_R: Host, mesh: Mesh, *, units: int, velocity: Host | None = None
) -> tuple[TrainState, SyncState]:
    """States of the pretend model on a mesh, moments all 1 and 5 steps taken."""
    replicas = len(params_R["gain"])
    state = init_state(place(params_R, mesh, axis=1), mesh)
    ones = {k: np.ones_like(v) for k, v in params_R.items()}
    moments = place(ones, mesh, axis=1)
    steps = {k: v + 5 for k, v in state.step.items()}
    state = state._replace(exp_avg=moments, exp_avg_sq=moments, step=steps)
    velocity = velocity or {k: np.zeros_like(v) for k, v in anchor.items()}
    stats = init_stats((units, replicas), dtype=np.float64)
    stats = jax.tree.map(lambda x: put(np.asarray(x), mesh, EVERYWHERE), stats)
    return state, SyncState(place(anchor, mesh, axis=0), place(velocity, mesh, axis=0), stats)


def toy_mesh(replicas: int, shards: int) -> Mesh:
    """A mesh for the pretend model."""
    return make_mesh(replicas, shards)


def cut(arrays: dict[str, jax.Array], *, axis: int) -> Host:
    """Unpadded host copies of the pretend model's tensors."""
    return {k: np.array(v).take(range(TOY_SHAPES[k][0]), axis=axis) for k, v in arrays.items()}


def batches_of(replicas: int, shards: int, *, batch: int = 2) -> Batches:
    """Batches of the tiny real model."""
    tokens = np.random.default_rng(7).integers(0, MODEL.vocabulary, 6 * 64 + 1)

    def batches(step: int) -> tuple[np.ndarray, np.ndarray]:
        return batch_of_all(
            tokens,
            step=step,
            replicas=replicas,
            shards=shards,
            batch=batch,
            sequence=6,
            seed=3,
        )

    return batches
