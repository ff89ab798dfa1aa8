"""Draws an estimated timeline as SVG: what is computed, what is on the link, who waits.

One panel for each direction, all on one scale, so that pictures of several stages can be laid
one above the other. Colours are CSS variables: the page, or ``standalone``, defines them
for light and dark. A label is drawn where it fits; every box tells the rest when pointed at.
"""

import html
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from core_torch.report.lanes import blocks_of, overlaps, waits_of
from core_torch.report.text import human_bytes, sanitise
from core_torch.shard.timeline import Span, Timeline, Transfer

COLOURS = """
.timeline { --compute: #b9d2ea; --gather: #a5dcc4; --scatter: #ecc3da; --sum: #e6d9a8;
  --wait: #d55e00; --memory: #8a93a0; --words: #1c1f23; --faint: #5f6670; --rule: #dfe3e8;
  --ground: #ffffff; }
@media (prefers-color-scheme: dark) { .timeline { --compute: #2d5377; --gather: #1c6a50;
  --scatter: #7b4166; --sum: #6d5f21; --wait: #ff8c42; --memory: #8f98a4; --words: #e8eaed;
  --faint: #a3abb5; --rule: #2f353c; --ground: #15181c; } }
.timeline text { font: 11px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans",
  sans-serif; fill: var(--words); }
.timeline .label { font-size: 10px; pointer-events: none; } .timeline .small { fill: var(--faint); }
.timeline .strong { font-weight: 600; }
.timeline .title { font-weight: 600; font-size: 13px; }
.timeline rect.box { stroke: var(--ground); stroke-width: 1; }
.timeline .compute { fill: var(--compute); } .timeline .all_gather { fill: var(--gather); }
.timeline .reduce_scatter { fill: var(--scatter); } .timeline .all_reduce { fill: var(--sum); }
.timeline .wait { fill: var(--wait); } .timeline .rule { stroke: var(--rule); }
.timeline .memory { fill: var(--memory); fill-opacity: 0.3; stroke: var(--memory); }
.timeline .peak { fill: var(--memory); }
"""
LEGEND = (
    ("compute", "compute"),
    ("wait", "compute waits"),
    ("all_gather", "gather of parameters"),
    ("reduce_scatter", "scatter of gradients"),
)
DIRECTIONS = ("forward", "backward")
_LEFT, _RIGHT, _ROW, _MEMORY, _TICKS, _MARGIN = 78, 30, 22, 34, 24, 18
_CHARACTER = 6.4  # pixels of a character, about
_NARROW = 5.8  # and of one inside a box


class Scale(NamedTuple):
    """What a pixel stands for; the same in all pictures that are to be compared."""

    width: int  # pixels of a picture
    seconds: float  # that a panel holds
    peak_bytes: int  # height of the memory row; 0: no such row

    def x(self, seconds: float) -> float:
        """Place of an instant, counted from the panel's beginning."""
        return _LEFT + (self.width - _LEFT - _RIGHT) * seconds / self.seconds

    @property
    def panel_height(self) -> int:
        """Pixels of one direction."""
        return 2 * _ROW + (_MEMORY + 6 if self.peak_bytes else 0) + _TICKS


def scale_of(timelines: Sequence[Timeline], *, width: int, memory: bool = True) -> Scale:
    """A scale on which every direction of every timeline fits."""
    bounds = [_bounds(timeline, way) for timeline in timelines for way in DIRECTIONS]
    longest = max(end - begin for begin, end in bounds)
    peak = max(timeline.peak_bytes for timeline in timelines)
    return Scale(width, longest or 1.0, peak if memory else 0)


def draw_timeline(timeline: Timeline, owners: Mapping[str, str], scale: Scale) -> str:
    """Both directions as one ``<svg>``, without a style.

    Args:
        timeline: of a step.
        owners: unit of every parameter.
        scale: see ``scale_of``.
    """
    height = 2 * scale.panel_height
    body = "".join(draw_panels(timeline, owners, scale, top=0))
    return (
        f'<svg class="timeline" xmlns="http://www.w3.org/2000/svg" width="{scale.width}" '
        f'height="{height}" viewBox="0 0 {scale.width} {height}" role="img">{body}</svg>'
    )


