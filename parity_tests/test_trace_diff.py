"""Two traces compared: every fault is named where it was put, and noise is not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core_torch.cli import main
from core_torch.sketch import sketch
from parity_tests.checks import synthetic
from parity_tests.checks.synthetic import Entry, Recipe, entries, write_trace
from parity_tests.instrument.diff import Comparison, compare, compare_folders
from parity_tests.instrument.divergence import Divergence, first_divergence
from parity_tests.instrument.files import Trace, UnreadableTrace, read_trace
from parity_tests.instrument.logs import event_log, ledger
from parity_tests.instrument.page import write_page
from parity_tests.instrument.results import CellResult, cell_result
from parity_tests.instrument.verdict import advise_cells

FAULTS = {  # phase: step, name and replica of the event to be changed
    "init": (0, "layers.0.ffn_norm.weight", 1),
    "data": (3, "targets.0", 0),
    "forward": (2, "output.0", 1),
    "backward": (2, "gradient.0", 0),
    "grad": (3, "layers.0.attention.wq.weight", 1),
    "clip": (3, "gradient", 1),
    "optim": (3, "output.weight/exp_avg_sq", 0),
    "sync.delta": (4, "tok_embeddings.weight", 1),
    "sync.vote": (4, "vote", 1),
    "sync.merge": (4, "output.weight", None),
    "sync.clip": (2, "outer", None),
    "sync.outer": (2, "layers.0.ffn_norm.weight/velocity", None),
    "sync.params": (4, "layers.0.ffn_norm.weight", 1),
    "sync.end": (4, "round", None),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace without noise, in one piece per replica, compressed."""
    folder = tmp_path_factory.mktemp("traces") / "reference"
    told = entries(Recipe())
    return write_trace(folder, told, tensors=True, packed=True, core="reference_jax")


def written(folder: Path, told: list[Entry], **how: Any) -> Path:
    """A trace as four ranks write it."""
    return write_trace(folder / "mine", told, **{"shards": 2} | how)


def differing(told: list[Entry], phase: str) -> Entry:
    """Changes one event of ``phase`` a little, and returns it."""
    step, name, replica = FAULTS[phase]
    units = (None, _unit_of(name))
    (entry,) = [
        e
        for e in told
        if (e.step, e.phase, e.name, e.replica) == (step, phase, name, replica) and e.unit in units
    ]
    if isinstance(entry.content, dict):
        field, value = next(iter(entry.content.items()))
        entry.content |= {field: not value if isinstance(value, bool) else value * (1 + 1e-6)}
    elif entry.content.dtype.kind == "i":
        entry.content = entry.content + (np.arange(entry.content.size) == 5).reshape(4, 3)
    else:
        entry.content = entry.content * (1 + 1e-6)
    return entry


def _unit_of(name: str) -> str | None:
    found = [unit for unit, shapes in synthetic.UNITS.items() if name.split("/")[0] in shapes]
    return found[0] if found else "layers.0"


def first_of(comparison: Comparison) -> Divergence:
    """The first divergence, which must be there."""
    found = first_divergence(comparison)
    assert found is not None
    return found


def test_the_builder_signs_elements_as_the_core_does() -> None:
    x = np.random.default_rng(0).normal(size=11)
    told = sketch(torch.from_numpy(x), 5)
    np.testing.assert_allclose(synthetic.signs(5, 11) @ x, told.sk, rtol=1e-13)


@pytest.mark.parametrize("shards", [1, 2, 4])  # four shards leave the last of a gain's empty
def test_noise_of_a_few_roundings_is_no_divergence_on_any_shards(
    shards: int, reference: Path, tmp_path: Path
) -> None:
    mine = written(tmp_path, entries(Recipe(noise=2)), shards=shards)
    found = compare_folders(mine, reference)
    assert found.ok and first_divergence(found) is None and not found.skipped
    assert len(found.findings) == len(entries(Recipe()))
    assert {f.key.phase for f in found.findings} == set(synthetic.TAPS)
    assert 0 < found.worst.ulps < 20


