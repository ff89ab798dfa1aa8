"""Runs read prepared folders where they lie, notice when one has changed, and pack as they are
told.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_torch.config import DataConfig
from core_torch.data.batches import IGNORE, Layout, batch_for, by_documents, count_sequences
from core_torch.data.corpus import Corpus, open_corpus, prepare
from core_torch.data.preparing import prepare_folder
from core_torch.data.reading import read_batch, read_held_out
from core_torch.data.token_file import TokenFile
from core_torch.data.tokenizer import ByteTokenizer
from core_torch.errors import DataError

PLACE = {"replicas": 2, "shards": 2, "step": 3, "replica": 1, "shard": 0}


def prepared(folder: Path, word: str, **settings: object) -> Path:
    """A prepared folder of 60 documents that repeat one word."""
    source = folder.with_name(f"{folder.name}.jsonl")
    source.write_text("\n".join(json.dumps({"text": f"{word} {n}\n" * 9}) for n in range(60)))
    prepare_folder([str(source)], folder, DataConfig(**settings))  # type: ignore[arg-type]
    return folder


@pytest.fixture
def prose(tmp_path: Path) -> Path:
    return prepared(tmp_path / "prose", "verse")


@pytest.fixture
def code(tmp_path: Path) -> Path:
    return prepared(tmp_path / "code", "goto")


def test_a_run_reads_a_prepared_folder_where_it_lies(prose: Path, tmp_path: Path) -> None:
    corpus = prepare(DataConfig(path=str(prose)), tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"data.json", "tokenizer.json"}
    for one in (corpus, open_corpus(tmp_path / "run")):
        assert one.train.path == prose / "train.tokens" and one.tokenizer.vocabulary == 257
        assert isinstance(one.train.ids, np.memmap)
    data = DataConfig(sequence=16, batch=3)
    layout = Layout(count_sequences(len(corpus.train), 16), 16, 3, 2, 2, seed=0)
    want = batch_for(corpus.train.ids, layout, step=3, replica=1, shard=0, first_row=5)
    batch = read_batch(corpus, data, **PLACE, first_row=5)
    np.testing.assert_array_equal(batch[:2], want)
    assert batch.documents is None


def test_a_run_does_not_go_on_with_a_folder_that_was_prepared_anew(
    prose: Path, tmp_path: Path
) -> None:
    config = DataConfig(path=str(prose))
    prepare(config, tmp_path / "run")
    moved = DataConfig(path=str(shutil.copytree(prose, tmp_path / "moved")))
    assert prepare(moved, tmp_path / "run").train.path == tmp_path / "moved/train.tokens"
    prepare(config, tmp_path / "run")
    shutil.rmtree(prose)
    with pytest.raises(DataError, match="is no folder of prepared tokens"):
        open_corpus(tmp_path / "run")
    prepared(prose, "worse")
    with pytest.raises(DataError, match="is not what it was when the run began"):
        open_corpus(tmp_path / "run")
    with pytest.raises(DataError, match="another text\n"):
        prepare(config, tmp_path / "run")


def test_a_mixture_remembers_its_weights_and_folders(
    prose: Path, code: Path, tmp_path: Path
) -> None:
    config = DataConfig(mixture=f"{prose}:3,{code}:1")
    corpus = prepare(config, tmp_path / "run")
    assert [part.weight for part in open_corpus(tmp_path / "run").parts] == [3.0, 1.0]
    assert [part.train.path.parent for part in corpus.parts] == [prose, code]
    for changed, named in (
        (f"{prose}:2,{code}:1", "mixture"),
        (f"{code}:3,{prose}:1", "text"),
        (f"{prose}:3", "text and mixture"),
    ):
        with pytest.raises(DataError, match=f"another {named}\n"):
            prepare(DataConfig(mixture=changed), tmp_path / "run")


def test_sources_of_a_mixture_need_one_tokenizer(prose: Path, tmp_path: Path) -> None:
    other = prepared(tmp_path / "other", "goto", tokenizer="bpe", bpe_vocabulary=260)
    with pytest.raises(DataError, match="prepared with another tokenizer") as info:
        prepare(DataConfig(mixture=f"{prose}:1,{other}:1"), tmp_path / "run")
    assert f"--tokenizer {prose}/tokenizer.json" in info.value.next


def test_a_mixture_trains_and_is_evaluated_in_its_shares(
    prose: Path, code: Path, tmp_path: Path
) -> None:
    data = DataConfig(mixture=f"{prose}:3,{code}:1", sequence=16, batch=256)
    corpus = prepare(data, tmp_path / "run")
    place = {"replicas": 1, "shards": 1, "replica": 0, "shard": 0}
    rows = [row for step in range(4) for row in read_batch(corpus, data, step=step, **place).inputs]
    texts = [ByteTokenizer().decode(row) for row in rows]
    assert sum("goto" in text or "oto" in text for text in texts) == pytest.approx(256, abs=8)
    held_out = [ByteTokenizer().decode(row) for row in read_held_out(corpus, data, 16).inputs]
    assert ["verse" in text or "erse" in text for text in held_out].count(True) == 12
    assert len(read_held_out(corpus, data, 1).inputs) == 2, "one of each source at least"


def test_sources_that_are_too_short_are_named(prose: Path, code: Path, tmp_path: Path) -> None:
    corpus = prepare(DataConfig(mixture=f"{prose}:3,{code}:1"), tmp_path / "run")
    corpus.check(sequence=100, draws=16)
    with pytest.raises(DataError, match=r"training split holds \d+ sequences of 300") as info:
        corpus.check(sequence=300, draws=600)
    assert str(prose) in info.value.where
    with pytest.raises(DataError, match="held-out split holds 0 sequences of 1000"):
        corpus.check(sequence=1000, draws=1)


def test_an_id_that_was_damaged_after_the_preparation_is_found_when_it_is_read(
    prose: Path, tmp_path: Path
) -> None:
    raw = bytearray((prose / "train.tokens").read_bytes())
    raw[33::2] = b"\xff" * len(raw[33::2])
    (prose / "train.tokens").write_bytes(raw)
    corpus = prepare(DataConfig(path=str(prose)), tmp_path / "run")
    with pytest.raises(DataError, match=r"token id \d+ is outside the vocabulary of 257"):
        read_batch(corpus, DataConfig(sequence=16, batch=2), **PLACE)


def test_the_hash_of_the_training_tokens_is_that_of_all_sources(
    prose: Path, code: Path, tmp_path: Path
) -> None:
    whole = prepare(DataConfig(mixture=f"{prose}:1,{code}:1"), tmp_path / "run")
    both = np.concatenate([part.train.ids for part in whole.parts])
    joined = Corpus(dataclasses.replace(whole.train, ids=both), whole.held_out, whole.tokenizer)
    assert whole.train_hash() == joined.train_hash()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(0, 4), min_size=7, max_size=7), min_size=1, max_size=4))
def test_a_document_ends_with_its_end_and_foretells_nothing(rows: list[list[int]]) -> None:
    window = np.array(rows)
    batch = by_documents(window[:, :-1], window[:, 1:], end_of_text=4)
    assert batch.documents is not None
    for row, targets, documents in zip(rows, batch.targets, batch.documents, strict=True):
        number = 0
        for t, token in enumerate(row[:-1]):
            assert documents[t] == number
            assert targets[t] == (IGNORE if token == 4 else row[t + 1])
            number += token == 4
    np.testing.assert_array_equal(batch.inputs, window[:, :-1])


def test_packing_by_documents_is_of_training_and_of_evaluation(prose: Path, tmp_path: Path) -> None:
    data = DataConfig(path=str(prose), sequence=200, batch=2, packing="documents")
    corpus = prepare(data, tmp_path / "run")
    for batch in (read_batch(corpus, data, **PLACE), read_held_out(corpus, data, 2)):
        assert batch.documents is not None and batch.documents.max() > 0
        assert ((batch.targets == IGNORE) == (batch.inputs == 256)).all()


class Endless(ByteTokenizer):
    end_of_text = None  # type: ignore[assignment]


def test_packing_by_documents_needs_ends_of_text() -> None:
    tokens = TokenFile(Path("tokens"), 257, np.zeros(100, np.uint16))
    corpus = Corpus(tokens, tokens, Endless())
    corpus.check(sequence=4, draws=2)
    data = DataConfig(sequence=4, batch=1, packing="documents")
    with pytest.raises(DataError, match="tokenizer has no end of text"):
        corpus.check(sequence=4, draws=2, packing="documents")
    with pytest.raises(DataError, match="tokenizer has no end of text"):
        read_batch(corpus, data, **PLACE)
