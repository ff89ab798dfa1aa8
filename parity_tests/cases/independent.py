"""Right-hand sides of the equalities that do not go through the engine: other optimizers,
methods written out by hand, a gradient computed by one process alone.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from core_torch.adamw import AdamW
from core_torch.errors import ReplicasDiffer
from core_torch.models import build_model, token_loss
from core_torch.shard.access import local_shard
from core_torch.train import TrainState, inner_step, micro_batch
from parity_tests.cases.equalities import (
    TINY,
    VOCABULARY,
    Account,
    Changes,
    account_of,
    begin,
    inject,
    sequence_of,
    snapshot,
)
from parity_tests.harness.torch_bridge import Shard, shards_of, to_numpy


def run_with_sgd(changes: Changes) -> Account | None:
    """A run whose inner optimizer is torch's SGD without momentum."""
    state = begin(changes)
    if state is None:
        return None
    sgd = torch.optim.SGD(state.model.parameters(), lr=0.0)  # the schedule sets it
    state.optimizer = cast(AdamW, sgd)
    if state.sync is not None:
        state.sync.optimizer = sgd
    return account_of(state)


def post_local_sgd_in_numpy(changes: Changes, every: int, warmup: int) -> list[Any]:
    """Synchronous steps, then local ones with a mean of the parameters every ``every``."""
    state = begin(changes)
    assert state is not None and state.sync is None
    history = [snapshot(state)]
    while state.step < state.config.train.steps:
        if step_by_hand(state, every, warmup):
            for p in state.model.parameters():
                everyone = np.stack([to_numpy(x) for x in of_all_replicas(state, p)])
                local_shard(p).copy_(torch.from_numpy(everyone.mean(axis=0)))
        history.append(snapshot(state))
    return history


def diloco_with_torch_sgd(
    changes: Changes, every: int, warmup: int, lr: float, momentum: float
) -> list[Any]:
    """DiLoCo as its paper writes it: torch's Nesterov SGD on the mean of anchor - local."""
    state = begin(changes)
    assert state is not None and state.sync is None
    history = [snapshot(state)]
    anchors: list[Tensor] = []
    while state.step < state.config.train.steps:
        due = step_by_hand(state, every, warmup)
        if state.step == warmup:
            anchors = [local_shard(p).clone() for p in state.model.parameters()]
            outer = torch.optim.SGD(anchors, lr=lr, momentum=momentum, nesterov=True)
        if due:
            for anchor, p in zip(anchors, state.model.parameters(), strict=True):
                local = of_all_replicas(state, p)
                anchor.grad = torch.stack([anchor - x for x in local]).mean(dim=0)
            outer.step()
            for anchor, p in zip(anchors, state.model.parameters(), strict=True):
                local_shard(p).copy_(anchor)
        history.append(snapshot(state))
    return history


def co2_in_numpy(
    changes: Changes, every: int, warmup: int, lr: float, momentum: float, clip: float
) -> list[Any]:
    """CO2: each meeting uses what the one before it has sent; the last uses its own as well."""
    state = begin(changes)
    assert state is not None and state.sync is None
    history, sent = [snapshot(state)], None
    anchors: list[np.ndarray] = []
    while state.step < state.config.train.steps:
        due = step_by_hand(state, every, warmup)
        if state.step == warmup:
            anchors = [to_numpy(p) for p in state.model.parameters()]
            velocities = [np.zeros_like(a) for a in anchors]
        if due:
            means, moved = means_and_progress(state, anchors)
            if sent is not None:
                use_late(state, anchors, velocities, sent, moved, (lr, momentum, clip))
            write(state, anchors)
            sent = means
        history.append(snapshot(state))
    assert due and sent is not None, "let the run end with a meeting"
    use_late(state, anchors, velocities, sent, moved, (lr, momentum, clip))
    write(state, anchors)
    return [*history, snapshot(state)]


