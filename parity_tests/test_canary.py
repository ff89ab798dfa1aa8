"""Known faults, and where the comparison of traces finds them."""

import json
import re
from pathlib import Path

import pytest

from core_torch.cli import main
from parity_tests.harness.engine_mutants import ENGINE_MUTANTS
from parity_tests.harness.mutants import MUTANTS
from parity_tests.harness.pool import RankPool
from parity_tests.instrument import canary
from parity_tests.instrument.canary import BIRDS, CELLS
from parity_tests.instrument.results import CellResult

PAGE = Path(__file__).parents[1] / "docs" / "parity.md"
BY_DEFAULT = ("no staleness gap",)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All faults with ``--full``; their cells run once in each case."""
    if "names" in metafunc.fixturenames:
        chosen = tuple(BIRDS) if metafunc.config.getoption("full") else BY_DEFAULT
        metafunc.parametrize("names", [chosen], ids=[f"{len(chosen)} faults"])


def test_each_fault_is_found_where_it_acts_and_nothing_without_one(
    pool: RankPool, names: tuple[str, ...]
) -> None:
    found = canary.run(pool, names)
    assert [one.name for one in found if not one.ok] == []
    assert [one.name for one in found if one.expected is not None] == list(names)
    assert {one.name for one in found if one.expected is None} == {
        f"no fault: {BIRDS[name].cell}" for name in names
    }


def result_at(phase: str) -> CellResult:
    """A comparison that parted in a phase; in none if that is empty."""
    return CellResult(
        method="co2",
        mesh="2x2",
        dtype="float64",
        model="tiny",
        core="fsdp2",
        worst_ulps=1e9,
        tolerance_ulps=1.0,
        phase=phase,
        tensor="",
        ok=not phase,
    )


def test_a_fault_that_is_seen_elsewhere_is_not_taken_for_found() -> None:
    name = "no staleness gap"
    found = canary.Found(name, BIRDS[name], True, "sync.clip", "model", result_at("sync.clip"))
    assert found.ok
    assert not found._replace(phase="sync.outer").ok
    assert not found._replace(unit="embedding").ok
    assert not found._replace(caught=False).ok


@pytest.mark.parametrize(("phase", "code"), [("sync.clip", 0), ("sync.outer", 1)])
def test_the_command_tells_where_faults_were_found_and_ends_with_1_if_one_was_not(
    phase: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "no staleness gap"
    found = canary.Found(name, BIRDS[name], True, phase, "model", result_at(phase))
    sound = canary.Found("no fault: co2", None, False, "", "", result_at(""))
    monkeypatch.setattr(canary, "run", lambda pool, names, tell: [sound, found])
    path = tmp_path / "canary.json"
    assert main(["parity", "canary", "--only", name, "--json", str(path)]) == code
    line = {"name": name, "caught": True, "phase": phase, "unit": "model", "localised": code == 0}
    assert json.loads(path.read_text()) == {"mutants": [line]}
    assert f"1 of 1 faults caught, {1 - code} where they act" in capsys.readouterr().out


def test_every_phase_but_the_start_has_a_fault_and_every_cell_is_used() -> None:
    assert len(BIRDS) >= 15 and BIRDS.keys() <= MUTANTS.keys() | ENGINE_MUTANTS.keys()
    phases = "data forward backward grad clip optim"
    rounds = "delta vote merge clip outer params end"
    wanted = {*phases.split(), *(f"sync.{name}" for name in rounds.split())}
    assert {bird.phase for bird in BIRDS.values()} == wanted
    assert {bird.cell for bird in BIRDS.values()} == CELLS.keys()


def test_the_page_tells_where_each_fault_is_found() -> None:
    table = PAGE.read_text().partition("## Known faults")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|`]+) \| `([\w.]+)` \| ([^|]*) \|$", table, re.M)
    told = {fault.strip(): (phase, unit.strip(" `")) for fault, phase, unit in rows}
    assert told == {name: (bird.phase, bird.unit or "any") for name, bird in BIRDS.items()}
