"""``twinshard parity record``, ``check`` and ``diff``: traces written, checked, compared.

The instrument itself is ``parity_tests.instrument``, imported when a command runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from core_torch.cli.bench import check_json_folder, write_result
from core_torch.cli.parity_options import (
    ParityCheckOptions,
    ParityDiffOptions,
    ParityRecordOptions,
)
from core_torch.errors import EXIT_OK, ConfigError, PeerLost

if TYPE_CHECKING:
    from parity_tests.harness.pool import RankPool
    from parity_tests.instrument.results import CellResult

EXIT_DIFFERENT = 1


def run(options: Any, words: list[str]) -> int:
    """Runs the command whose options these are.

    Returns:
        0, or 1 where something diverges.

    Raises:
        ConfigError: a file or folder that cannot be written; JAX is needed and not there.
        UnreadableTrace: a trace that cannot be read.
        PeerLost: a rank of the core ended.
    """
    commands: dict[type, Callable[[Any, list[str]], int]] = {
        ParityRecordOptions: record,
        ParityCheckOptions: check,
        ParityDiffOptions: diff,
    }
    return commands[type(options)](options, words)


def record(options: ParityRecordOptions, words: list[str]) -> int:
    """Writes the trace of one run, by the core on ranks or by the reference here."""
    from parity_tests.instrument import golden, recording
    from parity_tests.instrument.cells import cell_of

    out, status = Path(options.out), Console(stderr=True)
    if (out / "meta.json").exists():
        raise ConfigError(f"out: {options.out!r} holds a trace already", next="another --out")
    choice = (options.method, options.shape, options.dtype, options.model, options.sharding)
    cell = cell_of(choice, steps=options.steps)
    with status.status(f"recording {cell}"):
        if options.golden:
            prepare_jax()
            golden.record_golden(out)
        elif options.core == "jax":
            prepare_jax()
            recording.record_reference(cell, out)
        else:
            with ranks() as pool:
                recording.record_core(pool, cell, out, keep_tensors=options.tensors)
    if not options.golden:
        recording.save_weights(out / recording.WEIGHTS, recording.weights_of(cell))
    Console().print(f"trace  {out}", markup=False, highlight=False, soft_wrap=True)
    return EXIT_OK


def check(options: ParityCheckOptions, words: list[str]) -> int:
    """Runs the core anew beside recorded traces; without words beside the golden ones."""
    from parity_tests.instrument import golden

    check_outputs(options)
    folders = golden.traces_in(Path(words[0]) if words else golden.FOLDER)
    known = [folder.name for folder in folders]
    if strange := [name for name in options.chosen if name not in known]:
        raise ConfigError(f"methods: {strange[0]!r} is unknown; traces are {', '.join(known)}")
    chosen = [x for x in folders if not options.chosen or x.name in options.chosen]
    with ranks() as pool, Console(stderr=True).status("starting ranks") as line:
        cells = golden.check(
            pool,
            chosen,
            lambda name: line.update(f"running {name}"),
            shards=options.shards,
            sharding=options.sharding or None,
        )
    lead = "core_torch, run anew, beside recorded traces of the reference."
    return tell(cells, options, title="Parity with recorded traces", lead=lead)


def diff(options: ParityDiffOptions, words: list[str]) -> int:
    """Compares two traces; the second is the reference."""
    from parity_tests.instrument.diff import compare_folders
    from parity_tests.instrument.results import cell_result
    from parity_tests.instrument.terminal import print_comparison

    check_outputs(options)
    comparison = compare_folders(Path(words[0]), Path(words[1]))
    cell = cell_result(comparison)
    print_comparison(cell)
    sides = (comparison.mine, comparison.theirs)
    lead = " beside ".join(f"{trace.name} ({trace.folder})" for trace in sides)
    return write_cells([cell], options, title="Two traces", lead=lead)


def tell(cells: "list[CellResult]", options: Any, *, title: str, lead: str) -> int:
    """Prints many cells and writes what the options ask for; returns the exit code.

    Args:
        cells: what was found.
        options: with ``page`` and ``json``.
        title: heading of the page.
        lead: what was compared with what.
    """
    from parity_tests.instrument.terminal import print_cells

    print_cells(cells)
    return write_cells(cells, options, title=title, lead=lead)


def write_cells(cells: "list[CellResult]", options: Any, *, title: str, lead: str) -> int:
    """Page and JSON file of ``tell``, without printing the cells."""
    from parity_tests.instrument.page import write_page

    write_result(options.json, {"cells": [cell.as_json() for cell in cells]})
    if options.page:
        try:
            write_page(Path(options.page), cells, title=title, lead=lead)
        except OSError as error:
            raise ConfigError(f"page: cannot write {options.page!r}: {error.strerror}") from None
        Console().print(f"page  {options.page}", markup=False, highlight=False, soft_wrap=True)
    return EXIT_OK if all(cell.ok for cell in cells) else EXIT_DIFFERENT


def check_outputs(options: Any) -> None:
    """Refuses files that cannot be written, before the work and not after it.

    Raises:
        ConfigError: there is no such folder.
    """
    check_json_folder(options.json)
    if options.page and not Path(options.page).absolute().parent.is_dir():
        raise ConfigError(f"page: there is no folder {str(Path(options.page).parent)!r}")


def prepare_jax() -> None:
    """Imports JAX as comparisons need it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        from parity_tests.harness import jax_setup
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the reference needs JAX: {error}", next="pip install 'jax>=0.10.2,<0.11' flax"
        ) from None
    jax_setup.prepare()


@contextmanager
def ranks() -> "Iterator[RankPool]":
    """Torch ranks, started when they are needed.

    Raises:
        PeerLost: a rank raised, ended, or did not answer.
    """
    from parity_tests.harness.pool import RankPool, RanksFailed

    pool = RankPool()
    try:
        yield pool
    except RanksFailed as error:
        *trace, last = str(error).strip().splitlines()
        where = next((text.strip() for text in reversed(trace) if "File " in text), "")
        raise PeerLost(last.strip(), where=where, likely="twinshard doctor tells") from error
    finally:
        pool.close()
