"""One self-contained page about one or more runs: no script, nothing loaded from anywhere.

Everything that comes from a run (names, settings, generated text) passes ``_text``, which strips
control codes and escapes; figures are embedded. The content policy forbids all else.
"""

import base64
import html
from collections.abc import Iterator, Sequence
from pathlib import Path

from core_torch.report.advice import suggestions
from core_torch.report.figures import Drawn, shared_conditions
from core_torch.report.page_style import STYLE
from core_torch.report.records import Run
from core_torch.report.repeats import HEADINGS as REPEATED_HEADINGS
from core_torch.report.repeats import flatten, has_repeats, repeated_rows, repeats
from core_torch.report.summary import summary_of
from core_torch.report.table import HEADINGS, comparison_rows, run_labels
from core_torch.report.text import counted, one_line, sanitise

POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'"
)

BYTES_NOTE = """
<p>“Sent per rank” is the payload that rank 0 handed to collectives over the replica axis from the
first step to the end of the run: elements × bytes per element of each call, counted once, where
the call is made. It includes gradients in synchronous steps, pseudo-gradients, and the small
messages of norms in each round; it leaves out traffic inside a replica, over the shard axis. Of an
all-gather the result counts, so a compressed exchange counts the codes of all replicas.</p>
<p>It does not depend on the algorithm of the network library. A ring all-reduce over N replicas,
for one, moves 2&#8239;(N&#8239;−&#8239;1)&#8239;/&#8239;N times the payload over each link. Factors
compare bytes per token, between runs of equal mesh and model whose numbers of tokens differ by a
tenth at most. 1&nbsp;MB is 10<sup>6</sup> bytes.</p>
"""

READING_NOTE = """
<p class="note">Loss: training loss in nats per token, mean over the last 10&nbsp;% of the steps.
Validation perplexity: exp of the loss of the anchor on held-out text, a fixed number of sequences.
Tokens/s: tokens of all replicas over the time of the slowest one. Anomalies: contributions of one
replica to one unit in one round that were left out.</p>
"""

REPEATS_NOTE = """
<p class="note">Runs that differ in their seeds only, mean ± standard deviation of the sample.
Curves, rounds and sample text below are those of the first run of each.</p>
"""


def _text(value: object) -> str:
    """Text of a run made harmless, for an element or a quoted attribute."""
    return html.escape(sanitise(str(value)), quote=True)


