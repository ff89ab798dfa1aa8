"""``twinshard bench shard``: measures variants side by side on this machine."""

import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from core_torch.bench.costs_file import read_run_costs, write_run_costs
from core_torch.bench.link import Network, emulated, obstacle, parse_network
from core_torch.bench.results import merged, processor_name, ratio, unequal_losses
from core_torch.cli.doctor import installed_versions, machine
from core_torch.cli.launch import launch
from core_torch.cli.options import BenchOptions
from core_torch.cli.ranks import Place
from core_torch.errors import EXIT_OK, ConfigError
from core_torch.report.records import write_json
from core_torch.report.text import fixed, human_bytes

_SILENCE_SECONDS = 1800.0  # compilers can take long
# With these the C library gives memory back as soon as a tensor is freed, so that the
# system's figures follow the tensors. It costs time, hence a launch of its own.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}


def run(options: BenchOptions, words: list[str]) -> int:
    """Runs the benchmark, prints a table; 1 if the variants disagree.

    Raises:
        ConfigError: a link that cannot be had, a file that cannot be written.
    """
    check_json_folder(options.json)
    network = parse_network(options.network)
    console = Console()
    with tempfile.TemporaryDirectory(prefix="twinshard-bench-") as cache:
        result = compare(options, network, cache, Console(stderr=True))
    console.print(speed_table(result["variants"]))
    console.print(traffic_table(result["variants"]))
    if result["estimates"]:
        console.print(estimate_table(result))
    console.print(_network_line(result["network"]), highlight=False)
    write_result(options.json, result)
    if wrong := unequal_losses(result["variants"]):
        console.print(Text(f"loss differs: {', '.join(wrong)}", style="bold red"))
        return 1
    return EXIT_OK


def check_json_folder(path: str) -> None:
    """Refuses a file that cannot be there, before an hour of work and not after it.

    Raises:
        ConfigError: there is no such folder.
    """
    if path and not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"json: there is no folder {str(Path(path).parent)!r}")


def write_result(path: str, result: dict[str, Any]) -> None:
    """Writes the JSON file, if one is wanted.

    Raises:
        ConfigError: it cannot be written.
    """
    if path:
        try:
            write_json(Path(path), result)
        except OSError as error:
            raise ConfigError(f"json: cannot write {path!r}: {error.strerror}") from None


def surroundings() -> dict[str, Any]:
    """Machine, versions and command, without which a figure says nothing."""
    return {
        "hardware": {"processor": processor_name()} | machine(),
        "versions": installed_versions(),
        "command": shlex.join(["twinshard", *sys.argv[1:]]),
    }


def compare(
    options: BenchOptions, network: Network | None, cache: str, status: Console
) -> dict[str, Any]:
    """All launches; the content of the JSON file.

    Args:
        options: what to compare.
        network: the link between the ranks; None is the machine's own.
        cache: empty folder for compilers.
        status: where to say what is going on.
    """
    job: dict[str, Any] = {
        "kind": "bench_shard",
        "size": options.size,
        "variants": options.chosen,
        "steps": options.steps,
    }
    with linked(network, options.ranks) as (places, link):
        job["network"] = link
        timed = []
        for number in range(options.launches):
            where = f"launch {number + 1} of {options.launches}"
            timed.append(_launch(job | {"phase": "time"}, places, {}, cache, status, where))
        memory = _launch(job | {"phase": "memory"}, places, _MALLOC, cache, status, "memory")
        estimates = []
        if options.costs:
            job |= {"phase": "estimate", "costs": read_run_costs(Path(options.costs), network)}
            estimates = _launch(job, places, {}, cache, status, "estimates")
    if estimates and not Path(options.costs).exists():
        write_run_costs(Path(options.costs), estimates[0], network)
    return {
        "variants": merged(timed, memory),
        "estimates": estimates,
        **surroundings(),
        "network": link,
        "size": options.size,
        "ranks": options.ranks,
        "steps": options.steps,
        "launches": options.launches,
    }


