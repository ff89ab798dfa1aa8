"""Files of documents, read as a stream: text, JSON lines, parquet, a saved dataset.

One text file is one document; one line of JSON lines, or one row of a parquet file, is one too.
Documents come in pieces of bounded length, so that no file need fit into memory. A file that is
named must be readable; in a folder, what cannot be read is left out and told.
"""

import codecs
import gzip
import importlib
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from core_torch.errors import ConfigError, DataError

TEXT = (".txt", ".md", ".rst", ".text")
JSON_LINES = (".jsonl", ".jsonl.gz")
PARQUET = (".parquet",)
SUFFIXES = TEXT + JSON_LINES + PARQUET  # of the files that a folder is read for
LONGEST = 1 << 20  # characters of a piece
_CHUNK = 1 << 20  # bytes read at a time


class Piece(NamedTuple):
    """A part of a document, or all of it; not empty."""

    text: str
    ends: bool  # whether its document ends here


class Unfit(NamedTuple):
    """A line or row that holds no document, and why."""

    why: str


def files_of(path: Path, skipped: list[str]) -> list[Path]:
    """The file itself, or the files of documents below a folder; hidden ones do not count.

    Args:
        path: of a file, a folder, or a dataset saved by Hugging Face's ``datasets``.
        skipped: gets a line on the files whose names say that they hold no documents.

    Raises:
        DataError: missing, or a folder without any.
    """
    if path.is_file() or is_saved_dataset(path):
        return [path]
    if not path.is_dir():
        exists = path.exists()
        raise DataError(
            f"data path {path} is {'neither a file nor a folder' if exists else 'missing'}",
            where=str(path.absolute()),
            likely="a typing error, or a path relative to another folder",
            next="name a file of text, JSON lines or parquet, or a folder of them",
        )
    seen = [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    files = [file for file in seen if file.name.lower().endswith(SUFFIXES)]
    if not files:
        raise DataError(
            f"folder {path} holds no text files",
            where=str(path.absolute()),
            likely=f"no file name ends in {', '.join(SUFFIXES)}",
            next="rename the files, or name one file",
        )
    others = Counter(file.suffix or file.name for file in seen if file not in set(files))
    if others:
        listed = ", ".join(f"{count} {suffix}" for suffix, count in sorted(others.items()))
        skipped.append(f"of {path}, by their names: {listed}")
    return files


def read_files(path: Path, field: str, skipped: list[str]) -> Iterator[tuple[Path, list[Piece]]]:
    """Files with their pieces, whole files in memory; what cannot be read of a folder is left out.

    Args:
        path: see ``files_of``.
        field: see ``pieces_of``.
        skipped: gets a line for each file, or kind of line, that is left out.

    Raises:
        DataError: the named file, or nothing in the folder, can be read.
    """
    files, read = files_of(path, skipped), 0
    for file in files:
        told: list[str] = []
        try:
            pieces = list(pieces_of(file, field, told))
        except DataError as error:
            if file == path:
                raise
            skipped.append(error.what)
            continue
        read += 1
        skipped += told
        yield file, pieces
    if not read:
        raise nothing_readable(path, skipped)


def nothing_readable(path: Path, skipped: list[str]) -> DataError:
    """The error that all files of a folder had to be left out."""
    return DataError(
        f"nothing in folder {path} can be read: " + "; ".join(skipped[:3]),
        where=str(path.absolute()),
        likely="another kind of files, or copies that failed",
        next="name one of its files to see what is wrong with it",
    )


def pieces_of(file: Path, field: str, skipped: list[str]) -> Iterator[Piece]:
    """Pieces of all documents of a file, in order.

    Args:
        file: of any of the kinds; one of no known suffix is read as text.
        field: of JSON lines, column of parquet files and datasets.
        skipped: gets a line for each reason why some lines or rows are left out.

    Raises:
        DataError: not readable, or without a document; perhaps after some pieces.
        ConfigError: a package is missing.
    """
    name = file.name.lower()
    try:
        if is_saved_dataset(file):
            yield from _pieces_of_rows(file, _rows_of_dataset(file, field), skipped, "row")
        elif name.endswith(JSON_LINES):
            yield from _pieces_of_rows(file, _lines(file, field), skipped, "line")
        elif name.endswith(PARQUET):
            yield from _pieces_of_rows(file, _rows_of_parquet(file, field), skipped, "row")
        else:
            yield from _pieces_of_text(file)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{file} is damaged: {error}",
            where=str(file.absolute()),
            likely="a download or copy that failed",
            next=f"gzip -t {file.name}",
        ) from error
    except OSError as error:
        raise DataError(
            f"cannot read {error.filename or file}: {error.strerror}",
            where=str(file.absolute()),
            likely="no permission, or a damaged disk",
            next="check it with ls -l, or name another file",
        ) from error


