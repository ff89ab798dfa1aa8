"""``twinshard graph``: a model of many ranks, drawn by one process, with numbers that add up."""

import io
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from rich.console import Console

from core_torch.cli.commands import parse
from core_torch.cli.graph import (
    collectives_table,
    costs_of,
    described,
    drawn,
    facts_of,
    lanes_of,
    painted,
    run,
    summary_table,
)
from core_torch.cli.options import GraphOptions
from core_torch.errors import ConfigError
from core_torch.report.lanes import blocks_of, overlaps, waits_of
from core_torch.report.timeline import milliseconds, short
from core_torch.shard.preview import Preview, preview
from core_torch.shard.schedule import CompileOptions
from core_torch.tests.graph_cases import TINY

OPTIONS = GraphOptions(
    model=replace(TINY, layers=2), ranks=64, batch=1, sequence=8, backend="aot_eager"
)


@pytest.fixture(scope="module")
def found() -> Preview:
    """Two layers on 64 ranks that are not there."""
    return preview(
        OPTIONS.model,
        ranks=OPTIONS.ranks,
        batch=OPTIONS.batch,
        sequence=OPTIONS.sequence,
        options=CompileOptions(backend="aot_eager", costs=costs_of(OPTIONS)),
    )


def shown(part: Any) -> list[str]:
    """Lines of a terminal of 100 columns without colours."""
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(part)
    return console.export_text().splitlines()


def test_64_ranks_need_no_process_group_afterwards_and_no_other_process(found: Preview) -> None:
    assert not dist.is_initialized()
    of = found.stages[0].timeline.transfers[0]
    assert of.wire_bytes == of.payload_bytes * 63 / 64


def test_passes_leave_fewer_collectives_and_reordering_exposes_less(found: Preview) -> None:
    traced, bucketed, reordered = (stage.timeline for stage in found.stages)
    assert [len(x.transfers) for x in (traced, bucketed, reordered)] == [60, 10, 10]
    assert traced.exposed_seconds > bucketed.exposed_seconds >= reordered.exposed_seconds
    assert traced.seconds > bucketed.seconds >= reordered.seconds
    for timeline in (traced, bucketed):
        assert timeline.exposed_seconds == pytest.approx(timeline.link_seconds)


def test_blocks_and_waits_cover_the_step_exactly(found: Preview) -> None:
    for stage in found.stages:
        blocks, waits = blocks_of(stage.timeline, found.owners), waits_of(stage.timeline)
        busy = sum(block.end - block.begin for block in blocks)
        waiting = sum(wait.end - wait.begin for wait in waits)
        assert busy == pytest.approx(stage.timeline.compute_seconds)
        assert busy + waiting == pytest.approx(stage.timeline.seconds)
        assert {block.unit for block in blocks} - {""} == {*found.owners.values()}


def test_what_a_collective_overlaps_is_what_hides_it(found: Preview) -> None:
    for stage in found.stages:
        blocks = blocks_of(stage.timeline, found.owners)
        hidden = sum(o.seconds for t in stage.timeline.transfers for o in overlaps(t, blocks))
        exposed = stage.timeline.exposed_seconds
        assert hidden == pytest.approx(stage.timeline.link_seconds - exposed, abs=1e-9)


def test_the_terminal_shows_every_stage_in_100_columns(found: Preview) -> None:
    lines = shown(lanes_of(found, 100)) + shown(summary_table(found))
    lines += shown(collectives_table(found))
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    assert all(stage.title in text and stage.name in text for stage in found.stages)
    for sign in "█░▀▄":
        assert sign in text
    rows = [line for line in lines if re.match(r"(forward|backward) +\S+ +(gather|scatter)", line)]
    assert len(rows) == 10


def test_a_column_shows_what_takes_most_of_it_and_little_leaves_it_empty() -> None:
    pieces = [("a", 0.0, 1.6), ("b", 1.6, 2.0), ("c", 3.8, 4.0)]
    assert painted(pieces, 1.0) == "aa  "
    assert painted(pieces, 0.5) == "aaab   c"


