"""``twinshard bench sync``: the shape of its result, from a run too short for its figures."""

import json
import math
from pathlib import Path

import pytest

from core_torch.cli import main


def test_both_phases_run_and_tell_what_the_file_promises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sync.json"
    words = ["--size", "tiny", "--steps", "80", "--seconds", "0.1", "--rounds", "1"]
    assert main(["bench", "sync", *words, "--json", str(path)]) == 0
    told = json.loads(path.read_text())
    for method in ("edit", "aedit"):
        row = told[method]
        assert 0 < row["pace"] < 1.5 and math.isfinite(row["loss"]) and row["rounds"] >= 2
        assert row["tokens"] == sum(row["steps"]) * 256, "a step of a replica has 4 x 64 tokens"
    assert told["edit"]["steps"] == [80, 80]
    fast, slow = told["aedit"]["steps"]
    assert fast > slow, "who sleeps makes fewer steps"
    assert fast + slow >= 160, "A-EDiT trains on as many tokens"
    assert len(told["units"]) == len(told["exchange_ms_per_unit"]) == 4
    for part in ("layerwise", "compiled"):
        assert len(told[part]["exposed_ms_per_unit"]) == 4
        assert told[part]["hidden_fraction"] <= 1
    assert told["compiled"]["recompilations_at_rounds"] == 0
    assert math.isfinite(told["layerwise"]["whole_round_ms"])
    shown = capsys.readouterr().out
    assert "aedit" in shown and "layers.1" in shown and "hidden" in shown