@pytest.mark.parametrize("phase", FAULTS)
def test_a_fault_is_named_where_it_was_put(phase: str, reference: Path, tmp_path: Path) -> None:
    told = entries(Recipe(noise=2))
    fault = differing(told, phase)
    comparison = compare_folders(written(tmp_path, told, tensors=True), reference)
    found = first_of(comparison)
    key = found.found.key
    assert (key.phase, key.unit, key.name) == (fault.phase, fault.unit, fault.name)
    assert key.replica == fault.replica and found.found.step == fault.step
    assert sum(not f.ok for f in comparison.findings) == 1
    assert found.amplification > 1e3
    cell = cell_result(comparison)
    assert not cell.ok and cell.phase == phase and cell.advice
    event = found.found.mine
    assert event is not None and event.where in "\n".join(cell.divergence)
    line = json.loads(
        (comparison.mine.folder / event.parts[0].file)
        .read_text()
        .splitlines()[event.parts[0].line - 1]
    )
    assert (line["phase"], line["name"]) == (phase, fault.name)
    assert (found.element is not None) == (not isinstance(fault.content, dict))


def test_the_element_that_differs_most_is_shown(reference: Path, tmp_path: Path) -> None:
    told = entries(Recipe())
    (entry,) = [
        e for e in told if (e.step, e.phase, e.name, e.replica) == (1, "grad", "output.weight", 1)
    ]
    entry.content = entry.content.copy()
    entry.content[5, 2] += 1.0
    element = first_of(compare_folders(written(tmp_path, told, tensors=True), reference)).element
    assert element is not None and element.index == (5, 2) and element.differing == 1
    assert element.mine == pytest.approx(element.theirs + 1)


def test_a_nan_on_one_side_and_another_shape_are_divergences(
    reference: Path, tmp_path: Path
) -> None:
    told = entries(Recipe())
    grads = [e for e in told if e.phase == "grad" and e.step == 2]
    grads[0].content = np.where(grads[0].content == grads[0].content.max(), np.nan, 0.0)
    grads[2].content = grads[2].content[:2]
    comparison = compare_folders(written(tmp_path, told), reference)
    found = first_of(comparison).found
    assert found.detail == "1 elements are not finite, against 0"
    details = [f.detail for f in comparison.findings if not f.ok]
    assert "shape [2, 4] against [4, 4]" in details


def test_a_run_that_stops_early_parts_where_it_stopped(reference: Path, tmp_path: Path) -> None:
    told = [e for e in entries(Recipe()) if e.step < 4]
    cell = cell_result(comparison := compare_folders(written(tmp_path, told), reference))
    key = first_of(comparison).found.key
    assert (key.number, key.phase) == (4, "data")
    assert "stopped earlier" in cell.advice


def test_what_one_side_does_not_tap_is_left_out_and_counted(
    reference: Path, tmp_path: Path
) -> None:
    told = [  # as a compiled core tells: of the forward the end only, no backward
        e
        for e in entries(Recipe())
        if e.phase != "backward" and (e.phase != "forward" or e.unit in ("head", None))
    ]
    taps = [phase for phase in synthetic.TAPS if phase != "backward"]
    found = compare_folders(written(tmp_path, told, taps=taps), reference)
    assert found.ok
    assert found.skipped == {"backward": 3 * 2 * 4, "forward": 2 * 2 * 4}


def test_a_setting_that_an_older_version_did_not_have_is_no_difference(reference: Path) -> None:
    trace = read_trace(reference)

    def of(core: str, **model: Any) -> Trace:
        told = {"lr": 0.1, "model": model}
        return replace(
            trace, meta=trace.meta | {"core": core, "config": told, "config_hash": str(told)}
        )

    old = of("reference_jax", dim=8)
    assert compare(of("reference_jax", dim=8, kind="llama"), old).notes == []
    for other in (of("reference_jax", dim=9), of("core_torch", dim=8, kind="llama")):
        assert compare(other, old).notes == ["they were configured differently"]


