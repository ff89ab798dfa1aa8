"""Training: one generator that yields a record per inner step, so it needs no callbacks.

    state = build(config, mesh, corpus)
    for record in train(state):
        ...                          # log, checkpoint, stop whenever you like
    finish(state)

Everything that a run consists of is in ``TrainState``; the loop itself remembers nothing.
"""

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core_torch.adamw import AdamW
from core_torch.collectives import psum
from core_torch.config import RunConfig
from core_torch.data.batches import Layout, batch_for, count_sequences, held_out_batches
from core_torch.data.corpus import Corpus
from core_torch.errors import NonFinite
from core_torch.hf.folder import load_weights
from core_torch.mesh import Mesh
from core_torch.models import Llama, build_model, token_loss
from core_torch.schedules import learning_rate
from core_torch.shard.access import local_shard
from core_torch.shard.base import Sharded
from core_torch.shard.model import shard_model
from core_torch.sync.build import build_engine
from core_torch.sync.engine import LocalSGD
from core_torch.sync.events import RoundEvent, refuse_non_finite
from core_torch.sync.penalty import clip_coefficient
from core_torch.sync.sync_round import sum_of_squares
from core_torch.sync.trigger import Clock
from core_torch.taps.run import RunTaps

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One inner step of this rank's replica: a line of metrics.jsonl."""

    step: int
    tokens: int  # over all replicas
    loss: float  # mean over the replica's batch, before the step
    grad_norm: float  # of the replica, before clipping
    lr: float
    seconds: float  # of this step
    replica_bytes: int  # payload of this rank since the start, see collectives.py
    shard_bytes: int
    validation_loss: float | None = None
    round: RoundEvent | None = field(default=None, compare=False)

    def as_line(self) -> dict[str, Any]:
        """The record without the round, which has a file of its own."""
        line = asdict(self)
        del line["round"]
        return line


@dataclass(slots=True)
class TrainState:
    """A run in progress: all that a checkpoint saves, and what it is built from."""

    config: RunConfig
    mesh: Mesh
    corpus: Corpus
    model: Llama
    sharded: Sharded
    optimizer: AdamW
    sync: LocalSGD | None  # None: synchronous training
    step: int = 0  # completed inner steps of this replica
    tokens: int = 0  # seen by all replicas together; between timed rounds an estimate
    taps: RunTaps | None = None  # write a trace; see taps/run.py

    @property
    def planned_tokens(self) -> int:
        """Tokens of all replicas at the end of the run."""
        return self.config.train.steps * self.config.tokens_per_step

    @property
    def is_done(self) -> bool:
        """True when the run has its steps; if replicas' steps differ, its tokens."""
        if self.sync is not None and self.sync.is_timed and self.sync.state is not None:
            return self.sync.votes.agreed_tokens >= self.planned_tokens
        return self.step >= self.config.train.steps

    @property
    def common_step(self) -> int:
        """A step count on which all ranks agree, for the name of a commit."""
        if self.sync is not None and self.sync.is_timed and self.sync.state is not None:
            return self.sync.votes.agreed_tokens // self.config.tokens_per_step
        return self.step


def build(
    config: RunConfig,
    mesh: Mesh,
    corpus: Corpus,
    *,
    clock: Clock = time.monotonic_ns,
    resumes: bool = False,
) -> TrainState:
    """Builds model, shards, optimizer and engine for ``config`` on this rank.

    Args:
        config: of the run.
        mesh: joined.
        corpus: prepared.
        clock: of time triggers, in nanoseconds.
        resumes: a checkpoint will replace the weights, so ``train.init`` is not read.

    Raises:
        TwinshardError: the folder of ``train.init`` does not fit; see ``hf.folder``.
    """
    model = build_model(
        config.model,
        config.model.vocabulary or corpus.tokenizer.vocabulary,
        seed=config.train.seed,
        dtype=DTYPES[config.train.dtype],
    )
    if config.train.init and not resumes:
        load_weights(model, config.train.init)
    compute = config.train.compute
    compute_dtype = None if compute == "same" else DTYPES[compute]
    sharded = shard_model(model, mesh, config.shard, compute_dtype=compute_dtype)
    optimizer = build_optimizer(model, config)
    sync = build_engine(sharded, optimizer, mesh, config.sync, clock=clock)
    state = TrainState(config, mesh, corpus, model, sharded, optimizer, sync)
    if sync is not None:
        sync.votes.enough_tokens = state.planned_tokens
    return state


