"""The core beside traces that the reference has left in the repository; without JAX."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from core_torch.config import METHODS
from parity_tests.harness.pool import RankPool
from parity_tests.instrument import golden
from parity_tests.instrument.diff import compare
from parity_tests.instrument.files import Trace, UnreadableTrace, read_trace
from parity_tests.instrument.recording import (
    cell_of_meta,
    hash_of,
    load_weights,
    record_reference,
    weights_of,
)

ROOT = Path(__file__).parents[1]
USUAL = ("diloco", "edit", "aedit")
MOST_BYTES = 3e6  # of all of them
NO_JAX = """
import sys

class Refused:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "flax", "optax"):
            raise ModuleNotFoundError(f"{name} is not installed")

sys.meta_path.insert(0, Refused())
from core_torch.cli import main

sys.exit(main(sys.argv[1:]))
"""


def trace_of(method: str) -> Trace:
    """A golden trace."""
    return read_trace(golden.FOLDER / method)


def test_the_core_agrees_where_jax_is_not_installed(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    chosen = METHODS if pytestconfig.getoption("full") else USUAL
    told = tmp_path / "found.json"
    words = ["parity", "check", "--methods", ",".join(chosen), "--json", str(told)]
    words += [] if pytestconfig.getoption("full") else ["--shards", "1"]
    done = subprocess.run(
        [sys.executable, "-c", NO_JAX, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cells = json.loads(told.read_text())["cells"]
    assert {cell["method"] for cell in cells} == set(chosen)
    assert all(cell["ok"] and cell["phase"] for cell in cells)
    assert f"{len(chosen)} of {len(chosen)} agree" in done.stdout


@pytest.mark.only_full  # test_canary.py has one by default
def test_a_fault_in_the_core_is_named_by_its_phase(pool: RankPool) -> None:
    folder = golden.FOLDER / "edit"
    (cell,) = golden.check(pool, [folder])
    assert cell.ok and cell.mesh == "2x2" and cell.compared > 1000
    with pool.mutated("outer momentum dropped"):
        (cell,) = golden.check(pool, [folder])
    assert not cell.ok and cell.phase == "sync.outer" and cell.tensor.endswith("/anchor")
    assert "core_torch/sync/outer.py" in cell.advice


@pytest.mark.parametrize("method", METHODS)
def test_a_golden_trace_is_whole_and_tells_what_made_it(method: str) -> None:
    trace = trace_of(method)
    assert {"jax", "jaxlib", "flax", "numpy", "python"} <= set(trace.meta["versions"])
    assert trace.meta["method"] == method and trace.meta["dtype"] == "float64"
    cell = cell_of_meta(trace.meta, method)
    assert asdict(cell) == asdict(golden.golden_cell(method))
    weights = load_weights(golden.FOLDER / method, cell)
    assert trace.meta["weights_hash"] == hash_of(weights) == hash_of(weights_of(cell))
    steps = [e.key.number for e in trace.events if e.key.name == "loss"]
    assert max(steps) >= golden.STEPS and set(steps) == set(range(1, max(steps) + 1))


@pytest.mark.parametrize("method", [m for m in METHODS if m != "synchronous"])
def test_a_golden_trace_holds_a_full_round_and_the_forced_one(method: str) -> None:
    events = trace_of(method).events
    ends = [e.value for e in events if e.key.phase == "sync.end" and e.key.name == "round"]
    forced = [end["forced"] for end in ends if end is not None]
    assert False in forced
    assert forced[-1] or method == "aedit"
    if method == "aedit":
        counts = [e.value["steps"] for e in events if e.key.name == "vote" and e.value]
        assert len(set(counts)) > 1, "replicas must make unequal numbers of steps"


def test_golden_traces_are_small() -> None:
    sizes = [path.stat().st_size for path in golden.FOLDER.rglob("*") if path.is_file()]
    assert 0 < sum(sizes) < MOST_BYTES


def test_the_reference_still_computes_its_golden_traces(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    for method in METHODS if pytestconfig.getoption("full") else USUAL[-1:]:
        anew = read_trace(record_reference(golden.golden_cell(method), tmp_path / method))
        found = compare(anew, trace_of(method))
        assert found.ok and found.worst.share < 0.05, method
        assert not found.notes and not found.skipped


def test_a_trace_that_nobody_can_run_again_is_refused(pool: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    folder.mkdir()
    source = golden.FOLDER / "edit"
    meta = json.loads((source / "meta.json").read_text())
    (folder / "events.0.jsonl.xz").write_bytes((source / "events.0.jsonl.xz").read_bytes())
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UnreadableTrace, match="weights that the trace began with are missing"):
        golden.check(pool, [folder])
    del meta["recipe"]
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UnreadableTrace, match="does not tell how to run it again"):
        golden.check(pool, [folder])
    with pytest.raises(UnreadableTrace, match="there is no trace in"):
        golden.traces_in(tmp_path / "nowhere")