def _image(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")


def _figure(drawn: Drawn, dark: Path) -> str:
    """A figure with its caption; readers in the dark get the dark drawing."""
    return (
        "<figure><picture>"
        f'<source media="(prefers-color-scheme: dark)" srcset="{_image(dark)}">'
        f'<img src="{_image(drawn.path)}" alt="{_text(drawn.alternative)}">'
        f"</picture><figcaption>{_text(drawn.caption)}</figcaption></figure>"
    )


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column names the rows."""
    head = "".join(f'<th scope="col">{_text(heading)}</th>' for heading in headings)
    body = ""
    for row in rows:
        cells = "".join(
            f'<td data-label="{_text(heading)}">{_text(cell)}</td>'
            for heading, cell in zip(headings[1:], row[1:], strict=True)
        )
        body += f'<tr><th scope="row">{_text(row[0])}</th>{cells}</tr>'
    table = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table class="comparison">{table}</table></div>'


def _comparison(runs: Sequence[Run]) -> str:
    repeated = ""
    if has_repeats(runs):
        repeated = _table(REPEATED_HEADINGS, repeated_rows(runs)) + REPEATS_NOTE
    return repeated + _table(HEADINGS, comparison_rows(runs)) + READING_NOTE


def _alerts(runs: Sequence[Run]) -> Iterator[str]:
    """A line for each run that did not end well, with what leads on."""
    for run, label in zip(runs, run_labels(runs), strict=True):
        if run.outcome.get("exit_code", 0) == 0:
            continue
        message = f"{label} ended with exit code {run.outcome['exit_code']}"
        message += "".join(f": {run.outcome[k]}" for k in ("message",) if run.outcome.get(k))
        following = run.outcome.get("next")
        command = f" <code>{_text(following)}</code>" if following else ""
        yield f'<p class="alert">{_text(message)}.{command}</p>'


def _samples(runs: Sequence[Run]) -> str:
    parts = []
    for run, label in zip(runs, run_labels(runs), strict=True):
        if not run.samples:
            continue
        pair = "".join(
            f"<div><h4>{title}</h4><pre>{_text(run.samples.get(key, ''))}</pre></div>"
            for title, key in (("before training", "before"), ("after training", "after"))
        )
        prompt = _text(run.samples.get("prompt", ""))
        parts.append(
            f"<h3>{_text(label)}</h3><p class='note'>Prompt: <samp>{prompt}</samp></p>"
            f'<div class="pair">{pair}</div>'
        )
    note = '<p class="note">Drawn from the model; control codes are removed.</p>'
    return f"<h2>Sample text</h2>{note}{''.join(parts)}" if parts else ""


def _configuration(runs: Sequence[Run]) -> str:
    """The settings in which runs differ, seeds of repeats apart; then every run's in full."""
    firsts = [group[0] for group in repeats(runs)]
    flat = [flatten(run.config) for run in firsts]
    names = sorted({name for settings in flat for name in settings} - {"run"})
    differing = [name for name in names if len({settings.get(name) for settings in flat}) > 1]
    parts = ["<h2>Configuration</h2>"]
    if differing:
        names_of = ["setting", *run_labels(firsts)]
        head = "".join(f'<th scope="col">{_text(text)}</th>' for text in names_of)
        rows = "".join(
            f'<tr><th scope="row"><code>{_text(name)}</code></th>'
            + "".join(f"<td>{_text(settings.get(name, '–'))}</td>" for settings in flat)
            + "</tr>"
            for name in differing
        )
        parts.append("<p>The runs differ in these settings only.</p>")
        parts.append(f'<div class="scroll"><table class="settings"><thead><tr>{head}</tr></thead>')
        parts.append(f"<tbody>{rows}</tbody></table></div>")
    for run, label in zip(runs, run_labels(runs), strict=True):
        settings = flatten(run.config).items()
        lines = _text("\n".join(f"{name} = {value}" for name, value in settings))
        title = f"All settings: {_text(label)}, <code>{_text(run.folder.name)}</code>"
        parts.append(f"<details><summary>{title}</summary><pre>{lines}</pre></details>")
    return "".join(parts)


def _versions(runs: Sequence[Run]) -> str:
    """run.json of each distinct kind: versions, command line, whatever else it tells."""
    parts = []
    seen: list[str] = []
    for run, label in zip(runs, run_labels(runs), strict=True):
        info = {k: v for k, v in run.info.items() if k not in ("pid", "argv")}
        argv = run.info.get("argv")
        lines = ""
        if isinstance(argv, list) and argv:
            command = " ".join(one_line(part, 200) for part in argv)
            lines += f"<dt>command</dt><dd><code>{_text(command)}</code></dd>"
        flat = flatten(info)
        described = "".join(f"<dt>{_text(k)}</dt><dd>{_text(v)}</dd>" for k, v in flat.items())
        if described and described not in seen:
            seen.append(described)
            lines += described
        if lines:
            parts.append(f"<h3>{_text(label)}</h3><dl>{lines}</dl>")
    return "<h2>Versions and commands</h2>" + "".join(parts) if parts else ""


def _advice(runs: Sequence[Run]) -> str:
    items = "".join(
        f"<li>{_text(hint.text)} <code>{_text(hint.setting)}</code></li>"
        for hint in suggestions(runs)
    )
    return f"<h2>What to try next</h2><ul>{items}</ul>"


def render_page(runs: Sequence[Run], figures: Sequence[tuple[Drawn, Path]]) -> str:
    """The whole page.

    Args:
        runs: at least one.
        figures: each drawing with the file of its dark twin.

    Returns:
        HTML that refers to nothing outside itself.
    """
    labels = run_labels(runs)
    title = f"{labels[0]} on Twinshard" if len(runs) == 1 else "Twinshard: runs compared"
    firsts = [group[0] for group in repeats(runs)]
    lead = shared_conditions(firsts)
    if len(runs) > 1:
        lead = f"{counted(len(runs), 'run')}: {', '.join(run_labels(firsts))}. {lead}"
    methods = {str(summary_of(run)["method"]) for run in runs}
    missing = (
        ""
        if "synchronous" in methods
        else ('<p class="note">Bytes have no baseline here: none of these runs is synchronous.</p>')
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            f"<title>{_text(title)}</title><style>{STYLE}</style></head><body>",
            f'<header><h1>{_text(title)}</h1><p class="lead">{_text(lead)}</p></header><main>',
            *_alerts(runs),
            "<h2>Result</h2>",
            _comparison(runs) + missing,
            "<h2>Figures</h2>" if figures else "",
            *(_figure(drawn, dark) for drawn, dark in figures),
            _samples([group[0] for group in repeats(runs)]),
            _advice(runs),
            f"<h2>How bytes are counted</h2>{BYTES_NOTE}",
            _configuration(runs),
            _versions(runs),
            "</main></body></html>\n",
        ]
    )
