"""Bytes that one rank sends, counted as collectives.py counts them: the payload of each message.

Rank 0's, which no other rank exceeds. Tests compare with the ledger of real runs, message by
message. Evaluation, samples and checkpoints come on top.
"""

from typing import NamedTuple

from core_torch.config import RunConfig
from core_torch.simulate.shapes import (
    ITEM_BYTES,
    Parameter,
    Units,
    chunks,
    has_rounds,
    sync_units,
)
from core_torch.sync.methods import Rules, rules_of

BLOCK_BYTES, SCALE_BYTES = 256, 4  # of the int8 wire, see sync/wire.py
BALLOT = 5  # whole numbers of each replica in a round by the clock, see sync/votes.py


class Message(NamedTuple):
    """Messages of one kind, in a step or a round."""

    axis: str  # replica, shard or tp; model: all ranks of a replica
    op: str  # all_gather, reduce_scatter, all_reduce
    what: str  # parameters, gradients, pseudo-gradients, anchors, scalars
    bytes: int  # payload, all of them together
    times: int = 1


class Traffic(NamedTuple):
    """What a rank sends over all axes."""

    local_step: list[Message]  # one inner step by itself
    synchronous_step: list[Message]  # one with gradients averaged over the replicas too
    round: list[Message]  # all units once
    parting: list[Message]  # once, when replicas part


def compute_bytes(config: RunConfig) -> int:
    """Bytes of an element in forward and backward."""
    compute = config.train.compute
    return ITEM_BYTES[config.train.dtype if compute == "same" else compute]


def traffic_of(config: RunConfig, units: Units) -> Traffic:
    """All messages of a run by kind, but those over tp and pp; none over an axis of size 1.

    Args:
        config: of the run.
        units: of the model, as this rank of pp and tp holds them.
    """
    mesh, item = config.mesh, ITEM_BYTES[config.train.dtype]
    rules = rules_of(config.sync)
    model = model_axis(config)
    metrics = Message(model, "all_reduce", "scalars", 2 * 8)
    late = config.shard.method == "fsdp2"  # micro-batches but the last keep whole gradients
    times = 1 if late else config.train.accumulate
    apart = 1 if late and mesh.pp > 1 else config.train.accumulate
    local = [*_gathers(config, units), *_scatters(config, units, apart), metrics]
    synchronous = [*_gathers(config, units), *_scatters(config, units, times), metrics]
    for params in units.values():
        size = chunks(params, mesh.shards) * item
        synchronous.append(Message("replica", "all_reduce", "gradients", size))
    if rules.method.trigger == "seconds":
        local.append(Message(model, "all_reduce", "scalars", 8))
    parting = []
    if has_rounds(config.sync.method):
        parting = [
            Message(model, "all_reduce", "scalars", 8),
            Message("replica", "all_gather", "scalars", 8 * mesh.replicas),
        ]
    kinds = (local, synchronous, round_messages(config, units), parting)
    return Traffic(*([m for m in kind if _is_sent(m, config)] for kind in kinds))


