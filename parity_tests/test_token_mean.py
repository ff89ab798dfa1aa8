"""The loss is the mean over targets that count, however unequally they lie on the ranks."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest

from core_torch.data.batches import IGNORE
from parity_tests.cases import token_mean
from parity_tests.cases.equalities import TINY, VOCABULARY
from parity_tests.cases.token_mean import MICRO, ROWS, rows_of
from parity_tests.harness import tolerances
from parity_tests.harness.jax_bridge import assemble
from parity_tests.harness.pool import RankPool
from parity_tests.harness.ulps import ErrorTable
from reference_jax.fsdp import Inner, replicate, to_host
from reference_jax.methods import TrainConfig
from reference_jax.model import LlamaConfig
from reference_jax.train import Run

MODEL = tolerances.model("float64", layers=TINY.model.layers, width=VOCABULARY, passes=2)
Z_LOSS = 0.03
CASES = [
    ((1, 4), "fsdp2", False, {}),
    ((1, 4), "simple_fsdp", False, {"z_loss": Z_LOSS, "loss_chunk": 5}),
    ((2, 2), "fsdp2", True, {"z_loss": Z_LOSS, "loss_chunk": 5}),
    ((2, 2), "simple_fsdp", True, {}),
    ((2, 2), "fsdp2", False, {"z_loss": Z_LOSS}),
    pytest.param(
        *((2, 2), "simple_fsdp aot_eager", True, {"z_loss": Z_LOSS, "loss_chunk": 5}),
        marks=pytest.mark.only_full,
    ),
]


def changes_of(shape: tuple[int, int], method: str, train: dict[str, Any]) -> dict[str, Any]:
    """A configuration of ``MICRO`` micro-batches; a method may be compiled."""
    method, _, compiler = method.partition(" ")
    return {
        "mesh": {"replicas": shape[0], "shards": shape[1]},
        "shard": {"method": method, "compile": compiler or "off"},
        "data": {"batch": ROWS},
        "train": {"accumulate": MICRO, **train},
    }


@pytest.mark.parametrize(("shape", "method", "synchronous", "train"), CASES, ids=str)
def test_unequal_ranks_and_micro_batches_have_the_gradient_of_one_big_batch(
    pool: RankPool,
    errors: ErrorTable,
    shape: tuple[int, int],
    method: str,
    synchronous: bool,
    train: dict[str, Any],
) -> None:
    replicas, shards = shape
    changes = changes_of(shape, method, train)
    ranks = pool.run(token_mean.step, changes, synchronous)
    grads_R = assemble([rank["grads"] for rank in ranks], replicas=replicas)
    every = list(itertools.product(range(replicas), range(shards)))
    for n, grads in enumerate(grads_R):
        mine = [place for place in every if place[0] == n]
        own_loss, _ = token_mean.alone(changes, mine)
        _, alone = token_mean.alone(changes, every if synchronous else mine)
        for name in alone:
            errors.check("token mean", grads[name], alone[name], MODEL, where=name)
        told = np.mean([rank["loss"] for rank in ranks[n * shards : (n + 1) * shards]])
        errors.check("token mean, loss", np.array(told), np.array(own_loss), MODEL, where="loss")
    one_number = [("shard", "all_reduce", 1)] + [("replica", "all_reduce", 1)] * synchronous
    assert all(rank["sent"] == one_number for rank in ranks)


def test_the_places_of_the_test_differ_as_much_as_they_can() -> None:
    places = itertools.product(range(2), range(2), range(MICRO))
    counts = {int((rows_of((n, m), k)[1] != IGNORE).sum()) for n, m, k in places}
    assert 0 in counts and len(counts) > 6


@pytest.mark.parametrize(
    "synchronous",
    [pytest.param(False, marks=pytest.mark.only_full), True],
    ids=["local", "synchronous"],
)
def test_the_reference_counts_and_adds_the_z_loss_alike(
    errors: ErrorTable, synchronous: bool
) -> None:
    changes = changes_of((2, 2), "fsdp2", {"z_loss": Z_LOSS})
    model = TINY.model
    sizes = {
        name: getattr(model, name) for name in ("dim", "layers", "heads", "kv_heads", "hidden")
    }
    config = TrainConfig(
        model=LlamaConfig(vocabulary=VOCABULARY, **sizes),
        method="synchronous" if synchronous else "edit",
        replicas=2,
        shards=2,
        steps=1,
        inner=Inner(max_norm=0.0, z_loss=Z_LOSS),
    )
    run = Run(config, replicate(token_mean.initial(changes), 2))
    parts = [[[rows_of((n, m), k) for k in range(MICRO)] for m in range(2)] for n in range(2)]
    inputs, targets = (
        np.array(
            [[np.concatenate([micro[side] for micro in part]) for part in row] for row in parts]
        )
        for side in range(2)
    )
    seen = run.inner_step(inputs, targets, lr=0.0)
    grads_R = to_host(seen.grads, config.model, axis=1)
    for n in range(2):
        own_loss, own = token_mean.alone(changes, [(n, 0), (n, 1)])
        every = list(itertools.product(range(2), range(2)))
        alone = token_mean.alone(changes, every)[1] if synchronous else own
        for name in alone:
            errors.check("token mean", grads_R[name][n], alone[name], MODEL, where=name)
        told = np.asarray(jax.device_get(seen.loss_R))[n]
        errors.check("token mean, loss", told, np.array(own_loss), MODEL, where="reference")


@pytest.mark.parametrize(
    ("masked", "train"),
    [(False, {}), (True, {}), (True, {"loss_chunk": 5, "z_loss": Z_LOSS})],
    ids=["all", "some", "in chunks"],
)
def test_evaluation_is_the_mean_over_held_out_targets_that_count_without_the_z_loss(
    pool: RankPool, errors: ErrorTable, masked: bool, train: dict[str, Any]
) -> None:
    changes = {"mesh": {"replicas": 1, "shards": 4}, "train": train}
    for found, alone in pool.run(token_mean.evaluated, changes, masked):
        errors.check("held-out loss", np.array(found), np.array(alone), MODEL, where="evaluate")
