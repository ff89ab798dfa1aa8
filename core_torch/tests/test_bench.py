"""``twinshard bench shard``: the shape of its result, and that it measures what it says.

No speed is checked anywhere: what is fast depends on who else uses the machine.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core_torch.bench.link import obstacle, parse_network
from core_torch.bench.measure import Contestant, batch_of
from core_torch.bench.plan import SIZES, VARIANTS
from core_torch.bench.results import FIELDS, merged, ratio, unequal_losses
from core_torch.bench.variants import BUILDERS, build_objective
from core_torch.cli import bench, main
from core_torch.cli.launch import launch
from core_torch.tests.bench_jobs import MODULE

TINY = SIZES["tiny"]
JOB = {"kind": "bench_shard", "size": "tiny", "steps": 2, "phase": "time"}


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parameter_bytes() -> int:
    """Of the tiny model."""
    return 4 * sum(param.numel() for param in build_objective(TINY.model, seed=0).parameters())


def test_the_result_has_its_fields_and_the_variants_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    words = ["--size", "tiny", "--launches", "1", "--json", str(path)]
    assert main(["bench", "shard", *words, "--variants", "fsdp2_eager,simple_fsdp_eager"]) == 0
    result = json.loads(path.read_text())
    assert set(result) == (
        {"variants", "estimates", "hardware", "versions", "command", "network"}
        | {"size", "ranks", "steps", "launches"}
    )
    assert result["network"] == {"kind": "loopback"}
    fsdp2, simple = result["variants"]
    assert tuple(fsdp2) == tuple(simple) == FIELDS
    assert simple["loss"] == pytest.approx(fsdp2["loss"], rel=1e-6)
    # Two layers, embedding, head: gathered in both directions, scattered in one.
    assert (fsdp2["collectives_forward"], fsdp2["collectives_backward"]) == (4, 8)
    assert fsdp2["bytes"] == 3 * parameter_bytes()
    for row in (fsdp2, simple):
        assert 0 < row["exposed_ms"] <= row["step_ms"]
        assert row["peak_tensor_bytes"] is None or row["peak_tensor_bytes"] > 0
    assert "fsdp2_eager" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["emulated", "modelled"])
def test_the_same_is_measured_over_a_link(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "modelled":
        monkeypatch.setattr(bench, "obstacle", lambda: "this test wants none")
    elif obstacle():
        pytest.skip(f"no emulated link: {obstacle()}")
    with bench.linked(parse_network("1gbit,1ms"), 2) as (places, link):
        assert (link["kind"], link["delay_seconds"]) == (kind, 1e-3)
        assert ("reason" in link) == (kind == "modelled")
        job = JOB | {"network": link, "variants": ["fsdp2_eager"]}
        [row] = launch(job, 2, lambda event: None, module=MODULE, places=places)
    assert (row["collectives_forward"], row["collectives_backward"]) == (4, 8)
    assert row["bytes"] == 3 * parameter_bytes()
    assert row["exposed_ms"] > 2 * 12 * 1e-3  # each collective has a delay to wait for


def test_the_collectives_for_fsdp2_at_its_best_are_right() -> None:
    # Of three ranks one is neither the first nor the last.
    gathered = launch({"kind": "own_collectives"}, 3, lambda event: None, module=MODULE)
    assert gathered == [0, 0, 1, 1, 2, 2]


def test_a_modelled_line_delays_each_collective_and_changes_none() -> None:
    gather, scatter, reduce, exchange = launch(
        {"kind": "late_collectives"}, 2, lambda event: None, module=MODULE
    )
    assert gather >= 1 and exchange >= 1  # one hop
    assert scatter >= 2 and reduce >= 2  # two rings of one hop


class Greedy(nn.Module):
    """Needs 64 MiB for a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return self.weight * torch.ones(1 << 24).sum()


@pytest.mark.usefixtures("one_rank")
def test_the_peak_is_that_of_forward_and_backward() -> None:
    peak = Contestant("greedy", Greedy()).peak_bytes(torch.ones(1), torch.ones(1))
    if peak is None:
        pytest.skip("this system tells no peak")
    assert 60 << 20 < peak < 100 << 20


def test_every_variant_that_is_named_can_be_built() -> None:
    assert list(BUILDERS) == list(VARIANTS)


def test_batches_depend_on_seed_step_and_rank_only() -> None:
    def batch(seed: int = 0, step: int = 0, rank: int = 0) -> Tensor:
        return batch_of(50, (2, 8), seed=seed, step=step, rank=rank)[0]

    assert torch.equal(batch(), batch())
    for other in (batch(seed=1), batch(step=1), batch(rank=1)):
        assert not torch.equal(batch(), other)
    tokens, targets = batch_of(50, (2, 8), seed=0, step=0, rank=0)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert 0 <= int(tokens.min()) and int(tokens.max()) < 50


def row(name: str, **values: Any) -> dict[str, Any]:
    """A row of a launch."""
    return {"variant": name} | dict.fromkeys(FIELDS[1:], 1.0) | values


def test_times_are_medians_over_launches_and_compilation_is_the_first_one() -> None:
    launches = [[row("a", step_ms=t, compile_s=c)] for t, c in ((3.0, 9.0), (1.0, 0.0), (2.0, 0.0))]
    [result] = merged(launches, [{"variant": "a", "peak_tensor_bytes": 7}])
    assert (result["step_ms"], result["compile_s"], result["peak_tensor_bytes"]) == (2.0, 9.0, 7)


def test_a_loss_that_differs_is_loud(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row("fsdp2_eager"), row("other", loss=1.01), row("lost", loss=float("nan"))]
    assert unequal_losses(rows) == ["other", "lost"]
    result = {"variants": rows, "estimates": [], "network": {"kind": "loopback"}}
    monkeypatch.setattr(bench, "compare", lambda *args: result)
    assert main(["bench", "shard"]) == 1
    assert "loss differs: other, lost" in capsys.readouterr().out


def test_ratios_are_against_fsdp2_as_shipped() -> None:
    rows = [row("other", step_ms=3.0), row("fsdp2_eager", step_ms=2.0, peak_tensor_bytes=None)]
    assert ratio(rows[0], rows, "step_ms") == 1.5
    assert ratio(rows[0], rows, "peak_tensor_bytes") is None
    assert ratio(rows[0], rows[:1], "step_ms") is None


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["shard", "--network", "1gbit"], "'1gbit' is neither loopback nor RATE,DELAY"),
        (["shard", "--variants", "fsdp3"], "'fsdp3' is unknown"),
        (["shard", "--steps", "3"], "steps: must be at least 10"),
        (["shard", "--json", "/no/such/folder/x.json"], "there is no folder '/no/such/folder'"),
        (["sync", "--slow-replica", "0.5"], "slow_replica: must be at least 1.0, got 0.5"),
        (["sync", "--network", "1gbit"], "'1gbit' is neither loopback nor RATE,DELAY"),
        (["speed"], "after bench comes shard or sync; 'speed' is none"),
        ([], "after bench comes shard or sync; not said which"),
    ],
)
def test_mistakes_are_told_before_any_work(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    assert problem in capsys.readouterr().err
