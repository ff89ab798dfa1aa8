"""Bytes on one rank by category, and of a checkpoint. Rank 0's, which no other exceeds.

What lies there all the time is exact: tests compare it with the tensors of real runs. What an
eager forward keeps for its backward is what autograd keeps of the models on a CPU, also compared.
The peaks of what comes and goes are estimates. Allocator, kernels and libraries come on top, so a
plan should leave a tenth free.

Letters as in models/llama.py: D width, H heads, K key/value heads, E width of a head, F inside
the feed-forward, V vocabulary, T tokens of a sequence.
"""

from typing import NamedTuple

from core_torch.config import ModelConfig, RunConfig
from core_torch.simulate.shapes import ITEM_BYTES, Units, chunks, has_rounds, numel, sync_units
from core_torch.simulate.traffic import code_bytes, compute_bytes
from core_torch.sync.methods import Rules, rules_of

TEMPORARIES = 4  # copies of a unit at the end of its exchange: mean, anchor, velocity, scaled


class Part(NamedTuple):
    """One category."""

    name: str
    bytes: int
    place: str = "always"  # "always", "step", "round" (as long as that lasts) or "host"
    checked: bool = True  # against real tensors; False: an estimate


def memory_of(config: RunConfig, units: Units, vocabulary: int) -> list[Part]:
    """All categories of one rank, those without bytes left out."""
    item, shards = ITEM_BYTES[config.train.dtype], config.mesh.shards
    held = sum(chunks(params, shards) for params in units.values())
    parts = [
        Part("parameters", held * item),
        Part("gradients", held * item, "step"),
        Part("AdamW moments", 2 * held * item),
        *_outer_state(config, units, held),
        *_unsharded(config, units),
        *_activations(config, vocabulary),
        *_round(config, units),
    ]
    return [part for part in parts if part.bytes]


def device_peak(parts: list[Part], *, layerwise: bool) -> int:
    """Most bytes on the device at once: a round comes after a step, or inside its forward."""
    total = {place: sum(p.bytes for p in parts if p.place == place) for place in _PLACES}
    meeting = [total["step"], total["round"]]
    return total["always"] + (sum(meeting) if layerwise else max(meeting))


_PLACES = ("always", "step", "round")


def checkpoint_bytes(config: RunConfig, units: Units, *, in_flight: bool) -> int:
    """Bytes of all tensors of a commit, after replicas parted; headers and JSON come on top.

    Args:
        config: of the run.
        units: of the model.
        in_flight: an exchange of every unit is on its way (CO2: always, after the first round).
    """
    item, everything = ITEM_BYTES[config.train.dtype], sum(map(numel, units.values()))
    count = sum(map(len, units.values()))
    ranks, rules = config.mesh.ranks, rules_of(config.sync)
    own = 3 * everything * item  # parameters and moments
    if rules.wire != "fp32":
        own += everything * item  # residuals, from the first round on
    counters = 7 if has_rounds(config.sync.method) else 2  # int64, see checkpoint/snapshot.py
    # Every file has them, but for those of parameters on other stages.
    scalars = ranks // config.mesh.pp * count * item + ranks * counters * 8
    shared = 2 * everything * item if has_rounds(config.sync.method) else 0
    if in_flight:
        shared += everything * item
    return config.mesh.replicas * own + shared + scalars


