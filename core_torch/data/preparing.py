"""Documents to a prepared folder, in several processes: ``twinshard data prepare``.

Two passes over the sources, neither of which holds more than some pieces of text. The first one
finds out what can be read and how many characters there are, so that the end of the text can be
held out; the second one encodes. One process reads and writes, in order; the others only turn
text into ids, so their number changes no byte. A folder of a run (corpus.py) that is prepared
from the same files has the same ids, if no document is longer than a piece.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from core_torch.config import DataConfig
from core_torch.data.atomic import new_folder, write_atomic
from core_torch.data.corpus import kept
from core_torch.data.prepared import KIND, SPLITS, VERSION, content_of
from core_torch.data.sources import Piece, files_of, nothing_readable, pieces_of
from core_torch.data.token_file import TokenWriter
from core_torch.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer
from core_torch.errors import DataError

SAMPLE = 1 << 24  # characters at most that a tokenizer is trained on
_JOB = 1 << 18  # characters that a process is given at a time

Tell = Callable[[str, int, int], None]  # what is being done, characters done, of how many or 0
Encoded = tuple[np.ndarray, int]  # ids and the number of documents that end in them


class Found(NamedTuple):
    """A file of documents, and what the first pass counted in it."""

    path: Path
    documents: int
    characters: int


class Job(NamedTuple):
    """Pieces that follow each other in one split."""

    split: int  # place in SPLITS
    pieces: tuple[Piece, ...]

    @property
    def characters(self) -> int:
        """Of all pieces."""
        return sum(len(piece.text) for piece in self.pieces)


def prepare_folder(
    sources: Sequence[str],
    out: Path,
    config: DataConfig,
    *,
    processes: int = 1,
    tell: Tell = lambda doing, done, of: None,
    called: Callable[[str], str] = str,
) -> dict[str, Any]:
    """Writes a prepared folder; it appears at once, complete, or not at all.

    Args:
        sources: files and folders, in this order.
        out: the new folder.
        config: its tokenizer, held_out and field.
        processes: that encode; 1: this one does.
        tell: told of progress.
        called: paths, and sentences about them, as data.json is to have them.

    Returns:
        What data.json says.

    Raises:
        DataError: a source, or all of a folder, cannot be read; too little text; ``out`` exists
            or cannot be written; a process was killed.
    """
    with new_folder(out) as folder:
        skipped: list[str] = []
        found = [file for path in sources for file in _scan(Path(path), config, skipped, tell)]
        keep = kept(sum(file.characters for file in found), config.held_out)
        tokenizer = make_tokenizer(config, _sample(found, config, keep, tell))
        tokenizer.save(folder / "tokenizer.json")
        jobs = _jobs(found, config, keep)
        splits = _write(folder, jobs, tokenizer, processes, found, tell)
        manifest = {
            "kind": KIND,
            "version": VERSION,
            "tokenizer": config.tokenizer,
            "vocabulary": tokenizer.vocabulary,
            "held_out_share": config.held_out,
            **splits,
            "content": content_of(tokenizer, *(splits[name]["sha256"] for name in SPLITS)),
            "sources": [
                {
                    "path": called(str(file.path)),
                    "documents": file.documents,
                    "characters": file.characters,
                }
                for file in found
            ],
            "skipped": [called(text) for text in skipped],
        }
        write_atomic(folder / "data.json", [json.dumps(manifest, indent=1).encode()])
    return manifest


def _scan(path: Path, config: DataConfig, skipped: list[str], tell: Tell) -> list[Found]:
    """First pass over a source: its readable files."""
    found: list[Found] = []
    for file in files_of(path, skipped):
        told: list[str] = []
        documents = characters = 0
        try:
            for piece in pieces_of(file, config.field, told):
                documents += piece.ends
                characters += len(piece.text)
                tell(f"reading {file.name}", characters, 0)
        except DataError as error:
            if file == path:
                raise
            skipped.append(error.what)
            continue
        skipped += told
        found.append(Found(file, documents, characters))
    if not found:
        raise nothing_readable(path, skipped)
    return found


def _pieces(found: Sequence[Found], config: DataConfig, keep: int) -> Iterator[tuple[int, Piece]]:
    """Place of the split, and piece; the piece in which training text ends is cut in two."""
    left = keep
    for file in found:
        characters = 0
        for piece in pieces_of(file.path, config.field, []):
            characters += len(piece.text)
            own, rest = piece.text[:left], piece.text[left:]
            left -= len(own)
            if own:
                yield 0, Piece(own, ends=piece.ends or left == 0)
            if rest:
                yield 1, Piece(rest, ends=piece.ends)
        if characters != file.characters:
            raise DataError(
                f"{file.path} had {file.characters} characters and now has {characters}",
                likely="somebody writes to it",
                next="prepare a copy that nobody changes",
            )


def _sample(found: list[Found], config: DataConfig, keep: int, tell: Tell) -> Iterator[str]:
    """Training text for a tokenizer: pieces from all over it, ``SAMPLE`` characters at most."""
    every, taken = -(-keep // SAMPLE), 0
    for number, (split, piece) in enumerate(_pieces(found, config, keep)):
        if split != 0:
            return
        if number % every == 0 and taken + len(piece.text) <= SAMPLE:
            taken += len(piece.text)
            tell("training the tokenizer", taken, 0)
            yield piece.text


def _jobs(found: Sequence[Found], config: DataConfig, keep: int) -> Iterator[Job]:
    held: list[Piece] = []
    characters, now = 0, 0
    for split, piece in _pieces(found, config, keep):
        if held and (split != now or characters >= _JOB):
            yield Job(now, tuple(held))
            held, characters = [], 0
        held.append(piece)
        characters, now = characters + len(piece.text), split
    yield Job(now, tuple(held))


def _write(
    folder: Path,
    jobs: Iterator[Job],
    tokenizer: Tokenizer,
    processes: int,
    found: Sequence[Found],
    tell: Tell,
) -> dict[str, Any]:
    """Second pass: both token files. Returns what data.json says of them."""
    done, total = 0, sum(file.characters for file in found)
    documents = [0, 0]
    try:
        with contextlib.ExitStack() as stack:
            writers = [
                stack.enter_context(TokenWriter(folder / f"{name}.tokens", tokenizer.vocabulary))
                for name in SPLITS
            ]
            for job, (ids, ended) in _encoded(jobs, tokenizer, folder, processes):
                writers[job.split].append(ids)
                documents[job.split] += ended
                done += job.characters
                tell("encoding", done, total)
    except OSError as error:
        raise DataError(
            f"cannot write tokens: {error.strerror or error}",
            where=str(folder),
            likely="the disk is full",
            next="make space, or another --out",
        ) from error
    for writer in writers:
        if writer.count == 0:
            raise DataError(f"{writer.path.name} has no tokens", likely="the text is too short")
    return {
        name: {"tokens": writer.count, "documents": count, "sha256": writer.sha256}
        for name, writer, count in zip(SPLITS, writers, documents, strict=True)
    }


def _encoded(
    jobs: Iterator[Job], tokenizer: Tokenizer, folder: Path, processes: int
) -> Iterator[tuple[Job, Encoded]]:
    """Jobs with their ids, in order; at most two jobs for each process are under way."""
    if processes == 1:
        for job in jobs:
            yield job, encode(job, tokenizer)
        return
    pool = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(str(folder / "tokenizer.json"),),
    )
    waiting: deque[tuple[Job, Future[Encoded]]] = deque()
    try:
        for job in jobs:
            waiting.append((job, pool.submit(_encode_here, job)))
            if len(waiting) >= 2 * processes:
                job, future = waiting.popleft()
                yield job, future.result()
        while waiting:
            job, future = waiting.popleft()
            yield job, future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a process that encodes was killed",
            likely="the machine ran out of memory",
            next=f"fewer than --processes {processes}",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def encode(job: Job, tokenizer: Tokenizer) -> Encoded:
    """Ids of all pieces, each encoded by itself, with the end of text after each document.

    Raises:
        DataError: ordinary text gave the id that marks an end.
    """
    end, parts, ended = tokenizer.end_of_text, [], 0
    for piece in job.pieces:
        ids = tokenizer.encode(piece.text)
        if end is not None and (ids == end).any():
            raise DataError(
                f"text was encoded as token {end}, which is to mark ends of text only",
                likely="the tokenizer's end of text is an ordinary token of its vocabulary",
                next="another tokenizer",
            )
        parts.append(ids)
        ended += piece.ends
        if piece.ends and end is not None:
            parts.append(np.array([end]))
    return np.concatenate(parts), ended


_tokenizers: list[Tokenizer] = []  # of a process that encodes: the one it was begun with


def _begin(path: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that reads ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _tokenizers.append(load_tokenizer(path))


def _end_with_parent() -> None:
    """A parent that is killed says nothing to those that wait for its next job."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_here(job: Job) -> Encoded:
    return encode(job, _tokenizers[0])