def is_saved_dataset(path: Path) -> bool:
    """Whether ``Dataset.save_to_disk`` of Hugging Face's ``datasets`` wrote this folder."""
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def _pieces_of_text(file: Path) -> Iterator[Piece]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    newlines = io.IncrementalNewlineDecoder(decoder, translate=True)
    held, is_blank, is_start, read = "", True, True, 0
    with file.open("rb") as stream:
        while True:
            chunk = stream.read(_CHUNK)
            try:
                text = newlines.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                offset = read + len(chunk) - len(error.object) + error.start
                raise _not_utf_8(file, error.object[error.start], offset) from error
            if "\0" in text:
                raise DataError(
                    f"{file} is not text: zero byte at offset {read + chunk.index(0)}",
                    where=str(file.absolute()),
                    likely="a binary file",
                    next="name a text file as data.path, or move this one out of the folder",
                )
            read += len(chunk)
            if is_start and text:
                text, is_start = text.removeprefix("\ufeff"), False
            held += text
            is_blank = is_blank and not text.strip()
            if not chunk:
                break
            while len(held) > LONGEST:
                first, held = _cut(held)
                yield Piece(first, ends=False)
    if is_blank:
        raise DataError(
            f"{file} is empty",
            where=str(file.absolute()),
            likely="a download or copy that failed",
            next="fill it, name another file as data.path, or move this one out of the folder",
        )
    yield from _document(held)


def _not_utf_8(file: Path, byte: int, offset: int) -> DataError:
    return DataError(
        f"{file} is not UTF-8: byte 0x{byte:02x} at offset {offset}",
        where=str(file.absolute()),
        likely="a binary file, or text saved in another encoding",
        next=f"iconv -f LATIN1 -t UTF-8 {file.name} > utf8-{file.name}",
    )


def _document(text: str) -> Iterator[Piece]:
    while len(text) > LONGEST:
        first, text = _cut(text)
        yield Piece(first, ends=False)
    yield Piece(text, ends=True)


def _cut(text: str) -> tuple[str, str]:
    """After the last line end of the second half of a piece, if there is one."""
    at = text.rfind("\n", LONGEST // 2, LONGEST) + 1 or LONGEST
    return text[:at], text[at:]


def _pieces_of_rows(
    file: Path, rows: Iterable[object], skipped: list[str], unit: str
) -> Iterator[Piece]:
    """Each row that is text is a document; the others are counted by what is wrong."""
    found, wrong, first = False, Counter[str](), dict[str, int]()
    for number, row in enumerate(rows, start=1):
        why = _fault(row)
        if why is None:
            found = True
            yield from _document(str(row))
        elif why:
            wrong[why] += 1
            first.setdefault(why, number)
    listed = [f"{n} {unit}s {why}, the first is {unit} {first[why]}" for why, n in wrong.items()]
    if not found:
        raise DataError(
            f"{file} holds no document" + "".join(f"; {line}" for line in listed[:3]),
            where=str(file.absolute()),
            likely="documents stand in another field, or it is another kind of file",
            next="name the field with --field, or another file",
        )
    skipped += [f"of {file}: {line}" for line in listed]


def _fault(row: object) -> str | None:
    """Why a row is no document; empty if it does not matter, None if it is one."""
    if isinstance(row, Unfit):
        return row.why
    if not isinstance(row, str):
        return "hold no text"
    if not row.strip():
        return "are empty"
    try:
        row.encode()
    except UnicodeEncodeError:
        return "hold half a character"
    return None


def _lines(file: Path, field: str) -> Iterator[object]:
    """The field of each line of JSON."""
    packed = file.name.lower().endswith(".gz")
    with gzip.open(file, "rb") if packed else file.open("rb") as lines:
        for line in lines:
            yield _value(line, field)


def _value(line: bytes, field: str) -> object:
    if not line.strip():
        return Unfit("")
    try:
        value: Any = json.loads(line.decode().removeprefix("\ufeff"))
    except UnicodeDecodeError:
        return Unfit("are not UTF-8")
    except (ValueError, RecursionError):
        return Unfit("are not JSON")
    if not isinstance(value, dict) or field not in value:
        return Unfit(f"have no field {field!r}")
    return value[field]


def _rows_of_parquet(file: Path, field: str) -> Iterator[object]:
    try:
        pyarrow: Any = importlib.import_module("pyarrow")  # an extra
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise missing_package("pyarrow", file) from error
    try:
        with parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if field not in names:
                raise DataError(
                    f"{file} has no column {field!r}; it has {', '.join(names)}",
                    where=str(file.absolute()),
                    next="name the column with --field",
                )
            for batch in table.iter_batches(batch_size=1024, columns=[field]):
                yield from batch.column(0).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{file} is no sound parquet file: {str(error).splitlines()[0]}",
            where=str(file.absolute()),
            likely="a download or copy that failed",
            next="name another file, or move this one out of the folder",
        ) from error


def _rows_of_dataset(folder: Path, field: str) -> Iterator[object]:
    from core_torch.data.hf_datasets import load_saved, values_of

    return values_of(load_saved(folder), field)


def missing_package(name: str, file: Path) -> ConfigError:
    """The error that a kind of file needs a package that is not installed."""
    return ConfigError(
        f"{file.name} needs a package that is not installed: {name}",
        where=str(file.absolute()),
        next="pip install 'twinshard[data]'",
    )
