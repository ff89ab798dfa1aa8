"""``twinshard train`` on a folder of mixed files, and on a prepared folder and no other."""

import json
from pathlib import Path

import pytest

from core_torch.cli import main
from core_torch.data.prepared import open_prepared
from core_torch.errors import DataError
from core_torch.report.records import load_run
from core_torch.tests.test_cli_train import SMALL, folder
from core_torch.tests.test_data_sources import write_mixed
from core_torch.tests.test_resume_option import here

__all__ = ["folder", "here"]  # fixtures


def train(run: str, path: str, *more: str) -> list[str]:
    """A command that trains two steps, or as many as ``more`` says."""
    return ["train", *SMALL, "--data.path", path, "--run", run, "--train.steps", "2", *more]


def prepare(out: str) -> list[str]:
    """A command that prepares the text of ``folder`` in this process."""
    return ["data", "prepare", "text.txt", "--out", out, "--processes", "1"]


def test_training_on_a_folder_of_mixed_files_reads_what_it_can_and_says_what_it_skipped(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_mixed(here / "mixed")
    (here / "mixed/a.txt").write_text("Grüße\n" * 200)
    assert main(train("a", "mixed")) == 0
    told = [
        "of mixed, by their names: 1 .png",
        "mixed/d.txt is empty",
        "mixed/e.txt is not text: zero byte at offset 5",
        "mixed/f.txt is not UTF-8: byte 0xe9 at offset 3",
        "of mixed/h.jsonl: 1 lines are not JSON, the first is line 2",
    ]
    lines = capsys.readouterr().err.splitlines()
    skipped = [line for line in lines if line.startswith("skipped")]
    assert skipped == [f"skipped: {line}" for line in told]
    assert load_run(here / "a").summary["steps"] == 2
    assert json.loads((here / "a/data/data.json").read_text())["skipped"] == told

    for name in ("d.txt", "f.txt"):  # one that is named must be readable
        assert main(train("b", f"mixed/{name}")) == DataError.exit_code
        assert f"DataError: mixed/{name} is " in capsys.readouterr().err


def test_training_on_a_folder_without_a_readable_file_lists_the_reasons(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bad").mkdir()
    (folder / "bad/a.txt").write_bytes(b"\xff")
    (folder / "bad/b.txt").write_bytes(b"")
    assert main(train("a", "bad")) == DataError.exit_code
    told = capsys.readouterr().err
    assert "a.txt is not UTF-8: byte 0xff at offset 0; bad/b.txt is empty" in told


def test_training_reads_a_prepared_folder_where_it_is_and_goes_on_with_no_other_content(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(prepare("tokens")) == 0
    assert main(train("a", "tokens")) == 0
    assert main(train("b", "text.txt")) == 0
    losses = [[step.loss for step in load_run(here / run).metrics[0]] for run in ("a", "b")]
    assert losses[0] == losses[1], "the same tokens"
    copied = {path.name for path in (here / "a/data").iterdir()}
    assert copied == {"data.json", "tokenizer.json"}
    content = open_prepared(here / "tokens").content
    [source] = json.loads((here / "a/data/data.json").read_text())["sources"]
    assert source == {"path": str(here / "tokens"), "content": content}

    (here / "tokens").rename(here / "moved")
    more = ["--train.steps", "3", "--resume", "auto"]
    assert main(train("a", "moved", *more)) == 0  # the same content, elsewhere
    with (here / "text.txt").open("a") as text:
        text.write("And by opposing end them.\n")
    assert main(prepare("tokens")) == 0
    capsys.readouterr()
    assert main(train("a", "tokens", *more)) == DataError.exit_code
    assert "the folder was prepared with another text" in capsys.readouterr().err
