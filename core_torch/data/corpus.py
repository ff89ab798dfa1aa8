"""Text in, a prepared folder out: training tokens, held-out tokens and their tokenizer.

``prepare`` runs once per run, in the process that starts the ranks or in rank 0; every other
rank calls ``open_corpus``. A document is one file; every document is followed by the
tokenizer's end of text.

    train.tokens      the beginning of the text
    held_out.tokens   its end, which training never sees and the tokenizer is not trained on
    tokenizer.json
    data.json         what the three were made from; written last, so it marks them complete
"""

import hashlib
import importlib.resources
import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from core_torch.config import DataConfig
from core_torch.data.atomic import write_atomic
from core_torch.data.batches import count_sequences
from core_torch.data.token_file import TokenFile, open_tokens, write_tokens
from core_torch.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer
from core_torch.errors import DataError

SHIPPED = "shakespeare.txt.xz"  # PROVENANCE.md says where it comes from
SUFFIXES = (".txt", ".md", ".rst", ".text")  # of the files that a folder is read for
_VERSION = 1  # of the prepared folder


@dataclass(frozen=True, eq=False)  # arrays have no single truth value
class Corpus:
    """A prepared text: two token files and the tokenizer that made them."""

    train: TokenFile
    held_out: TokenFile
    tokenizer: Tokenizer

    def check(self, *, sequence: int, draws: int) -> None:
        """Checks that the text is long enough for a layout.

        Args:
            sequence: tokens per sequence.
            draws: sequences that all ranks draw together in one micro-step; with fewer in the
                training split, two rows of a step would be equal.

        Raises:
            DataError: fewer than ``draws`` training sequences, or no held-out sequence.
        """
        _check_split(self.train, "training", sequence, draws)
        _check_split(self.held_out, "held-out", sequence, 1)


def load_text(path: str) -> str:
    """Returns the text of a file, of a folder's text files in order of their paths, or, for
    an empty path, the shipped corpus. Line ends are "\\n", a byte order mark is dropped.

    Raises:
        DataError: missing, empty, binary, not UTF-8, or a folder without text files.
    """
    return "\n".join(load_documents(path))


def load_documents(path: str) -> list[str]:
    """Returns one text per file; see ``load_text``."""
    if not path:
        shipped = importlib.resources.files("core_torch.data").joinpath(SHIPPED)
        return [lzma.decompress(shipped.read_bytes()).decode("ascii")]
    try:
        return [_read_text(file) for file in _text_files(Path(path))]
    except OSError as error:
        raise DataError(
            f"cannot read {error.filename or path}: {error.strerror}",
            where=str(Path(path).absolute()),
            likely="no permission, or a damaged disk",
            next="check it with ls -l, or set data.path to another file",
        ) from error


def prepare(config: DataConfig, folder: Path) -> Corpus:
    """Writes the prepared folder unless it is there already, and opens it.

    Two processes may prepare one folder with one config at the same time: both write the same
    bytes, every file appears whole, and data.json appears last.

    Args:
        config: where the text is and how to cut it.
        folder: made if missing, with access for its owner only.

    Raises:
        DataError: the text cannot be read or split, the folder cannot be written, or it was
            prepared from another text or with other settings.
    """
    documents = load_documents(config.path)
    recipe = _recipe(config, documents)
    if (folder / "data.json").exists():
        corpus, found = open_corpus(folder), _read_manifest(folder)
        changed = [name for name in recipe if found.get(name) != recipe[name]]
        if changed:
            raise DataError(
                f"the folder was prepared with another {' and '.join(changed)}",
                where=str(folder),
                likely="data settings or the text changed since the run began",
                next="choose another run folder with --run, or restore the old settings",
            )
        return corpus
    _write_prepared(config, documents, recipe, folder)
    return open_corpus(folder)


def open_corpus(folder: Path) -> Corpus:
    """Opens what ``prepare`` wrote and reads both token files once to check every id.

    Raises:
        DataError: not prepared, damaged, or files that do not belong together.
    """
    manifest = _read_manifest(folder)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    corpus = Corpus(
        open_tokens(folder / "train.tokens"), open_tokens(folder / "held_out.tokens"), tokenizer
    )
    if tokenizer.fingerprint() != manifest.get("fingerprint"):
        raise _mixed(folder, "tokenizer.json is not the tokenizer that the tokens were made with")
    for split in (corpus.train, corpus.held_out):
        if split.vocabulary != tokenizer.vocabulary:
            message = f"{split.path.name} has vocabulary {split.vocabulary}, the tokenizer"
            raise _mixed(folder, f"{message} {tokenizer.vocabulary}")
        split.check_ids()
    return corpus


