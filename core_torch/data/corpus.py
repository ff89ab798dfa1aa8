"""Text in, a prepared folder out: training tokens, held-out tokens and their tokenizer.

``prepare`` runs once per run, in the process that starts the ranks or in rank 0; every other
rank calls ``open_corpus``. Documents are those of sources.py; every document is followed by the
tokenizer's end of text.

    train.tokens      the beginning of the text
    held_out.tokens   its end, which training never sees and the tokenizer is not trained on
    tokenizer.json
    data.json         what the three were made from; written last, so it marks them complete

Where ``data.path`` or ``data.mixture`` name folders of ``twinshard data prepare``, tokens are not
copied: data.json then names the folders with the fingerprint of their content.
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
from core_torch.config_data import BLOCK, Share
from core_torch.data.atomic import write_atomic
from core_torch.data.batches import check_packing, count_sequences
from core_torch.data.mixture import allotted
from core_torch.data.prepared import is_prepared, open_prepared, read_json
from core_torch.data.sources import read_files
from core_torch.data.token_file import TokenFile, open_tokens, write_tokens
from core_torch.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer
from core_torch.errors import DataError

SHIPPED = "shakespeare.txt.xz"  # PROVENANCE.md says where it comes from
_VERSION = 1  # of the prepared folder


@dataclass(frozen=True, eq=False)  # arrays have no single truth value
class Part:
    """A source of a corpus: two token files, and its weight among the sources."""

    train: TokenFile
    held_out: TokenFile
    weight: float = 1.0


@dataclass(frozen=True, eq=False)
class Corpus:
    """A prepared text: two token files and the tokenizer that made them, or a mixture of such."""

    train: TokenFile  # of the first source
    held_out: TokenFile
    tokenizer: Tokenizer
    weight: float = 1.0  # of the first source
    others: tuple[Part, ...] = ()  # further sources, with the same tokenizer
    skipped: tuple[str, ...] = ()  # what was left out when the text was read, a line each

    @property
    def parts(self) -> tuple[Part, ...]:
        """All sources."""
        return (Part(self.train, self.held_out, self.weight), *self.others)

    def check(self, *, sequence: int, draws: int, packing: str = "stream") -> None:
        """Checks that the text is long enough for a layout, and can be packed so.

        Args:
            sequence: tokens per sequence.
            draws: sequences that all ranks draw together in one micro-step; with fewer in the
                training split, two rows of a step would be equal.
            packing: as ``DataConfig.packing``.

        Raises:
            DataError: fewer than ``draws`` training sequences, or no held-out sequence; or
                documents that cannot be told apart.
        """
        shares = allotted(BLOCK, [part.weight for part in self.parts])
        for part, share in zip(self.parts, shares, strict=True):
            blocks = -(-draws // BLOCK) + 1  # that a micro-step can touch
            _check_split(part.train, "training", sequence, min(draws, share * blocks))
            _check_split(part.held_out, "held-out", sequence, 1)
        check_packing(packing, self.tokenizer.end_of_text)

    def train_hash(self) -> str:
        """SHA-256 of the training tokens of all sources, as hexadecimal digits."""
        digest = hashlib.sha256()
        for part in self.parts:
            digest.update(np.ascontiguousarray(part.train.ids).data)
        return digest.hexdigest()


def kept(total: int, held_out: float) -> int:
    """How many of a text's characters are for training, from its beginning.

    Raises:
        DataError: none would be, or none would be held out.
    """
    keep = total - round(total * held_out)
    if not 0 < keep < total:
        raise DataError(
            f"a text of {total} characters is too short to hold out {held_out} of it",
            likely="a wrong file",
            next="use more text, or raise data.held_out",
        )
    return keep


def load_text(path: str) -> str:
    """Returns the text of a file, of a folder's files in order of their paths, or, for an empty
    path, the shipped corpus. Line ends are "\\n", a byte order mark is dropped.

    Raises:
        DataError: missing, empty, binary, not UTF-8, or a folder without readable files.
    """
    return "\n".join(load_documents(path, "text", []))


def load_documents(path: str, field: str, skipped: list[str]) -> list[str]:
    """Returns one text per document; see ``load_text`` and sources.py.

    Args:
        path: of a file or folder; empty: the shipped corpus.
        field: of JSON lines, column of parquet files.
        skipped: gets a line for each file, or kind of line, that is left out.
    """
    if not path:
        shipped = importlib.resources.files("core_torch.data").joinpath(SHIPPED)
        return [lzma.decompress(shipped.read_bytes()).decode("ascii")]
    documents, begun = [], ""
    try:
        for _, pieces in read_files(Path(path), field, skipped):
            for piece in pieces:
                begun += piece.text
                if piece.ends:
                    documents.append(begun)
                    begun = ""
    except OSError as error:
        raise DataError(
            f"cannot read {error.filename or path}: {error.strerror}",
            where=str(Path(path).absolute()),
            likely="no permission, or a damaged disk",
            next="check it with ls -l, or set data.path to another file",
        ) from error
    return documents


def prepare(config: DataConfig, folder: Path) -> Corpus:
    """Writes the prepared folder unless it is there already, and opens it.

    Two processes may prepare one folder with one config at the same time: both write the same
    bytes, every file appears whole, and data.json appears last.

    Args:
        config: where the text is and how to cut it, or which folders are prepared already.
        folder: made if missing, with access for its owner only.

    Raises:
        DataError: the text cannot be read or split, the folder cannot be written, or it was
            prepared from another text or with other settings.
    """
    single = [Share(config.path, 1.0)] if config.path and is_prepared(Path(config.path)) else []
    shares = config.shares or single
    if shares:
        return _refer(shares, folder)
    skipped: list[str] = []
    documents = load_documents(config.path, config.field, skipped)
    recipe = _recipe(config, documents) | ({"skipped": skipped} if skipped else {})
    if (folder / "data.json").exists():
        corpus, found = open_corpus(folder), _read_manifest(folder)
        _refuse_change(found, recipe, folder)
        return corpus
    _write_prepared(config, documents, recipe, folder)
    return open_corpus(folder)


def _refuse_change(found: dict[str, Any], recipe: dict[str, Any], folder: Path) -> None:
    told = ("skipped", "sources")  # paths: other files left out, or a folder moved, are no change
    changed = [name for name in recipe if name not in told and found.get(name) != recipe[name]]
    if changed:
        raise DataError(
            f"the folder was prepared with another {' and '.join(changed)}",
            where=str(folder),
            likely="data settings or the text changed since the run began",
            next="choose another run folder with --run, or restore the old settings",
        )


def _refer(shares: list[Share], folder: Path) -> Corpus:
    """Writes which prepared folders a run reads, unless that is written, and opens them."""
    opened = [open_prepared(Path(share.path)) for share in shares]
    first = opened[0].tokenizer
    for share, source in zip(shares, opened, strict=True):
        if source.tokenizer.fingerprint() != first.fingerprint():
            raise DataError(
                f"{share.path} was prepared with another tokenizer than {shares[0].path}",
                where=str(folder),
                likely="each was given a tokenizer trained on it alone",
                next=f"twinshard data prepare with --tokenizer {shares[0].path}/tokenizer.json",
            )
    pairs = list(zip(shares, opened, strict=True))
    recipe = {
        "version": _VERSION,
        "text": hashlib.sha256("".join(source.content for source in opened).encode()).hexdigest(),
        "mixture": [share.weight for share in shares],
        "sources": [
            {"path": str(Path(share.path).absolute()), "content": source.content}
            for share, source in pairs
        ],
        "fingerprint": first.fingerprint(),
    }
    if (folder / "data.json").exists():
        _refuse_change(_read_manifest(folder), recipe, folder)
    _make(folder)
    first.save(folder / "tokenizer.json")
    write_atomic(folder / "data.json", [json.dumps(recipe, indent=1).encode()])
    return open_corpus(folder)


def _open_referred(folder: Path, manifest: dict[str, Any]) -> Corpus:
    parts = []
    for source, weight in zip(manifest["sources"], manifest["mixture"], strict=True):
        prepared = open_prepared(Path(source["path"]))
        if prepared.content != source["content"]:
            raise DataError(
                f"{source['path']} is not what it was when the run began",
                where=str(folder),
                likely="it was prepared anew",
                next="prepare it as it was, or choose another run folder with --run",
            )
        parts.append(Part(prepared.train, prepared.held_out, weight))
    first = parts[0]
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    return Corpus(
        first.train, first.held_out, tokenizer, weight=first.weight, others=tuple(parts[1:])
    )


def open_corpus(folder: Path) -> Corpus:
    """Opens what ``prepare`` wrote. Files of its own are read once to check every id.

    Raises:
        DataError: not prepared, damaged, or files that do not belong together.
    """
    manifest = _read_manifest(folder)
    if "sources" in manifest:
        return _open_referred(folder, manifest)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    corpus = Corpus(
        open_tokens(folder / "train.tokens"),
        open_tokens(folder / "held_out.tokens"),
        tokenizer,
        skipped=tuple(manifest.get("skipped", ())),
    )
    if tokenizer.fingerprint() != manifest.get("fingerprint"):
        raise _mixed(folder, "tokenizer.json is not the tokenizer that the tokens were made with")
    for split in (corpus.train, corpus.held_out):
        if split.vocabulary != tokenizer.vocabulary:
            message = f"{split.path.name} has vocabulary {split.vocabulary}, the tokenizer"
            raise _mixed(folder, f"{message} {tokenizer.vocabulary}")
        split.check_ids()
    return corpus


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
    _make(folder)
    for name, part in (("train.tokens", train), ("held_out.tokens", held_out)):
        write_tokens(folder / name, _encode(part, tokenizer), tokenizer.vocabulary)
    tokenizer.save(folder / "tokenizer.json")
    manifest = recipe | {"fingerprint": tokenizer.fingerprint()}
    write_atomic(folder / "data.json", [json.dumps(manifest, indent=1).encode()])


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot make the folder: {error.strerror}",
            where=str(folder),
            likely="a read-only place, or a file of the same name",
            next="choose another run folder with --run",
        ) from error


def _split(documents: list[str], held_out: float) -> tuple[list[str], list[str]]:
    """Cuts the last ``held_out`` share of all characters off; may cut inside a document."""
    keep = kept(sum(map(len, documents)), held_out)
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
    found = read_json(folder / "data.json")
    if found is None:
        raise DataError(
            "the data folder is not prepared",
            where=str(folder),
            likely="rank 0 did not reach the preparation, or the folder is another one",
            next="start the run again",
        )
    if not found:
        raise _mixed(folder, "data.json is damaged")
    return found


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
