"""``twinshard parity run`` and ``canary``: many comparisons, and whether comparisons notice faults.

The instrument itself is ``parity_tests.instrument``, imported when a command runs.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from core_torch.cli.bench import write_result
from core_torch.cli.parity import (
    EXIT_DIFFERENT,
    check_outputs,
    prepare_jax,
    ranks,
    tell,
    write_cells,
)
from core_torch.cli.parity_options import ParityCanaryOptions, ParityRunOptions
from core_torch.errors import EXIT_OK, ConfigError

if TYPE_CHECKING:
    from parity_tests.instrument.canary import Found


def run(options: Any, words: list[str]) -> int:
    """Runs the command whose options these are; 0, or 1 where something is not as it must be."""
    check_outputs(options)
    prepare_jax()
    return canary(options) if isinstance(options, ParityCanaryOptions) else matrix(options)


def matrix(options: ParityRunOptions) -> int:
    """Both cores over the cells that the options choose."""
    from parity_tests.instrument import cells, matrix

    choices = cells.product() if options.full else cells.covering()
    chosen = matrix.named([cells.cell_of(choice) for choice in choices], options.words)
    if not chosen:
        raise ConfigError(
            f"only: no cell is called {options.only!r}",
            next="words such as edit, 2x2, float64, gqa or simple_fsdp",
        )
    done = 0
    with ranks() as pool, Console(stderr=True).status("starting ranks") as line:

        def count(result: object) -> None:
            nonlocal done
            done += 1
            line.update(f"{done} of {len(chosen)} cells compared")

        results = matrix.run(pool, chosen, mode=options.mode, tell=count)
    lead = "core_torch beside reference_jax, cell by cell."
    return tell(results, options, title="Parity of the two cores", lead=lead)


def canary(options: ParityCanaryOptions) -> int:
    """Known faults, and whether the comparison finds them where they act."""
    from parity_tests.instrument import canary

    names = [name for name in canary.BIRDS if options.only.lower() in name.lower()]
    if not names:
        raise ConfigError(
            f"only: no fault is called {options.only!r}", next="twinshard parity canary"
        )
    with ranks() as pool, Console(stderr=True).status("starting ranks") as line:
        found = canary.run(pool, names, tell=lambda one: line.update(f"compared: {one.name}"))
    print_canary(found)
    faults = [one.as_json() for one in found if one.expected is not None]
    write_result(options.json, {"mutants": faults})
    cells = [one.result for one in found]
    page = replace(options, json="")  # the file is written
    write_cells(cells, page, title="Known faults", lead="Each line but the first ones has a fault.")
    return EXIT_OK if all(one.ok for one in found) else EXIT_DIFFERENT


def print_canary(found: "list[Found]") -> None:
    """A line for each fault: was it caught, and where."""
    table = Table("", "fault", "first divergence", "unit", box=None, pad_edge=False)
    for one in found:
        mark = "[green]ok[/green]" if one.ok else "[red]missed[/red]"
        where = one.phase or ("nothing, as it must be" if one.ok else "nothing")
        table.add_row(mark, one.name, where, one.unit)
    Console().print(table)
    faults = [one for one in found if one.expected is not None]
    caught = sum(one.caught for one in faults)
    placed = sum(one.ok for one in faults)
    Console().print(f"{caught} of {len(faults)} faults caught, {placed} where they act")
