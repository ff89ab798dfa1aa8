"""A report shows a run's own numbers, survives broken files, and trusts nothing in them."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from core_torch.errors import DataError
from core_torch.report import (
    RecordWriter,
    comparison_rows,
    comparison_table,
    human_bytes,
    load_run,
    perplexity,
    sanitise,
    summarise,
    summary_of,
    write_json,
    write_report,
)
from core_torch.report.advice import suggestions
from core_torch.report.curves import smooth
from core_torch.report.figures import draw_loss_by_bytes
from core_torch.report.round_figures import draw_rounds
from core_torch.report.text import human_count, one_line
from core_torch.tests.report_runs import INF, NAN, make_event, make_run, make_step


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Path]:
    """A synchronous, a DiLoCo and a troubled EDiT run, and the report about them."""
    base = tmp_path_factory.mktemp("runs")
    hostile = ("\x1b]0;owned\x07\x1b[31mred\x1b[0m<script>alert(1)</script>", "a\x00b\u202e & \"c'")
    runs = [
        make_run(base / "sync", "synchronous", steps=48),
        make_run(base / "di <b>lo $x_1$ 雪", "diloco", steps=48, every=8),
        make_run(base / "edit", "edit", steps=192, samples=hostile),
    ]
    return runs, write_report(runs, base / "report")


class References(HTMLParser):
    """Collects what a page could load, run or link to, and the text it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.urls: list[str] = []
        self.shown: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not any(name.startswith("on") for name, _ in attrs), "an event handler"
        self.urls += [v or "" for n, v in attrs if n in ("src", "srcset", "href", "action")]

    def handle_data(self, data: str) -> None:
        self.shown.append(data)


def read_page(page: Path) -> References:
    parser = References()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_non_finite_numbers_survive_a_round_trip_through_strict_json(
    tmp_path: Path, value: float
) -> None:
    run = make_run(tmp_path / "run", steps=16)
    with RecordWriter(run, 0) as writer:
        writer.step(make_step(17, loss=value))
        units, norms = ["nan", "head"], [[value, 1.0], [1.0, 1.0]]
        writer.event(make_event(1, 17, norms, units=units))
    loaded = load_run(run)
    assert repr(loaded.metrics[0][-1].loss) == repr(value)
    assert repr(loaded.events[-1].norm_UN[0][0]) == repr(value)
    assert loaded.events[-1].units == ["nan", "head"] and loaded.events[-1].finite_UN[0][1]
    for line in (run / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line, parse_constant=pytest.fail)


def test_a_half_written_last_line_is_left_out_and_the_next_writer_cuts_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=8, replicas=1)
    path = run / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert [record.step for record in load_run(run).metrics[0]] == list(range(1, 8))
    with RecordWriter(run, 0) as writer:
        writer.step(make_step(8))
    assert [record.step for record in load_run(run).metrics[0]] == list(range(1, 9))


def test_a_broken_line_in_the_middle_names_file_and_line(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=8, replicas=1)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    for broken in ("{", "[1]", '{"step": 3}', '{"step": NaN}', "[" * 100_000):
        (run / "metrics.jsonl").write_text("\n".join([*lines[:2], broken, *lines[3:]]))
        with pytest.raises(DataError) as caught:
            load_run(run)
        assert "metrics.jsonl, line 3 of 8" in str(caught.value)


def test_after_a_resume_the_repeated_steps_and_rounds_count_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=48, replicas=3)
    assert len((run / "events.jsonl").read_text().splitlines()) == 3, "only replica 0 writes them"
    with RecordWriter(run, 0) as writer:
        writer.step(make_step(40, loss=9.0))
        writer.event(make_event(2, 56, [[1.0]], units=["model"]))
    loaded = load_run(run)
    assert [record.step for record in loaded.metrics[0]] == list(range(1, 41))
    assert loaded.metrics[0][-1].loss == 9.0 and sorted(loaded.metrics) == [0, 1, 2]
    assert [(event.round, event.step) for event in loaded.events] == [(0, 16), (1, 32), (2, 56)]