def draw_panels(
    timeline: Timeline, owners: Mapping[str, str], scale: Scale, *, top: int
) -> Iterator[str]:
    """Elements of both directions, the upper one at ``top``."""
    for place, way in enumerate(DIRECTIONS):
        begin, end = _bounds(timeline, way)
        y = top + place * scale.panel_height
        yield f'<text class="strong" x="0" y="{y + 15}">{way}</text>'
        yield from _ticks(scale, end - begin, y)
        yield from _compute_row(timeline, owners, scale, way, begin, y)
        yield from _link_row(timeline, owners, scale, way, begin, y + _ROW)
        if scale.peak_bytes:
            yield from _memory_row(timeline, scale, way, begin, y + 2 * _ROW + 4)


def _bounds(timeline: Timeline, way: str) -> tuple[float, float]:
    spans = [span for span in timeline.spans if span.program == way]
    return (spans[0].begin, spans[-1].end) if spans else (0.0, 0.0)


def _compute_row(
    timeline: Timeline, owners: Mapping[str, str], scale: Scale, way: str, begin: float, y: int
) -> Iterator[str]:
    for block in blocks_of(timeline, owners):
        if block.program == way:
            told = f"compute of {block.unit}: {milliseconds(block.end - block.begin)}"
            ends = (block.begin - begin, block.end - begin)
            yield from _box(scale, ends, y, "compute", block.unit, told)
    for wait in waits_of(timeline):
        if wait.program == way:
            told = f"waits for the {words(wait.op)} of {wait.name}: "
            told += milliseconds(wait.end - wait.begin)
            yield from _box(scale, (wait.begin - begin, wait.end - begin), y, "wait", "", told)


def _link_row(
    timeline: Timeline, owners: Mapping[str, str], scale: Scale, way: str, begin: float, y: int
) -> Iterator[str]:
    blocks = blocks_of(timeline, owners)
    yield f'<text class="small" x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">link</text>'
    for transfer in timeline.transfers:
        if transfer.program == way:
            told = describe(transfer)
            behind = ", ".join(o.unit for o in overlaps(transfer, blocks))
            told += f", behind {behind}" if behind else ", behind nothing"
            ends = (transfer.begin - begin, transfer.end - begin)
            label = owners.get(transfer.name, transfer.name)
            yield from _box(scale, ends, y, transfer.op, label, told)


def _memory_row(timeline: Timeline, scale: Scale, way: str, begin: float, y: int) -> Iterator[str]:
    """Live bytes; the highest in each pixel, so that no peak is lost."""
    spans = [span for span in timeline.spans if span.program == way]
    base, path, last = y + _MEMORY, [], _LEFT
    for column, highest in _columns(spans, scale, begin):
        path.append(f"H{column}V{base - _MEMORY * highest / scale.peak_bytes:.1f}")
        last = column
    end = scale.x(spans[-1].end - begin) if spans else last
    yield f'<text class="small" x="{_LEFT - 8}" y="{y + 22}" text-anchor="end">memory</text>'
    yield f'<path class="memory" d="M{_LEFT} {base}{"".join(path)}H{end:.1f}V{base}Z"/>'
    peak = timeline.spans[timeline.peak_at] if timeline.peak_at >= 0 else None
    if peak and peak.program == way:
        x = scale.x(peak.begin - begin)
        top = base - _MEMORY * timeline.peak_bytes / scale.peak_bytes
        side, anchor = (8, "start") if x < scale.width / 2 else (-8, "end")
        yield f'<circle class="peak" cx="{x:.1f}" cy="{top:.1f}" r="3"/>'
        yield (
            f'<text x="{x + side:.1f}" y="{base - 6}" text-anchor="{anchor}">'
            f"peak {human_bytes(timeline.peak_bytes)}</text>"
        )


def _columns(spans: Sequence[Span], scale: Scale, begin: float) -> Iterator[tuple[int, int]]:
    """(pixel, highest bytes in it), in order."""
    found: dict[int, int] = {}
    for span in spans:
        column = round(scale.x(span.begin - begin))
        found[column] = max(found.get(column, 0), span.peak_bytes)
    yield from sorted(found.items())


