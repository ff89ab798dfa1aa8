"""Run folders of plausible numbers, written as training writes them, for tests of reports."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core_torch.report import RecordWriter, load_run, summarise, write_json

NAN, INF = math.nan, math.inf
PARAMETERS = 879_000
TOKENS_PER_STEP = 4096


def make_step(step: int, **changes: Any) -> dict[str, Any]:
    values = {"step": step, "tokens": step * TOKENS_PER_STEP, "loss": 3.0, "grad_norm": 0.7}
    values |= {"lr": 2e-3, "seconds": 0.25, "replica_bytes": 0, "shard_bytes": 100 * step}
    return values | {"validation_loss": None} | changes


def make_event(
    index: int, step: int, norm_UN: list[list[float]], *, units: list[str], clip: float = 1.0
) -> dict[str, Any]:
    """A round as the penalty would decide it: softmax weights, non-finite or huge left out."""
    bad_UN = [[not math.isfinite(norm) or norm > 50 for norm in row] for row in norm_UN]
    weight_UN = []
    for row, bad in zip(norm_UN, bad_UN, strict=True):
        powers = [0.0 if b else math.exp(-norm) for norm, b in zip(row, bad, strict=True)]
        weight_UN.append([power / (sum(powers) or 1.0) for power in powers])
    squares = [sum(w * w for w in row) for row in weight_UN]
    return {
        "round": index,
        "step": step,
        "forced": False,
        "units": units,
        "norm": norm_UN,
        "finite": [[math.isfinite(norm) for norm in row] for row in norm_UN],
        "flagged": [[math.isfinite(norm) and norm > 50 for norm in row] for row in norm_UN],
        "rearmed": [[False] * len(row) for row in norm_UN],
        "anomalous": bad_UN,
        "weight": weight_UN,
        "effective_replicas": [1 / s if s else 0.0 for s in squares],
        "combined_norm": [min(row) for row in norm_UN],
        "clip": [clip if u % 2 else 1.0 for u in range(len(units))],
        "rollback": [all(row) for row in bad_UN],
        "steps": [8] * len(norm_UN[0]),
        "empty": False,
        "gap": [1.0] * len(units),
    }


def make_norms(draw: random.Random, index: int, units: list[str], count: int) -> list[list[float]]:
    """Norms that fall over the run; one replica spikes, another is NaN once, all fail once."""
    norms = [
        [draw.uniform(0.6, 1.3) * (0.5 + 2 / (1 + index)) for _ in range(count)] for _ in units
    ]
    if len(units) == 1:
        return norms
    if index == 4:
        norms = [[*row[:-1], NAN] for row in norms]
    if index == 7:
        norms[2][0], norms[3][0] = 300.0, INF
    if index == 9:
        norms[1] = [INF] * count
    return norms


def make_run(
    folder: Path,
    method: str = "edit",
    *,
    steps: int = 200,
    every: int = 16,
    replicas: int = 2,
    layers: int = 4,
    samples: Sequence[str] = ("q8#k zzW", "And so, good night, sweet prince."),
    healthy: bool = False,
) -> Path:
    """A run folder of plausible numbers, written as training writes it."""
    draw = random.Random(f"{method}{steps}")
    units = ["embedding", *(f"layers.{i}" for i in range(layers)), "head"]
    units = units if method == "edit" else ["model"]
    floor = {"synchronous": 1.62, "diloco": 1.69, "post_local_sgd": 1.78}.get(method, 1.66)
    sent, rounds = 0, 0
    writers = [RecordWriter(folder, replica) for replica in range(replicas)]
    for step in range(1, steps + 1):
        due = method != "synchronous" and step % every == 0
        sent += 4 * PARAMETERS if due or method == "synchronous" else 0
        drop = 5.55 * math.exp(-step / 6) + (5 * (1 + step / 4) ** -0.75)
        for writer in writers:
            writer.step(
                make_step(
                    step,
                    loss=floor + drop + draw.gauss(0, 0.05),
                    tokens=step * TOKENS_PER_STEP * replicas,
                    replica_bytes=sent,
                    seconds=draw.uniform(0.2, 0.3),
                    validation_loss=floor + drop + 0.1 if step % (steps // 4) == 0 else None,
                )
            )
            if due:
                norms = make_norms(draw, rounds + 20 * healthy, units, replicas)
                clip = 0.3 + 0.7 * min(1, rounds / 8)
                writer.event(make_event(rounds, step, norms, units=units, clip=clip))
        rounds += due
    for writer in writers:
        writer.close()
    (folder / "config.toml").write_text(
        f'run = "{folder.name}"\n[model]\ndim = 128\nlayers = {layers}\n[mesh]\n'
        f"replicas = {replicas}\nshards = 2\n"
        f'[sync]\nmethod = "{method}"\nevery = {every}\n[sync.outer]\nlr = 0.8\n'
    )
    run = load_run(folder)
    summary = summarise(
        run.metrics,
        run.events,
        method=method,
        replicas=replicas,
        shards=2,
        validation_loss=floor + 0.25,
        vocabulary=257,
        parameters=PARAMETERS,
    )
    write_json(folder / "summary.json", summary)
    write_papers(folder, *samples)
    return folder


def write_papers(folder: Path, before: str, after: str) -> None:
    """What a run leaves beside its records."""
    texts = {"prompt": "HAMLET:", "before": before, "after": after}
    write_json(folder / "samples.json", texts)
    write_json(folder / "run.json", {"versions": {"twinshard": "0.1.0", "torch": "2.13.0"}})
    write_json(folder / "outcome.json", {"exit_code": 0, "state": "finished"})
