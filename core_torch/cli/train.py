"""``twinshard train``, in the process that the user started: check, prepare, launch, show.

``train_rank`` is what the ranks do. Under torchrun this process is a rank itself.
"""

import contextlib
import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Any

from core_torch.checkpoint.commit import latest
from core_torch.cli.data import skipped_lines
from core_torch.cli.events import OnEvent
from core_torch.cli.launch import Interrupted, launch
from core_torch.cli.options import TrainOptions
from core_torch.cli.progress import ProgressView
from core_torch.cli.resume import Start, start_of
from core_torch.cli.run_folder import CONFIG, DATA, LOGS, check_unused, named, write_outcome
from core_torch.cli.watch_options import check_installed
from core_torch.cli.worker import run_here, torchrun_place
from core_torch.config import RunConfig
from core_torch.data.corpus import Corpus, prepare
from core_torch.errors import EXIT_OK, ConfigError, PeerLost, Preempted, TwinshardError
from core_torch.report.text import (
    counted,
    fixed,
    human_bytes,
    human_count,
    mesh_title,
    method_title,
    one_line,
)

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
    check_installed(own.log)
    config = named(config, under_torchrun=torchrun_place() is not None)
    try:
        start = start_of(own.resume, config)
        summary = train_run(config, start, own)
    except ConfigError:
        raise  # the run did not begin: the folder may be another's
    except TwinshardError as error:
        write_outcome(config, error, next=error.next)
        raise
    if summary is not None:
        write_outcome(config, None, next=report_of(config))
        print(closing_lines(config, summary))
    return EXIT_OK


def train_run(config: RunConfig, start: Start, own: TrainOptions) -> dict[str, Any] | None:
    """Trains ``config`` and returns its summary, or None on ranks other than the first.

    Args:
        config: of the run; its folder is known.
        start: where it begins.
        own: how it begins and who watches.

    Raises:
        TwinshardError: see the classes in ``errors``.
    """
    folder = Path(config.run)
    if not start.continues:
        check_unused(config)
    corpus = prepare(config.data, folder / DATA)
    check_corpus(config, corpus)
    place = torchrun_place()
    if place is None or place.rank == 0:
        tell_skipped(corpus)
    if config.train.init and start.folder is None:
        check_weights(config, corpus)
    entry = {
        "config": dataclasses.asdict(config),
        "data": str(folder / DATA),
        "resume": start,
        "stop_after": own.stop_after,
        "force": own.force,
        "prompt": None,
        "log": dataclasses.asdict(own.log),
        "profile": dataclasses.asdict(own.profile),
    }
    job = {"kind": "train", "runs": [entry], "preemptible": True}
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
    draws = config.mesh.readers * config.data.batch
    corpus.check(sequence=config.data.sequence, draws=draws, packing=config.data.packing)


def tell_skipped(corpus: Corpus) -> None:
    """Says on standard error which files of the text were left out, and why."""
    for line in skipped_lines(corpus.skipped):
        print(line, file=sys.stderr)


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
    code = f" --model.build {config.model.build}" if config.model.build else ""
    return f"twinshard train {path} --resume auto{code}     ({note})"


def report_of(config: RunConfig) -> str:
    """The command that shows this run."""
    return f"twinshard report {shlex.quote(config.run)}"


def sample_of(config: RunConfig) -> str:
    """The command that writes text with this run's model."""
    code = f" --build {config.model.build}" if config.model.build else ""
    return f'twinshard sample {shlex.quote(config.run)} --prompt "To be, or not"{code}'


def closing_lines(config: RunConfig, summary: dict[str, Any]) -> str:
    """What the run gave, where things are, and what to try next."""
    name = one_line(config.run)
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
            f"{mesh_title(config.mesh)}",
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