def round_messages(config: RunConfig, units: Units) -> list[Message]:
    """One round of all units: of Streaming DiLoCo, one of every fragment."""
    rules, found = rules_of(config.sync), list[Message]()
    replicas, shards = config.mesh.replicas, config.mesh.shards
    item, taking_part = ITEM_BYTES[config.train.dtype], sync_units(units, rules)
    meetings = [[u] for u in taking_part] if rules.fragments > 1 else [list(taking_part)]
    for members in meetings if taking_part else []:
        norms = len(members) * item
        if rules.method.trigger == "seconds":
            told = (len(members) + BALLOT) * 8
        else:
            told = norms
        found.append(Message(model_axis(config), "all_reduce", "scalars", norms))
        found.append(Message("replica", "all_gather", "scalars", told * replicas))
    late = rules.method.outer == "momentum" and rules.co2.staleness
    for params in taking_part.values():
        size = chunks(params, shards)
        found.append(exchange(size, item, rules, replicas))
        scalars = (2 if late else 1) * item
        found.append(Message(model_axis(config), "all_reduce", "scalars", scalars))
        if rules.store == "replicas":
            whole = -(-size // replicas) * replicas * item
            found.append(Message("replica", "all_gather", "anchors", 2 * whole, 2))
    return found


def exchange(size: int, item: int, rules: Rules, replicas: int) -> Message:
    """The pseudo-gradient of a unit of which this rank holds ``size`` elements."""
    if rules.wire == "fp32":
        return Message("replica", "all_reduce", "pseudo-gradients", size * item)
    coded = replicas * code_bytes(size, rules.wire)
    return Message("replica", "all_gather", "pseudo-gradients", coded)


def code_bytes(size: int, wire: str) -> int:
    """Bytes of the code of ``size`` elements, as in sync/coded.py."""
    if wire == "bf16":
        return 2 * size
    return -(-size // BLOCK_BYTES) * (BLOCK_BYTES + SCALE_BYTES)


def _gathers(config: RunConfig, units: Units) -> list[Message]:
    """Parameters gathered in the micro-batches of one inner step."""
    item, shards, found = compute_bytes(config), config.mesh.shards, list[Message]()
    for unit, params in units.items():
        for group in _groups(config, params):
            times = _readings(config, units, unit, group[0]) * config.train.accumulate
            if config.mesh.pp > 1 and config.shard.method == "fsdp2":
                times = _gathers_of_stage(config)
            size = chunks(group, shards) * shards * item * times
            found.append(Message("shard", "all_gather", "parameters", size, times))
    return found


def _scatters(config: RunConfig, units: Units, times: int) -> list[Message]:
    """Gradients scattered in one inner step."""
    item, shards, found = ITEM_BYTES[config.train.dtype], config.mesh.shards, list[Message]()
    for params in units.values():
        for group in _groups(config, params):
            uses = 2 if _is_read_twice(config, group[0]) else 1
            size = chunks(group, shards) * shards * item * times * uses
            found.append(Message("shard", "reduce_scatter", "gradients", size, times * uses))
    return found


def _groups(config: RunConfig, params: list[Parameter]) -> list[list[Parameter]]:
    """What shares a collective: a unit, but under eager SimpleFSDP each parameter by itself."""
    is_eager = config.shard.method == "simple_fsdp" and config.shard.compile == "off"
    if not params:  # on another stage of a pipeline
        return []
    return [[p] for p in params] if is_eager else [params]


def _gathers_of_stage(config: RunConfig) -> int:
    """How often FSDP2 gathers a unit of a pipeline's stage in an inner step.

    What a backward has gathered stays until the next forward has used it, or until the end: under
    1F1B only the first forwards, and each backward behind a forward, gather. Of interleaved
    stages it is a bound: which stage follows which decides.
    """
    parts = config.train.accumulate
    if not config.shard.reshard_after_forward:
        return 1
    return 2 * parts if config.shard.pipeline == "interleaved" else parts + 1


def _readings(config: RunConfig, units: Units, unit: str, first: Parameter) -> int:
    """How often a micro-batch gathers a group of parameters.

    FSDP2 gathers each unit again for the backward. SimpleFSDP gathers what the backward reads,
    and the gradient of a lookup or of a bias does not read it; the compiled graph keeps what the
    end of the forward has gathered, because the backward begins with it.
    """
    shard = config.shard
    if shard.method == "fsdp2":
        return 2 if shard.reshard_after_forward else 1
    again = 1 if shard.reshard_after_forward else 0
    if shard.compile != "off":
        is_end = unit in ("embedding", list(units)[-1]) and not unit.startswith("layers.")
        return 1 if is_end else 1 + again
    if _is_read_twice(config, first):
        return 2 + again
    is_read_back = "embeddings" not in first.name and not first.name.endswith(".bias")
    return 1 + again if is_read_back else 1


def _is_read_twice(config: RunConfig, first: Parameter) -> bool:
    """A tied weight under eager SimpleFSDP: each module that has it gathers it."""
    is_eager = config.shard.method == "simple_fsdp" and config.shard.compile == "off"
    return is_eager and config.model.tied and first.name == "tok_embeddings.weight"


def model_axis(config: RunConfig) -> str:
    """The name of the axis over all ranks of a replica, see mesh.py."""
    return "shard" if config.mesh.pp == config.mesh.tp == 1 else "model"


def axis_size(axis: str, config: RunConfig) -> int:
    """Ranks of an axis."""
    mesh = config.mesh
    whole = mesh.ranks // mesh.replicas
    sizes = {"replica": mesh.replicas, "shard": mesh.shards, "tp": mesh.tp, "pp": mesh.pp}
    return whole if axis == "model" else sizes[axis]


def _is_sent(message: Message, config: RunConfig) -> bool:
    return axis_size(message.axis, config) > 1 and message.bytes > 0


def on_wire(message: Message, config: RunConfig) -> float:
    """Bytes that leave a rank on a ring: a share of the payload, twice that of an all-reduce."""
    if message.op == "send":
        return message.bytes
    size = axis_size(message.axis, config)
    return message.bytes * (size - 1) / size * (2 if message.op == "all_reduce" else 1)
