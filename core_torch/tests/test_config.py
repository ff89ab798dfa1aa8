"""A configuration that cannot work is refused with every reason, each by its path."""

from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from typing import Any, get_args, get_type_hints

import pytest

from core_torch.config import (
    CheckpointConfig,
    Co2Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    OuterConfig,
    PenaltyConfig,
    RopeScaling,
    RunConfig,
    ScheduleConfig,
    ShardConfig,
    StreamingConfig,
    SyncConfig,
    TimedConfig,
    TrainConfig,
    all_problems,
    check,
)
from core_torch.errors import ConfigError

NAN = float("nan")


def changed(config: Any, path: str, value: Any) -> Any:
    """``config`` with the field at the dotted ``path`` replaced."""
    name, _, rest = path.partition(".")
    return replace(config, **{name: changed(getattr(config, name), rest, value) if rest else value})


def paths(config: Any) -> list[str]:
    return [problem.path for problem in all_problems(config)]


def floats(config: Any, prefix: str = "") -> list[str]:
    """Dotted paths of every field that holds a real number."""
    found: list[str] = []
    hints = get_type_hints(type(config))
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value):
            found += floats(value, f"{prefix}{f.name}.")
        elif hints[f.name] is float or float in get_args(hints[f.name]):
            found.append(prefix + f.name)
    return found


# Each value is just beyond what works; the one beside it just works.
BOUNDS: dict[str, list[tuple[Any, Any]]] = {
    "model.vocabulary": [(-1, 0)],
    "model.dim": [(0, 16), (18, 24)],
    "model.layers": [(0, 1)],
    "model.heads": [(0, 2), (3, 4)],
    "model.kv_heads": [(0, 1), (3, 4)],
    "model.head_dim": [(-1, 0), (3, 4)],
    "model.hidden": [(0, 1)],
    "model.context": [(0, 128)],
    "model.norm_eps": [(0.0, 1e-12)],
    "model.rope_theta": [(0.0, 1.0)],
    "model.init_std": [(-0.1, 0.0)],
    "model.rope_scaling.factor": [(0.5, 1.0)],
    "model.rope_scaling.low_freq_factor": [(0.0, 0.5)],
    "model.rope_scaling.high_freq_factor": [(1.0, 1.5), (0.5, 2.0)],
    "model.rope_scaling.original_context": [(0, 1)],
    "data.sequence": [(0, 1), (1025, 1024)],
    "data.batch": [(0, 1)],
    "data.held_out": [(0.0, 0.01), (0.51, 0.5)],
    "data.seed": [(-1, 0)],
    "mesh.replicas": [(0, 1)],
    "mesh.shards": [(0, 1)],
    "mesh.pp": [(0, 1)],
    "mesh.tp": [(0, 1)],
    "mesh.deadline_seconds": [(0.0, 0.1)],
    "optim.lr": [(0.0, 1e-9), (-1.0, 1.0)],
    "optim.beta1": [(1.0, 0.999), (-0.1, 0.0)],
    "optim.beta2": [(1.0, 0.999), (-0.1, 0.0)],
    "optim.eps": [(0.0, 1e-12)],
    "optim.weight_decay": [(-0.1, 0.0)],
    "optim.max_norm": [(-1.0, 0.0)],
    "schedule.warmup_tokens": [(-1, 0)],
    "schedule.total_tokens": [(-1, 0)],
    "schedule.final_ratio": [(-0.1, 0.0), (1.1, 1.0)],
    "schedule.decay_share": [(0.0, 0.01), (1.1, 1.0)],
    "sync.every": [(0, 1), ("600s", 600)],
    "sync.warmup": [(-1, 0)],
    "sync.prefetch_units": [(0, 1)],
    "sync.outer.lr": [(0.0, 0.1), (-1.0, None)],
    "sync.outer.momentum": [(1.0, 0.99), (-0.1, 0.0)],
    "sync.penalty.z_threshold": [(0.0, 0.1)],
    "sync.penalty.ema_alpha": [(0.0, 0.01), (1.1, 1.0)],
    "sync.penalty.warmup_rounds": [(9, 10)],
    "sync.penalty.spike_ratio": [(1.0, 1.1)],
    "sync.penalty.rearm_after": [(0, 1)],
    "sync.penalty.temperature": [(0.0, 0.1)],
    "sync.penalty.max_norm": [(0.0, 0.1)],
    "sync.penalty.eps": [(0.0, 1e-12)],
    "sync.streaming.fragments": [(0, 1), (3, 4)],
    "sync.streaming.delay": [(-1, 0), (8, 7)],
    "sync.streaming.mix": [(-0.1, 0.0), (1.1, 1.0)],
    "sync.co2.clip": [(0.0, 0.1)],
    "sync.timed.min_total_steps": [(0, 1)],
    "sync.timed.step_weight": [(-0.1, 0.0), (1.1, 1.0)],
    "shard.memory_limit_mib": [(-1, 0)],
    "shard.forward_prefetch": [(-1, 0)],
    "shard.virtual_stages": [(1, 2)],
    "train.steps": [(0, 1)],
    "train.accumulate": [(0, 1)],
    "train.seed": [(-1, 0)],
    "train.z_loss": [(-0.1, 0.0)],
    "train.loss_chunk": [(-1, 0)],
    "train.evaluate_every": [(-1, 0)],
    "train.evaluate_sequences": [(0, 1)],
    "checkpoint.every": [(-1, 0)],
    "checkpoint.keep": [(1, 2)],
}
# Settings of one method are refused with another.
BASES = {
    "sync.streaming": RunConfig(sync=SyncConfig(method="streaming_diloco", every=8)),
    "sync.co2": RunConfig(sync=SyncConfig(method="co2")),
    "sync.timed": RunConfig(sync=SyncConfig(method="aedit", every="600s")),
}
# Where the value is to blame together with another field, the one that is named.
NAMED = {("model.dim", 18): "model.heads", ("model.context", 0): "model.context"}