def test_a_folder_without_a_config_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no config.toml"):
        load_run(tmp_path)
    with pytest.raises(DataError, match="there is no such folder"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(DataError, match="at least one run"):
        write_report([], tmp_path)


def test_the_summary_takes_the_last_tenth_of_all_replicas_and_counts_every_decision(
    tmp_path: Path,
) -> None:
    run = load_run(make_run(tmp_path / "run", steps=192))
    tails = [record.loss for steps in run.metrics.values() for record in steps[-19:]]
    summary = summarise(
        run.metrics, run.events, method="edit", replicas=2, shards=2, validation_loss=2.0
    )
    assert summary["loss"] == pytest.approx(sum(tails) / len(tails), rel=1e-12)
    assert summary["validation_perplexity"] == pytest.approx(math.exp(2.0))
    assert (summary["rounds"], summary["anomalies"]) == (12, 6 + 2 + 2)
    slowest = max(sum(record.seconds for record in steps) for steps in run.metrics.values())
    assert summary["tokens_per_second"] == pytest.approx(summary["tokens"] / slowest)
    assert perplexity(1e4) == INF and math.isnan(perplexity(NAN) or 0.0)


def test_every_number_of_the_table_is_the_summary_s(compared: tuple[list[Path], Path]) -> None:
    runs = [load_run(folder) for folder in compared[0]]
    for row, run in zip(comparison_rows(runs), runs, strict=True):
        summary = json.loads((run.folder / "summary.json").read_text())
        assert row.loss == f"{summary['loss']:.3f}"
        assert row.perplexity == f"{summary['validation_perplexity']:.2f}"
        assert row.tokens_per_second == f"{summary['tokens_per_second']:,.0f}"
        assert row.sent == human_bytes(summary["replica_bytes"])
        assert (row.rounds, row.anomalies) == (str(summary["rounds"]), str(summary["anomalies"]))
    rows = comparison_rows(runs)
    assert rows[0].against == "baseline" and rows[1].against == "8.0× less"
    assert rows[2].against == "–", "another length does not compare"
    shown = read_page(compared[1]).shown
    assert all(cell in shown for row in rows for cell in row)
    entries = json.loads((compared[1].parent / "report.json").read_text())
    assert [entry["loss"] for entry in entries] == [summary_of(run)["loss"] for run in runs]


def test_the_page_refers_to_nothing_outside_and_runs_nothing(
    compared: tuple[list[Path], Path],
) -> None:
    page = read_page(compared[1])
    assert page.urls and all(url.startswith("data:image/png;base64,") for url in page.urls)
    assert not page.tags & {"script", "link", "iframe", "object", "embed", "a", "form", "base", "b"}
    text = re.sub(r"base64,[A-Za-z0-9+/=]+", "", compared[1].read_text(encoding="utf-8"))
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in text
    assert not re.search(r"https?:|//|url\(|@import", text)


def test_hostile_text_is_shown_as_text(compared: tuple[list[Path], Path]) -> None:
    text = compared[1].read_text(encoding="utf-8")
    assert "red&lt;script&gt;alert(1)&lt;/script&gt;" in text and "owned" not in text
    assert "ab &amp; &quot;c&#x27;" in text
    assert "di &lt;b&gt;lo $x_1$ 雪" in text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("\x1b[1;31mred\x1b[0m\x9b2J", "red"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bP1$r\x1b\\a\x1b(Bb\x1bc", "ab"),
        ("tab\tline\r\nnext\rlast\u2028end", "tab\tline\nnext\nlast\nend"),
        ("\x1b]unfinished", "]unfinished"),
        ("a\u202eb\u200bc\ufeff\x07\x7f", "abc"),
        ("\ud800", "\ufffd"),
    ],
)
def test_sanitise_keeps_letters_and_lines_only(text: str, clean: str) -> None:
    assert sanitise(text) == clean
    assert sanitise(clean) == clean


def test_sanitise_is_linear_on_unfinished_escapes() -> None:
    assert len(sanitise("\x1b]" * 200_000)) == 200_000


def test_figures_exist_and_show_something(compared: tuple[list[Path], Path]) -> None:
    from matplotlib.image import imread

    names = {path.name for path in compared[1].parent.glob("*.png")}
    rounds = {"rounds-2-di-b-lo-x_1.png", "rounds-3-edit.png"}
    assert names == {"loss-by-tokens.png", "loss-by-bytes.png"} | rounds
    for name in names:
        pixels = imread(compared[1].parent / name)[..., :3]
        assert pixels.shape[1] >= 1000 and pixels.std() > 0.05, name
        assert len({tuple(colour) for colour in pixels.reshape(-1, 3)[::7].tolist()}) > 20, name


def test_a_run_without_rounds_or_traffic_has_no_figure_of_them(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "alone", "synchronous", steps=12, replicas=1)
    lines = (folder / "metrics.jsonl").read_text()
    silent = re.sub(r'"replica_bytes": \d+', '"replica_bytes": 0', lines)
    (folder / "metrics.jsonl").write_text(silent)
    run = load_run(folder)
    assert draw_rounds(run, "synchronous", tmp_path / "a.png") is None
    assert draw_loss_by_bytes([run], tmp_path / "b.png") is None
    assert "Sample text" in write_report([folder], tmp_path / "out").read_text(encoding="utf-8")


@pytest.mark.parametrize("method", ["diloco", "edit"])
def test_a_run_with_no_finite_norm_or_loss_still_plots(tmp_path: Path, method: str) -> None:
    folder = make_run(tmp_path / "run", method, steps=8, every=4)
    with RecordWriter(folder, 0) as writer:
        writer.step(make_step(1, loss=NAN, grad_norm=INF))
        writer.event(make_event(0, 4, [[NAN, INF]], units=["layers.0"]))
    run = load_run(folder)
    drawn = draw_rounds(run, method, tmp_path / "rounds.png")
    assert drawn is not None and drawn.path.stat().st_size > 5_000
    assert write_report([folder], tmp_path / "out").exists()


def test_a_run_killed_before_its_first_step_still_reports_what_happened(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[sync]\nmethod = "edit"\n')
    outcome = {"exit_code": 6, "message": "no answer from rank 1", "next": "twinshard doctor"}
    write_json(tmp_path / "outcome.json", outcome)
    shown = "".join(read_page(write_report([tmp_path], tmp_path / "out")).shown)
    assert "EDiT ended with exit code 6: no answer from rank 1" in shown
    assert comparison_rows([load_run(tmp_path)])[0].loss == "–"


def test_smoothing_skips_what_is_not_finite_and_keeps_the_length() -> None:
    assert smooth([1.0, NAN, 3.0, 5.0], 3) == [1.0, 2.0, 4.0, 4.0]
    assert math.isnan(smooth([NAN, INF], 1)[1]) and smooth([], 5) == []


def test_hints_follow_from_the_numbers(tmp_path: Path) -> None:
    troubled = load_run(make_run(tmp_path / "a", steps=192))
    texts = [f"{hint.text} {hint.setting}" for hint in suggestions([troubled])]
    assert any("--sync.method synchronous" in text for text in texts)
    assert any("9 non-finite" in text for text in texts)
    calm = [
        load_run(make_run(tmp_path / "b", "synchronous", steps=64)),
        load_run(make_run(tmp_path / "c", steps=64, every=8, healthy=True)),
    ]
    assert "--sync.every 16" in suggestions(calm)[-1].setting


def test_numbers_read_well() -> None:
    texts = [human_bytes(n) for n in (0, 999, 1_234_567, 999_999, None)]
    assert texts == ["0 B", "999 B", "1.23 MB", "1.00 MB", "–"]
    assert human_count(1_638_400) == "1.64 M"
    assert one_line("a\n b\x1b[2J" + "c" * 99, 10) == "a bcccccc…"


def test_the_terminal_table_takes_nothing_for_markup(compared: tuple[list[Path], Path]) -> None:
    folder = make_run(compared[1].parent.parent / "[red]x", "edit", steps=16)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(comparison_table([load_run(compared[0][2]), load_run(folder)]))
    assert "EDiT ([red]x)" in captured.get()
