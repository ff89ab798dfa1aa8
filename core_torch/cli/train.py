"""``twinshard train``, in the process that the user started: check, prepare, launch, show.

``train_rank`` is what the ranks do. Under torchrun this process is a rank itself.
"""

import contextlib
import dataclasses
import shlex
from pathlib import Path
from typing import Any

from core_torch.checkpoint.commit import latest
from core_torch.cli.events import OnEvent
from core_torch.cli.launch import Interrupted, launch
from core_torch.cli.options import TrainOptions
from core_torch.cli.progress import ProgressView
from core_torch.cli.resume import Start, start_of
from core_torch.cli.run_folder import CONFIG, DATA, LOGS, check_unused, named, write_outcome
from core_torch.cli.worker import run_here, torchrun_place
from core_torch.config import RunConfig
from core_torch.data.corpus import Corpus, prepare
from core_torch.errors import EXIT_OK, ConfigError, PeerLost, Preempted, TwinshardError
from core_torch.report.text import counted, fixed, human_bytes, human_count, method_title, one_line

_PATIENCE_SECONDS = 60.0  # the ranks' own deadline comes first, and says more


def run(options: tuple[TrainOptions, RunConfig], words: list[str]) -> int:
    """Trains and says where things are.

    Raises:
        TwinshardError: what went wrong and how to go on; also in outcome.json.
    """
    own, config = options
    if own.resume == "auto" and not config.run:
        raise ConfigError(
            "--resume auto needs the run to go on with",
            next="twinshard train RUN/config.toml --resume auto",
        )
    config = named(config, under_torchrun=torchrun_place() is not None)
    try:
        start = start_of(own.resume, config)
        summary = train_run(config, start, force=own.force, stop_after=own.stop_after)
    except ConfigError:
        raise  # the run did not begin: the folder may be another's
    except TwinshardError as error:
        write_outcome(config, error, next=error.next)
        raise
    if summary is not None:
        write_outcome(config, None, next=report_of(config))
        print(closing_lines(config, summary))
    return EXIT_OK


def train_run(
    config: RunConfig, start: Start, *, force: bool, stop_after: int
) -> dict[str, Any] | None:
    """Trains ``config`` and returns its summary, or None on ranks other than the first.

    Args:
        config: of the run; its folder is known.
        start: where it begins.
        force: take the folder from another process that seems to hold it.
        stop_after: inner step at which to commit and end; 0 for none.

    Raises:
        TwinshardError: see the classes in ``errors``.
    """
    folder = Path(config.run)
    if not start.continues:
        check_unused(config)
    corpus = prepare(config.data, folder / DATA)
    check_corpus(config, corpus)
    if config.train.init and start.folder is None:
        check_weights(config, corpus)
    entry = {
        "config": dataclasses.asdict(config),
        "data": str(folder / DATA),
        "resume": start,
        "stop_after": stop_after,
        "force": force,
        "prompt": None,
    }
    job = {"kind": "train", "runs": [entry], "preemptible": True}
    place = torchrun_place()
    view = ProgressView() if place is None or place.rank == 0 else None
    try:
        with view or contextlib.nullcontext():
            if place is not None:
                [summary] = run_here(job, place, view or (lambda event: None))
            else:
                assert view is not None
                [summary] = _launch(job, config, view)
    except (Interrupted, PeerLost, Preempted) as error:
        error.next = error.next or resume_command(config)
        raise
    checked: dict[str, Any] | None = summary
    return checked


def check_corpus(config: RunConfig, corpus: Corpus) -> None:
    """Checks that text, model and layout fit each other.

    Raises:
        ConfigError: the model knows fewer tokens than the text uses.
        DataError: too little text for the layout.
    """
    known, needed = config.model.vocabulary, corpus.tokenizer.vocabulary
    if known and known < needed:
        raise ConfigError(
            f"model.vocabulary: {known} is less than the tokenizer's {needed}",
            next="--model.vocabulary 0 takes the tokenizer's",
        )
    corpus.check(sequence=config.data.sequence, draws=config.mesh.readers * config.data.batch)


def check_weights(config: RunConfig, corpus: Corpus) -> None:
    """Checks that the run can begin with the weights of ``train.init``.

    Raises:
        TwinshardError: they are missing, damaged, or of another model.
    """
    from core_torch.hf.folder import check_init  # brings torch along

    vocabulary = config.model.vocabulary or corpus.tokenizer.vocabulary
    check_init(config.train.init, dataclasses.replace(config.model, vocabulary=vocabulary))


def resume_command(config: RunConfig) -> str:
    """The command that goes on with this run, and from where."""
    folder = Path(config.run)
    if not (folder / CONFIG).exists():
        return "the same command again: the run had not begun"
    commit = latest(folder)
    note = "nothing committed yet: from the start" if commit is None else f"from {commit.name}"
    path = shlex.quote(str(folder / CONFIG))
    return f"twinshard train {path} --resume auto     ({note})"


def report_of(config: RunConfig) -> str:
    """The command that shows this run."""
    return f"twinshard report {shlex.quote(config.run)}"


def sample_of(config: RunConfig) -> str:
    """The command that writes text with this run's model."""
    return f'twinshard sample {shlex.quote(config.run)} --prompt "To be, or not"'


def closing_lines(config: RunConfig, summary: dict[str, Any]) -> str:
    """What the run gave, where things are, and what to try next."""
    name, mesh = one_line(config.run), config.mesh
    sent = human_bytes(summary["replica_bytes"])
    facts = [
        f"loss {fixed(summary['loss'], 4)}",
        f"validation perplexity {fixed(summary['validation_perplexity'], 2)}",
        f"{human_count(summary['tokens_per_second'])} tokens/s",
        f"{counted(summary['rounds'], 'round')}, {sent} sent per rank between replicas",
    ]
    return "\n".join(
        [
            f"{name}: {method_title(config.sync.method)}, {counted(config.train.steps, 'step')} on "
            f"{counted(mesh.replicas, 'replica')} x {counted(mesh.shards, 'shard')}",
            *(f"  {fact}" for fact in facts),
            f"  files:  {name}/ (metrics.jsonl, events.jsonl, summary.json)",
            f"  text:   {sample_of(config)}",
            f"  next:   {report_of(config)}",
        ]
    )


def _launch(job: dict[str, Any], config: RunConfig, on_event: OnEvent) -> Any:
    logs = Path(config.run) / LOGS
    logs.mkdir(mode=0o700, exist_ok=True)
    silence = config.mesh.deadline_seconds + _PATIENCE_SECONDS
    return launch(
        job, config.mesh.ranks, on_event, silence_seconds=silence, logs=logs, preemptible=True
    )
