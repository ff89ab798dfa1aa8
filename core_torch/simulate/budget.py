"""The plan of a run: memory, messages, work, time, and the smallest change that makes it fit."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from core_torch.config import RunConfig, all_problems
from core_torch.config_pipeline import bubble_share
from core_torch.simulate.memory import Part, checkpoint_bytes, device_peak
from core_torch.simulate.shapes import Units, count_products, has_rounds, numel, units_of_model
from core_torch.simulate.stages import fullest, units_at, with_stages
from core_torch.simulate.tensor import cut_over_tp, with_slices
from core_torch.simulate.traffic import Message, Traffic, on_wire, traffic_of

USABLE = 0.9  # of a device's memory; the rest is for allocator, kernels and libraries
MOST_SHARDS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run takes."""

    config: RunConfig
    vocabulary: int
    units: Units
    stage: int  # rank of pp whose memory and messages these are: the fullest
    memory: list[Part]
    peak_bytes: int  # on one device
    traffic: Traffic
    checkpoint_bytes: int  # of one commit at the end
    token_flops: int  # per token, forward and backward, without what is computed again
    done_flops: int  # with it

    @property
    def parameters(self) -> int:
        """Elements of the model."""
        return sum(map(numel, self.units.values()))

    @property
    def bubble(self) -> float:
        """Share of a step in which the ranks of a pipeline wait for each other."""
        config = self.config
        return bubble_share(config.mesh.pp, stages=config.stages, parts=config.train.accumulate)

    @property
    def step_flops(self) -> int:
        """Of one inner step on one rank, with what is computed again."""
        return self.done_flops * self.config.tokens_per_step // self.config.mesh.ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Duration:
    """Seconds of a mean inner step at given rates, after the warm-up."""

    compute: float  # with a pipeline's bubble
    shard: float
    replica: float
    tp: float  # products wait for these messages, so they are never hidden
    pp: float = 0.0  # stages do, too

    @property
    def hidden(self) -> float:
        """If all other messages travel while the ranks compute."""
        return max(self.compute + self.tp + self.pp, self.shard, self.replica)

    @property
    def exposed(self) -> float:
        """If none does."""
        return self.compute + self.tp + self.pp + self.shard + self.replica


def plan_of(config: RunConfig, vocabulary: int) -> Plan:
    """The plan of a checked configuration.

    Args:
        config: of the run.
        vocabulary: token ids, where the configuration leaves it to the tokenizer.
    """
    units = units_of_model(config.model, vocabulary)
    held = cut_over_tp(units, config.mesh.tp)
    stage, memory = fullest(config, held, vocabulary)
    mine = held if config.mesh.pp == 1 else units_at(config, held, stage)
    slices = with_slices(traffic_of(config, mine), config, units, vocabulary)
    flops = token_flops(config, units)
    again = {"none": 0.0, "selective": 0.5, "full": 1.0}[config.shard.recompute]
    return Plan(
        config=config,
        vocabulary=vocabulary,
        units=units,
        memory=memory,
        stage=stage,
        peak_bytes=device_peak(
            memory, layerwise=config.sync.rounds_in_forward and config.mesh.pp == 1
        ),
        traffic=with_stages(slices, config, stage),
        checkpoint_bytes=checkpoint_bytes(
            config, units, in_flight=config.sync.method in ("co2", "co2_star")
        ),
        token_flops=flops,
        done_flops=flops + round(again * block_flops(config) / 3),
    )


def token_flops(config: RunConfig, units: Units) -> int:
    """FLOPs of forward and backward for one token: ``6 P + 6 L T H E``.

    P counts the elements of all matrices that multiply each token: the embedding is only looked
    up, unless it is the head as well. Attention: two products of 2 T H E in the forward, twice that
    in the backward, and half of it, because causal kernels skip what is masked.
    """
    model = config.model
    products, width = count_products(units, tied=model.tied), model.heads * model.head_width
    return 6 * products + 6 * model.layers * config.data.sequence * width


def block_flops(config: RunConfig) -> int:
    """The part of ``token_flops`` that is in the blocks."""
    headless = units_of_model(config.model, 0)
    return token_flops(config, headless)


def mean_bytes(plan: Plan, axis: str) -> float:
    """Payload bytes per inner step over an axis after the warm-up, rounds spread over theirs.

    Rounds by the clock are left out: how many steps lie between them depends on the speed.
    """
    return sum(m.bytes * share for m, share in _spread(plan) if m.axis == axis)


def _spread(plan: Plan) -> Iterator[tuple[Message, float]]:
    """Messages of a mean step, each with how often it is sent."""
    sync, traffic = plan.config.sync, plan.traffic
    if not has_rounds(sync.method):
        yield from ((m, 1.0) for m in traffic.synchronous_step)
        return
    yield from ((m, 1.0) for m in traffic.local_step)
    if isinstance(sync.every, int):
        yield from ((m, 1.0 / sync.every) for m in traffic.round)


def duration(plan: Plan, *, tflops: float, bandwidth: float, replica_bandwidth: float) -> Duration:
    """Seconds of a mean inner step.

    Args:
        plan: of the run.
        tflops: 10^12 operations per second that a rank sustains.
        bandwidth: 10^9 bytes per second out of a rank to others of its replica, all messages on
            rings.
        replica_bandwidth: the same on the replica axis.
    """
    seconds = {"shard": 0.0, "replica": 0.0, "tp": 0.0, "pp": 0.0}
    for message, share in _spread(plan):
        rate = replica_bandwidth if message.axis == "replica" else bandwidth
        axis = "shard" if message.axis == "model" else message.axis
        seconds[axis] += on_wire(message, plan.config) * share / (rate * 1e9)
    return Duration(compute=plan.step_flops / (tflops * 1e12) / (1 - plan.bubble), **seconds)


def fits(plan: Plan, limit_bytes: float) -> bool:
    """Whether a rank's peak leaves a tenth of its memory free."""
    return plan.peak_bytes <= USABLE * limit_bytes


def smallest_change(plan: Plan, limit_bytes: float) -> tuple[list[str], Plan] | None:
    """The options that make a run fit, and its plan with them; None if none of these do.

    In this order: what costs no rank (recompute, offload, both), then twice the shards, alone
    and with the same, then four times, and so on.
    """
    for words, config in _changes(plan.config):
        if all_problems(config):
            continue
        found = plan_of(config, plan.vocabulary)
        if fits(found, limit_bytes):
            return words, found
    return None


def _changes(config: RunConfig) -> Iterator[tuple[list[str], RunConfig]]:
    modes: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
    higher = modes[modes.index(config.shard.recompute) :]
    offloads = (False, True) if not config.sync.offload else (True,)
    shards = config.mesh.shards
    while shards <= max(MOST_SHARDS, config.mesh.shards):
        for offload, mode in product(offloads, higher):
            words = []
            if shards != config.mesh.shards:
                words.append(f"--mesh.shards {shards}")
            if mode != config.shard.recompute:
                words.append(f"--shard.recompute {mode}")
            if offload != config.sync.offload:
                words.append("--sync.offload true")
            yield (
                words,
                replace(
                    config,
                    mesh=replace(config.mesh, shards=shards),
                    shard=replace(config.shard, recompute=mode),
                    sync=replace(config.sync, offload=offload),
                ),
            )
        shards *= 2