def means_and_progress(
    state: TrainState, anchors: list[np.ndarray]
) -> tuple[list[np.ndarray], float]:
    """Mean pseudo-gradients over the replicas, and the mean of their norms."""
    everyone = [
        np.stack([anchor - to_numpy(x) for x in of_all_replicas(state, p)])
        for anchor, p in zip(anchors, state.model.parameters(), strict=True)
    ]
    norms = [norm_over_shards(state, [d[n] for d in everyone]) for n in range(len(everyone[0]))]
    return [d.mean(axis=0) for d in everyone], float(np.mean(norms))


def norm_over_shards(state: TrainState, parts: list[np.ndarray]) -> float:
    """L2 norm of what the ranks of this replica hold together."""
    square = torch.tensor([sum(float((x * x).sum()) for x in parts)], dtype=torch.float64)
    dist.all_reduce(square, group=state.mesh.model.group)
    return float(square) ** 0.5


def use_late(
    state: TrainState,
    anchors: list[np.ndarray],
    velocities: list[np.ndarray],
    sent: list[np.ndarray],
    moved: float,
    numbers: tuple[float, float, float],
) -> None:
    """Heavy-ball momentum on a stale mean, clipped by element; in place."""
    lr, momentum, clip = numbers
    gap = 1 + norm_over_shards(state, velocities) / (moved + 1e-6)
    for anchor, velocity, mean in zip(anchors, velocities, sent, strict=True):
        velocity[...] = np.clip(momentum * velocity + mean / gap, -clip, clip)
        anchor -= lr * velocity


def streaming_in_numpy(
    changes: Changes, every: int, warmup: int, delay: int, mix: float, outer: tuple[float, float]
) -> list[Any]:
    """Streaming DiLoCo with two fragments: the embedding and block 1; block 0 and the head."""
    state = begin(changes)
    assert state is not None and state.sync is None
    history, flights = [snapshot(state)], dict[int, tuple[int, dict[str, np.ndarray]]]()
    params = dict(state.model.named_parameters())
    second = ("layers.0.", "norm.", "output.")
    anchors: dict[str, np.ndarray] = {}
    while state.step < state.config.train.steps:
        step_by_hand(state, every, warmup)
        if state.step == warmup:
            anchors = {name: to_numpy(p) for name, p in params.items()}
            velocities = {name: np.zeros_like(a) for name, a in anchors.items()}
        if state.step in flights:
            for name, mean in flights.pop(state.step)[1].items():
                nesterov(anchors[name], velocities[name], mean, *outer)
                mixed = mix * to_numpy(params[name]) + (1 - mix) * anchors[name]
                local_shard(params[name]).copy_(torch.from_numpy(mixed))
        for p in range(2):
            since = state.step - warmup - p * every // 2
            if state.step > warmup and since % every == 0:
                mine = [name for name in params if name.startswith(second) == bool(p)]
                means = {name: mean_progress(state, anchors[name], params[name]) for name in mine}
                flights[state.step + delay] = (p, means)
        history.append(snapshot(state))
    return history


def mean_progress(state: TrainState, anchor: np.ndarray, p: Tensor) -> np.ndarray:
    """Mean over the replicas of anchor - local."""
    everyone = [anchor - to_numpy(x) for x in of_all_replicas(state, p)]
    return np.stack(everyone).mean(axis=0)


def nesterov(
    anchor: np.ndarray, velocity: np.ndarray, mean: np.ndarray, lr: float, momentum: float
) -> None:
    """In place, as Sutskever et al. write it for a gradient."""
    velocity *= momentum
    velocity += mean
    anchor -= lr * (mean + momentum * velocity)


def write(state: TrainState, values: list[np.ndarray]) -> None:
    """Puts this rank's rows of every parameter in place."""
    for value, p in zip(values, state.model.parameters(), strict=True):
        local_shard(p).copy_(torch.from_numpy(value))


