"""Golden traces: what the reference computed, in the repository, to be checked without JAX.

One folder for each method: eight steps of the tiny model in float64 on two replicas, events
compressed, versions in meta.json, the weights once for all. ``twinshard parity record`` makes
folders of the same form.
"""

import lzma
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from core_torch.config import METHODS
from parity_tests.checks.cells import Cell, Sharding
from parity_tests.harness.pool import RankPool
from parity_tests.instrument.cells import cell_of
from parity_tests.instrument.diff import compare
from parity_tests.instrument.files import AGAIN, Trace, UnreadableTrace, read_trace
from parity_tests.instrument.recording import (
    WEIGHTS,
    cell_of_meta,
    hash_of,
    load_weights,
    record_core,
    record_reference,
    save_weights,
    weights_of,
)
from parity_tests.instrument.results import CellResult, cell_result

FOLDER = Path(__file__).parents[1] / "golden"
STEPS = 8


def golden_cell(method: str) -> Cell:
    """The run whose golden trace is kept; on two shards, where the reference has one."""
    return cell_of((method, (2, 2), "float64", "tiny", "fsdp2"), steps=STEPS)


def record_golden(folder: Path = FOLDER, methods: Sequence[str] = METHODS) -> None:
    """Writes golden traces anew; needs JAX."""
    for method in methods:
        cell = golden_cell(method)
        pack(record_reference(cell, folder / method))
        save_weights(folder / WEIGHTS, weights_of(cell))


def pack(trace: Path) -> None:
    """Compresses the events of a trace."""
    for path in trace.glob("events.*.jsonl"):
        packed = lzma.compress(path.read_bytes(), preset=9 | lzma.PRESET_EXTREME)
        path.with_name(path.name + ".xz").write_bytes(packed)
        path.unlink()


def traces_in(folder: Path) -> list[Path]:
    """The folder if it is a trace, else the traces in it.

    Raises:
        UnreadableTrace: neither.
    """
    if (folder / "meta.json").exists():
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/meta.json"))
    if not found:
        raise UnreadableTrace(
            f"there is no trace in {folder}",
            where=str(folder),
            next="twinshard parity record --out FOLDER",
        )
    order = {method: i for i, method in enumerate(METHODS)}
    return sorted(found, key=lambda path: order.get(path.name, len(order)))


def check(
    pool: RankPool,
    folders: Sequence[Path],
    tell: Callable[[str], None] = lambda name: None,
    *,
    shards: int = 0,
    sharding: Sharding | None = None,
) -> list[CellResult]:
    """Runs the core anew for each recorded trace and compares. Needs no JAX.

    Args:
        pool: of ranks.
        folders: traces with a recipe.
        tell: called with the name of each before it runs.
        shards: of the core; 0: as recorded.
        sharding: of the core; None: as recorded.

    Raises:
        UnreadableTrace: a trace is damaged, or its weights are not what it began with.
    """
    results = []
    for folder in folders:
        tell(folder.name)
        golden = read_trace(folder)
        cell = cell_of_meta(golden.meta, str(folder / "meta.json"))
        cell = replace(cell, shards=shards or cell.shards, sharding=sharding or cell.sharding)
        results.append(_check_one(pool, folder, golden, cell))
    return results


def _check_one(pool: RankPool, folder: Path, golden: Trace, cell: Cell) -> CellResult:
    weights = load_weights(folder, cell)
    if golden.meta.get("weights_hash") not in ("", hash_of(weights)):
        raise UnreadableTrace(
            "the weights are not those that the trace began with", where=str(folder), next=AGAIN
        )
    with tempfile.TemporaryDirectory(prefix="twinshard-trace-") as place:
        mine = read_trace(record_core(pool, cell, Path(place) / "trace", weights=weights))
    versions = " ".join(f"{k} {v}" for k, v in golden.meta.get("versions", {}).items())
    comparison = compare(mine, golden)
    return cell_result(comparison, core=cell.sharding, note=f"recorded with {versions}")