def build_optimizer(model: Llama, config: RunConfig) -> AdamW:
    """AdamW in which matrices decay and gains do not."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim >= 2]},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    optim = config.optim
    optimizer = AdamW(
        groups,
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
    )
    optimizer.init_state()
    return optimizer


def train(state: TrainState) -> Iterator[StepRecord]:
    """Takes inner steps until the run has its steps, and yields a record after each.

    A round that is due runs inside the step that it belongs to, or in the forward of the next
    one. Stop by leaving the loop; go on by calling this again. Under a time trigger a replica
    that by its own estimate is at the end waits in the next round, for the others to agree.

    Raises:
        NonFinite: a loss, gradient or pseudo-gradient that no penalty may leave out.
    """
    config, sync = state.config, state.sync
    while not state.is_done:
        if sync is not None and sync.is_timed and sync.state is not None and sync.votes.has_enough:
            sync.serve()
            state.tokens = sync.votes.tokens
            continue
        began = time.perf_counter()
        synchronous = sync is None or sync.is_synchronous
        loss, grad_norm = inner_step(state, synchronous=synchronous)
        state.step += 1
        check_step(state, loss, grad_norm, synchronous=synchronous)
        event = None
        if sync is None:
            state.tokens += config.tokens_per_step
        else:
            event = sync.after_step(config.tokens_per_step // state.mesh.replica.size)
            state.tokens = sync.votes.tokens
        refuse_non_finite(event, config.sync)
        seconds = time.perf_counter() - began
        every = config.train.evaluate_every
        evaluate_now = every > 0 and state.step % every == 0
        record = StepRecord(
            step=state.step,
            tokens=state.tokens,
            loss=loss,
            grad_norm=grad_norm,
            lr=state.optimizer.param_groups[0]["lr"],
            seconds=seconds,
            replica_bytes=state.mesh.ledger.bytes_over("replica"),
            shard_bytes=state.mesh.ledger.bytes_over("shard"),
            validation_loss=evaluate(state) if evaluate_now else None,
            round=event,
        )
        if state.taps is not None:
            state.taps.end_step()
        yield record


def finish(state: TrainState) -> list[RoundEvent]:
    """Ends a run: what is due, in flight or left over. Returns the events not yet told.

    Commit a checkpoint *before* this call if the run may be extended.
    """
    events = [] if state.sync is None else state.sync.finish()
    for event in events:
        refuse_non_finite(event, state.config.sync)
    return events


def micro_batch(state: TrainState, index: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (B, T) int64 each, of micro-batch ``index`` of this rank."""
    data, mesh = state.config.data, state.mesh
    ids = state.corpus.train.ids
    layout = Layout(
        num_sequences=count_sequences(len(ids), data.sequence),
        sequence=data.sequence,
        batch=data.batch,
        replicas=mesh.replica.size,
        shards=mesh.shard.size,
        seed=data.seed,
    )
    pair = batch_for(ids, layout, step=index, replica=mesh.replica.index, shard=mesh.shard.index)
    inputs, targets = (torch.from_numpy(x).to(mesh.device) for x in pair)
    return inputs, targets


def inner_step(state: TrainState, *, synchronous: bool) -> tuple[float, float]:
    """Gradients of all micro-batches, clipping, AdamW. Returns loss and gradient norm."""
    accumulate = state.config.train.accumulate
    state.sharded.mean_over_replicas = synchronous
    total = torch.zeros((), device=state.mesh.device, dtype=torch.float64)
    for k in range(accumulate):
        inputs, targets = micro_batch(state, state.step * accumulate + k)
        state.sharded.begin_micro_batch(is_last=k == accumulate - 1)
        if state.taps is not None:
            state.taps.data(k, inputs, targets)
        logits = state.model(inputs)
        if state.taps is not None:
            state.taps.logits(logits)
        loss = token_loss(logits, targets) / accumulate
        del logits  # autograd keeps what it needs of them
        loss.backward()
        total += loss.detach()
    state.sharded.finish_gradients()
    if state.sync is not None:  # a round inside the forward may have counted anew
        state.tokens = state.sync.votes.tokens
    return apply_gradients(state, total)


