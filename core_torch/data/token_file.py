"""Token ids on disk: a 32-byte header, then the ids, all little-endian.

    bytes 0..7    magic, the ASCII text TWINTOKS
    bytes 8..11   uint32  version of this format, 1
    bytes 12..15  uint32  bytes per id: 2 (uint16) or 4 (uint32)
    bytes 16..23  uint64  vocabulary: every id is smaller
    bytes 24..31  uint64  number of ids
    bytes 32..    the ids

The file's size follows from the header, so a truncated file is noticed before any id is read.
"""

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

from core_torch.data.atomic import write_atomic
from core_torch.errors import DataError

MAGIC = b"TWINTOKS"
VERSION = 1
HEADER = struct.Struct("<8sIIQQ")
LARGEST_VOCABULARY = 2**32  # of uint32 ids
_REBUILD = "delete data.json beside it and start the run again"
_SCAN = 1 << 24  # ids looked at together, so that a check of a large file needs little memory


@dataclass(frozen=True, eq=False)  # arrays have no single truth value
class TokenFile:
    """An open token file. ``ids`` is a read-only memory map, (count,) uint16 or uint32."""

    path: Path
    vocabulary: int
    ids: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def check_ids(self) -> None:
        """Reads the whole file once.

        Raises:
            DataError: an id lies outside the vocabulary; names its position and value.
        """
        _check_ids(self.ids, self.vocabulary, self.path)


def write_tokens(path: Path | str, ids: np.ndarray, vocabulary: int) -> None:
    """Writes ``ids`` (count,) atomically, as uint16 if the vocabulary fits, else as uint32.

    Raises:
        DataError: no ids, an id outside ``range(vocabulary)``, or a path that cannot be written.
        ValueError: ``ids`` are no 1-D integers, or the vocabulary does not fit uint32.
    """
    path = Path(path)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"ids must be 1-D integers, got {ids.dtype} {ids.shape}")
    if not 1 <= vocabulary <= LARGEST_VOCABULARY:
        raise ValueError(f"vocabulary must lie in 1..{LARGEST_VOCABULARY}, got {vocabulary}")
    if len(ids) == 0:
        raise DataError("no tokens to write", where=str(path), likely="the text is empty")
    _check_ids(ids, vocabulary, path)
    itemsize = 2 if vocabulary <= 2**16 else 4
    header = HEADER.pack(MAGIC, VERSION, itemsize, vocabulary, len(ids))
    write_atomic(path, [header, np.ascontiguousarray(ids, dtype=f"<u{itemsize}").data])


class TokenWriter:
    """Writes a token file bit by bit; it counts only once it is closed without an error.

    Args:
        path: of the new file; not atomic, so it must lie in a folder that nobody reads yet.
        vocabulary: every id is smaller.
    """

    def __init__(self, path: Path, vocabulary: int) -> None:
        self.path, self.vocabulary, self.count = path, vocabulary, 0
        self._type = np.dtype("<u2" if vocabulary <= 2**16 else "<u4")
        self._hash = hashlib.sha256()
        self._file = path.open("xb")
        self._file.write(bytes(HEADER.size))

    def __enter__(self) -> Self:
        return self

    def append(self, ids: np.ndarray) -> None:
        """Writes (count,) ids.

        Raises:
            DataError: an id outside the vocabulary.
        """
        if len(ids) == 0:
            return
        _check_ids(ids, self.vocabulary, self.path)
        raw = np.ascontiguousarray(ids, dtype=self._type).data
        self._file.write(raw)
        self._hash.update(raw)
        self.count += len(ids)

    @property
    def sha256(self) -> str:
        """Of the ids so far, as hexadecimal digits."""
        return self._hash.hexdigest()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        with self._file as file:
            if kind is not None:
                return
            file.seek(0)
            itemsize = self._type.itemsize
            file.write(HEADER.pack(MAGIC, VERSION, itemsize, self.vocabulary, self.count))
            file.flush()
            os.fsync(file.fileno())


def ids_hash(tokens: TokenFile) -> str:
    """SHA-256 of a file's ids, as ``TokenWriter.sha256``; reads all of it."""
    digest = hashlib.sha256()
    for start in range(0, len(tokens), _SCAN):
        digest.update(np.ascontiguousarray(tokens.ids[start : start + _SCAN]).data)
    return digest.hexdigest()


def open_tokens(path: Path | str) -> TokenFile:
    """Maps a token file into memory; reads its header only, see ``TokenFile.check_ids``.

    Raises:
        DataError: missing, not a token file, another version, or not of the size it says.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:  # opened once: another process may replace the path
            return _map(file, path)
    except OSError as error:
        raise DataError(
            f"cannot read {path.name}: {error.strerror}",
            where=str(path),
            likely="the run was not prepared, or the folder was moved",
            next=_REBUILD,
        ) from error


def _map(file: BinaryIO, path: Path) -> TokenFile:
    size = os.fstat(file.fileno()).st_size
    head = file.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise _broken(path, "is not a token file")
    _, version, itemsize, vocabulary, count = HEADER.unpack(head)
    if version != VERSION:
        raise _broken(path, f"has format version {version}; this version reads {VERSION}")
    if not 1 <= vocabulary <= LARGEST_VOCABULARY or itemsize != (2 if vocabulary <= 2**16 else 4):
        message = f"has a damaged header: {itemsize} bytes per id, vocabulary {vocabulary}"
        raise _broken(path, message)
    want = HEADER.size + count * itemsize
    if count == 0 or size != want:
        raise _broken(path, f"has {size} bytes; {count} ids need {want}")
    ids = np.memmap(file, dtype=f"<u{itemsize}", mode="r", offset=HEADER.size, shape=(count,))
    return TokenFile(path, vocabulary, ids)


def _check_ids(ids: np.ndarray, vocabulary: int, path: Path) -> None:
    for start in range(0, len(ids), _SCAN):
        part = ids[start : start + _SCAN]
        if part.min() >= 0 and part.max() < vocabulary:
            continue
        first = int(np.argmax((part < 0) | (part >= vocabulary)))
        raise DataError(
            f"token id {part[first]} at position {start + first} is outside the vocabulary "
            f"of {vocabulary}",
            where=str(path),
            likely="the tokens come from another tokenizer, or the file is damaged",
            next=_REBUILD,
        )


def _broken(path: Path, message: str) -> DataError:
    return DataError(
        f"{path.name} {message}",
        where=str(path),
        likely="the file was cut off, changed or written by something else",
        next=_REBUILD,
    )
