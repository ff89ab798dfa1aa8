"""``twinshard graph``: what the passes make of a training step, estimated on one process."""

import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from core_torch.bench.link import parse_network
from core_torch.cli.doctor import installed_versions
from core_torch.cli.options import GraphOptions
from core_torch.errors import EXIT_OK, ConfigError
from core_torch.report.graph_page import (
    COLLECTIVE_HEADINGS,
    SUMMARY_HEADINGS,
    Picture,
    collective_rows,
    render_graph_page,
    summary_row,
)
from core_torch.report.lanes import blocks_of, facts, waits_of
from core_torch.report.text import counted, human_bytes, human_count, model_title
from core_torch.report.timeline import DIRECTIONS, milliseconds, standalone
from core_torch.shard.cost import Costs
from core_torch.shard.preview import Preview, preview
from core_torch.shard.schedule import CompileOptions
from core_torch.shard.timeline import Timeline

Piece = tuple[str, float, float]  # character, begin and end in seconds
_MIB = 1 << 20
_SVG_WIDTH = 860
_LABEL = 9  # columns before a lane
_STYLES = {"█": "blue", "░": "bold yellow", "▀": "green", "▄": "magenta"}


def run(options: GraphOptions, words: list[str]) -> int:
    """Traces, prints the timelines before and after the passes, and writes what was asked for.

    Raises:
        ConfigError: a file that cannot be written.
    """
    for name in ("out", "json"):
        path = getattr(options, name)
        if path and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"{name}: there is no folder {str(Path(path).parent)!r}")
    console, costs = Console(), costs_of(options)
    with Console(stderr=True).status("tracing a step"):
        found = preview(
            options.model,
            ranks=options.ranks,
            batch=options.batch,
            sequence=options.sequence,
            options=compile_options(options, costs),
            recompute=options.recompute,
        )
    told = described(options, found)
    console.print(Text(f"Estimate, not a measurement: {told}"))
    console.print(lanes_of(found, console.width))
    console.print(summary_table(found))
    console.print(collectives_table(found))
    if options.json:
        _write("json", options.json, json.dumps(facts_of(options, costs, found), indent=1))
    if options.out:
        _write("out", options.out, drawn(options, costs, found, told))
        console.print(f"page  {options.out}", markup=False, highlight=False, soft_wrap=True)
    return EXIT_OK


def costs_of(options: GraphOptions) -> Costs:
    """Rates that the options name; what they leave open is typical of one CPU core."""
    costs = replace(
        Costs.typical(),
        flops_per_second=options.gflops * 1e9,
        bytes_per_second=options.gbytes * 1e9,
    )
    network = parse_network(options.network)
    if network is None:
        return costs
    return replace(costs, latency_seconds=network.delay, link_bytes_per_second=network.rate / 8)


def compile_options(options: GraphOptions, costs: Costs) -> CompileOptions:
    """How the graph is to be scheduled."""
    limit = options.memory_limit_mib * _MIB or None
    return CompileOptions(
        backend=options.backend, wrap=options.wrap, costs=costs, memory_limit_bytes=limit
    )


def described(options: GraphOptions, found: Preview) -> str:
    """What was modelled, in a line."""
    model = options.model
    link = "a fast link" if options.network == "loopback" else f"a link of {options.network}"
    return (
        f"{model_title(model.kind, model.layers, model.dim)} "
        f"({human_count(found.parameters)} parameters), {counted(options.ranks, 'rank')} over "
        f"{link}, {options.batch} × {options.sequence} tokens a rank, wrap {options.wrap}, "
        f"{options.backend}, recompute {options.recompute}."
    )


def lanes_of(found: Preview, width: int) -> Group:
    """Both directions of every stage as rows of characters on one scale."""
    pieces = [(s.title, way, _pieces(s.timeline, way)) for s in found.stages for way in DIRECTIONS]
    longest = max(end for *_, rows in pieces for row in rows for *_, end in row)
    step = longest / max(20, width - _LABEL - 1)
    parts: list[Text] = []
    for title, way, (compute, link) in pieces:
        if way == DIRECTIONS[0]:
            parts.append(Text(f"\n{title}", style="bold"))
        for label, row in ((way, compute), ("link", link)):
            line = Text(label.ljust(_LABEL), style="dim")
            for character in painted(row, step):
                line.append(character, style=_STYLES.get(character, ""))
            parts.append(line)
    legend = f"\n█ compute   ░ waits   ▀ gather   ▄ scatter   one column: {milliseconds(step)}\n"
    return Group(*parts, Text(legend))


