"""``twinshard bench sync``: a slow replica under EDiT and A-EDiT, and what rounds cost."""

import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from core_torch.bench.link import parse_network
from core_torch.bench.plan import PACES
from core_torch.cli.bench import (
    check_json_folder,
    column_table,
    linked,
    surroundings,
    write_result,
)
from core_torch.cli.launch import launch
from core_torch.cli.options import BenchSyncOptions
from core_torch.data.corpus import prepare
from core_torch.errors import EXIT_OK
from core_torch.report.text import fixed

_SILENCE_SECONDS = 900.0
RANKS = 2


def run(options: BenchSyncOptions, words: list[str]) -> int:
    """Measures, prints, writes.

    Raises:
        ConfigError: a link that cannot be had, a file that cannot be written.
    """
    check_json_folder(options.json)
    console = Console()
    with tempfile.TemporaryDirectory(prefix="twinshard-bench-") as folder:
        result = compare(options, Path(folder), Console(stderr=True))
    console.print(pace_table(result))
    console.print(overlap_table(result))
    console.print(f"network: {result['network']}", highlight=False)
    write_result(options.json, result)
    return EXIT_OK


def compare(options: BenchSyncOptions, folder: Path, status: Console) -> dict[str, Any]:
    """Both phases; the content of the JSON file.

    Args:
        options: what to measure.
        folder: empty; for the prepared text.
        status: where to say what is going on.
    """
    prepare(PACES[options.size].config.data, folder / "data")
    job: dict[str, Any] = {
        "kind": "bench_sync",
        "data": str(folder / "data"),
        "slow": options.slow_replica,
        "size": options.size,
        "seconds": options.seconds,
        "steps": options.steps,
        "rounds": options.rounds,
        "backend": options.backend,
    }
    result: dict[str, Any] = {}
    with linked(parse_network(options.network), RANKS) as (places, link):
        for phase in ("pace", "overlap"):
            with status.status(phase) as line:

                def show(event: dict[str, Any], phase: str = phase, line: Any = line) -> None:
                    if event["event"] == "bench":
                        line.update(f"{phase}: {event['variant']}, {event['step']}")

                result |= launch(
                    job | {"phase": phase, "network": link},
                    RANKS,
                    show,
                    silence_seconds=_SILENCE_SECONDS,
                    places=places,
                )
    result["network"] = link
    return result | surroundings()


def pace_table(result: dict[str, Any]) -> Table:
    """Both methods with a slow replica."""
    shown = column_table("method", "pace", "steps", "tokens", "loss")
    for method in ("edit", "aedit"):
        row = result[method]
        steps = " + ".join(map(str, row["steps"]))
        cells = (fixed(row["pace"], 2), steps, str(row["tokens"]), fixed(row["loss"], 3))
        shown.add_row(method, *cells)
    return shown


def overlap_table(result: dict[str, Any]) -> Table:
    """Milliseconds of each unit's exchange: by itself, and what of it a forward shows."""
    shown = column_table("unit", "exchange ms", "exposed ms", "exposed ms, compiled")
    inside, compiled = result["layerwise"], result["compiled"]
    columns = (
        result["exchange_ms_per_unit"],
        inside["exposed_ms_per_unit"],
        compiled["exposed_ms_per_unit"],
    )
    for unit, *cells in zip(result["units"], *columns, strict=True):
        shown.add_row(unit, *(fixed(x, 1) for x in cells))
    hidden = (f"{100 * part['hidden_fraction']:.0f} % hidden" for part in (inside, compiled))
    shown.add_row("after the first two", "", *hidden)
    rounds = (inside["whole_round_ms"], inside["round_ms"], compiled["round_ms"])
    shown.add_row("a round adds", *(fixed(x, 1) for x in rounds))
    return shown