def _ticks(scale: Scale, seconds: float, y: int) -> Iterator[str]:
    """Lines at round times; the last label gives way to the end of the panel."""
    bottom, step = y + scale.panel_height - _TICKS + 2, _round_step(scale.seconds / 9)
    count = math.floor(seconds / step + 1e-9)
    places = [i * step for i in range(count + 1)] + [seconds]
    room = _CHARACTER * 8
    for at, following in pairwise([*places, math.inf]):
        x = scale.x(at)
        yield f'<line class="rule" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{bottom}"/>'
        if following == math.inf or scale.x(min(following, seconds)) - x > room:
            text = milliseconds(at)
            yield (
                f'<text class="small" x="{x:.1f}" y="{bottom + 12}" text-anchor="middle">'
                f"{text}</text>"
            )


def _round_step(least: float) -> float:
    """The smallest 1, 2 or 5 times a power of ten that is not below ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * f for f in (1, 2, 5, 10) if power * f >= least * (1 - 1e-9))


def _box(
    scale: Scale, ends: tuple[float, float], y: int, kind: str, label: str, told: str
) -> Iterator[str]:
    x, right = scale.x(ends[0]), scale.x(ends[1])
    tip = f"<title>{escaped(told)}</title>"
    yield (
        f'<rect class="box {kind}" x="{x:.2f}" y="{y}" width="{max(right - x, 0.4):.2f}" '
        f'height="{_ROW - 2}">{tip}</rect>'
    )
    brief = short(label)
    for text in (brief,) if brief[:1].isdigit() else (brief, brief[:1]):
        if text and len(text) * _NARROW <= right - x - 2:
            middle = f'x="{(x + right) / 2:.1f}" y="{y + 14}" text-anchor="middle"'
            yield f'<text class="label" {middle}>{escaped(text)}</text>'
            return


def short(name: str) -> str:
    """A unit's name where room is scarce: "layers.3" is 3, "layers.0..layers.1" is 0..1."""
    return re.sub(r"\blayers\.(\d+)(?:\.\w+)*", r"\1", name)


def words(op: str) -> str:
    """What an operation does, for people."""
    return {"all_gather": "gather", "reduce_scatter": "scatter"}.get(op, "sum over replicas")


def milliseconds(seconds: float) -> str:
    """A duration with its unit, three digits."""
    value = 1000 * seconds
    decimals = 0 if abs(value) >= 99.95 or value == 0 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{decimals}f} ms"


def describe(transfer: Transfer) -> str:
    """A collective in one line."""
    taken = milliseconds(transfer.end - transfer.begin)
    size = human_bytes(transfer.payload_bytes)
    return f"{words(transfer.op)} of {transfer.name}: {size} in {taken}"


def legend(x: int, y: int) -> Iterator[str]:
    """Swatches with their meaning, in one row."""
    for kind, meaning in LEGEND:
        yield f'<rect class="{kind}" x="{x}" y="{y - 10}" width="14" height="12"/>'
        yield f'<text x="{x + 20}" y="{y}">{meaning}</text>'
        x += 46 + round(len(meaning) * _CHARACTER)


def standalone(
    pictures: Sequence[tuple[str, Timeline]],
    owners: Mapping[str, str],
    *,
    title: str,
    note: str,
    width: int,
) -> str:
    """Titled timelines one above the other, as a picture that needs no page.

    Args:
        pictures: title and timeline of each.
        owners: unit of every parameter.
        title: of the whole.
        note: under the title; what was modelled.
        width: pixels.
    """
    inner = width - 2 * _MARGIN
    scale = scale_of([timeline for _, timeline in pictures], width=inner, memory=False)
    step = 2 * scale.panel_height + 40
    height = 2 * _MARGIN + 64 + step * len(pictures)
    parts = [
        f'<text class="title" x="0" y="12">{escaped(title)}</text>',
        f'<text class="small" x="0" y="31">{escaped(note)}</text>',
        *legend(0, 58),
    ]
    for place, (name, timeline) in enumerate(pictures):
        y = 94 + place * step
        parts.append(f'<text class="strong" x="0" y="{y}">{escaped(name)}</text>')
        parts += draw_panels(timeline, owners, scale, top=y + 12)
    return (
        f'<svg class="timeline" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img"><title>{escaped(title)}</title>'
        f"<style>{COLOURS}</style>"
        f'<rect width="{width}" height="{height}" rx="8" style="fill: var(--ground)"/>'
        f'<g transform="translate({_MARGIN} {_MARGIN})">{"".join(parts)}</g></svg>\n'
    )


def escaped(text: str) -> str:
    """Text made harmless for an element."""
    return html.escape(sanitise(text), quote=True)
