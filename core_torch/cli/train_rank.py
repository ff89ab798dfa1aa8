"""``twinshard train`` and ``twinshard demo``, on each rank: join once, then one session per run."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core_torch.checkpoint.commit import STEP, TOKENIZER
from core_torch.checkpoint.run_lock import run_lock
from core_torch.checkpoint.sound import newest_sound
from core_torch.cli.events import Event, OnEvent
from core_torch.cli.resume import Start
from core_torch.cli.run_folder import CONFIG
from core_torch.cli.session import Session, write_samples
from core_torch.cli.signals import StopWish, listening
from core_torch.cli.watch_options import LogOptions, ProfileOptions
from core_torch.cli.worker import Context, Job
from core_torch.collectives import gather_json
from core_torch.config import RunConfig
from core_torch.config_file import from_values, to_toml
from core_torch.data.corpus import open_corpus
from core_torch.errors import CheckpointError, CheckpointMismatch
from core_torch.mesh import Mesh, joined, rank_from_environment


def run(job: Job, context: Context) -> list[dict[str, Any] | None]:
    """Trains ``job["runs"]`` one after the other; the summaries on rank 0, None elsewhere.

    Each run is a dictionary: ``config``, ``data`` (folder of the prepared text), ``resume``
    (a ``resume.Start``, as a list), ``stop_after`` (inner step, 0 for none),
    ``force``, ``prompt`` for samples of text or None, and if wanted ``log`` and ``profile`` as in
    watch_options.py. All use the mesh of the first.
    ``job["preemptible"]`` says whether SIGTERM makes a run commit before it ends.

    Raises:
        TwinshardError: see the classes in ``errors``.
    """
    configs = [from_values(entry["config"], RunConfig()) for entry in job["runs"]]
    assert all(config.mesh == configs[0].mesh for config in configs), "runs need one mesh"
    place = rank_from_environment()
    assert place is not None, "launch and torchrun both say which rank this is"
    emit = context.emit if context.rank == 0 else _ignore
    with (
        listening(to_signals=job["preemptible"]) as asked,
        joined(configs[0].mesh, place, context.init_method) as mesh,
    ):
        pairs = zip(configs, job["runs"], strict=True)
        return [run_one(config, entry, mesh, emit, asked) for config, entry in pairs]


def run_one(
    config: RunConfig, entry: dict[str, Any], mesh: Mesh, emit: OnEvent, asked: StopWish
) -> dict[str, Any] | None:
    """One run from its start, or a commit, to its summary."""
    corpus = open_corpus(Path(entry["data"]))
    with held(config, mesh, force=entry["force"]):
        commit = commit_of(Start(*entry["resume"]), mesh, emit)
        if commit is not None:
            check_tokenizer(commit, Path(entry["data"]) / TOKENIZER)
        session = Session(
            config,
            mesh,
            corpus,
            resume_from=commit,
            emit=emit,
            asked=asked,
            stop_after=entry["stop_after"],
            log=LogOptions(**entry.get("log", {})),
            profile=ProfileOptions(**entry.get("profile", {})),
        )
        if mesh.is_lead:  # not before the checkpoint has accepted it
            (Path(config.run) / CONFIG).write_text(to_toml(config), encoding="utf-8")
        summary = session.run()
        if mesh.is_lead and entry["prompt"] is not None:
            write_samples(config, corpus, entry["prompt"])
    return summary


def commit_of(start: Start, mesh: Mesh, emit: OnEvent) -> Path | None:
    """The commit to begin with, found by the lead so that no rank takes another.

    Raises:
        CheckpointError: there must be one, and none is sound.
    """
    if start.folder is None:
        return None
    if STEP.fullmatch(Path(start.folder).name):
        return Path(start.folder)
    answer: dict[str, Any] = {"path": None, "refused": []}
    if mesh.is_lead:
        path, refused = newest_sound(Path(start.folder))
        answer = {"path": path and str(path), "refused": [str(error) for error in refused]}
    decided = gather_json(answer, device=mesh.device)[0]
    for text in decided["refused"]:
        emit({"event": "note", "text": f"passed over a damaged checkpoint: {text}"})
    if start.is_required and not decided["path"]:
        raise CheckpointError(
            f"no commit of {start.folder} is sound",
            next=f"twinshard ckpt verify {shlex.quote(start.folder)}",
        )
    return Path(decided["path"]) if decided["path"] else None


def check_tokenizer(commit: Path, now: Path) -> None:
    """Checks that the run's tokens mean what they meant when the commit was saved.

    Raises:
        CheckpointMismatch: the commit holds another tokenizer.
    """
    saved = commit / TOKENIZER
    if not saved.exists() or saved.read_bytes() == now.read_bytes():
        return
    raise CheckpointMismatch(
        f"the tokenizer of {commit.name} is not that of {now.parent}",
        where=str(saved),
        likely="the text, or data.tokenizer, was changed since",
        next="train on the text that the commit was trained on",
    )


@contextmanager
def held(config: RunConfig, mesh: Mesh, *, force: bool) -> Iterator[None]:
    """The lead holds the run's folder against other processes.

    Raises:
        ConfigError: another process holds it.
    """
    if not mesh.is_lead:
        yield
        return
    with run_lock(Path(config.run), force=force):
        yield


def _ignore(event: Event) -> None:
    """Takes the events of ranks that nobody listens to."""