@pytest.mark.parametrize(
    ("path", "bad", "good"),
    [(path, bad, good) for path, pairs in BOUNDS.items() for bad, good in pairs],
)
def test_a_value_just_beyond_its_bound_is_refused_by_its_path(
    path: str, bad: Any, good: Any
) -> None:
    base = BASES.get(path.rpartition(".")[0], RunConfig())
    assert NAMED.get((path, bad), path) in paths(changed(base, path, bad))
    check(changed(base, path, good))


@pytest.mark.parametrize("path", floats(RunConfig()))
def test_nan_is_refused_everywhere(path: str) -> None:
    assert path in paths(changed(RunConfig(), path, NAN))


def test_every_number_stands_in_the_table_of_bounds() -> None:
    def numbers(config: Any, prefix: str = "") -> list[str]:
        found = []
        for f in fields(config):
            value, path = getattr(config, f.name), prefix + f.name
            if is_dataclass(value):
                found += numbers(value, path + ".")
            elif isinstance(value, int | float) and not isinstance(value, bool):
                found.append(path)
        return found

    elsewhere = {"data.bpe_vocabulary"}  # counts only for a "bpe" tokenizer
    assert set(numbers(RunConfig())) <= BOUNDS.keys() | elsewhere


@pytest.mark.parametrize(
    ("config", "path", "words"),
    [
        (
            ModelConfig(dim=128, heads=3, kv_heads=1),
            "heads",
            "3 heads do not divide dim 128; 2 would",
        ),
        (ModelConfig(dim=12, heads=4), "heads", "dim / heads = 3 must be even"),
        (ModelConfig(heads=4, kv_heads=3), "kv_heads", "3 key/value heads do not divide 4 heads"),
        (
            RopeScaling(low_freq_factor=5.0),
            "high_freq_factor",
            "must exceed low_freq_factor 5.0, got 4.0",
        ),
        (
            ShardConfig(compile="inductor"),
            "compile",
            "inductor needs shard.method simple_fsdp, got fsdp2",
        ),
        (ShardConfig(method="simple_fsdp", wrap="auto"), "wrap", "shard.compile is off"),
        (
            ShardConfig(method="simple_fsdp", compile="aot_eager", memory_limit_mib=5),
            "memory_limit_mib",
            "wrap is manual",
        ),
        (
            ShardConfig(method="simple_fsdp", compile="aot_eager", costs="c.json"),
            "costs",
            "'c.json' is for wrap auto; wrap is manual",
        ),
        (DataConfig(tokenizer="bpe", bpe_vocabulary=256), "bpe_vocabulary", "at least 257"),
        (
            ScheduleConfig(warmup_tokens=100, total_tokens=99),
            "total_tokens",
            "99 ends before the warm-up of 100 tokens does",
        ),
        (SyncConfig(every="600s"), "every", "edit counts inner steps, e.g. 128; got '600s'"),
        (
            SyncConfig(method="synchronous", warmup=3),
            "warmup",
            "synchronous has no rounds to warm up for, got 3",
        ),
        (
            SyncConfig(method="diloco", penalty=PenaltyConfig(clip=False)),
            "penalty",
            "diloco has no penalty; edit and aedit have",
        ),
        (
            SyncConfig(method="post_local_sgd", outer=OuterConfig(lr=0.5)),
            "outer",
            "post_local_sgd has no outer optimizer",
        ),
        (
            SyncConfig(method="synchronous", outer=OuterConfig(momentum=0.5)),
            "outer",
            "synchronous has no outer optimizer",
        ),
        (
            SyncConfig(method="aedit", every=600),
            "every",
            "aedit counts seconds, e.g. 600s; got 600",
        ),
        (SyncConfig(method="aedit", every="0s"), "every", "aedit counts seconds"),
        (SyncConfig(method="aedit", every="ten minutes"), "every", "got 'ten minutes'"),
        (SyncConfig(method="diloco", layerwise=True), "layerwise", "unit by unit"),
        (SyncConfig(method="synchronous", wire="int8"), "wire", "sends gradients"),
        (SyncConfig(method="synchronous", offload=True), "offload", "has no anchor"),
        (SyncConfig(method="co2_star", offload=True), "offload", "over the replicas already"),
        (SyncConfig(streaming=StreamingConfig(delay=0)), "streaming", "edit has no fragments"),
        (SyncConfig(co2=Co2Config(clip=2.0)), "co2", "edit has no staleness penalty"),
        (SyncConfig(timed=TimedConfig(step_weight=0.5)), "timed", "edit counts steps"),
        (
            SyncConfig(method="streaming_diloco", every=9),
            "streaming.fragments",
            "2 fragments need sync.every to be a multiple of 2, got 9",
        ),
        (
            SyncConfig(method="streaming_diloco", every=4, streaming=StreamingConfig(delay=4)),
            "streaming.delay",
            "a delay of 4 steps must be below sync.every 4",
        ),
        (ShardConfig(method="simple_fsdp", forward_prefetch=1), "forward_prefetch", "for fsdp2"),
        (TrainConfig(dtype="float64", compute="bfloat16"), "compute", "float64 only"),
        (
            RunConfig(model=ModelConfig(context=64), data=DataConfig(sequence=65)),
            "data.sequence",
            "65 tokens exceed model.context 64",
        ),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused_in_words(
    config: Any, path: str, words: str
) -> None:
    [problem] = all_problems(config)
    assert problem.path == path
    assert words in problem.message


@pytest.mark.parametrize(
    "config",
    [
        DataConfig(bpe_vocabulary=1),  # of no effect with the byte tokenizer
        DataConfig(tokenizer="bpe", bpe_vocabulary=257),
        ScheduleConfig(warmup_tokens=100, total_tokens=100),
        ScheduleConfig(warmup_tokens=100),  # the end follows from the length of the run
        SyncConfig(method="synchronous"),
        SyncConfig(method="post_local_sgd", warmup=5),
        SyncConfig(method="diloco", outer=OuterConfig(lr=0.5, momentum=0.0)),
        SyncConfig(method="aedit", every="600s", timed=TimedConfig(step_weight=0.5)),
        SyncConfig(method="aedit", every="2.5s", penalty=PenaltyConfig(clip=False)),
        SyncConfig(method="co2_star", outer=OuterConfig(lr=0.5), wire="bf16"),
        SyncConfig(layerwise=False, offload=True),
        TrainConfig(dtype="float64"),
        TrainConfig(compute="bfloat16"),
        MeshConfig(device="cuda"),  # whether there is one is for the mesh to say
        OptimConfig(max_norm=0.0),
        CheckpointConfig(every=10),
    ],
)
def test_settings_that_fit_have_no_problem(config: Any) -> None:
    assert all_problems(config) == []


def test_the_defaults_can_work() -> None:
    check(RunConfig())


def test_all_problems_are_raised_together_with_their_values() -> None:
    config = RunConfig(
        optim=OptimConfig(lr=-1.0, beta1=2.0),
        model=ModelConfig(rope_scaling=RopeScaling(factor=0.5)),
        sync=SyncConfig(penalty=PenaltyConfig(warmup_rounds=1)),
        mesh=MeshConfig(replicas=0),
    )
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert caught.value.what.splitlines() == [
        "5 problems in the configuration",
        "    model.rope_scaling.factor: must be at least 1, got 0.5",
        "    mesh.replicas: must be at least 1, got 0",
        "    optim.lr: must be above 0, got -1.0",
        "    optim.beta1: must lie in [0, 1), got 2.0",
        "    sync.penalty.warmup_rounds: must be at least 10, got 1",
    ]
    assert caught.value.next and caught.value.exit_code == 2


def test_a_single_problem_is_counted_in_the_singular() -> None:
    with pytest.raises(ConfigError, match=": 1 problem in the configuration\n    steps: "):
        check(TrainConfig(steps=0))


def test_a_run_counts_the_tokens_of_all_ranks_and_micro_batches() -> None:
    config = RunConfig(
        mesh=MeshConfig(replicas=3, shards=2),
        data=DataConfig(batch=5, sequence=7),
        train=TrainConfig(steps=11, accumulate=13),
    )
    assert config.mesh.ranks == 6
    assert config.tokens_per_step == 3 * 2 * 13 * 5 * 7
    assert config.total_tokens == 11 * config.tokens_per_step
    assert replace(config, schedule=ScheduleConfig(total_tokens=99)).total_tokens == 99


def test_a_configuration_cannot_be_changed_after_it_was_checked() -> None:
    config = RunConfig()
    with pytest.raises(FrozenInstanceError):
        config.run = "elsewhere"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        config.sync.penalty.eps = 0.0  # type: ignore[misc]
