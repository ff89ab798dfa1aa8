"""Pipeline parallelism: what the rank of pp with the fullest device holds and sends.

The cut is that of parallel/pipeline.py. Its schedule keeps the activations of several
micro-batches, and FSDP2 keeps whole gradients to the end of the step and whole parameters from a
backward to the next forward. Messages between stages were not compared with real runs.
"""

from dataclasses import replace

from core_torch.config import RunConfig
from core_torch.config_pipeline import blocks_of, forwards_ahead
from core_torch.simulate.memory import Part, device_peak, memory_of
from core_torch.simulate.shapes import ITEM_BYTES, Units, chunks
from core_torch.simulate.traffic import Message, Traffic, compute_bytes


def places_of(config: RunConfig, rank: int) -> range:
    """Stages of a rank of pp."""
    return range(rank, config.stages, config.mesh.pp)


def units_at(config: RunConfig, units: Units, rank: int) -> Units:
    """All units of the model; those of other ranks of pp hold nothing."""
    names, held = list(units), set[str]()
    for place in places_of(config, rank):
        blocks = blocks_of(place, stages=config.stages, layers=config.model.layers)
        held |= {names[1 + i] for i in blocks}
        held |= {names[0]} if place == 0 else set()
        held |= {names[-1]} if place == config.stages - 1 else set()
    return {name: params if name in held else [] for name, params in units.items()}


def fullest(config: RunConfig, units: Units, vocabulary: int) -> tuple[int, list[Part]]:
    """The rank of pp whose device holds most at once, and what; without a pipeline the only one.

    Args:
        config: of the run.
        units: of the whole model, cut over tp.
        vocabulary: token ids.
    """
    found = [(rank, _memory_at(config, units, vocabulary, rank)) for rank in range(config.mesh.pp)]
    layerwise = config.sync.rounds_in_forward and config.mesh.pp == 1
    return max(found, key=lambda one: device_peak(one[1], layerwise=layerwise))


def _memory_at(config: RunConfig, units: Units, vocabulary: int, rank: int) -> list[Part]:
    if config.mesh.pp == 1:
        return memory_of(config, units, vocabulary)
    held = units_at(config, units, rank)
    places = places_of(config, rank)
    blocks = sum(name.startswith("layers.") for name, params in held.items() if params)
    inside = replace(config, model=replace(config.model, layers=max(1, blocks)))
    parts = memory_of(inside, held, vocabulary)
    cut = {"ranks": config.mesh.pp, "stages": config.stages, "parts": config.train.accumulate}
    kept, share = forwards_ahead(rank, **cut), len(places)
    has_head = config.stages - 1 in places
    found = []
    for part in parts:
        if part.name == "activations":  # of all stages of the rank, for one micro-batch
            part = part._replace(bytes=part.bytes * kept // share, checked=False)
        if part.name == "logits and their gradient" and not has_head:
            continue
        if not part.name.startswith(("gathered", "whole")) or config.shard.method != "fsdp2":
            found.append(part)
    if config.shard.method == "fsdp2":
        shards = config.mesh.shards
        whole = sum(chunks(params, shards) * shards for params in held.values())
        wide = ITEM_BYTES[config.train.dtype]
        found.append(Part("gathered parameters", whole * compute_bytes(config), "step", False))
        found.append(Part("whole gradients of the stages", whole * wide, "step", False))
    return found


def with_stages(traffic: Traffic, config: RunConfig, rank: int) -> Traffic:
    """``traffic`` and what a rank of pp sends to its neighbours in every inner step."""
    if config.mesh.pp == 1:
        return traffic
    data, parts, places = config.data, config.train.accumulate, places_of(config, rank)
    entry = data.batch * data.sequence // config.mesh.tp * config.model.dim * compute_bytes(config)
    forwards = parts * sum(place + 1 < config.stages for place in places)
    backwards = parts * sum(place > 0 for place in places)
    found = [
        Message("pp", "send", what, times * entry, times)
        for what, times in (("activations", forwards), ("gradients", backwards))
        if times
    ]
    return traffic._replace(
        local_step=[*traffic.local_step, *found],
        synchronous_step=[*traffic.synchronous_step, *found],
    )