def step_by_hand(state: TrainState, every: int, warmup: int) -> bool:
    """One inner step; True if replicas have to meet after it."""
    inner_step(state, synchronous=state.step < warmup)
    state.step += 1
    return state.step > warmup and (state.step - warmup) % every == 0


def of_all_replicas(state: TrainState, p: Tensor) -> list[Tensor]:
    """This rank's rows of ``p`` as each replica holds them."""
    mine = local_shard(p).contiguous()
    everyone = [torch.empty_like(mine) for _ in range(state.mesh.replica.size)]
    dist.all_gather(everyone, mine, group=state.mesh.replica.group)
    return everyone


def gradients(
    changes: Changes, synchronous: bool, identities: Sequence[int] | None
) -> dict[str, Shard]:
    """This rank's part of the first inner step's gradient, before clipping.

    With a single identity, draw q of all replicas together is its row q, on every mesh.
    """
    state = begin(changes, identities)
    assert state is not None
    state.sharded.mean_over_replicas = synchronous
    accumulate = state.config.train.accumulate
    for k in range(accumulate):
        inputs, targets, _ = micro_batch(state, k)
        state.sharded.begin_micro_batch(is_last=k == accumulate - 1)
        loss = token_loss(state.model(inputs), targets) / accumulate
        torch.autograd.backward(loss)
    state.sharded.finish_gradients()
    grads = {name: p.grad for name, p in state.model.named_parameters()}
    return shards_of({name: g for name, g in grads.items() if g is not None})


def gradient_alone(identities: Sequence[int], rows: int) -> dict[str, np.ndarray]:
    """Gradient of the mean over the first rows of these identities; no ranks, no sharding."""
    model = build_model(TINY.model, VOCABULARY, seed=TINY.train.seed, dtype=torch.float64)
    whole = np.stack([sequence_of(i, row) for i in identities for row in range(rows)])
    inputs = torch.from_numpy(whole.astype(np.int64))
    targets = torch.cat((inputs[:, 1:], torch.zeros_like(inputs[:, :1])), dim=1)
    torch.autograd.backward(token_loss(model(inputs), targets))
    return {name: to_numpy(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def error_of_other_seeds(changes: Changes) -> str | None:
    """What this rank is told when replica 1 was initialised from another seed."""
    replicas = changes["mesh"]["replicas"]
    shards = changes["mesh"]["shards"]
    other = changes | {"train": {"seed": int(dist.get_rank() // shards == replicas - 1)}}
    try:
        begin(other)
    except ReplicasDiffer as error:
        return error.what
    return None


@torch.no_grad()
def anchor_weights_restore(changes: Changes, steps: int) -> dict[str, bool]:
    """Takes ``steps`` steps, hides a NaN, enters and leaves ``anchor_weights`` twice."""
    state = begin(changes)
    assert state is not None and state.sync is not None
    with torch.enable_grad():
        while state.step < steps:
            inner_step(state, synchronous=False)
            state.step += 1
            state.sync.after_step()
    inject(state, steps, 0, "tok_embeddings.weight", float("nan"))
    before = bits_of(state)
    assert state.sync.state is not None
    store = state.sync.state.store
    held = [x for u in range(len(state.sync.units)) for x in store.get(u).anchor]
    with state.sync.anchor_weights():
        inside = [local_shard(p) for unit in state.sync.units for p in unit.params]
        shows_anchor = all(torch.equal(x, a) for x, a in zip(inside, held, strict=True))
        differs = bits_of(state) != before
    left = bits_of(state) == before
    try:
        with state.sync.anchor_weights():
            raise KeyError("an evaluation fails")
    except KeyError:
        pass
    return {
        "shows the anchor": shows_anchor,
        "anchor differs from parameters": differs,
        "restored": left,
        "restored after an error": bits_of(state) == before,
    }


def bits_of(state: TrainState) -> list[bytes]:
    """Exact bits of this rank's parameters."""
    return [to_numpy(p).tobytes() for p in state.model.parameters()]
