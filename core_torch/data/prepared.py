"""A folder that ``twinshard data prepare`` wrote, opened by memory map.

    train.tokens, held_out.tokens, tokenizer.json
    data.json        from what and how they were made, and the fingerprint of their content

The content's fingerprint is the SHA-256 of those of the tokenizer and of the ids of both files.
Opening compares sizes, not the ids: a corpus may be larger than memory. ``check_content`` reads
them.
"""

import hashlib
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core_torch.data.token_file import TokenFile, ids_hash, open_tokens
from core_torch.data.tokenizer import Tokenizer, load_tokenizer
from core_torch.errors import DataError

SPLITS = ("train", "held_out")
VERSION = 1  # of the folder
KIND = "prepared tokens"  # the word in data.json by which the folder is known


@dataclass(frozen=True, eq=False)  # arrays have no single truth value
class Prepared:
    """An open prepared folder."""

    train: TokenFile
    held_out: TokenFile
    tokenizer: Tokenizer
    manifest: dict[str, Any]

    @property
    def content(self) -> str:
        """Fingerprint of tokenizer and ids."""
        return str(self.manifest["content"])

    def check_content(self) -> None:
        """Reads both token files.

        Raises:
            DataError: they are not what was written.
        """
        for name in SPLITS:
            tokens: TokenFile = getattr(self, name)
            if ids_hash(tokens) != self.manifest[name]["sha256"]:
                raise _broken(tokens.path.parent, f"{tokens.path.name} is not what was written")


def content_of(tokenizer: Tokenizer, train_hash: str, held_out_hash: str) -> str:
    """Fingerprint of a prepared folder's content, as hexadecimal digits."""
    parts = f"{tokenizer.fingerprint()} {train_hash} {held_out_hash}"
    return hashlib.sha256(parts.encode()).hexdigest()


def is_prepared(folder: Path) -> bool:
    """Whether this is a folder of ``twinshard data prepare``, sound or not."""
    found = read_json(folder / "data.json")
    return found is not None and found.get("kind") == KIND


def open_prepared(folder: Path) -> Prepared:
    """Opens a prepared folder; reads headers only.

    Raises:
        DataError: it is none, or its files do not belong together.
    """
    manifest = read_json(folder / "data.json")
    if not manifest or manifest.get("kind") != KIND:
        raise DataError(
            f"{folder} is no folder of prepared tokens",
            where=str(folder.absolute()),
            likely="a mistyped path, or a preparation that has not ended",
            next=f"twinshard data prepare SOURCE --out {shlex.quote(str(folder))}",
        )
    if manifest.get("version") != VERSION:
        version = manifest.get("version")
        raise _broken(folder, f"{folder} has version {version!r}; this version reads {VERSION}")
    train, held_out = (open_tokens(folder / f"{name}.tokens") for name in SPLITS)
    prepared = Prepared(train, held_out, load_tokenizer(folder / "tokenizer.json"), manifest)
    tokenizer = prepared.tokenizer
    hashes = []
    for name, tokens in zip(SPLITS, (train, held_out), strict=True):
        told = manifest.get(name)
        if not isinstance(told, dict) or told.get("tokens") != len(tokens):
            raise _broken(folder, f"{name}.tokens has {len(tokens)} tokens; data.json says other")
        if tokens.vocabulary != tokenizer.vocabulary:
            message = f"{name}.tokens has vocabulary {tokens.vocabulary}, the tokenizer"
            raise _broken(folder, f"{message} {tokenizer.vocabulary}")
        hashes.append(str(told.get("sha256")))
    if content_of(tokenizer, *hashes) != manifest.get("content"):
        raise _broken(folder, "tokenizer.json or data.json is not what was written")
    return prepared


def read_json(path: Path) -> dict[str, Any] | None:
    """The table in a JSON file; None if there is no such file, empty if it holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return None
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _broken(folder: Path, message: str) -> DataError:
    return DataError(
        message,
        where=str(folder.absolute()),
        likely="a file was damaged, changed or copied from another folder",
        next="delete the folder and prepare it again",
    )
