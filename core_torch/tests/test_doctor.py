"""Doctor: a sound machine is green, a lie is red."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from core_torch.cli import doctor, doctor_rank, main
from core_torch.cli.doctor_rank import COLLECTIVES, Collective, check_collective, inputs_of
from core_torch.errors import PeerLost
from core_torch.models import build_model

CPU = torch.device("cpu")


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_sound_machine_is_green(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(path)]) == 0
    assert "no check is red" in capsys.readouterr().out
    result = json.loads(path.read_text())
    states = {check["name"]: check["state"] for check in result["checks"]}
    assert result["ok"]
    assert set(states.values()) <= {"ok", "not offered", "warning"}
    for name in ("all_reduce SUM", "initial weights: mesh 1 x 2 as one rank"):
        assert states[name] == "ok"
    assert torch.__version__.startswith(result["facts"]["versions"]["torch"].partition("+")[0])


def wrong_sum(output: Tensor, given: Tensor, asynchronous: bool) -> None:
    output.copy_(given * 2)


def wrong_if_asynchronous(output: Tensor, given: Tensor, asynchronous: bool) -> None:
    output.copy_(given + asynchronous)


def not_implemented(output: Tensor, given: Tensor, asynchronous: bool) -> None:
    raise RuntimeError("no such operation\nwith details")


@pytest.mark.parametrize(
    ("call", "is_used", "state", "detail"),
    [
        (wrong_sum, True, "wrong", "sync: want [1.0, 2.0, 3.0], got [2.0, 4.0, 6.0]"),
        (wrong_sum, False, "wrong", "sync: want [1.0, 2.0, 3.0], got [2.0, 4.0, 6.0]"),
        (wrong_if_asynchronous, True, "wrong", "async: want"),
        (not_implemented, True, "failed", "no such operation"),
        (not_implemented, False, "not offered", "no such operation"),
    ],
)
@pytest.mark.usefixtures("one_rank")
def test_a_collective_that_lies_is_wrong_and_a_missing_one_fails_if_used(
    call: Callable[[Tensor, Tensor, bool], None], is_used: bool, state: str, detail: str
) -> None:
    result = check_collective(Collective("sum", call, lambda x, rank: x.sum(0), is_used), CPU)
    assert result["state"] == state
    assert detail in result["detail"]


@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda c: c.name)
@pytest.mark.parametrize("ranks", [2, 3])
def test_no_collective_could_pass_by_doing_nothing(collective: Collective, ranks: int) -> None:
    inputs = inputs_of(ranks, CPU)
    for rank in range(ranks):
        want = collective.want(inputs, rank)
        is_source = collective.name == "broadcast" and rank == 0
        assert is_source or not torch.equal(want, inputs[rank])


def test_models_that_differ_have_other_checksums() -> None:
    layer = torch.nn.Linear(2, 2)
    before = doctor_rank.checksum(layer)
    with torch.no_grad():
        layer.bias[1] += 1e-6
    assert doctor_rank.checksum(layer) != before


def test_repeated_rows_of_initial_weights_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def repeating(*args: Any, **options: Any) -> torch.nn.Module:
        model = build_model(*args, **options)
        with torch.no_grad():
            weight = model.get_parameter("layers.0.attention.wq.weight")
            weight[1] = weight[0]
        return model

    assert doctor_rank.check_rows_of_initial_weights()["state"] == "ok"
    monkeypatch.setattr(doctor_rank, "build_model", repeating)
    result = doctor_rank.check_rows_of_initial_weights()
    assert (result["state"], result["detail"]) == (
        "wrong",
        "layers.0.attention.wq.weight repeats rows",
    )


def test_one_wrong_rank_makes_a_check_red_and_is_named() -> None:
    seen = [
        doctor_rank.check("all_gather", state, detail) | {"rank": rank}
        for rank, (state, detail) in enumerate([("ok", ""), ("wrong", "want 1, got 2")])
    ]
    [check] = doctor.merged(seen)
    assert (check["state"], check["detail"]) == ("wrong", "rank 1: want 1, got 2")


def test_ranks_that_cannot_work_together_are_red(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(*args: Any, **options: Any) -> None:
        raise PeerLost("no answer from rank 1")

    monkeypatch.setattr(doctor, "launch", lost)
    assert main(["doctor"]) == 1
    assert "red: ranks work together" in capsys.readouterr().out


def test_a_missing_package_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "twinshard-no-such-package"))
    monkeypatch.setattr(doctor, "launch", lambda *args, **options: {})
    result = doctor.examine(1)
    assert not result["ok"]
    assert [check["name"] for check in result["checks"]] == ["package twinshard-no-such-package"]
