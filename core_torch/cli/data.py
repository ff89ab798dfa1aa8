"""``twinshard data``: turns files of documents into a folder of tokens, and shows one."""

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from core_torch.cli.data_options import DataPrepareOptions, DataShowOptions
from core_torch.data.prepared import SPLITS, open_prepared
from core_torch.data.preparing import prepare_folder
from core_torch.errors import EXIT_OK
from core_torch.report.text import counted, human_count, one_line, sanitise

_LISTED = 10  # lines on what was skipped
_WIDE = 300  # characters of such a line
_PAUSE_SECONDS = 0.1  # between two looks of the bar


def run(options: DataPrepareOptions | DataShowOptions, words: list[str]) -> int:
    """Runs the command whose options these are.

    Args:
        options: of one of the two commands.
        words: sources, or the one folder to show.

    Raises:
        DataError: a source cannot be read, or the folder not be written or opened.
    """
    if isinstance(options, DataShowOptions):
        return show(options, Path(words[0]))
    out = Path(options.out)
    with Bar() as bar:
        manifest = prepare_folder(words, out, options.config, processes=options.workers, tell=bar)
    print("\n".join([*skipped_lines(manifest["skipped"]), *lines_of(out, manifest)]))
    print(f"  next:   twinshard train --data.path {shlex.quote(str(out))}")
    return EXIT_OK


def show(options: DataShowOptions, folder: Path) -> int:
    """What a prepared folder holds, and its first tokens as text."""
    prepared = open_prepared(folder)
    if options.check:
        prepared.check_content()
    print("\n".join(lines_of(folder, prepared.manifest)))
    print(f"  content: {prepared.content}" + (", as written" if options.check else ""))
    print(f"  skipped: {counted(len(prepared.manifest['skipped']), 'line')} in data.json")
    beginning = prepared.tokenizer.decode(prepared.train.ids[: options.tokens])
    print("\n".join(f"  | {line}" for line in sanitise(beginning).splitlines()))
    return EXIT_OK


def lines_of(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """The folder, its tokenizer, and a line for each split."""
    tokenizer, vocabulary = one_line(manifest["tokenizer"]), manifest["vocabulary"]
    return [
        f"{one_line(folder, _WIDE)}: tokenizer {tokenizer}, vocabulary {vocabulary}",
        *(
            f"  {name.replace('_', ' ')}: {human_count(manifest[name]['tokens'])} tokens in "
            f"{counted(manifest[name]['documents'], 'document')}"
            for name in SPLITS
        ),
    ]


def skipped_lines(skipped: Sequence[str]) -> list[str]:
    """What was left out and why, the first of it."""
    lines = [f"skipped: {one_line(line, _WIDE)}" for line in skipped[:_LISTED]]
    more = len(skipped) - _LISTED
    return [*lines, f"skipped: {more} more, see data.json"] if more > 0 else lines


class Bar:
    """A progress bar on standard error, in a terminal; call it with each piece of progress."""

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[facts]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", facts="", total=None)
        self._next_look = 0.0

    def __enter__(self) -> "Bar":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def __call__(self, doing: str, done: int, of: int) -> None:
        """Shows that ``done`` characters of ``of``, if that is known, are done."""
        now = time.monotonic()
        if now < self._next_look and done != of:
            return
        self._next_look = now + _PAUSE_SECONDS
        facts = f"{human_count(done)} characters"
        self._bar.update(
            self._task,
            description=one_line(doing),
            completed=done,
            total=of or None,
            facts=facts,
        )
