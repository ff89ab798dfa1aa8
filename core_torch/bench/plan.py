"""What ``twinshard bench`` can compare: names of variants, sizes, lengths of the phases.

Standard library only, since the process that a user starts never loads torch.
"""

from typing import NamedTuple

from core_torch.config import (
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
)

BASELINE = "fsdp2_eager"
VARIANTS = {
    BASELINE: "FSDP2 as shipped: fully_shard per unit, torch's own collectives",
    "fsdp2_best": "FSDP2 with asynchronous prefetch, faster reduce-scatter, compiled blocks",
    "fsdp2_compiled": "FSDP2, then torch.compile of the whole",
    "ddp_compiled": "DDP, then torch.compile of the whole",
    "simple_fsdp_eager": "SimpleFSDP without a compiler",
    "simple_fsdp_aot": "SimpleFSDP, manual plan, operators as in eager mode",
    "simple_fsdp_compiled_none": "SimpleFSDP compiled, one collective per parameter",
    "simple_fsdp_compiled_manual": "SimpleFSDP compiled, one collective per unit",
    "simple_fsdp_compiled_auto": "SimpleFSDP compiled, automatic plan",
}
WARM_UP = 3  # steps before the first timed one; the first compiles
FEWEST_STEPS = 10  # timed; a median of fewer says little
MEMORY_STEPS = 4  # of forward and backward, watched for their peak
LOSS_TOLERANCE = 1e-3  # relative; what compilers may round away over a few dozen steps


class Size(NamedTuple):
    """A model and its batch on each rank."""

    model: ModelConfig
    batch: int  # sequences
    sequence: int  # tokens of each


def _size(dim: int, layers: int, vocabulary: int, batch: int, sequence: int) -> Size:
    """Heads are 64 wide, the feed-forward is 8/3 as wide as the model, in multiples of 64."""
    heads = max(1, dim // 64)
    model = ModelConfig(
        vocabulary=vocabulary,
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        hidden=-(-8 * dim // 3 // 64) * 64,
        context=sequence,
    )
    return Size(model, batch, sequence)


SIZES = {
    "tiny": _size(32, 2, 64, 2, 16),  # to see that everything works; its times say nothing
    "small": _size(256, 8, 4096, 2, 256),
    "medium": _size(512, 12, 8192, 2, 512),
}


class Pace(NamedTuple):
    """What ``bench sync`` trains where one replica is slow."""

    config: RunConfig
    alone_steps: int  # of each replica by itself
    warm_steps: int  # of these, not counted
    every: int  # inner steps between rounds of EDiT


def _pace(dim: int, layers: int, alone_steps: int, every: int) -> Pace:
    model = ModelConfig(dim=dim, layers=layers, heads=4, kv_heads=2, hidden=176, context=64)
    config = RunConfig(
        model=model,
        data=DataConfig(sequence=64, batch=4),
        mesh=MeshConfig(replicas=2, device="cpu"),
        optim=OptimConfig(lr=4e-3),
        train=TrainConfig(evaluate_sequences=128),
    )
    return Pace(config, alone_steps, alone_steps // 6, every)


class Overlap(NamedTuple):
    """What ``bench sync`` computes while exchanges run."""

    size: Size
    warm_rounds: int


EXPOSED_UNITS = 2  # at the start of a forward nothing runs that could hide an exchange
PACES = {"tiny": _pace(32, 1, 12, 6), "small": _pace(64, 3, 60, 20)}
OVERLAPS = {
    "tiny": Overlap(_size(32, 2, 64, 2, 16), 1),  # as for ``bench shard``
    "small": Overlap(_size(256, 8, 1024, 4, 256), 2),
}
