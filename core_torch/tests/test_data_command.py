"""``twinshard data`` from the words of the command to what it prints."""

from pathlib import Path

import pytest
from rich.console import Console

from core_torch.cli import main
from core_torch.cli.data import Bar, skipped_lines
from core_torch.cli.data_options import DataPrepareOptions
from core_torch.cli.train import tell_skipped
from core_torch.config import DataConfig
from core_torch.data.corpus import prepare
from core_torch.errors import EXIT_OK, ConfigError, DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a text, one that is empty, and one with a terminal escape in its name."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("Grüße aus Köln.\n" * 100)
    (tmp_path / "texts/b.txt").write_bytes(b"")
    (tmp_path / "texts/\x1b[31mc.txt").write_bytes(b"\xff")
    return tmp_path / "texts"


def test_prepare_says_what_it_made_what_it_skipped_and_what_is_next(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["data", "prepare", str(folder), "--out", str(out), "--processes", "1"]
    assert main(words) == EXIT_OK
    said = capsys.readouterr().out
    assert said.splitlines() == [
        f"skipped: {folder}/c.txt is not UTF-8: byte 0xff at offset 0",
        f"skipped: {folder}/b.txt is empty",
        f"{out}: tokenizer byte, vocabulary 257",
        "  train: 1.81 k tokens in 1 document",
        "  held out: 96 tokens in 1 document",
        f"  next:   twinshard train --data.path {out}",
    ]
    assert main(words) == DataError.exit_code
    assert "exists already" in capsys.readouterr().err


def test_show_tells_sizes_and_the_beginning(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    main(["data", "prepare", str(folder), "--out", str(out), "--processes", "1"])
    capsys.readouterr()
    assert main(["data", "show", str(out), "--tokens", "18", "--check"]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("vocabulary 257") and lines[-1] == "  | Grüße aus Köln."
    assert lines[3].startswith("  content: ") and lines[3].endswith(", as written")
    assert lines[4] == "  skipped: 2 lines in data.json"
    raw = bytearray((out / "held_out.tokens").read_bytes())
    raw[40] ^= 1
    (out / "held_out.tokens").write_bytes(raw)
    assert main(["data", "show", str(out)]) == EXIT_OK
    assert main(["data", "show", str(out), "--check"]) == DataError.exit_code


def test_all_that_is_wrong_with_the_words_is_told_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["data", "prepare", "--held_out", "0.7"]) == ConfigError.exit_code
    said = capsys.readouterr().err
    assert "SOURCE: is missing: a file or folder of documents" in said
    assert "out: is missing" in said and "held_out: must be at most 0.5" in said
    assert main(["data", "show"]) == ConfigError.exit_code
    assert "DIR: is missing: the folder of tokens" in capsys.readouterr().err


def test_processes_default_to_the_cores() -> None:
    assert DataPrepareOptions(out="x").workers >= 1
    assert DataPrepareOptions(out="x", processes=3).workers == 3


def test_a_long_list_of_what_was_skipped_is_cut() -> None:
    lines = skipped_lines([f"{n}.txt is empty" for n in range(14)])
    assert len(lines) == 11 and lines[-1] == "skipped: 4 more, see data.json"


def test_train_says_what_it_skipped_of_a_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tell_skipped(prepare(DataConfig(path=str(folder)), tmp_path / "run"))
    assert capsys.readouterr().err.splitlines() == [
        f"skipped: {folder}/c.txt is not UTF-8: byte 0xff at offset 0",
        f"skipped: {folder}/b.txt is empty",
    ]


def test_the_bar_shows_characters_and_takes_unknown_lengths() -> None:
    console = Console(force_terminal=True, width=100, record=True, file=None, stderr=True)
    with console.capture() as captured, Bar(console) as bar:
        bar("reading a.txt", 10, 0)
        bar("encoding", 2000, 2000)
    assert "encoding" in captured.get() and "2.00 k characters" in captured.get()
