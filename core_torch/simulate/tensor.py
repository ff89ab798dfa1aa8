"""Tensor parallelism: shapes of a rank's pieces, and what it sends over the axis tp.

The cuts are those of parallel/tensor.py. Its messages are torch's own and stand in no ledger; a
test counts them in a short run. Letters as in memory.py.
"""

from collections.abc import Iterator

from core_torch.config import RunConfig
from core_torch.simulate.shapes import Parameter, Units
from core_torch.simulate.traffic import Message, Traffic, compute_bytes

BY_ROWS = ("tok_embeddings", "pos_embeddings", "output", "wq", "wk", "wv", "w1", "w3")
BY_COLUMNS = ("wo", "w2")  # their biases lie on every rank of tp whole, as gains do


def cut_over_tp(units: Units, tp: int) -> Units:
    """Every parameter as the first rank of tp holds it, which no other exceeds."""
    return {unit: [_cut(p, tp) for p in params] for unit, params in units.items()}


def _cut(p: Parameter, tp: int) -> Parameter:
    module, (first, *rest) = p.name.split(".")[-2], p.shape
    if module in BY_ROWS:
        return p._replace(shape=(-(-first // tp), *rest))
    if module in BY_COLUMNS and rest:
        return p._replace(shape=(first, rest[0] // tp))
    return p


def with_slices(traffic: Traffic, config: RunConfig, units: Units, vocabulary: int) -> Traffic:
    """``traffic`` and what the slices of every inner step send each other.

    Args:
        traffic: over the other axes.
        config: of the run.
        units: of the whole model.
        vocabulary: token ids.
    """
    if config.mesh.tp == 1:
        return traffic
    found = list(_messages(config, units, vocabulary))
    return traffic._replace(
        local_step=[*traffic.local_step, *found],
        synchronous_step=[*traffic.synchronous_step, *found],
    )


def _messages(config: RunConfig, units: Units, vocabulary: int) -> Iterator[Message]:
    """Of one inner step.

    Each gather of a forward has a scatter in the backward, and the reverse. A block has two of
    each: before its products (a gather) and behind them (a scatter). Only the logits' gather has
    no counterpart, for every rank has their whole gradient.
    """
    model, item, tp = config.model, compute_bytes(config), config.mesh.tp
    times = config.train.accumulate
    entry = config.data.batch * config.data.sequence * model.dim * item  # (B, T, D)
    names = [p.name for params in units.values() for p in params]
    norms, ends, again = 2 * model.layers + 1, 2 * model.layers + 1, 0
    if config.shard.recompute != "none":  # a block's forward once more, but for its end
        again = model.layers
    gathers = norms + ends + 2 * again
    scatters = norms + ends + again
    yield Message("tp", "all_gather", "activations", gathers * entry * times, gathers * times)
    yield Message("tp", "reduce_scatter", "activations", scatters * entry * times, scatters * times)
    if "pos_embeddings.weight" in names:
        row = config.data.sequence * model.dim * item  # (1, T, D)
        yield Message("tp", "all_gather", "activations", row * times, times)
        yield Message("tp", "reduce_scatter", "activations", row * times, times)
    padded = -(-vocabulary // tp) * tp
    logits = entry // model.dim * padded
    yield Message("tp", "all_gather", "logits", logits * times, times)
    copied = [p for params in units.values() for p in params if _cut(p, tp) == p]
    size = sum(p.numel for p in copied) * item
    yield Message("tp", "all_reduce", "gradients", size * times, len(copied) * times)
