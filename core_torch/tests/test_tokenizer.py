"""A tokenizer gives every text back, is the same each time it is trained, and says so."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from core_torch.config import DataConfig
from core_torch.data.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    JsonTokenizer,
    Tokenizer,
    load_tokenizer,
    make_tokenizer,
    train_bpe,
)
from core_torch.errors import DataError

TEXT = "Shall I compare thee to a summer's day?\nThou art more lovely and more temperate.\n" * 5
BPE = train_bpe(TEXT, 300)
both = pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["byte", "bpe"])


@both
@settings(deadline=None)
@given(text=st.text())
def test_any_unicode_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64 and ids.ndim == 1
    assert not len(ids) or 0 <= ids.min() <= ids.max() < tokenizer.vocabulary
    assert tokenizer.decode(ids) == text


@both
def test_the_end_of_text_is_its_own_token_and_never_comes_from_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.end_of_text is not None
    spelled = f"one{END_OF_TEXT}two"
    ids = tokenizer.encode(spelled)
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode(ids) == spelled
    assert tokenizer.decode(np.append(ids, tokenizer.end_of_text)) == spelled


@both
def test_characters_cut_in_the_middle_decode_to_a_replacement_mark(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"


@both
@pytest.mark.parametrize("bad", [-1, 257 + 1000])
def test_an_id_outside_the_vocabulary_is_refused_with_its_position(
    tokenizer: Tokenizer, bad: int
) -> None:
    with pytest.raises(DataError, match=f"id {bad} at position 1 .* {tokenizer.vocabulary}"):
        tokenizer.decode(np.array([0, bad]))


@both
def test_a_saved_tokenizer_is_the_same_after_loading(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    text = f"Thou art {END_OF_TEXT} lovely"
    assert loaded.fingerprint() == tokenizer.fingerprint()
    assert (loaded.vocabulary, loaded.end_of_text) == (tokenizer.vocabulary, tokenizer.end_of_text)
    assert loaded.encode(text).tolist() == tokenizer.encode(text).tolist()


def test_bytes_are_their_own_ids_and_the_end_of_text_follows_them() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert (tokenizer.end_of_text, tokenizer.vocabulary) == (256, 257)


def test_bpe_has_the_size_asked_for_and_needs_fewer_tokens_than_bytes() -> None:
    assert BPE.vocabulary == 300
    assert len(BPE.encode(TEXT)) < 0.7 * len(TEXT)


def test_bpe_of_a_text_too_short_for_its_merges_is_smaller_than_asked_for() -> None:
    assert train_bpe("ab", 300).vocabulary == 258


def test_training_prints_nothing_and_gives_the_same_tokenizer_in_every_process() -> None:
    program = (
        "import sys; from core_torch.data.tokenizer import train_bpe\n"
        "sys.stdout.write(train_bpe(sys.stdin.read(), 300).fingerprint())"
    )
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", program],
            input=TEXT,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
            cwd=Path(__file__).parents[2],
        )
        assert (run.stdout, run.stderr) == (BPE.fingerprint(), "")


def test_tokenizers_that_differ_have_different_fingerprints() -> None:
    others: list[Tokenizer] = [
        ByteTokenizer(),
        BPE,
        train_bpe(TEXT, 301),
        train_bpe(TEXT[::-1], 300),
    ]
    assert len({t.fingerprint() for t in others}) == 4


def test_the_config_chooses_the_tokenizer(tmp_path: Path) -> None:
    BPE.save(tmp_path / "mine.json")
    made = [
        make_tokenizer(DataConfig(tokenizer=name, bpe_vocabulary=280), TEXT)
        for name in ("byte", "bpe", str(tmp_path / "mine.json"))
    ]
    assert [t.vocabulary for t in made] == [257, 280, 300]


def foreign(end: str, **entries: int) -> tokenizers.Tokenizer:
    """A tokenizer.json of another program: whole words, with gaps between the ids."""
    inner = tokenizers.Tokenizer(models.WordLevel(entries | {"?": 0}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens([end])
    return inner


def test_a_foreign_tokenizer_is_never_cut_or_padded_and_counts_ids_with_gaps(
    tmp_path: Path,
) -> None:
    inner = foreign("<|endoftext|>", to=1, be=9)
    inner.enable_truncation(2)
    inner.enable_padding(length=8)
    inner.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(tmp_path / "t.json")
    assert tokenizer.encode("to be to be to").tolist() == [1, 9, 1, 9, 1]
    assert tokenizer.end_of_text == inner.token_to_id("<|endoftext|>")
    assert tokenizer.vocabulary == 10


def test_a_foreign_tokenizer_without_a_known_end_has_none() -> None:
    assert JsonTokenizer(foreign("<stop>", to=1)).end_of_text is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (json.dumps({"model": 1}).encode(), "is not a tokenizer"),
        (json.dumps({"twinshard_tokenizer": "byte", "version": 2}).encode(), "is not a tokenizer"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(DataError, match=f"t.json {message}") as caught:
        load_tokenizer(tmp_path / "t.json")
    assert caught.value.where.endswith("t.json") and caught.value.likely and caught.value.next


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gone.json cannot be read"):
        make_tokenizer(DataConfig(tokenizer=str(tmp_path / "gone.json")), TEXT)
