"""Reports on methods whose replicas or units differ from round to round, and on repeats."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from core_torch.report import (
    RecordWriter,
    comparison_rows,
    has_repeats,
    load_run,
    summary_of,
    write_json,
    write_report,
)
from core_torch.report.advice import suggestions
from core_torch.report.curves import keeps_step, mean_curve, token_axis
from core_torch.report.repeats import Spread, draw_spread, repeated_rows, repeats
from core_torch.report.round_figures import draw_rounds, norm_series
from core_torch.report.summary import round_facts
from core_torch.tests.report_runs import TOKENS_PER_STEP, make_event, make_run, make_step

PER_STEP = 2 * TOKENS_PER_STEP  # of both replicas
UNITS = ["embedding", "head"]


def write_timed(folder: Path, counts: list[list[int]]) -> Path:
    """A run of A-EDiT whose two replicas made ``counts`` steps before each round.

    A replica's own count of tokens between rounds supposes that the other is as fast.
    """
    agreed, sent, done, since = 0, 0, [0, 0], [0, 0]
    writers = [RecordWriter(folder, replica) for replica in range(2)]
    for number, pair in enumerate(counts, start=1):
        for replica, steps in enumerate(pair):
            for local in range(1, steps + 1):
                done[replica] += 1
                tokens = agreed + local * PER_STEP
                step = make_step(done[replica], tokens=tokens, replica_bytes=sent)
                writers[replica].step(step | {"loss": 6.0 - 0.1 * number})
        since = [a + b for a, b in zip(since, pair, strict=True)]
        agreed += sum(pair) * TOKENS_PER_STEP
        event = make_event(number, done[0], [[0.5, 0.6], [0.7, 0.8]], units=UNITS)
        is_empty = sum(since) < 4
        absent = [[steps == 0 for steps in since]] * len(UNITS)
        writers[0].event(event | {"steps": since, "empty": is_empty, "anomalous": absent})
        if not is_empty:
            since, sent = [0, 0], sent + 1000
    for writer in writers:
        writer.close()
    (folder / "config.toml").write_text(
        '[mesh]\nreplicas = 2\nshards = 2\n[sync]\nmethod = "aedit"\nevery = "4s"\n'
    )
    return folder


def test_a_fast_and_a_slow_replica_share_the_tokens_between_two_rounds(tmp_path: Path) -> None:
    run = load_run(write_timed(tmp_path / "run", [[3, 1], [4, 2]]))
    assert not keeps_step(run)
    unit = float(TOKENS_PER_STEP)
    fast, slow = token_axis(run, 0), token_axis(run, 1)
    shares = [4 / 3, 8 / 3, 4.0, 5.5, 7.0, 8.5, 10.0]
    assert fast == pytest.approx([share * unit for share in shares])
    assert slow == pytest.approx([4 * unit, 7 * unit, 10 * unit])
    tokens = [point.tokens for point in mean_curve(run)]
    assert tokens == sorted(tokens) and len(tokens) == 10
    sent = [point.replica_bytes for point in mean_curve(run)]
    assert sent == sorted(sent), "bytes never fall along the curve"
    assert summary_of(run)["tokens"] == 10 * TOKENS_PER_STEP


def test_replicas_that_keep_step_are_drawn_at_their_own_counts(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path / "run", steps=12))
    assert token_axis(run, 1) == [r.tokens for r in run.metrics[1]]
    both = [(run.metrics[0][i].loss + run.metrics[1][i].loss) / 2 for i in range(12)]
    assert [point.loss for point in mean_curve(run)] == pytest.approx(both)


def height(picture: Path) -> int:
    """Pixels; a panel more makes a picture higher."""
    from matplotlib.image import imread

    return int(imread(picture).shape[0])


def test_unequal_steps_have_a_panel(tmp_path: Path) -> None:
    unequal = load_run(write_timed(tmp_path / "aedit", [[3, 1], [4, 2]]))
    equal = load_run(make_run(tmp_path / "edit", steps=32, layers=0))
    drawn = [draw_rounds(run, "x", tmp_path / f"{i}.png") for i, run in enumerate((unequal, equal))]
    assert drawn[0] is not None and drawn[1] is not None
    assert height(drawn[0].path) > height(drawn[1].path)


def test_an_empty_round_and_an_absent_replica_are_no_anomalies(tmp_path: Path) -> None:
    run = load_run(write_timed(tmp_path / "run", [[3, 1], [1, 0], [2, 1], [5, 0]]))
    facts = round_facts(run.events)
    assert (facts.rounds, facts.empty, facts.anomalies) == (3, 1, 0)
    assert facts.decisions == 3 * len(UNITS)
    drawn = draw_rounds(run, "A-EDiT", tmp_path / "rounds.png")
    assert drawn is not None and "3 rounds and 1 empty one: no anomalies" in drawn.title
    assert "hollow where a round was empty" in drawn.caption and "every 4s" in drawn.caption
    [row] = comparison_rows([run])
    assert (row.method, row.rounds, row.anomalies) == ("A-EDiT", "3", "0")


def test_a_run_of_empty_rounds_only_still_plots(tmp_path: Path) -> None:
    folder = write_timed(tmp_path / "run", [[1, 0], [1, 1]])
    assert round_facts(load_run(folder).events).rounds == 0
    assert write_report([folder], tmp_path / "out").exists()


def test_each_fragment_has_its_own_line(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "streaming_diloco", steps=32)
    (folder / "events.jsonl").unlink()
    with RecordWriter(folder, 0) as writer:
        for number in range(1, 5):
            unit = f"fragment.{number % 2}"
            writer.event(make_event(number, 4 * number, [[number, 10 + number]], units=[unit]))
        last = make_event(5, 20, [[7.0, 8.0], [9.0, 10.0]], units=["fragment.0", "fragment.1"])
        writer.event(last | {"forced": True})
    run = load_run(folder)
    assert norm_series(run.events, 1) == {
        "fragment.1": [(1, 11.0), (3, 13.0), (5, 10.0)],
        "fragment.0": [(2, 12.0), (4, 14.0), (5, 8.0)],
    }
    drawn = draw_rounds(run, "Streaming DiLoCo", tmp_path / "rounds.png")
    assert drawn is not None and "fragment.1, fragment.0" in drawn.caption
    assert "A round of each fragment every 16 inner steps." in drawn.caption


def test_the_gap_of_co2_has_a_panel(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "co2", steps=48)
    plain = draw_rounds(load_run(folder), "CO2", tmp_path / "plain.png")
    text = (folder / "events.jsonl").read_text().replace('"gap": [1.0]', '"gap": [1.5]')
    (folder / "events.jsonl").write_text(text)
    drawn = draw_rounds(load_run(folder), "CO2", tmp_path / "gap.png")
    assert drawn is not None and plain is not None
    assert "Staleness gap" in drawn.caption and "Staleness gap" not in plain.caption
    assert height(drawn.path) > height(plain.path)


def test_events_of_before_there_was_a_gap_are_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=16)
    path = folder / "events.jsonl"
    path.write_text(re.sub(r', "steps".*\}', "}", path.read_text()))
    assert "gap" not in path.read_text()
    [event] = load_run(folder).events
    assert (event.steps_N, event.empty, set(event.gap_U)) == ([], False, {1.0})


def ended(folder: Path, method: str, *, last_lr: float, validation_loss: float) -> Any:
    """A run with training loss 3.4 whose learning rate fell to ``last_lr``."""
    make_run(folder, method, steps=64, every=8, healthy=True)
    text = (folder / "metrics.jsonl").read_text().splitlines()
    text[-1] = text[-1].replace('"lr": 0.002', f'"lr": {last_lr}')
    (folder / "metrics.jsonl").write_text("\n".join(text) + "\n")
    numbers = {"loss": 3.4, "validation_perplexity": math.exp(validation_loss)}
    write_json(folder / "summary.json", summary_of(load_run(folder)) | numbers)
    return load_run(folder)


@pytest.mark.parametrize(
    ("method", "last_lr", "validation_loss", "hinted"),
    [
        ("edit", 2e-4, 7.3, True),
        ("co2", 2e-4, 7.3, True),
        ("edit", 2e-3, 7.3, False),  # the learning rate did not fall
        ("edit", 2e-4, 3.6, False),  # held-out text is always a little harder
        ("post_local_sgd", 2e-4, 7.3, False),  # has no momentum
    ],
)
def test_a_velocity_that_outlives_the_learning_rate_is_hinted_at(
    tmp_path: Path, method: str, last_lr: float, validation_loss: float, hinted: bool
) -> None:
    run = ended(tmp_path / "run", method, last_lr=last_lr, validation_loss=validation_loss)
    settings = [hint.setting for hint in suggestions([run])]
    assert ("--sync.outer.momentum 0.3" in settings) == hinted


def test_runs_that_differ_in_seeds_only_are_one_experiment(tmp_path: Path) -> None:
    methods = {"edit": "edit", "edit-1": "edit", "diloco": "diloco", "edit-2": "edit"}
    folders = [make_run(tmp_path / name, method, steps=16) for name, method in methods.items()]
    for seed, folder in enumerate(folders):
        with (folder / "config.toml").open("a") as file:
            file.write(f"[train]\nseed = {seed}\n[data]\nseed = {seed}\n")
        numbers = {"loss": 2.0 + seed, "validation_perplexity": math.exp(3.0 + seed)}
        write_json(folder / "summary.json", summary_of(load_run(folder)) | numbers)
    runs = [load_run(folder) for folder in folders]
    assert [[run.folder.name for run in group] for group in repeats(runs)] == [
        ["edit", "edit-1", "edit-2"],
        ["diloco"],
    ]
    assert has_repeats(runs) and not has_repeats(runs[1:3])
    edit, diloco = repeated_rows(runs)
    assert (edit.method, edit.runs, edit.loss) == ("EDiT", "3", "3.333 ± 1.528")
    assert edit.validation_loss == "4.333 ± 1.528" and diloco.validation_loss == "5.000"
    assert draw_spread(runs[1:3], tmp_path / "none.png") is None
    page = write_report(folders, tmp_path / "out")
    assert "differ in their seeds only" in page.read_text(encoding="utf-8")
    pictures = {path.name for path in page.parent.glob("*.png")}
    assert "seeds.png" in pictures and "rounds-1-edit.png" in pictures
    assert not [name for name in pictures if "edit-1" in name or "edit-2" in name]


def test_two_runs_with_equal_seeds_too_are_no_repeats(tmp_path: Path) -> None:
    runs = [load_run(make_run(tmp_path / name, steps=8)) for name in ("clean", "disturbed")]
    assert [len(group) for group in repeats(runs)] == [1, 1]


def test_a_spread_leaves_out_what_is_missing_and_has_a_deviation_from_two_on() -> None:
    assert Spread((1.0, 2.0, 4.0)).shown(2) == "2.33 ± 1.53"
    assert Spread((1.0,)).shown(2) == "1.00" and Spread(()).shown(2) == "–"
    assert math.isnan(Spread((1.0,)).deviation) and math.isnan(Spread(()).mean)


def test_bytes_compare_per_token_where_lengths_are_about_equal(tmp_path: Path) -> None:
    runs = [load_run(make_run(tmp_path / m, m, steps=32)) for m in ("synchronous", "edit")]
    numbers = summary_of(runs[1])
    for ratio, shown in ((1.0, "16.0× less"), (1.05, "16.8× less"), (1.2, "–")):
        changed = numbers | {"tokens": int(ratio * numbers["tokens"])}
        write_json(runs[1].folder / "summary.json", changed)
        assert comparison_rows([runs[0], load_run(runs[1].folder)])[1].against == shown
