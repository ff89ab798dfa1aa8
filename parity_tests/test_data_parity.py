"""Both cores deal the same tokens to every rank, of one source or several, packed or not."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_torch.config import DataConfig
from core_torch.data.corpus import Corpus, Part
from core_torch.data.mixture import sources_of
from core_torch.data.reading import read_batch
from core_torch.data.token_file import TokenFile
from core_torch.data.tokenizer import ByteTokenizer
from reference_jax import data as reference

END = ByteTokenizer.end_of_text
weights = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4)


def source_of(place: int, weight: float) -> Part:
    """Many short documents, in another order and number for every source."""
    ids = np.random.default_rng(place).integers(0, 256, 80 + 37 * place)
    ids[np.random.default_rng(-1 - place + 9).random(len(ids)) < 0.3] = END
    file = TokenFile(Path(), ByteTokenizer.vocabulary, ids)
    return Part(file, file, weight)


def corpus_of(weights: list[float]) -> Corpus:
    """A mixture."""
    first, *others = (source_of(j, weight) for j, weight in enumerate(weights))
    return Corpus(
        first.train, first.held_out, ByteTokenizer(), weight=first.weight, others=tuple(others)
    )


@settings(deadline=None, max_examples=30)
@given(weights, st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**40), st.data())
def test_every_rank_reads_the_same_in_both_cores(
    weights: list[float], replicas: int, shards: int, step: int, data: st.DataObject
) -> None:
    corpus, seed = corpus_of(weights), data.draw(st.integers(0, 2**64 - 1), label="seed")
    place = {
        "step": step,
        "replica": data.draw(st.integers(0, replicas - 1), label="replica"),
        "shard": data.draw(st.integers(0, shards - 1), label="shard"),
        "first_row": data.draw(st.integers(0, 5000), label="first row"),
        "replicas": replicas,
        "shards": shards,
    }
    config = DataConfig(sequence=8, batch=3, seed=seed, packing="documents")
    tokens = [part.train.ids for part in corpus.parts]
    theirs = reference.batch_for(
        tokens if len(tokens) > 1 else tokens[0],
        weights=weights if len(tokens) > 1 else (),
        batch=3,
        sequence=8,
        seed=seed,
        **place,
    )
    stream = read_batch(corpus, dataclasses.replace(config, packing="stream"), **place)
    assert stream.documents is None
    documents = reference.by_documents(*theirs, end_of_text=END)
    for mine, other in (
        *zip(stream[:2], theirs, strict=True),
        *zip(read_batch(corpus, config, **place), documents, strict=True),
    ):
        np.testing.assert_array_equal(mine, other)


@settings(deadline=None, max_examples=20)
@given(weights, st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**50), max_size=8))
def test_every_draw_has_the_same_source_in_both_cores(
    weights: list[float], seed: int, draws: list[int]
) -> None:
    source_B, own_B = sources_of(np.array(draws, np.int64), weights, seed)
    for draw, *mine in zip(draws, source_B, own_B, strict=True):
        assert tuple(mine) == reference.source_of_draw(draw, weights=weights, seed=seed)


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_a_row_shows_what_packing_means(packing: str) -> None:
    file = TokenFile(Path(), 257, np.array([1, 2, END, 3, END, END, 4, 5]))
    corpus = Corpus(file, file, ByteTokenizer())
    config = DataConfig(sequence=7, batch=1, packing=packing)  # type: ignore[arg-type]
    inputs, targets, documents = read_batch(
        corpus, config, replicas=1, shards=1, step=0, replica=0, shard=0
    )
    assert inputs.tolist() == [[1, 2, END, 3, END, END, 4]]
    if packing == "stream":
        assert documents is None and targets.tolist() == [[2, END, 3, END, END, 4, 5]]
    else:
        assert documents is not None and documents.tolist() == [[0, 0, 0, 1, 1, 2, 3]]
        assert targets.tolist() == [[2, END, -100, END, -100, -100, 5]]
