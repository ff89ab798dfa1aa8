"""Documents come out of files of every kind as they went in; what is left out is told."""

import gzip
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_torch.config import DataConfig
from core_torch.data import sources
from core_torch.data.corpus import load_documents, open_corpus, prepare
from core_torch.data.sources import Piece, files_of, is_saved_dataset, pieces_of
from core_torch.errors import ConfigError, DataError


def documents_of(file: Path, field: str = "text", skipped: list[str] | None = None) -> list[str]:
    found, begun = [], ""
    for piece in pieces_of(file, field, [] if skipped is None else skipped):
        begun += piece.text
        if piece.ends:
            found.append(begun)
            begun = ""
    assert not begun, "the last piece ends no document"
    return found


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of at most 8 characters, files read 5 bytes at a time."""
    monkeypatch.setattr(sources, "LONGEST", 8)
    monkeypatch.setattr(sources, "_CHUNK", 5)


@pytest.mark.usefixtures("small")
def test_a_text_file_longer_than_a_piece_is_one_document_whatever_lies_on_the_seams(
    tmp_path: Path,
) -> None:
    file = tmp_path / "a.txt"

    @settings(deadline=None, max_examples=60)
    @given(st.text(st.sampled_from("aé€😀\r\n \ufeff"), min_size=1))
    def check(text: str) -> None:
        file.write_bytes(text.encode())
        want = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
        if not want.strip():
            with pytest.raises(DataError, match="a.txt is empty"):
                documents_of(file)
            return
        assert documents_of(file) == [want]
        assert all(0 < len(piece.text) <= 8 for piece in pieces_of(file, "text", []))

    check()


@pytest.mark.usefixtures("small")
def test_pieces_end_with_lines_if_they_can(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("12345\n789012345678901")
    pieces = list(pieces_of(tmp_path / "a.txt", "text", []))
    assert pieces == [Piece("12345\n", False), Piece("78901234", False), Piece("5678901", True)]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"0123456789ab\xff", "byte 0xff at offset 12"),
        (b"0123\xe2\x82", "byte 0xe2 at offset 4"),
        (b"012\xe2\x82ab", "byte 0xe2 at offset 3"),
        (b"0123456\x00", "zero byte at offset 7"),
    ],
)
def test_offsets_of_bad_bytes_count_from_the_beginning_of_the_file(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        documents_of(tmp_path / "a.txt")


LINES = (
    '\ufeff{"text": "one\\n", "body": "eins"}\n'
    "\n"
    '{"body": "zwei"}\n'
    '{"text": 3}\n["text"]\n{"text"\n{"text": " "}\n{"text": "\\ud83d"}\n'
    '{"text": "two é"}'
)
FAULTS = [
    "2 lines have no field 'text', the first is line 3",
    "1 lines hold no text, the first is line 4",
    "1 lines are not JSON, the first is line 6",
    "1 lines are empty, the first is line 7",
    "1 lines hold half a character, the first is line 8",
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL.gz"])
def test_a_line_of_json_is_a_document_and_lines_that_hold_none_are_counted(
    tmp_path: Path, name: str
) -> None:
    raw = LINES.encode() + b'\n{"text": "\xff"}'
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    skipped: list[str] = []
    assert documents_of(tmp_path / name, skipped=skipped) == ["one\n", "two é"]
    want = [*FAULTS, "1 lines are not UTF-8, the first is line 10"]
    assert skipped == [f"of {tmp_path / name}: {fault}" for fault in want]
    assert documents_of(tmp_path / name, "body") == ["eins", "zwei"]


def test_a_file_of_lines_without_a_document_is_refused_with_the_reasons(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n' * 3)
    with pytest.raises(DataError, match="holds no document; 3 lines have no field 'text'") as info:
        documents_of(tmp_path / "a.jsonl")
    assert "--field" in info.value.next


def test_a_packed_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"text": "x"}\n' * 1000)
    for name, raw in (("cut.jsonl.gz", whole[:-9]), ("other.jsonl.gz", b'{"text": "x"}')):
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(DataError, match=f"{name} is damaged"):
            documents_of(tmp_path / name)


def write_mixed(folder: Path) -> None:
    """UTF-8, CRLF, a byte order mark, JSON lines; empty, binary, Latin-1, a picture."""
    (folder / "inner").mkdir(parents=True)
    contents = {
        "a.txt": "Grüße\n".encode(),
        "b.md": b"one\r\ntwo\r\n",
        "c.txt": b"\xef\xbb\xbfmark\n",
        "d.txt": b"",
        "e.txt": b"\x7fELF\x01\x00",
        "f.txt": b"caf\xe9",
        "g.png": b"picture",
        "h.jsonl": b'{"text": "line 1"}\nnot\n{"text": "line 3"}\n',
        "inner/i.rst": b"deep\n",
        ".hidden.txt": b"unseen",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def test_of_a_folder_of_mixed_files_what_can_be_read_is_read_and_the_rest_is_told(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "mixed"
    write_mixed(folder)
    skipped: list[str] = []
    found = load_documents(str(folder), "text", skipped)
    assert found == ["Grüße\n", "one\ntwo\n", "mark\n", "line 1", "line 3", "deep\n"]
    assert skipped == [
        f"of {folder}, by their names: 1 .png",
        f"{folder}/d.txt is empty",
        f"{folder}/e.txt is not text: zero byte at offset 5",
        f"{folder}/f.txt is not UTF-8: byte 0xe9 at offset 3",
        f"of {folder}/h.jsonl: 1 lines are not JSON, the first is line 2",
    ]


def test_a_run_on_a_folder_of_mixed_files_remembers_what_it_skipped(tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    write_mixed(folder)
    (folder / "a.txt").write_text("Grüße\n" * 50)
    config = DataConfig(path=str(folder))
    corpus = prepare(config, tmp_path / "run")
    assert len(corpus.skipped) == 5 and "d.txt is empty" in corpus.skipped[1]
    assert open_corpus(tmp_path / "run").skipped == corpus.skipped
    (folder / "g.png").unlink()  # what is read is what it was
    assert prepare(config, tmp_path / "run").train.ids.tolist() == corpus.train.ids.tolist()


def test_a_folder_in_which_nothing_can_be_read_is_refused_with_the_reasons(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff")
    (tmp_path / "b.txt").write_bytes(b"")
    with pytest.raises(DataError, match=r"nothing in folder .*a.txt is not UTF-8.*b.txt is empty"):
        load_documents(str(tmp_path), "text", [])


def test_rows_of_a_parquet_file_are_documents(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    rows = ["one", None, "", "two é"] * 600  # more than are read at a time
    parquet.write_table(pyarrow.table({"text": rows, "n": list(range(2400))}), file)
    skipped: list[str] = []
    assert documents_of(file, skipped=skipped) == ["one", "two é"] * 600
    assert skipped == [
        f"of {file}: 600 rows hold no text, the first is row 2",
        f"of {file}: 600 rows are empty, the first is row 3",
    ]
    with pytest.raises(DataError, match="has no column 'body'; it has text, n"):
        documents_of(file, "body")
    with pytest.raises(DataError, match="holds no document; 2400 rows hold no text"):
        documents_of(file, "n")
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(DataError, match="a.parquet is no sound parquet file"):
        documents_of(file)


def test_a_package_that_is_missing_is_named_with_what_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "a.txt").write_text("words")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for path in (tmp_path / "a.parquet", tmp_path):  # data that are there are not passed over
        with pytest.raises(ConfigError, match="not installed: pyarrow") as info:
            load_documents(str(path), "text", [])
        assert info.value.next == "pip install 'twinshard[data]'"


def test_a_saved_dataset_is_known_by_its_files_and_needs_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("state.json", "dataset_info.json"):
        assert not is_saved_dataset(tmp_path)
        (tmp_path / name).write_text(json.dumps({}))
    assert is_saved_dataset(tmp_path) and files_of(tmp_path, []) == [tmp_path]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="not installed: datasets"):
        documents_of(tmp_path)
