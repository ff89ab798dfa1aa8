"""What ranks do for the mean over targets that count: a step on rows with few or many of them."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from core_torch import evaluation
from core_torch import train as core_train
from core_torch.data.batches import IGNORE, Batch
from core_torch.data.reading import read_held_out
from core_torch.models import build_model
from core_torch.models.loss import summed_loss
from core_torch.train import TrainState
from parity_tests.cases.equalities import (
    SEQUENCE,
    TINY,
    VOCABULARY,
    Account,
    Changes,
    begin,
    configured,
)
from parity_tests.cases.training import gradients_of
from parity_tests.harness.torch_bridge import to_numpy

ROWS, MICRO = 2, 3  # sequences per rank and micro-batch, micro-batches per step
Place = tuple[int, int]  # replica, shard


def rows_of(place: Place, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a micro-batch; of some no target counts, of some all."""
    rng = np.random.default_rng([*place, k])
    window = rng.integers(0, VOCABULARY, (ROWS, SEQUENCE + 1))
    inputs, targets = window[:, :-1].copy(), window[:, 1:].copy()
    dropped = targets.size if (place, k) == ((0, 1), 0) else int(rng.integers(0, targets.size))
    targets.reshape(-1)[rng.permutation(targets.size)[:dropped]] = IGNORE
    return inputs, targets


def step(changes: Changes, synchronous: bool) -> Account:
    """Loss and gradient of the first inner step as the trainer makes it, and what it sends."""
    state = begin(changes)
    assert state is not None
    place = (state.mesh.replica.index, state.mesh.shard.index)
    told: Account = {}

    def micro_batch(state: TrainState, index: int) -> Batch[Tensor]:
        return Batch(*(torch.from_numpy(x) for x in rows_of(place, index)))

    def apply_gradients(state: TrainState, loss: Tensor) -> tuple[float, float]:
        told["grads"] = gradients_of(state)
        return float(loss), 0.0

    with (
        mock.patch.object(core_train, "micro_batch", micro_batch),
        mock.patch.object(core_train, "apply_gradients", apply_gradients),
        mock.patch.object(TrainState, "leaves_out_targets", True),
    ):
        told["loss"], _ = core_train.inner_step(state, synchronous=synchronous)
    trace = state.mesh.ledger.trace or []
    told["sent"] = [(d.axis, d.op, d.numel) for d in trace if d.scope == "tokens"]
    return told


def alone(changes: Changes, places: Sequence[Place]) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradient of all rows of ``places`` as one batch, in one process, unsharded."""
    config = configured(TINY, changes)
    model = build_model(config.model, VOCABULARY, seed=config.train.seed, dtype=torch.float64)
    sides = zip(*(rows_of(place, k) for place in places for k in range(MICRO)), strict=True)
    inputs, targets = (torch.from_numpy(np.concatenate(side)) for side in sides)
    summed = summed_loss(model(inputs), targets, z_loss=config.train.z_loss)
    loss = summed / (targets != IGNORE).sum()
    torch.autograd.backward(loss)
    grads = {name: p.grad for name, p in model.named_parameters()}
    return loss.item(), {name: to_numpy(g) for name, g in grads.items() if g is not None}


def evaluated(changes: Changes, masked: bool) -> list[Any]:
    """Held-out losses: the trainer's, and the plain mean over targets in one process."""
    state = begin(changes)
    assert state is not None
    data, count = state.config.data, state.config.train.evaluate_sequences
    inputs, targets, _ = read_held_out(state.corpus, data, count)
    if masked:
        targets[np.random.default_rng(0).random(targets.shape) < 0.6] = IGNORE
    with mock.patch.object(evaluation, "read_held_out", lambda *_: Batch(inputs, targets)):
        found = evaluation.evaluate(state)
    model = build_model(state.config.model, VOCABULARY, seed=0, dtype=torch.float64)
    with torch.no_grad():
        y = torch.from_numpy(targets)
        summed = summed_loss(model(torch.from_numpy(inputs)), y)
    return [found, summed.item() / int((y != IGNORE).sum())]


def initial(changes: Changes) -> dict[str, np.ndarray]:
    """The weights that ``alone`` begins with."""
    config = configured(TINY, changes)
    model = build_model(config.model, VOCABULARY, seed=config.train.seed, dtype=torch.float64)
    return {name: to_numpy(p) for name, p in model.named_parameters()}
