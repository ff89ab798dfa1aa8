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
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from core_torch.adamw import AdamW
from core_torch.collectives import psum
from core_torch.config import RunConfig
from core_torch.data.batches import Batch
from core_torch.data.corpus import Corpus
from core_torch.data.reading import read_batch
from core_torch.errors import NonFinite
from core_torch.evaluation import evaluate
from core_torch.hf.folder import load_weights
from core_torch.mesh import Mesh
from core_torch.models import Model, build_model, token_loss
from core_torch.models.loss import set_loss, summed_loss
from core_torch.parallel.pipeline import Pipelined, pipelined
from core_torch.parallel.tensor import tensor_parallel
from core_torch.schedules import learning_rate
from core_torch.shard.access import copies_of, local_shard
from core_torch.shard.base import Sharded
from core_torch.shard.counts import Counts, count_targets
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
    model: Model
    sharded: Sharded
    optimizer: AdamW
    sync: LocalSGD | None  # None: synchronous training
    step: int = 0  # completed inner steps of this replica
    tokens: int = 0  # seen by all replicas together; between timed rounds an estimate
    taps: RunTaps | None = None  # write a trace; see taps/run.py
    first_row: int = 0  # of the data, see data/batches.py; other only after a change of layout

    @property
    def planned_tokens(self) -> int:
        """Tokens of all replicas at the end of the run."""
        return self.config.train.steps * self.config.tokens_per_step

    @property
    def rows(self) -> int:
        """Sequences that this replica has taken; where its data go on, whatever the layout."""
        return self.first_row + self.step * self.config.rows_per_step

    @property
    def leaves_out_targets(self) -> bool:
        """Whether some targets may not count, so that ranks must tell how many do."""
        return self.config.data.packing == "documents"

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
    set_loss(model, chunk=config.train.loss_chunk, z_loss=config.train.z_loss)
    if config.train.init and not resumes:
        load_weights(model, config.train.init)
    if mesh.tp.size > 1:
        tensor_parallel(model, mesh)
    compute = config.train.compute
    compute_dtype = None if compute == "same" else DTYPES[compute]
    if mesh.pp.size > 1:
        stages = pipelined(model, mesh, config, compute_dtype=compute_dtype)
        sharded: Sharded = stages
        model = stages.module  # what this rank holds of it
    else:
        sharded = shard_model(model, mesh, config.shard, compute_dtype=compute_dtype)
    optimizer = build_optimizer(model, config)
    sync = build_engine(sharded, optimizer, mesh, config.sync, clock=clock)
    state = TrainState(config, mesh, corpus, model, sharded, optimizer, sync)
    if sync is not None:
        sync.votes.enough_tokens = state.planned_tokens
    return state


def build_optimizer(model: Model, config: RunConfig) -> AdamW:
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
        fused=optim.implementation == "fused",
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


def micro_batch(state: TrainState, index: int) -> Batch[Tensor]:
    """Micro-batch ``index`` of this rank."""
    mesh = state.mesh
    batch = read_batch(
        state.corpus,
        state.config.data,
        replicas=mesh.replica.size,
        shards=mesh.shard.size,
        step=index,
        replica=mesh.replica.index,
        shard=mesh.shard.index,
        first_row=state.first_row,
    )
    return Batch(*(torch.from_numpy(x).to(mesh.device) for x in batch if x is not None))


def inner_step(state: TrainState, *, synchronous: bool) -> tuple[float, float]:
    """Gradients of all micro-batches, clipping, AdamW. Returns loss and gradient norm."""
    accumulate, mesh = state.config.train.accumulate, state.mesh
    state.sharded.mean_over_replicas = synchronous
    batches = [micro_batch(state, state.step * accumulate + k) for k in range(accumulate)]
    counts = None
    if state.leaves_out_targets:
        counts = count_targets([batch.targets for batch in batches], mesh, synchronous=synchronous)
    total = torch.zeros((), device=mesh.device, dtype=torch.float64)
    if isinstance(state.sharded, Pipelined):
        total = state.sharded.step(batches, lambda x, y: loss_of(state.config, x, y, counts))
        batches = []
    for k, batch in enumerate(batches):
        state.sharded.begin_micro_batch(is_last=k == accumulate - 1)
        if state.taps is not None:
            state.taps.data(k, batch.inputs, batch.targets)
        loss = batch_loss(state, batch, counts)
        loss.backward()
        total += loss.detach()
    if counts is not None:  # what is recorded is the replica's own mean
        total *= counts.averaged / counts.replica
    state.sharded.finish_gradients()
    if state.sync is not None:  # a round inside the forward may have counted anew
        state.tokens = state.sync.votes.tokens
    return apply_gradients(state, total)


def batch_loss(state: TrainState, batch: Batch[Tensor], counts: Counts | None) -> Tensor:
    """() share of a micro-batch in the loss of the inner step; its mean over ranks is the loss.

    Args:
        state: of the run.
        batch: of this rank.
        counts: of the step; None: all targets count.
    """
    packed = {} if batch.documents is None else {"documents_BT": batch.documents}
    if state.config.train.loss_chunk:
        summed = state.model(batch.inputs, batch.targets, **packed)
        if state.taps is not None:
            state.taps.logits(None)
        return summed / divisor_of(state.config, counts)
    logits = state.model(batch.inputs, **packed)
    if state.taps is not None:
        state.taps.logits(logits)
    return loss_of(state.config, logits, batch.targets, counts)


def loss_of(
    config: RunConfig, logits_BTV: Tensor, targets_BT: Tensor, counts: Counts | None
) -> Tensor:
    """() the same from the logits."""
    train = config.train
    if counts is None and not train.z_loss:
        return token_loss(logits_BTV, targets_BT) / train.accumulate
    summed = summed_loss(logits_BTV, targets_BT, z_loss=train.z_loss)
    return summed / divisor_of(config, counts)


def divisor_of(config: RunConfig, counts: Counts | None) -> float:
    """By what a rank divides its summed losses. (L2)"""
    if counts is not None:
        return counts.averaged
    return config.train.accumulate * config.data.batch * config.data.sequence


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
    found = [p.grad for p in state.model.parameters() if p.grad is not None]
    grads = [local_shard(grad) for grad in found]
    copies = tuple(copies_of(grad, mesh.holders) for grad in found)
    square = sum_of_squares(grads, copies).to(loss.dtype)
    mine = torch.stack((loss / mesh.tp.size, square))  # ranks of tp have the same loss
    sums = psum(mine, mesh.model, scope="metrics")
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
