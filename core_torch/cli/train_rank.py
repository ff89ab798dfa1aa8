"""``twinshard train``, on each rank: join, build, train, write records."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from core_torch.checkpoint.run_lock import run_lock
from core_torch.cli.run_folder import CONFIG, DATA
from core_torch.cli.worker import Context, Job
from core_torch.config import RunConfig
from core_torch.config_file import from_values, to_toml
from core_torch.data.corpus import open_corpus
from core_torch.mesh import Mesh, joined, rank_from_environment
from core_torch.report.records import RecordWriter, load_run, write_json
from core_torch.report.summary import summarise
from core_torch.train import TrainState, build, evaluate, finish, train


def run(job: Job, context: Context) -> dict[str, Any] | None:
    """Trains and returns the summary on rank 0, None elsewhere.

    Raises:
        TwinshardError: see the classes in ``errors``.
    """
    config = from_values(job["config"], RunConfig())
    folder = Path(config.run)
    place = rank_from_environment()
    assert place is not None, "launch and torchrun both say which rank this is"
    with (
        held(folder, config, context, force=job["force"]),
        joined(config.mesh, place, context.init_method) as mesh,
    ):
        state = build(config, mesh, open_corpus(folder / DATA))
        train_with_records(state, folder, context)
        return conclude(state, folder)


@contextmanager
def held(folder: Path, config: RunConfig, context: Context, *, force: bool) -> Iterator[None]:
    """Rank 0 holds the run's folder against other processes and leaves the config there.

    Raises:
        ConfigError: another process holds it.
    """
    if context.rank > 0:
        yield
        return
    with run_lock(folder, force=force):
        (folder / CONFIG).write_text(to_toml(config), encoding="utf-8")
        yield


def train_with_records(state: TrainState, folder: Path, context: Context) -> None:
    """Runs all steps and the closing round; one rank of each replica writes its records."""
    with records_of(state.mesh, folder) as writer:
        for record in train(state):
            line = record.as_line()
            if context.rank == 0:
                context.emit({"event": "progress", "steps": state.config.train.steps, **line})
            if writer is not None:
                writer.step(line)
                if record.round is not None:
                    writer.event(asdict(record.round))
        last = finish(state)
        if writer is not None and last is not None:
            writer.event(asdict(last))


@contextmanager
def records_of(mesh: Mesh, folder: Path) -> Iterator[RecordWriter | None]:
    """A writer on the first shard of each replica, None on the others."""
    if mesh.shard.index > 0:
        yield None
        return
    with RecordWriter(folder, mesh.replica.index) as writer:
        yield writer


def conclude(state: TrainState, folder: Path) -> dict[str, Any] | None:
    """Evaluates the anchor and writes summary.json, once all replicas' records are there."""
    sent_bytes = state.mesh.ledger.bytes_over("replica")
    validation_loss = evaluate(state)
    dist.barrier()
    if not state.mesh.is_lead:
        return None
    records = load_run(folder)
    summary = summarise(
        records.metrics,
        records.events,
        method=state.config.sync.method,
        replicas=state.mesh.replica.size,
        shards=state.mesh.shard.size,
        validation_loss=validation_loss,
        vocabulary=state.config.model.vocabulary or state.corpus.tokenizer.vocabulary,
        parameters=sum(p.numel() for p in state.model.parameters()),
        replica_bytes=sent_bytes,
    )
    write_json(folder / "summary.json", summary)
    return summary
