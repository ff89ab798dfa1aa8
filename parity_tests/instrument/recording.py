"""Records the trace of a cell, by the core on ranks or by the reference in this process.

``meta.json`` then also holds the recipe, from which the same run can be made again, and the
weights both start from lie beside it. The reference is imported when it is asked for.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from core_torch.config import ModelConfig
from parity_tests.checks.cells import (
    MODELS,
    SEQUENCE,
    Cell,
    core_changes,
    parameters_of,
    tokens_of,
)
from parity_tests.harness.names import expected_shapes
from parity_tests.harness.pool import RankPool
from parity_tests.instrument.files import AGAIN, UnreadableTrace

WEIGHTS = "weights.safetensors"
DEADLINE = 300.0
Weights = dict[str, np.ndarray]


def shapes_of(cell: Cell) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a cell's parameters, in the model's order."""
    fields = dict(MODELS[cell.model], layers=cell.layers, context=SEQUENCE)
    fields.pop("rope_scaling", None)  # has no part in shapes
    return expected_shapes(ModelConfig(**fields))


def weights_of(cell: Cell) -> Weights:
    """Initial weights of a cell, drawn without either core."""
    return parameters_of(cell, shapes_of(cell))


def hash_of(weights: Mapping[str, np.ndarray]) -> str:
    """sha256 over names and bytes in the model's order, as the reference puts it down."""
    digest = hashlib.sha256()
    for name, x in weights.items():
        digest.update(name.encode() + np.ascontiguousarray(x).tobytes())
    return digest.hexdigest()


def record_core(
    pool: RankPool,
    cell: Cell,
    folder: Path,
    *,
    weights: Weights | None = None,
    keep_tensors: bool = False,
    mutant: str | None = None,
) -> Path:
    """Runs the core on as many ranks as the cell's mesh has.

    Args:
        pool: of ranks.
        cell: what to run.
        folder: of the trace, which must hold none.
        weights: to begin with; None draws those of the cell.
        keep_tensors: also write every tensor itself.
        mutant: a fault to inject, see ``harness/mutants.py``.

    Raises:
        RanksFailed: a rank raised or did not answer.
    """
    from parity_tests.cases import tracing  # imports torch

    weights = weights_of(cell) if weights is None else weights
    pool.run(
        tracing.record,
        core_changes(cell),
        tokens_of(cell),
        weights,
        str(folder),
        list(cell.step_ns),
        keep_tensors,
        list(cell.faults),
        hash_of(weights),
        ranks=cell.replicas * cell.shards,
        deadline=DEADLINE,
        mutant=mutant,
    )
    complete_meta(folder, cell)
    return folder


def record_reference(cell: Cell, folder: Path) -> Path:
    """Runs the reference on one device for each replica; needs JAX."""
    from parity_tests.checks import reference_runs
    from reference_jax import trace

    alone = cell.on_one_shard
    with reference_runs.separate_programs():
        trace.write(
            folder,
            reference_runs.config_of(alone),
            lambda step: reference_runs.batch(alone, step, 1),
            params=weights_of(cell),
            data_hash=hashlib.sha256(tokens_of(cell).tobytes()).hexdigest(),
        )
    complete_meta(folder, cell)
    return folder


def complete_meta(folder: Path, cell: Cell) -> None:
    """Adds the model's name, and what is needed to run the cell again."""
    path = folder / "meta.json"
    meta = json.loads(path.read_text(encoding="utf-8"))
    meta["model"]["name"] = cell.model
    meta["recipe"] = asdict(cell)
    path.write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")


def cell_of_meta(meta: Mapping[str, Any], where: str) -> Cell:
    """The cell whose trace has this meta.json.

    Raises:
        UnreadableTrace: it was not recorded by ``parity record``.
    """
    try:
        return Cell(**{name: _hashable(value) for name, value in meta["recipe"].items()})
    except (KeyError, TypeError, AttributeError):
        raise UnreadableTrace(
            "the trace does not tell how to run it again",
            where=where,
            likely="it was not recorded by twinshard parity record",
            next="twinshard parity diff A B compares any two traces",
        ) from None


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def save_weights(path: Path, weights: Weights) -> None:
    """Writes them so that any framework reads them."""
    save_file(weights, path)


def load_weights(trace: Path, cell: Cell) -> Weights:
    """Those of a trace, which lie in its folder or in the one above, shared by several.

    Raises:
        UnreadableTrace: there are none, or they are another model's.
    """
    for path in (trace / WEIGHTS, trace.parent / WEIGHTS):
        if path.exists():
            held, shapes = load_file(path), shapes_of(cell)
            if {name: x.shape for name, x in held.items()} != shapes:
                raise UnreadableTrace(
                    f"the weights are not those of the model {cell.model}",
                    where=str(path),
                    next=AGAIN,
                )
            return {name: held[name] for name in shapes}
    raise UnreadableTrace(
        "the weights that the trace began with are missing", where=str(trace / WEIGHTS), next=AGAIN
    )