def test_replicas_stand_beside_each_other_and_a_fast_one_before_the_round(tmp_path: Path) -> None:
    told = entries(Recipe())
    for entry in told:  # replica 1 makes steps 3 and 4 before round 1; replica 0 makes none
        if entry.round == 1:
            entry.step = 4 if entry.replica == 1 else 2
    first, later = (
        [e for e in told if (e.round or 0) != 1 and c(e.step)]
        for c in (
            lambda step: step <= 2,
            lambda step: step > 2,
        )
    )
    fast = [e for e in later if e.replica == 1 and e.round is None]
    order = [*first, *fast, *(e for e in told if e.round == 1)]
    keys = [e.key for e in read_trace(written(tmp_path, order)).events]
    assert [k.replica for k in keys[:4]] == [0, 1, 0, 1]
    rounds = [i for i, k in enumerate(keys) if k.moment == "round"]
    assert rounds == list(range(len(keys) - len(rounds), len(keys)))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("cut", "line 7"),
        ("shard", "rank 3 has no file"),
        ("twice", "told twice"),
        ("gap", "missing"),
        ("schema", "twinshard-trace/9"),
        ("none", "is no trace"),
    ],
)
def test_a_damaged_trace_is_refused_with_file_and_line(
    damage: str, message: str, tmp_path: Path
) -> None:
    mine = written(tmp_path, entries(Recipe(steps=1)))
    path = mine / "events.3.jsonl"
    lines = path.read_text().splitlines()
    if damage == "cut":
        path.write_text("\n".join([*lines[:6], lines[6][:50]]))
    elif damage == "shard":
        path.unlink()
    elif damage == "schema":
        (mine / "meta.json").write_text('{"schema": "twinshard-trace/9"}')
    elif damage == "none":
        mine = tmp_path / "nowhere"
    else:
        line = json.loads(lines[1])
        line["shard"]["start"] += 4 if damage == "gap" else -4
        path.write_text("\n".join([lines[0], json.dumps(line), *lines[2:]]))
    with pytest.raises(UnreadableTrace) as caught:
        read_trace(mine)
    assert message in str(caught.value) and "next:" in str(caught.value)


def test_tolerances_say_why_and_grow_with_the_square_root_of_steps(
    reference: Path, tmp_path: Path
) -> None:
    found = compare_folders(written(tmp_path, entries(Recipe(noise=1))), reference)
    by_place = {(f.key.phase, f.key.number): f.tolerance for f in found.findings}
    assert by_place["grad", 1].reason == "4 sqrt(L=1 K=16)"
    assert "4 sqrt(t=4) (r=" in by_place["grad", 4].reason
    updates = [f for f in found.findings if f.key.name == "output.weight/update"]
    assert all(f.theirs is not None for f in updates)
    starts = {
        f.key.replica: f.theirs.norm
        for f in found.findings
        if f.theirs and (f.key.phase, f.key.name) == ("init", "output.weight")
    }
    for f in updates:
        assert f.theirs is not None
        ratio = starts[f.key.replica] / f.theirs.norm
        assert f.tolerance.value == pytest.approx(4 * f.key.number**0.5 * (ratio + 4))


def test_bfloat16_compute_is_measured_in_its_own_ulps(tmp_path: Path) -> None:
    meta: dict[str, Any] = {"compute": "bfloat16", "dtype": "float32"}
    sides = [
        write_trace(tmp_path / str(noise), entries(Recipe(noise=noise)), **meta)
        for noise in (2.0**44, 0.0)  # times eps of float64: one rounding of bfloat16 is 2**45
    ]
    found = compare_folders(*sides)
    assert found.ok and found.unit == "bfloat16" and 0.2 < found.worst.ulps < 5
    grads = [f for f in found.findings if f.key.phase == "grad"]
    assert all(f.tolerance.reason.startswith(f"4 sqrt(p=2 t={f.step} L=1)") for f in grads)
    assert all(f.tolerance.value >= 4 * f.step**0.5 for f in grads)


