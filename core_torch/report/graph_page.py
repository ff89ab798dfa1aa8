"""The page of ``twinshard graph``: one step before and after each pass, on one file.

No script, nothing loaded from anywhere; the content policy forbids all else.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from core_torch.report.lanes import blocks_of, collectives, overlaps
from core_torch.report.page_style import STYLE
from core_torch.report.text import fixed, human_bytes
from core_torch.report.timeline import (
    COLOURS,
    LEGEND,
    draw_timeline,
    escaped,
    milliseconds,
    scale_of,
    words,
)
from core_torch.shard.timeline import Timeline

WIDTH = 1060
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_OWN_STYLE = """
body { max-width: 71rem; }
figure .scroll { border: 1px solid var(--line); border-radius: 8px; padding: 0.7rem; }
.timeline { display: block; }
.legend { display: flex; flex-wrap: wrap; gap: 0.3rem 1.4rem; font-size: 0.92rem; padding: 0;
  margin: 0.8rem 0; list-style: none; }
.legend li { margin: 0; display: flex; align-items: center; gap: 0.5rem; }
.legend svg { width: 1.1rem; height: 0.9rem; flex: none; }
.numbers td, .numbers th { white-space: nowrap; }
.numbers td:last-child, .numbers th:last-child { white-space: normal; text-align: left; }
"""
_NOTE = """
<p>Everything here is an <strong>estimate</strong>: nothing was computed, nothing was sent. The
step was traced once, on one process that pretends to be one of many; what each part costs
follows from the rates below. Compute takes FLOPs&#8239;/&#8239;rate plus
bytes&#8239;/&#8239;rate plus a fixed time per operator; a collective takes the delay of the link
plus its bytes on the wire over its rate, whatever the number of ranks. The link serves
collectives in order of issue.</p>
<p>Memory is what lives besides the parameters' own shards and the optimizer: gathered
parameters, activations, gradients, buffers of collectives. Bytes are payload, as in the ledger:
of a gather the whole result, of a scatter the whole input. 1&nbsp;MB is 10<sup>6</sup> bytes.
Every box tells its name, bytes and time when pointed at.</p>
"""


class Picture(NamedTuple):
    """A stage to show."""

    title: str
    timeline: Timeline
    buckets: Sequence[Sequence[str]]  # names of parameters


def render_graph_page(
    pictures: Sequence[Picture],
    owners: Mapping[str, str],
    *,
    lead: str,
    assumptions: Mapping[str, str],
) -> str:
    """The whole page.

    Args:
        pictures: stages in order.
        owners: unit of every parameter.
        lead: what was modelled, in a sentence.
        assumptions: name and value of everything that the estimate rests on.

    Returns:
        HTML that refers to nothing outside itself.
    """
    title = "A training step under SimpleFSDP, modelled"
    scale = scale_of([picture.timeline for picture in pictures], width=WIDTH)
    figures = ""
    for picture in pictures:
        drawn = draw_timeline(picture.timeline, owners, scale)
        figures += f"<h3>{escaped(picture.title)}</h3><figure><div class='scroll'>{drawn}</div>"
        figures += f"<figcaption>{escaped(caption(picture.timeline))}</figcaption></figure>"
    rows = "".join(f"<dt>{escaped(k)}</dt><dd>{escaped(v)}</dd>" for k, v in assumptions.items())
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{STYLE}{COLOURS}{_OWN_STYLE}</style></head><body>",
            f'<header><h1>{title}</h1><p class="lead">{escaped(lead)}</p></header><main>',
            _summary(pictures),
            "<h2>Timelines</h2>",
            "<p>All on one scale; forward and backward each begin at 0. Numbers in boxes are "
            "layers; e is the embedding, h the head.</p>",
            _legend(),
            figures,
            "<h2>What was assumed</h2>",
            f"{_NOTE}<dl>{rows}</dl>",
            "<h2>Every collective</h2>",
            *(_details(picture, owners) for picture in pictures),
            "</main></body></html>\n",
        ]
    )


def caption(timeline: Timeline) -> str:
    """What to see in a picture, as a sentence with numbers."""
    share = 100 * timeline.exposed_seconds / timeline.seconds if timeline.seconds else 0.0
    hidden = timeline.link_seconds - timeline.exposed_seconds
    return (
        f"Step {milliseconds(timeline.seconds)}, of which {milliseconds(timeline.exposed_seconds)} "
        f"({share:.0f} %) waiting. The link is busy for {milliseconds(timeline.link_seconds)}, "
        f"{milliseconds(max(hidden, 0.0))} of it behind compute."
    )


SUMMARY_HEADINGS = (
    "stage",
    "collectives forward",
    "backward",
    "payload",
    "step",
    "exposed",
    "peak memory",
)


def summary_row(title: str, timeline: Timeline) -> tuple[str, ...]:
    """Cells under ``SUMMARY_HEADINGS``."""
    return (
        title,
        str(collectives(timeline, "forward")),
        str(collectives(timeline, "backward")),
        human_bytes(sum(t.payload_bytes for t in timeline.transfers)),
        milliseconds(timeline.seconds),
        milliseconds(timeline.exposed_seconds),
        human_bytes(timeline.peak_bytes),
    )


COLLECTIVE_HEADINGS = ("pass", "bucket", "what", "payload", "link", "exposed", "runs behind")


def collective_rows(timeline: Timeline, owners: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Cells under ``COLLECTIVE_HEADINGS``, in order of issue."""
    blocks = blocks_of(timeline, owners)
    return [
        (
            t.program,
            t.name,
            words(t.op),
            human_bytes(t.payload_bytes),
            milliseconds(t.end - t.begin),
            milliseconds(t.exposed),
            ", ".join(o.unit for o in overlaps(t, blocks)) or "nothing",
        )
        for t in timeline.transfers
    ]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], kind: str) -> str:
    head = "".join(f'<th scope="col">{escaped(text)}</th>' for text in headings)
    body = "".join(
        f'<tr><th scope="row">{escaped(first)}</th>'
        + "".join(f"<td>{escaped(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    table = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table class="{kind}">{table}</table></div>'


def _summary(pictures: Sequence[Picture]) -> str:
    rows = [summary_row(picture.title, picture.timeline) for picture in pictures]
    return _table(SUMMARY_HEADINGS, rows, "summary")


def _legend() -> str:
    items = "".join(
        f'<li><svg class="timeline" viewBox="0 0 14 12"><rect class="{kind}" width="14" '
        f'height="12"/></svg>{meaning}</li>'
        for kind, meaning in LEGEND
    )
    return f'<ul class="legend">{items}</ul>'


def _details(picture: Picture, owners: Mapping[str, str]) -> str:
    count = fixed(len(picture.timeline.transfers), 0)
    rows = collective_rows(picture.timeline, owners)
    plan = "\n".join(f"{i}  {' '.join(names)}" for i, names in enumerate(picture.buckets))
    return (
        f"<details><summary>{escaped(picture.title)}: {count} collectives</summary>"
        f"{_table(COLLECTIVE_HEADINGS, rows, 'numbers')}"
        f"<h3>Buckets</h3><pre>{escaped(plan)}</pre></details>"
    )
