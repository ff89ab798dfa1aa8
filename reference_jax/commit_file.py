"""How a checkpoint of core_torch looks on the disk: see docs/checkpoints.md and chapter `handover`.

No chapter: files in, whole arrays out, and back. Whoever cut the rows, and into how many files,
is forgotten in between.
"""

import hashlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

from reference_jax.fsdp import local_rows
from reference_jax.record import Host

FORMAT = 1


class Saved(NamedTuple):
    """A commit in memory, without a trace of who held which rows."""

    scalars: dict[str, Any]
    shared: Host  # kind/NAME -> [...]
    own: list[Host]  # of each replica
    shards: int  # that wrote it


def load(folder: str | Path) -> Saved:
    """Reads a committed step, ``.../ckpt/step-XXXXXXXX``, after checking every file.

    Raises:
        ValueError: another format, or a file that is not what COMMIT.json says.
    """
    folder = Path(folder)
    commit = json.loads((folder / "COMMIT.json").read_bytes())
    if commit["format"] != FORMAT:
        raise ValueError(f"{folder} has format {commit['format']}, not {FORMAT}")
    for name, record in commit["files"].items():
        if described(folder / name) != record:
            raise ValueError(f"{folder / name} is not what COMMIT.json says")
    state = json.loads((folder / "state.json").read_bytes())
    table, layout = state["tensors"], state["layout"]
    groups: dict[str, list[str]] = {}
    for file in sorted(table):
        groups.setdefault(file.split("/")[0], []).append(file)
    found = {group: _joined(folder, files, table) for group, files in groups.items()}
    own = [found[f"replica-{n:04d}"] for n in range(layout["replicas"])]
    return Saved(state["scalars"], found["tensors"], own, layout["shards"])


def _joined(folder: Path, files: list[str], table: Mapping[str, Any]) -> Host:
    """Whole tensors of one folder's files."""
    whole: Host = {}
    for file in files:
        rows = load_file(folder / file)
        for name, piece in table[file].items():
            x = whole.setdefault(name, np.empty(piece["shape"], rows[name].dtype))
            here = slice(piece["start"], piece["start"] + piece["rows"]) if piece["shape"] else ...
            x[here] = rows[name]
    return whole


def described(path: Path) -> dict[str, Any]:
    """Size and hash of a file, as a commit promises them."""
    data = path.read_bytes()
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def save(run_folder: str | Path, saved: Saved) -> Path:
    """Commits ``ckpt/step-XXXXXXXX`` in the folder of a run, and tells where it is."""
    name = f"{saved.scalars['step']:08d}"
    temporary = Path(run_folder) / "ckpt" / f".tmp-{name}-{secrets.token_hex(8)}"
    temporary.mkdir(parents=True)
    folders = {"tensors": saved.shared}
    folders |= {f"replica-{n:04d}": one for n, one in enumerate(saved.own)}
    table = {}
    for folder, whole in folders.items():
        (temporary / folder).mkdir()
        for m in range(saved.shards):
            file = f"{folder}/shard-{m:04d}.safetensors"
            rows = {k: _rows(x, shards=saved.shards, shard=m) for k, x in whole.items()}
            save_file({k: x for k, (x, _) in rows.items()}, temporary / file)
            table[file] = {k: _piece(x, whole[k], start) for k, (x, start) in rows.items()}
    layout = {"replicas": len(saved.own), "shards": saved.shards}
    step = saved.scalars["step"]
    state = {"step": step, "layout": layout, "scalars": saved.scalars, "tensors": table}
    (temporary / "state.json").write_text(json.dumps(state, allow_nan=False, indent=1) + "\n")
    files = {file: described(temporary / file) for file in sorted([*table, "state.json"])}
    config_hash = saved.scalars["config_hash"]
    commit = {"format": FORMAT, "step": step, "config_hash": config_hash, "files": files}
    (temporary / "COMMIT.json").write_text(json.dumps(commit, indent=1) + "\n")
    return temporary.rename(temporary.parent / f"step-{name}")


def _rows(x: np.ndarray, *, shards: int, shard: int) -> tuple[np.ndarray, int]:
    """A shard's rows and the place of the first; a number without dimensions is on all."""
    if not x.ndim:
        return x, 0
    mine = local_rows(len(x), shards=shards, shard=shard)
    return np.ascontiguousarray(x[mine]), mine.start


def _piece(x: np.ndarray, whole: np.ndarray, start: int) -> dict[str, Any]:
    rows = len(x) if x.ndim else 0
    return {"dtype": x.dtype.name, "shape": list(whole.shape), "start": start, "rows": rows}
