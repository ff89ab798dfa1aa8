"""What `twinshard plan` foretells is what short real runs send, hold and commit."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core_torch.config import RunConfig
from core_torch.simulate.budget import plan_of
from core_torch.simulate.traffic import Message
from parity_tests.cases import planned
from parity_tests.cases.equalities import TINY, VOCABULARY, configured
from parity_tests.harness.pool import RankPool

MESH = {"replicas": 2, "shards": 2}
SINGLE = {"dtype": "float32"}
MIXED = {"dtype": "float32", "compute": "bfloat16"}
SIMPLE = {"method": "simple_fsdp"}
SECOND = 10**9
CASES: dict[str, dict[str, Any]] = {
    "edit": {
        "sync": {"method": "edit", "every": 3, "warmup": 2},
        "train": {"accumulate": 2},
    },
    "inside": {
        "sync": {"every": 2, "warmup": 0, "layerwise": True, "offload": True, "wire": "int8"},
        "train": MIXED,
    },
    "aedit": {
        "sync": {"method": "aedit", "every": "3s", "warmup": 1, "timed": {"min_total_steps": 1}},
    },
    "streaming": {"sync": {"method": "streaming_diloco", "every": 4, "warmup": 1}},
    "co2_star": {"sync": {"method": "co2_star", "every": 2, "warmup": 1, "wire": "bf16"}},
    "simple_tied": {
        "model": {"tied": True},
        "shard": SIMPLE,
        "sync": {"method": "diloco", "every": 2, "warmup": 1},
        "train": {"accumulate": 2},
    },
}
MORE: dict[str, dict[str, Any]] = {
    "compiled": {
        "shard": SIMPLE | {"compile": "aot_eager"},
        "sync": {"method": "diloco", "every": 1, "warmup": 1},
        "train": MIXED,
    },
    "synchronous": {"sync": {"method": "synchronous", "warmup": 0}, "train": {"accumulate": 2}},
    "co2": {"sync": {"method": "co2", "every": 2, "warmup": 1}, "train": SINGLE},
    "unsharded": {"mesh": {"shards": 1}, "sync": {"method": "post_local_sgd", "every": 2}},
    "kept": {
        "shard": {"reshard_after_forward": False},
        "sync": {"method": "diloco", "every": 2, "warmup": 1},
    },
    "recomputed": {"shard": SIMPLE | {"recompute": "full"}, "sync": {"every": 1}},
    "simple_kept": {
        "model": {"tied": True},
        "shard": SIMPLE | {"reshard_after_forward": False},
        "sync": {"every": 1},
    },
    "compiled_tied": {
        "model": {"tied": True},
        "shard": SIMPLE | {"compile": "aot_eager"},
        "sync": {"method": "edit", "every": 1, "warmup": 1, "layerwise": True},
    },
    "compiled_kept": {
        "shard": SIMPLE | {"compile": "aot_eager", "reshard_after_forward": False},
        "sync": {"method": "diloco", "every": 1, "warmup": 1},
    },
}
HELD = (
    "parameters",
    "gradients",
    "AdamW moments",
    "anchor",
    "velocity",
    "residuals",
    "rotary tables",
)
WITH_COMMIT = ("edit", "inside", "co2_star", "simple_tied")


def config_of(case: dict[str, Any]) -> tuple[RunConfig, dict[str, Any], int]:
    """The run, its changes, and the steps between two rounds."""
    sync = {"warmup": 0, **case["sync"]}
    every = sync.get("every", 1)
    interval = every if isinstance(every, int) else int(every[:-1])
    steps = sync["warmup"] + 2 * interval
    changes = {
        **case,
        "mesh": MESH | case.get("mesh", {}),
        "sync": sync,
        "train": {**case.get("train", {}), "steps": steps},
    }
    return configured(TINY, changes), changes, interval


def sent(told: dict[str, Any], first: int, last: int) -> Counter[tuple[str, str]]:
    """Bytes by axis and operation of steps ``first`` to ``last``, the proof of parting aside."""
    total: Counter[tuple[str, str]] = Counter()
    for axis, op, dtype, numel, scope in told["trace"][
        told["marks"][first - 1] : told["marks"][last]
    ]:
        if scope != "checksum":
            total[axis, op] += numel * (2 if dtype == "bfloat16" else np.dtype(dtype).itemsize)
    return total


def bytes_of(messages: Iterable[Message], times: int = 1) -> Counter[tuple[str, str]]:
    """The same of messages that were foretold."""
    total: Counter[tuple[str, str]] = Counter()
    for message in messages:
        total[message.axis, message.op] += times * message.bytes
    return total


def committed_bytes(folder: Path) -> int:
    """Bytes of the tensors in all files of a run's only commit; their headers left out."""
    total = 0
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        total += path.stat().st_size - 8 - header
    return total


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.only_full) for name in MORE)]
)
def test_a_run_sends_holds_and_commits_what_was_planned(
    pool: RankPool, tmp_path: Path, name: str
) -> None:
    config, changes, interval = config_of((CASES | MORE)[name])
    plan, commits = plan_of(config, VOCABULARY), name in WITH_COMMIT
    step_ns = [SECOND] * 2 if name == "aedit" else []
    told, *_ = pool.run(planned.observed, changes, str(tmp_path) if commits else "", step_ns)
    warmup = config.sync.warmup
    if warmup or config.sync.method == "synchronous":
        assert sent(told, 1, 1) == bytes_of(plan.traffic.synchronous_step)
    if config.sync.method != "synchronous":
        wanted = bytes_of(plan.traffic.local_step, interval) + bytes_of(plan.traffic.round)
        assert sent(told, warmup + interval + 1, warmup + 2 * interval) == wanted
        parting = [m for m in told["trace"] if m[4] == "checksum"]
        assert [(m.axis, m.bytes) for m in plan.traffic.parting] == [
            (axis, numel * 8) for axis, _, _, numel, _ in parting
        ]
    foretold = {part.name: part.bytes for part in plan.memory if part.name in HELD}
    assert {kind: size for kind, size in told["held"].items() if size} == foretold
    if commits:
        assert committed_bytes(tmp_path) == plan.checkpoint_bytes