def _text_files(path: Path) -> list[Path]:
    """The file itself, or the text files below a folder; hidden ones do not count."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        exists = path.exists()
        raise DataError(
            f"data path {path} is {'neither a file nor a folder' if exists else 'missing'}",
            where=str(path.absolute()),
            likely="a typing error, or a path relative to another folder",
            next="set data.path to a UTF-8 text file, a folder of them, or leave it empty",
        )
    files = [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file()
        and file.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not files:
        raise DataError(
            f"folder {path} holds no text files",
            where=str(path.absolute()),
            likely=f"no file name ends in {', '.join(SUFFIXES)}",
            next="rename the files, or name one file as data.path",
        )
    return files


def _read_text(file: Path) -> str:
    """Text of one file; raises DataError, or OSError where it cannot be opened."""
    raw = file.read_bytes()
    try:
        text = raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}",
            where=str(file.absolute()),
            likely="a binary file, or text saved in another encoding",
            next=f"iconv -f LATIN1 -t UTF-8 {file.name} > utf8-{file.name}",
        ) from error
    if "\0" in text:
        raise DataError(
            f"{file} is not text: zero byte at offset {raw.index(0)}",
            where=str(file.absolute()),
            likely="a binary file",
            next="name a text file as data.path, or move this one out of the folder",
        )
    if not text.strip():
        raise DataError(
            f"{file} is empty",
            where=str(file.absolute()),
            likely="a download or copy that failed",
            next="fill it, name another file as data.path, or move this one out of the folder",
        )
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _recipe(config: DataConfig, documents: list[str]) -> dict[str, Any]:
    """Everything that decides the prepared files, as written to data.json."""
    text = hashlib.sha256()
    for document in documents:
        raw = document.encode()
        text.update(len(raw).to_bytes(8, "little") + raw)
    tokenizer = config.tokenizer
    if tokenizer == "bpe":
        tokenizer = f"bpe {config.bpe_vocabulary}"
    elif tokenizer != "byte":
        tokenizer = load_tokenizer(tokenizer).fingerprint()  # its path may say something else
    return {
        "version": _VERSION,
        "text": text.hexdigest(),
        "tokenizer": tokenizer,
        "held_out": config.held_out,
    }


def _write_prepared(
    config: DataConfig, documents: list[str], recipe: dict[str, Any], folder: Path
) -> None:
    train, held_out = _split(documents, config.held_out)
    tokenizer = make_tokenizer(config, "\n".join(train))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot make the folder: {error.strerror}",
            where=str(folder),
            likely="a read-only place, or a file of the same name",
            next="choose another run folder with --run",
        ) from error
    for name, part in (("train.tokens", train), ("held_out.tokens", held_out)):
        write_tokens(folder / name, _encode(part, tokenizer), tokenizer.vocabulary)
    tokenizer.save(folder / "tokenizer.json")
    manifest = recipe | {"fingerprint": tokenizer.fingerprint()}
    write_atomic(folder / "data.json", [json.dumps(manifest, indent=1).encode()])


def _split(documents: list[str], held_out: float) -> tuple[list[str], list[str]]:
    """Cuts the last ``held_out`` share of all characters off; may cut inside a document."""
    total = sum(map(len, documents))
    keep = total - round(total * held_out)
    if not 0 < keep < total:
        raise DataError(
            f"a text of {total} characters is too short to hold out {held_out} of it",
            likely="a wrong file",
            next="use more text, or raise data.held_out",
        )
    train, rest = [], []
    for document in documents:
        train.append(document[:keep])
        rest.append(document[keep:])
        keep = max(0, keep - len(document))
    return [d for d in train if d], [d for d in rest if d]


def _encode(documents: list[str], tokenizer: Tokenizer) -> np.ndarray:
    end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    parts = [part for text in documents for part in (tokenizer.encode(text), end)]
    return np.concatenate(parts).astype(np.int64)


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / "data.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            "the data folder is not prepared",
            where=str(folder),
            likely="rank 0 did not reach the preparation, or the folder is another one",
            next="start the run again",
        ) from error
    except (ValueError, RecursionError) as error:
        raise _mixed(folder, "data.json is damaged") from error
    if not isinstance(manifest, dict):
        raise _mixed(folder, "data.json is damaged")
    return manifest


def _mixed(folder: Path, message: str) -> DataError:
    return DataError(
        message,
        where=str(folder),
        likely="a file was changed or copied from another run",
        next="delete data.json in it and start the run again",
    )


def _check_split(tokens: TokenFile, name: str, sequence: int, need: int) -> None:
    have = count_sequences(len(tokens), sequence)
    if have < need:
        raise DataError(
            f"the {name} split holds {have} sequences of {sequence} tokens, {need} are needed",
            where=f"{tokens.path}, {len(tokens)} tokens",
            likely="the text is too short for this sequence length and number of ranks",
            next="use more text, or lower data.sequence, data.batch or the number of ranks",
        )