def test_rounds_and_bytes_stand_side_by_side(reference: Path, tmp_path: Path) -> None:
    told = entries(Recipe())
    differing(told, "sync.vote")
    mine = written(tmp_path, told, shards=1)
    sent = {"seq": 10**6, "step": 2, "kind": "collective", "op": "all_reduce", "axis": "replica"}
    other = written(tmp_path / "other", entries(Recipe()), shards=1)
    for folder, size in ((mine, 100), (other, 90)):
        with (folder / "events.0.jsonl").open("a") as file:
            file.write(json.dumps(sent | {"bytes": size, "unit": "head"}) + "\n")
    comparison = compare_folders(mine, other)
    rows = event_log(comparison)
    assert len(rows) == 2 * (6 + 3 + 1)
    assert [(r.round, r.unit, r.what) for r in rows if not r.ok] == [
        (2, "layers.0", "vote of replica 1")
    ]
    found = ledger(comparison)
    assert found.comparable and [(r.step, r.mine, r.theirs) for r in found.rows] == [(2, 100, 90)]
    assert not ledger(compare_folders(mine, reference)).rows


CELL = CellResult(
    method="edit",
    mesh="2x2",
    dtype="float64",
    model="tiny",
    core="fsdp2",
    worst_ulps=5.0,
    tolerance_ulps=45.0,
    phase="grad",
    tensor="output.weight",
    ok=True,
)
BAD = replace(CELL, ok=False, worst_ulps=float("inf"))


@pytest.mark.parametrize(
    ("bad", "advice"),
    [
        (replace(BAD, dtype="bfloat16"), "look for a cast"),
        (replace(BAD, mesh="4x1"), "scope of a reduction"),
        (replace(BAD, core="simple_fsdp_aot"), "shards or compiles"),
        (replace(BAD, method="co2"), "rounds of this method"),
        (replace(BAD, model="odd"), "odd sizes"),
        (BAD, "nothing in common"),
    ],
)
def test_the_pattern_of_cells_says_what_to_try_next(bad: CellResult, advice: str) -> None:
    others = [replace(CELL, model="gqa"), replace(CELL, mesh="1x4"), replace(CELL, dtype="float32")]
    assert advice in advise_cells([CELL, *others, bad])
    assert "Nothing to do" in advise_cells([CELL, *others])
    assert "Every cell differs" in advise_cells([bad])


def test_the_page_of_many_cells_needs_nothing_from_elsewhere(
    reference: Path, tmp_path: Path
) -> None:
    told = entries(Recipe(noise=2))
    differing(told, "grad")
    found = cell_result(compare_folders(written(tmp_path, told, tensors=True), reference))
    strange = replace(CELL, tensor="<script>alert(1)</script>\x1b[31m")
    write_page(tmp_path / "page.html", [CELL, strange, found], lead="three")
    page = (tmp_path / "page.html").read_text()
    assert (
        "<script" not in page
        and "\x1b" not in page
        and "http" not in page.replace("http-equiv", "")
    )
    assert "1 of 3 cells differ" in page and page.count("data:image/png;base64,") == 4
    assert "First divergence: EDiT 2x2 float64 tiny core_torch" in page
    assert "Derivatives of outputs agree" in page


def test_the_command_compares_two_folders(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = entries(Recipe(noise=2))
    good = written(tmp_path, told)
    differing(told, "sync.outer")
    bad = written(tmp_path / "bad", told)
    told_json = tmp_path / "found.json"
    assert main(["parity", "diff", str(good), str(reference)]) == 0
    assert "1 of 1 agree" in capsys.readouterr().out
    assert main(["parity", "diff", str(bad), str(reference), "--json", str(told_json)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "first divergence: round 1, sync.outer, layers.0.ffn_norm.weight/velocity" in shown
    (cell,) = json.loads(told_json.read_text())["cells"]
    assert (cell["ok"], cell["phase"], cell["mesh"]) == (False, "sync.outer", "2x2")
    assert cell["tensor"] == "layers.0.ffn_norm.weight/velocity"
    assert cell["worst_ulps"] > cell["tolerance_ulps"] > 0
    assert main(["parity", "diff", str(good), str(tmp_path / "nowhere")]) == 3
