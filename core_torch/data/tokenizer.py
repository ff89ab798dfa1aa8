"""Text to token ids and back: bytes, a byte-level BPE trained here, or a tokenizer.json.

All of them read any Unicode text. Text never yields a special token: a document that spells out
"<|end_of_text|>" is split into ordinary tokens, and only ``end_of_text`` marks an end.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from core_torch.config import DataConfig
from core_torch.data.atomic import write_atomic
from core_torch.errors import DataError

END_OF_TEXT = "<|end_of_text|>"
_END_NAMES = (END_OF_TEXT, "<|endoftext|>", "</s>", "<eos>")
_BYTE_FILE = {"twinshard_tokenizer": "byte", "version": 1}


class Tokenizer(Protocol):
    """What the rest of Twinshard needs of a tokenizer."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids; every id is smaller."""

    @property
    def end_of_text(self) -> int | None:
        """Id that follows every document; None if the tokenizer has none."""

    def encode(self, text: str) -> np.ndarray:
        """Returns the (count,) int64 ids of ``text``; no special tokens."""

    def decode(self, ids: np.ndarray) -> str:
        """Returns the text of ``ids`` (count,); special tokens vanish, cut characters show as
        U+FFFD."""

    def save(self, path: Path | str) -> None:
        """Writes a file that ``load_tokenizer`` reads; DataError if that fails."""

    def fingerprint(self) -> str:
        """SHA-256, as hexadecimal digits, of everything that decides the ids."""


class ByteTokenizer:
    """Ids 0..255 are the bytes of UTF-8, 256 is the end of text."""

    vocabulary = 257
    end_of_text = 256

    def encode(self, text: str) -> np.ndarray:
        """Returns the (count,) int64 bytes of ``text``."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: np.ndarray) -> str:
        """Returns the text of ``ids``; DataError for an id above 256."""
        ids = np.asarray(ids)
        _check_range(ids, self.vocabulary)
        return bytes(ids[ids != self.end_of_text].astype(np.uint8)).decode(errors="replace")

    def save(self, path: Path | str) -> None:
        """Writes a file that ``load_tokenizer`` reads; DataError if that fails."""
        write_atomic(Path(path), [self._serialised()])

    def fingerprint(self) -> str:
        """SHA-256 of the saved form."""
        return hashlib.sha256(self._serialised()).hexdigest()

    def _serialised(self) -> bytes:
        return json.dumps(_BYTE_FILE).encode()


class JsonTokenizer:
    """A tokenizer of the ``tokenizers`` library, whose file format is tokenizer.json."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        # Special tokens spelled out in the text count as text. The file does not keep this.
        inner.encode_special_tokens = True
        inner.no_truncation()  # a file may ask for 512 tokens at most; a corpus is one long text
        inner.no_padding()
        self._inner = inner
        ids = inner.get_vocab(with_added_tokens=True)
        self.vocabulary = max(ids.values()) + 1  # ids may have gaps, so not their number
        self.end_of_text = next((ids[name] for name in _END_NAMES if name in ids), None)

    def encode(self, text: str) -> np.ndarray:
        """Returns the (count,) int64 ids of ``text``; no special tokens."""
        return np.array(self._inner.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids: np.ndarray) -> str:
        """Returns the text of ``ids``; DataError for an id outside the vocabulary."""
        ids = np.asarray(ids)
        _check_range(ids, self.vocabulary)
        return self._inner.decode(ids.tolist(), skip_special_tokens=True)

    def save(self, path: Path | str) -> None:
        """Writes a tokenizer.json; DataError if that fails."""
        write_atomic(Path(path), [self._inner.to_str().encode()])

    def fingerprint(self) -> str:
        """SHA-256 of the saved form."""
        return hashlib.sha256(self._inner.to_str().encode()).hexdigest()


def make_tokenizer(config: DataConfig, text: str | Iterable[str]) -> Tokenizer:
    """Returns the tokenizer that ``config.tokenizer`` names; "bpe" is trained on ``text``.

    Raises:
        DataError: the named file is missing or no tokenizer.
    """
    if config.tokenizer == "byte":
        return ByteTokenizer()
    if config.tokenizer == "bpe":
        return train_bpe(text, config.bpe_vocabulary)
    return load_tokenizer(config.tokenizer)


def train_bpe(text: str | Iterable[str], vocabulary: int) -> JsonTokenizer:
    """Returns a byte-level BPE; the same text gives the same tokenizer on every machine.

    Id 0 is the end of text, 1..256 are bytes, merges follow. No merge crosses from one text to the
    next, if there are several. A short text yields fewer merges
    than asked for, and so a smaller vocabulary.
    """
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [text] if isinstance(text, str) else text
    inner.train_from_iterator(texts, trainer=trainer)
    return JsonTokenizer(inner)


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Reads what ``save`` wrote, or another program's tokenizer.json.

    Raises:
        DataError: missing, not UTF-8, or not a tokenizer.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = json.loads(text)
    except OSError as error:
        raise _unreadable(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, f"is not JSON: {error}") from error
    if content == _BYTE_FILE:
        return ByteTokenizer()
    try:
        return JsonTokenizer(tokenizers.Tokenizer.from_str(text))
    except Exception as error:  # the library raises bare Exception for a bad file
        raise _unreadable(path, f"is not a tokenizer: {error}") from error


def _check_range(ids: np.ndarray, vocabulary: int) -> None:
    outside = (ids < 0) | (ids >= vocabulary)
    if outside.any():
        first = int(np.argmax(outside))
        raise DataError(
            f"token id {ids[first]} at position {first} is outside the vocabulary of {vocabulary}",
            likely="the ids come from another tokenizer, or the model's vocabulary is larger",
            next="use the tokenizer.json of the run that made the ids",
        )


def _unreadable(path: Path | str, message: str) -> DataError:
    return DataError(
        f"tokenizer {Path(path).name} {message}",
        where=str(path),
        likely="a wrong path, or a file that is not a tokenizer.json",
        next='set data.tokenizer to "byte", "bpe" or the path of a tokenizer.json',
    )