def _outer_state(config: RunConfig, units: Units, held: int) -> list[Part]:
    """Anchor, velocity, exchanges in flight between rounds, residuals."""
    rules, item = rules_of(config.sync), ITEM_BYTES[config.train.dtype]
    if not has_rounds(config.sync.method):
        return []
    replicas, taking_part = config.mesh.replicas, sync_units(units, rules)
    sizes = [chunks(params, config.mesh.shards) for params in taking_part.values()]
    cut = replicas if rules.store == "replicas" else 1
    kept = sum(-(-size // cut) for size in sizes) * item
    place = "host" if rules.store == "host" else "always"
    parts = [Part("anchor", kept, place), Part("velocity", kept, place)]
    if rules.method.finish == "next round":
        parts.append(
            Part("exchange in flight", sum(_flight(s, item, rules, replicas) for s in sizes))
        )
    elif rules.delay_steps:
        most = max(_flight(size, item, rules, replicas) for size in sizes)
        parts.append(Part("exchange in flight", most))
    if rules.wire != "fp32" and replicas > 1:
        parts.append(Part("residuals", held * item))
    return parts


def _flight(size: int, item: int, rules: Rules, replicas: int) -> int:
    """Bytes of a unit's sum, or of all replicas' codes, until it is used."""
    if rules.wire == "fp32" or replicas == 1:
        return size * item
    return replicas * code_bytes(size, rules.wire)


def _unsharded(config: RunConfig, units: Units) -> list[Part]:
    """Whole parameters and gradients at their peak, in the backward."""
    shards = config.mesh.shards
    whole = [chunks(params, shards) * shards for params in units.values()]
    largest = max(whole)
    if config.shard.method == "simple_fsdp" and config.shard.compile == "off":
        largest = max(p.chunk(shards) * shards for params in units.values() for p in params)
        pair = largest  # gathered when read, freed after
    else:
        pair = max(map(sum, zip(whole, whole[1:], strict=False)), default=largest)  # one ahead
    gathered = pair if config.shard.reshard_after_forward else sum(whole)
    item, wide = compute_bytes(config), ITEM_BYTES[config.train.dtype]
    parts = [
        Part("gathered parameters", gathered * item, "step", checked=False),
        Part("whole gradients of a unit", largest * (item + wide), "step", checked=False),
    ]
    averages = config.sync.method == "synchronous" or config.sync.warmup > 0
    if config.shard.method == "fsdp2" and config.train.accumulate > 1 and averages:
        name = "whole gradients between micro-batches"
        parts.append(Part(name, sum(whole) * wide, "step", checked=False))
    return parts


def _activations(config: RunConfig, vocabulary: int) -> list[Part]:
    """What the forward keeps for the backward, by the tokens of one micro-batch."""
    model, item = config.model, compute_bytes(config)
    wide, tokens = max(item, 4), config.data.batch * config.data.sequence
    layer, mode = layer_bytes(model, item, config.mesh.tp), config.shard.recompute
    if mode == "none":
        kept = model.layers * layer
    else:
        entry = model.dim * item
        if mode == "selective":
            entry += _selective(model, item)
        kept = model.layers * entry + layer  # one block at a time is computed again
    is_eager = mode == "none" and config.shard.compile == "off" and config.mesh.tp == 1
    rest = end_bytes(model, item) + 2 * 8  # final norm; ids and targets
    logits = vocabulary * (2 * wide + (item if item < wide else 0))
    held = min(tokens, config.train.loss_chunk or tokens)
    places, tables = 0, model.context * model.head_width * ITEM_BYTES[config.train.dtype]
    if model.kind == "gpt2":
        places, tables = config.data.sequence * 8, 0
    return [
        Part("activations", (kept + rest) * tokens + places, "step", checked=is_eager),
        Part("logits and their gradient", logits * held, "step", checked=False),
        Part("rotary tables", tables),
    ]


def layer_bytes(model: ModelConfig, item: int, tp: int = 1) -> int:
    """Bytes per token that a block keeps for its backward, computing in ``item`` bytes.

    Two norms keep their input wide, it normed, and the result; attention its three inputs, its
    result and a logarithm per head; the feed-forward its wide gate and three of width F, and
    GPT-2's its wide input and its result. Norms of heads keep their input wide and it normed.
    Under tensor parallelism only the result of norms is there for all positions and all widths.
    """
    wide, every = max(item, 4), model.heads + model.kv_heads
    norms = 2 * (model.dim * item + (model.dim * (wide + item) + _statistics(model, wide)) // tp)
    attention = 2 * every * model.head_width * item + model.heads * wide
    if model.kind == "qwen3":
        attention += every * (model.head_width * (wide + item) + wide)
    inside = wide + item if model.kind == "gpt2" else wide + 3 * item
    return norms + (attention + model.hidden * inside) // tp


def end_bytes(model: ModelConfig, item: int) -> int:
    """Bytes per token that the final norm keeps."""
    wide = max(item, 4)
    return model.dim * (wide + 2 * item) + _statistics(model, wide)


def _statistics(model: ModelConfig, wide: int) -> int:
    """Bytes of what a norm divides by, and of the mean if it takes that away."""
    return 2 * wide if model.kind == "gpt2" else wide


def _selective(model: ModelConfig, item: int) -> int:
    """Bytes per token that selective recomputation keeps of a block besides its input.

    The result of attention, and of every second product: wq, wv, w1 and, if there is w3, w2.
    """
    products = (2 * model.heads + model.kv_heads) * model.head_width + model.hidden
    products += 0 if model.kind == "gpt2" else model.dim
    return products * item + model.heads * max(item, 4)


def _round(config: RunConfig, units: Units) -> list[Part]:
    """What a round needs besides, at its peak."""
    rules, item = rules_of(config.sync), ITEM_BYTES[config.train.dtype]
    taking_part = sync_units(units, rules)
    if not taking_part:
        return []
    sizes = [chunks(params, config.mesh.shards) for params in taking_part.values()]
    replicas, most = config.mesh.replicas, max(sizes)
    abreast = min(rules.prefetch_units, len(sizes))
    waiting = sum(sorted(_flight(size, item, rules, replicas) for size in sizes)[-abreast:])
    brought = 0
    if rules.store == "host":
        brought = 2 * sum(sorted(sizes)[-abreast:]) * item
    elif rules.store == "replicas":
        brought = 2 * most * item
    at_once = rules.method.finish == "at once"
    size = TEMPORARIES * most * item + brought + (waiting if at_once else 0)
    return [Part("a round", size, "round", checked=False)]