@torch.no_grad()
def apply_gradients(state: TrainState, loss: Tensor) -> tuple[float, float]:
    """Clips by the replica's own norm and steps the optimizer; one small message.

    Args:
        state: with gradients in place.
        loss: () this rank's mean loss.

    Returns:
        Mean loss and gradient norm of the replica.
    """
    mesh, optim = state.mesh, state.config.optim
    grads = [local_shard(p.grad) for p in state.model.parameters() if p.grad is not None]
    square = sum_of_squares(grads, (1,) * len(grads)).to(loss.dtype)
    sums = psum(torch.stack((loss, square)), mesh.shard, scope="metrics")
    norm, factor = sums[1].sqrt(), None
    if state.taps is not None:
        state.taps.gradients(sums[0] / mesh.shard.size)
    if optim.max_norm > 0:
        factor = clip_coefficient(norm, max_norm=optim.max_norm, eps=1e-6)
        for grad in grads:
            grad.mul_(factor)
    if state.taps is not None:
        state.taps.clipped(norm, factor)
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate_of(
            state.config, tokens=state.tokens + state.config.tokens_per_step
        )
    state.optimizer.step()
    state.optimizer.zero_grad()
    return float(sums[0]) / mesh.shard.size, float(norm)


def learning_rate_of(config: RunConfig, *, tokens: int) -> float:
    """Learning rate of the inner step that ends at ``tokens`` tokens over all replicas."""
    schedule = config.schedule
    return learning_rate(
        tokens,
        peak=config.optim.lr,
        shape=schedule.shape,
        warmup_tokens=schedule.warmup_tokens,
        total_tokens=config.total_tokens,
        final_ratio=schedule.final_ratio,
        decay_share=schedule.decay_share,
    )


def check_step(state: TrainState, loss: float, grad_norm: float, *, synchronous: bool) -> None:
    """Stops on a non-finite step, unless the penalty will leave this replica out.

    In a synchronous step a NaN reaches every replica through the mean, so nothing can help.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    if not synchronous and state.sync is not None and state.sync.rules.excludes:
        return
    what = "loss" if not math.isfinite(loss) else "gradient norm"
    raise NonFinite(
        f"{what} is {loss if what == 'loss' else grad_norm}",
        where=f"replica {state.mesh.replica.index}, inner step {state.step}, "
        f"method {state.config.sync.method}",
        likely="the learning rate is too high, or the data hold something unusual",
        next="a lower --optim.lr, or --sync.method edit, whose penalty leaves bad replicas out",
    )


@torch.no_grad()
def evaluate(state: TrainState) -> float:
    """Mean loss of the anchor over ``config.train.evaluate_sequences`` held-out sequences.

    Every replica evaluates the same sequences, cut over its shards, so that nothing crosses
    the replica axis (but for CO2*, whose anchor is cut over it); the trajectory is not touched.
    """
    data, mesh = state.config.data, state.mesh
    wanted = state.config.train.evaluate_sequences
    [(inputs, targets)] = held_out_batches(
        state.corpus.held_out.ids, data.sequence, batch=wanted, count=wanted
    )
    count, shards = len(inputs), mesh.shard.size
    turns = -(-count // (shards * data.batch))  # every rank runs as many forwards
    total = torch.zeros((), device=mesh.device, dtype=torch.float64)
    state.model.eval()
    with anchor(state):
        for turn in range(turns):
            first = (turn * shards + mesh.shard.index) * data.batch
            rows = np.arange(first, first + data.batch)
            keep = torch.from_numpy(rows < count).to(mesh.device)
            x, y = (torch.from_numpy(a[rows % count]).to(mesh.device) for a in (inputs, targets))
            total += sum_of_losses(state.model, x, y, keep)
    state.model.train()
    return float(psum(total, mesh.shard, scope="evaluation")) / count


def sum_of_losses(model: Llama, inputs_BT: Tensor, targets_BT: Tensor, keep_B: Tensor) -> Tensor:
    """() float64 sum of the mean losses of the kept sequences."""
    logits = model(inputs_BT)
    pairs = zip(logits, targets_BT, strict=True)
    losses = torch.stack([token_loss(x[None], y[None]).double() for x, y in pairs])
    return (losses * keep_B).sum()


def anchor(state: TrainState) -> AbstractContextManager[None]:
    """Context in which the model holds what all replicas agreed on last."""
    return nullcontext() if state.sync is None else state.sync.anchor_weights()
