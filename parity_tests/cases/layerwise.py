"""Runs whose rounds may lie inside a forward, told forward by forward. Imports no jax.

A whole round right after a step and one inside the next forward must give the same parameters
once that forward is over, and the same loss; in between they differ by design.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from core_torch import train as core_train
from core_torch.models import Llama, token_loss
from core_torch.shard.access import local_shard
from core_torch.train import TrainState
from parity_tests.cases.equalities import Account, Changes, Fault, account_of, begin


def run(
    changes: Changes,
    faults: Sequence[Fault] = (),
    observed: bool = False,
    step_ns: Sequence[int] = (),
) -> Account | None:
    """As ``equalities.run``, with an account of every training forward in place of the history.

    Returns:
        ``forwards``, the loss of each and a digest of this rank's parameters right after it.
    """
    state = begin(changes, step_ns=step_ns)
    return None if state is None else told_by_forwards(state, faults, observed)


def run_with_a_unit_used_twice(changes: Changes, faults: Sequence[Fault] = ()) -> Account | None:
    """The same with a model that goes through its first block again at the end."""
    with mock.patch.object(Llama, "forward", through_the_first_block_twice):
        return run(changes, faults)


def through_the_first_block_twice(model: Llama, tokens: Tensor) -> Tensor:
    """Logits of a model whose first block comes once more behind the last one."""
    x = model.tok_embeddings(tokens)
    for block in [*model.layers, model.layers[0]]:
        x = block(x)
    logits: Tensor = model.output(model.norm(x))
    return logits


def told_by_forwards(
    state: TrainState, faults: Sequence[Fault] = (), observed: bool = False
) -> Account:
    """Trains ``state`` to its end; see ``run``."""
    forwards: list[dict[str, Any]] = []

    def loss_and_parameters(logits: Tensor, targets: Tensor) -> Tensor:
        loss = token_loss(logits, targets)
        if torch.is_grad_enabled():
            now = (local_shard(p) for p in state.model.parameters())
            forwards.append({"loss": float(loss.detach()), "parameters": digest(now)})
        return loss

    with mock.patch.object(core_train, "token_loss", loss_and_parameters):
        told = account_of(state, faults, observed)
    del told["history"]
    return told | {"forwards": forwards}


def digest(tensors: Iterable[Tensor]) -> str:
    """Of every bit."""
    found = hashlib.sha256()
    for x in tensors:
        found.update(x.detach().contiguous().numpy().tobytes())
    return found.hexdigest()
