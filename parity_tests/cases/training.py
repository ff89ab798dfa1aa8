"""What ranks do for the comparison with the reference: run a cell as shipped and tell all.

Two of the core's functions are wrapped to copy what passes through them and is kept nowhere:
gradients before clipping, and a round's input and combined pseudo-gradient. The wrapped ones
are the shipped functions themselves, so a mutant acts in them as in any run.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from core_torch import train as core_train
from core_torch.collectives import Pending
from core_torch.config import RunConfig
from core_torch.data.corpus import Corpus
from core_torch.data.token_file import TokenFile
from core_torch.data.tokenizer import ByteTokenizer
from core_torch.errors import TwinshardError
from core_torch.models import token_loss
from core_torch.sync import sync_round
from core_torch.sync.unit_state import UnitState
from core_torch.sync.units import SyncUnit
from core_torch.train import TrainState, micro_batch
from parity_tests.cases.equalities import (
    Account,
    Changes,
    Fault,
    StepClock,
    configured,
    inject,
    like,
    snapshot,
)
from parity_tests.cases.part_mesh import mesh_over
from parity_tests.harness.torch_bridge import load_parameters, shards_of, to_numpy

Whole = dict[str, np.ndarray]


def begin(
    changes: Changes, tokens: np.ndarray, params: Whole, step_ns: Sequence[int] = ()
) -> TrainState | None:
    """A run before its first step, with these weights; None on a rank outside the mesh."""
    config: RunConfig = configured(RunConfig(), changes)
    mesh = mesh_over(config.mesh.replicas, config.mesh.shards)
    if mesh is None:
        return None
    mesh.ledger.trace = []
    mesh.ledger.reset()
    file = TokenFile(Path(), config.model.vocabulary, tokens)
    clock = StepClock(step_ns[mesh.replica.index] if step_ns else 0)
    corpus = Corpus(file, file, ByteTokenizer())
    clock.state = core_train.build(config, mesh, corpus, clock=clock)
    load_parameters(clock.state.model, params)
    return clock.state


def forward(changes: Changes, tokens: np.ndarray, params: Whole) -> Account | None:
    """Logits of this rank's first micro-batch; loss and gradients of the first step.

    Gradients twice: averaged over the shards, and over the replicas too.
    """
    state = begin(changes, tokens, params)
    if state is None:
        return None
    told: Account = {}
    for phase, synchronous in (("local", False), ("synchronous", True)):
        accumulate = state.config.train.accumulate
        losses: list[float] = []
        state.sharded.mean_over_replicas = synchronous
        for k in range(accumulate):
            inputs, targets, _ = micro_batch(state, k)
            state.sharded.begin_micro_batch(is_last=k == accumulate - 1)
            logits = state.model(inputs)
            loss = token_loss(logits, targets)
            torch.autograd.backward(loss / accumulate)
            told.setdefault("logits", to_numpy(logits))
            losses.append(float(loss))
        state.sharded.finish_gradients()
        told[phase], told["loss"] = gradients_of(state), sum(losses) / accumulate
        state.optimizer.zero_grad()
    return told


def gradients_of(state: TrainState) -> dict[str, Any]:
    """This rank's rows of every gradient."""
    named = state.model.named_parameters()
    return shards_of({name: p.grad for name, p in named if p.grad is not None})


def run(
    changes: Changes,
    tokens: np.ndarray,
    params: Whole,
    faults: Sequence[Fault] = (),
    step_ns: Sequence[int] = (),
) -> Account | None:
    """Trains to the end, finishes, and tells of every step; None on a rank outside the mesh.

    Returns:
        ``states`` before the first step and after each (the last one after ``finish``);
        ``begun``, the parameters that each step began with; ``grads`` of each step; ``inner``,
        the state right before each round, and ``combined``, its pseudo-gradient; ``records``
        and ``events``; the name of the ``error`` that ended the run; the ``trace`` of
        collectives.
    """
    state = begin(changes, tokens, params, step_ns)
    if state is None:
        return None
    told: Account = {"records": [], "events": [], "states": [snapshot(state)], "error": None}
    told |= {"begun": [parameters_of(state)], "grads": [], "inner": [], "combined": []}
    with tapped(state, told):
        try:
            for record in core_train.train(state):
                told["records"].append(record.as_line())
                told["events"] += [] if record.round is None else [asdict(record.round)]
                told["states"].append(snapshot(state))
                for fault in faults:
                    inject(state, *fault)
                told["begun"].append(parameters_of(state))
            for event in core_train.finish(state):
                told["events"].append(asdict(event))
                told["states"][-1] = snapshot(state)
        except TwinshardError as error:
            told["error"] = type(error).__name__
    told["trace"] = [tuple(dispatch) for dispatch in state.mesh.ledger.trace or []]
    return told


def parameters_of(state: TrainState) -> dict[str, Any]:
    """This rank's rows of every parameter."""
    return shards_of(state.model.named_parameters())


@contextmanager
def tapped(state: TrainState, told: Account) -> Iterator[None]:
    """Copies gradients and pseudo-gradients into ``told`` as they pass."""
    shipped_step, shipped_measure = core_train.apply_gradients, sync_round.measure_all
    shipped_finish = sync_round.finish

    def apply_gradients(of: TrainState, loss: Tensor) -> tuple[float, float]:
        told["grads"].append(gradients_of(of))
        return shipped_step(of, loss)

    def measure_all(*args: Any) -> tuple[sync_round.Measured, Tensor | None]:
        told["inner"].append(snapshot(state))
        told["combined"].append({})
        return shipped_measure(*args)

    def finish(
        unit: SyncUnit, held: UnitState, pending: Pending, *args: Any, **kwargs: Any
    ) -> sync_round.Finished:
        total, shards = pending.wait(), told["inner"][-1]["theta"]
        parts = total.clone().split([a.numel() for a in held.anchor])
        for name, part, a in zip(unit.names, parts, held.anchor, strict=True):
            told["combined"][-1][name] = like(shards[name], part.view(a.shape))
        return shipped_finish(unit, held, Pending(total, None), *args, **kwargs)

    with (
        mock.patch.object(core_train, "apply_gradients", apply_gradients),
        mock.patch.object(sync_round, "measure_all", measure_all),
        mock.patch.object(sync_round, "finish", finish),
    ):
        yield