def _pieces(timeline: Timeline, way: str) -> tuple[list[Piece], list[Piece]]:
    """The compute and the link row of one direction, which begins at 0."""
    start = min((span.begin for span in timeline.spans if span.program == way), default=0.0)
    busy = [("█", b.begin, b.end) for b in blocks_of(timeline, {}) if b.program == way]
    busy += [("░", w.begin, w.end) for w in waits_of(timeline) if w.program == way]
    mine = [t for t in timeline.transfers if t.program == way]
    link = [("▀" if t.op == "all_gather" else "▄", t.begin, t.end) for t in mine]
    moved = [[(c, begin - start, end - start) for c, begin, end in row] for row in (busy, link)]
    return moved[0], moved[1]


def painted(pieces: Sequence[Piece], step: float) -> str:
    """A row of characters, each ``step`` seconds wide and showing what takes most of it.

    Args:
        pieces: character, begin and end of each.
        step: seconds. Less than a third of them leaves a column empty.
    """
    columns = math.ceil(max((end for *_, end in pieces), default=0.0) / step - 1e-6)
    shares: list[dict[str, float]] = [{} for _ in range(columns)]
    for character, begin, end in pieces:
        for column in range(math.floor(begin / step), min(math.ceil(end / step), columns)):
            inside = min(end, (column + 1) * step) - max(begin, column * step)
            shares[column][character] = shares[column].get(character, 0.0) + inside
    return "".join(
        max(share, key=share.__getitem__) if sum(share.values()) > step / 3 else " "
        for share in shares
    )


def summary_table(found: Preview) -> Table:
    """One row for each stage."""
    rows = [summary_row(stage.name, stage.timeline) for stage in found.stages]
    headings = [text.replace("collectives ", "") for text in SUMMARY_HEADINGS]
    return _table(headings, rows, numbers=range(1, len(headings)))


def collectives_table(found: Preview) -> Table:
    """Every collective of the last stage."""
    stage = found.stages[-1]
    rows = [
        (way, textwrap.shorten(bucket, 30, placeholder="…"), *rest)
        for way, bucket, *rest in collective_rows(stage.timeline, found.owners)
    ]
    return _table(COLLECTIVE_HEADINGS, rows, numbers=range(3, 6))


def _table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int]
) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for place, heading in enumerate(headings):
        is_last = place == len(headings) - 1
        justify: Any = "right" if place in numbers else "left"
        shown.add_column(heading, justify=justify, no_wrap=not is_last)
    for row in rows:
        shown.add_row(*map(Text, row))
    return shown


def assumptions(options: GraphOptions, costs: Costs) -> Iterator[tuple[str, str]]:
    """Name and value of everything that the estimate rests on."""
    yield "arithmetic", f"{options.gflops:g} GFLOP/s"
    yield "memory", f"{options.gbytes:g} GB/s"
    yield "operator", f"{costs.seconds_per_operator * 1e6:g} µs each"
    yield "link", f"{human_bytes(costs.link_bytes_per_second)}/s each way"
    yield "delay", f"{milliseconds(costs.latency_seconds)} per collective"
    yield "wrap", options.wrap
    yield "backend", options.backend
    yield "recompute", options.recompute
    if options.memory_limit_mib:
        yield "memory limit", f"{options.memory_limit_mib} MiB"
    yield "torch", str(installed_versions()["torch"])


def drawn(options: GraphOptions, costs: Costs, found: Preview, told: str) -> str:
    """The page, or before and after as one picture where the file's name ends in .svg."""
    if Path(options.out).suffix == ".svg":
        pictures = [(stage.title, stage.timeline) for stage in (found.stages[0], found.stages[-1])]
        title = "A training step under SimpleFSDP before and after the passes (estimate)"
        return standalone(pictures, found.owners, title=title, note=told, width=_SVG_WIDTH)
    return render_graph_page(
        [Picture(stage.title, stage.timeline, stage.buckets) for stage in found.stages],
        found.owners,
        lead=f"Estimates, not measurements. {told}",
        assumptions=dict(assumptions(options, costs)),
    )


def facts_of(options: GraphOptions, costs: Costs, found: Preview) -> dict[str, Any]:
    """The content of the JSON file."""
    return {
        "kind": "estimate",
        "options": asdict(options),
        "costs": {k: v for k, v in asdict(costs).items() if k != "profile"},
        "parameters": found.parameters,
        "stages": [
            {"name": stage.name, "title": stage.title, "buckets": stage.buckets}
            | facts(stage.timeline, found.owners)
            for stage in found.stages
        ],
        "versions": installed_versions(),
    }


def _write(name: str, path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{name}: cannot write {path!r}: {error.strerror}") from None
