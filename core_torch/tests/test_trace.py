"""The writer of traces: what its lines hold, which folders it takes, how it is continued."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core_torch.sketch import sketch
from core_torch.trace import SCHEMA, Key, Part, TraceError, Tracer

META = {"core": "core_torch", "method": "edit", "mesh": {"replicas": 1, "shards": 1}}
X = torch.arange(6.0).view(2, 3) - 2.5


def lines_of(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    text = (folder / f"events.{rank}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def write_steps(tracer: Tracer, first: int, last: int) -> None:
    """Two lines for each step, and its end."""
    for step in range(first, last + 1):
        tracer.tensor(Key(step, "grad", "head", "w", 0), Part(X * step, (2, 3)))
        tracer.value(Key(step, "optim", None, "rate", 0), {"lr": 1.0 / step})
        tracer.mark(step)


def test_lines_are_as_the_format_says(tmp_path: Path) -> None:
    with Tracer(tmp_path / "new" / "trace", 3, META) as tracer:
        tracer.tensor(Key(6, "sync.merge", "layers.0", "w", None, 2), Part(X, (4, 3), 6))
        tracer.value(Key(6, "clip", None, "gradient", 1), {"norm": float("inf"), "factor": 1.0})
        tracer.collective(6, "all_reduce", "replica", 48, "layers.0")
    tensor, value, collective = lines_of(tmp_path / "new" / "trace", 3)
    assert tensor == {
        "seq": 0,
        "step": 6,
        "round": 2,
        "phase": "sync.merge",
        "unit": "layers.0",
        "name": "w",
        "replica": None,
        "shape": [4, 3],
        "dtype": "float32",
        "shard": {"axis": 0, "start": 6, "n": 6},
        **sketch(X, 6)._asdict(),
    }
    assert value == {
        "seq": 1,
        "step": 6,
        "round": None,
        "phase": "clip",
        "unit": None,
        "name": "gradient",
        "replica": 1,
        "value": {"norm": "inf", "factor": 1.0},
    }
    assert collective == {
        "seq": 2,
        "step": 6,
        "kind": "collective",
        "op": "all_reduce",
        "axis": "replica",
        "bytes": 48,
        "unit": "layers.0",
    }


def test_rank_0_alone_says_what_ran(tmp_path: Path) -> None:
    for rank in (0, 1):
        Tracer(tmp_path / str(rank), rank, META).close()
    assert json.loads((tmp_path / "0" / "meta.json").read_text()) == {"schema": SCHEMA, **META}
    assert not (tmp_path / "1" / "meta.json").exists()


def test_a_line_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with Tracer(tmp_path, 0, META) as tracer:
        write_steps(tracer, 1, 2)
        assert len(lines_of(tmp_path)) == 4
        assert (tmp_path / "marks.0.jsonl").read_text().count("\n") == 2


def test_kept_tensors_are_found_by_the_number_of_their_line(tmp_path: Path) -> None:
    with Tracer(tmp_path, 0, META, keep_tensors=True) as tracer:
        write_steps(tracer, 1, 2)
    kept = load_file(tmp_path / "tensors.0.safetensors")
    assert sorted(kept) == ["0", "2"] and torch.equal(kept["2"], X * 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "events.0.jsonl",
        "marks.0.jsonl",
        "meta.json",
        "tensors.0.safetensors",
    ]


@pytest.mark.parametrize("keep", [False, True])
def test_a_folder_that_holds_a_trace_is_refused_and_left_alone(tmp_path: Path, keep: bool) -> None:
    with Tracer(tmp_path, 0, META) as tracer:
        write_steps(tracer, 1, 1)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(TraceError, match="holds a trace already"):
        Tracer(tmp_path, 0, META, keep_tensors=keep)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    Tracer(tmp_path, 1, META).close()  # the other ranks of the same run


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with Tracer(whole, 0, META, keep_tensors=True) as tracer:
        write_steps(tracer, 1, 4)
    with Tracer(parts, 0, META, keep_tensors=True) as tracer:
        write_steps(tracer, 1, 4)  # the last step is made after the commit, and lost in a crash
        tracer.tensor(Key(5, "grad", "head", "w", 0), Part(X * 99, (2, 3)))
    for name, cut_off in (("events", '{"seq": 9, "st'), ("marks", '{"step": 5, "s')):
        with (parts / f"{name}.0.jsonl").open("a") as file:
            file.write(cut_off)
    with Tracer(parts, 0, META, keep_tensors=True, resume_at=3) as tracer:
        assert tracer.continues and tracer.seq == 6
        write_steps(tracer, 4, 4)
    for name in ("events.0.jsonl", "marks.0.jsonl", "meta.json"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes(), name
    kept, expected = (load_file(f / "tensors.0.safetensors") for f in (parts, whole))
    assert kept.keys() == expected.keys()
    assert all(torch.equal(kept[seq], expected[seq]) for seq in kept)


def test_a_resumed_run_whose_beginning_was_not_traced_begins_a_trace(tmp_path: Path) -> None:
    with Tracer(tmp_path, 0, META, resume_at=5) as tracer:
        assert not tracer.continues
        write_steps(tracer, 6, 6)
    assert lines_of(tmp_path)[0]["seq"] == 0


@pytest.mark.parametrize("step", [0, 4])
def test_a_trace_that_does_not_reach_the_step_of_the_resume_is_refused(
    tmp_path: Path, step: int
) -> None:
    with Tracer(tmp_path, 0, META) as tracer:
        write_steps(tracer, 1, 3)
    with pytest.raises(TraceError, match=f"ends with inner step {step}"):
        Tracer(tmp_path, 0, META, resume_at=step)


def test_the_trace_of_another_run_is_not_continued(tmp_path: Path) -> None:
    with Tracer(tmp_path, 0, META) as tracer:
        write_steps(tracer, 1, 3)
    with pytest.raises(TraceError, match="method: the trace says 'edit', the run 'co2'"):
        Tracer(tmp_path, 0, META | {"method": "co2"}, resume_at=3)
    assert len(lines_of(tmp_path)) == 6


def test_a_trace_without_a_readable_meta_is_not_continued(tmp_path: Path) -> None:
    with Tracer(tmp_path, 0, META) as tracer:
        write_steps(tracer, 1, 3)
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(TraceError, match="cannot read meta.json"):
        Tracer(tmp_path, 0, META, resume_at=3)