class Page(HTMLParser):
    """Tags that are open, and what could load or run something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.suspect: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
        names = dict(attrs)
        if tag in ("script", "link", "img", "iframe") or {"src", "href", "onclick"} & names.keys():
            self.suspect.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Opens nothing."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_loads_nothing_and_says_that_it_is_an_estimate(found: Preview) -> None:
    text = drawn(replace(OPTIONS, out="x.html"), costs_of(OPTIONS), found, "told & <so>")
    page = Page(text)
    assert page.open == [] and page.suspect == []
    assert "told &amp; &lt;so&gt;" in text and "<so>" not in text
    assert "Estimates, not measurements" in text and "prefers-color-scheme: dark" in text
    assert text.count('<svg class="timeline" xmlns') == 3
    assert all(stage.title in text for stage in found.stages)


def test_a_picture_is_xml_of_its_own_with_before_and_after(found: Preview) -> None:
    text = drawn(replace(OPTIONS, out="x.svg"), costs_of(OPTIONS), found, described(OPTIONS, found))
    root = ET.fromstring(text)
    words = " ".join(root.itertext())
    assert found.stages[0].title in words and found.stages[2].title in words
    assert found.stages[1].title not in words and "(estimate)" in words
    width = float(root.attrib["width"])
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(box.attrib.get("x", 0)) + float(box.attrib["width"]) <= width


def test_boxes_of_a_row_do_not_cover_each_other(found: Preview) -> None:
    text = drawn(replace(OPTIONS, out="x.svg"), costs_of(OPTIONS), found, "")
    rows: dict[str, list[tuple[float, float]]] = {}
    for box in ET.fromstring(text).iter("{http://www.w3.org/2000/svg}rect"):
        if box.attrib.get("class", "").startswith("box"):
            x, width = float(box.attrib["x"]), float(box.attrib["width"])
            rows.setdefault(box.attrib["y"], []).append((x, x + width))
    assert len(rows) == 8
    for row in rows.values():
        row.sort()
        assert all(a[1] <= b[0] + 0.45 for a, b in zip(row, row[1:], strict=False))


def test_the_json_says_estimate_and_holds_what_was_drawn(found: Preview) -> None:
    facts = json.loads(json.dumps(facts_of(OPTIONS, costs_of(OPTIONS), found)))
    assert facts["kind"] == "estimate" and facts["options"]["ranks"] == 64
    last = facts["stages"][-1]
    assert (last["collectives_forward"], last["collectives_backward"]) == (4, 6)
    assert sum(t["payload_bytes"] for t in last["transfers"]) == last["bytes"]
    assert sorted(name for bucket in last["buckets"] for name in bucket) == sorted(found.owners)


def test_the_network_sets_the_link_and_loopback_leaves_the_typical_one() -> None:
    link = costs_of(replace(OPTIONS, network="8mbit,3ms"))
    assert (link.link_bytes_per_second, link.latency_seconds) == (1e6, 3e-3)
    assert costs_of(replace(OPTIONS, network="loopback")).latency_seconds == 2e-4


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("--ranks 0", "ranks"),
        ("--network 1gbit", "network"),
        ("--memory-limit-mib 5", "memory_limit_mib"),
        ("--model.vocabulary 0", "model.vocabulary"),
        ("--sequence 4096", "sequence"),
        ("--gflops 0", "gflops"),
        ("--model.heads 3", "model.heads"),
    ],
)
def test_options_that_cannot_work_are_named(line: str, path: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(path)):
        parse("graph", line.split())


def test_options_have_the_names_of_train_where_they_mean_the_same() -> None:
    (options,), _ = parse("graph", "--model.dim 64 --wrap auto --memory-limit-mib 9".split())
    assert (options.model.dim, options.wrap, options.memory_limit_mib) == (64, "auto", 9)


def test_a_folder_that_is_not_there_is_told_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="out: there is no folder"):
        run(replace(OPTIONS, out=str(tmp_path / "no" / "x.html")), [])


def test_names_and_durations_are_short() -> None:
    assert short("layers.3") == "3" and short("layers.0..layers.1") == "0..1"
    assert short("layers.3.attention.wq.weight") == "3" and short("head") == "head"
    assert [milliseconds(s) for s in (0, 0.00123, 0.0123, 0.123, 1.23)] == [
        "0 ms",
        "1.23 ms",
        "12.3 ms",
        "123 ms",
        "1,230 ms",
    ]
