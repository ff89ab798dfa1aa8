"""The loss on text that no step has seen, of what all replicas agreed on last."""

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from core_torch.collectives import psum
from core_torch.data.batches import IGNORE
from core_torch.data.reading import read_held_out
from core_torch.models import token_loss
from core_torch.models.loss import summed_loss
from core_torch.taps.run import Run


@torch.no_grad()
def evaluate(state: Run) -> float:
    """Mean loss of the anchor over ``config.train.evaluate_sequences`` held-out sequences.

    The cross entropy of the targets that count, without a z-loss. Every replica evaluates the
    same sequences, cut over its shards, so that nothing crosses the replica axis (but for CO2*,
    whose anchor is cut over it); the trajectory is not touched.
    """
    data, mesh, chunked = state.config.data, state.mesh, state.config.train.loss_chunk > 0
    wanted = state.config.train.evaluate_sequences
    batch = read_held_out(state.corpus, data, wanted)
    count, shards = len(batch.inputs), mesh.shard.size
    by_token = chunked or bool((batch.targets == IGNORE).any())
    turns = -(-count // (shards * data.batch))  # every rank runs as many forwards
    total = torch.zeros((), device=mesh.device, dtype=torch.float64)
    state.model.eval()
    with anchor(state):
        for turn in range(turns):
            first = (turn * shards + mesh.shard.index) * data.batch
            rows = np.arange(first, first + data.batch)
            keep = torch.from_numpy(rows < count).to(mesh.device)
            x, y, *more = (
                torch.from_numpy(a[rows % count]).to(mesh.device) for a in batch if a is not None
            )
            known = {"documents_BT": more[0]} if more else {}
            if by_token:
                y = y.where(keep[:, None], IGNORE)
            if chunked:
                total += state.model(x, y, **known)
                continue
            logits = state.sharded.logits(x, **known)
            if logits is not None:
                total += summed_loss(logits, y) if by_token else sum_of_losses(logits, y, keep)
        state.sharded.free()
    state.model.train()
    divisor = int((batch.targets != IGNORE).sum()) if by_token else count
    total = psum(psum(total, mesh.shard, scope="evaluation"), mesh.pp, scope="evaluation")
    return float(total) / max(1, divisor)


def sum_of_losses(logits_BTV: Tensor, targets_BT: Tensor, keep_B: Tensor) -> Tensor:
    """() float64 sum of the mean losses of the kept sequences."""
    pairs = zip(logits_BTV, targets_BT, strict=True)
    losses = torch.stack([token_loss(x[None], y[None]).double() for x, y in pairs])
    return (losses * keep_B).sum()


def anchor(state: Run) -> AbstractContextManager[None]:
    """Context in which the model holds what all replicas agreed on last."""
    return nullcontext() if state.sync is None else state.sync.anchor_weights()