@contextmanager
def linked(network: Network | None, ranks: int) -> Iterator[tuple[list[Place], dict[str, Any]]]:
    """Where the ranks must run to have ``network`` between them, and what that is."""
    here = [Place() for _ in range(ranks)]
    if network is None:
        yield here, {"kind": "loopback"}
        return
    facts = {
        "text": network.text,
        "rate_bits_per_second": network.rate,
        "delay_seconds": network.delay,
    }
    if why := obstacle():
        yield here, {"kind": "modelled", "reason": why} | facts
        return
    with emulated(network, ranks) as sides:
        places = [Place(side.prefix, side.environment) for side in sides]
        yield places, {"kind": "emulated"} | facts


def speed_table(rows: list[dict[str, Any]]) -> Table:
    """Time and memory; in brackets, against FSDP2 as shipped."""
    shown = column_table("variant", "ms per step", "exposed ms", "peak memory", "loss")
    for row in rows:
        times, peaks = ratio(row, rows, "step_ms"), ratio(row, rows, "peak_tensor_bytes")
        shown.add_row(
            row["variant"],
            _against(fixed(row["step_ms"], 1), times),
            fixed(row["exposed_ms"], 1),
            _against(human_bytes(row["peak_tensor_bytes"]), peaks),
            fixed(row["loss"], 4),
        )
    return shown


def traffic_table(rows: list[dict[str, Any]]) -> Table:
    """Collectives of one step, and what the first call cost."""
    shown = column_table("variant", "forward", "backward", "payload", "compile s")
    for row in rows:
        calls = (str(row["collectives_forward"]), str(row["collectives_backward"]))
        size = human_bytes(row["bytes"])
        shown.add_row(row["variant"], *calls, size, fixed(row["compile_s"], 1))
    return shown


def estimate_table(result: dict[str, Any]) -> Table:
    """What the timeline says, in brackets against what was measured."""
    shown = column_table("program of", "ms measured", "own costs", "given costs", "peak estimated")
    peaks = {row["variant"]: row["peak_tensor_bytes"] for row in result["variants"]}
    for row in result["estimates"]:
        measured, peak = row["program_ms"], peaks[row["variant"]]
        told = [row.get(f"estimate_{name}_ms") for name in ("own", "given")]
        shown.add_row(
            row["variant"],
            fixed(measured, 1),
            *("" if x is None else _against(fixed(x, 1), x / measured) for x in told),
            _against(
                human_bytes(row["estimate_peak_bytes"]),
                row["estimate_peak_bytes"] / peak if peak else None,
            ),
        )
    return shown


def column_table(first: str, *others: str) -> Table:
    """An empty table: names on the left, figures on the right."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    shown.add_column(first, no_wrap=True)
    for heading in others:
        shown.add_column(heading, justify="right")
    return shown


def _against(text: str, ratio: float | None) -> str:
    return text if ratio is None else f"{text} ({ratio:.2f})"


def _network_line(link: dict[str, Any]) -> str:
    said = f"network: {link['kind']}" + (f" {link['text']}" if "text" in link else "")
    return f"{said}, because {link['reason']}" if "reason" in link else said


def _launch(
    job: dict[str, Any],
    places: list[Place],
    environment: dict[str, str],
    cache: str,
    status: Console,
    where: str,
) -> list[dict[str, Any]]:
    """One launch of all ranks; its rows."""
    extra = environment | {"TORCHINDUCTOR_CACHE_DIR": cache}
    places = [place._replace(environment={**place.environment, **extra}) for place in places]
    with status.status(where) as line:

        def show(event: dict[str, Any]) -> None:
            if event["event"] == "bench":
                line.update(f"{where}: step {event['step']}, {event['variant']}")

        rows: list[dict[str, Any]] = launch(
            job, len(places), show, silence_seconds=_SILENCE_SECONDS, places=places
        )
    return rows
