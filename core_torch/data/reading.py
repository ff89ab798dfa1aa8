"""What a rank reads of a corpus, whatever it consists of: batches of training and of evaluation."""

import numpy as np

from core_torch.config import DataConfig
from core_torch.data.batches import (
    Batch,
    Layout,
    batch_for,
    count_sequences,
    held_out_batches,
    packed,
)
from core_torch.data.corpus import Corpus
from core_torch.data.mixture import allotted, mixed_batch_for
from core_torch.data.token_file import TokenFile
from core_torch.errors import DataError


def read_batch(
    corpus: Corpus,
    data: DataConfig,
    *,
    replicas: int,
    shards: int,
    step: int,
    replica: int,
    shard: int,
    first_row: int = 0,
) -> Batch[np.ndarray]:
    """A micro-batch of one rank; (B, T) int64 each. See batches.py and mixture.py.

    Args:
        corpus: of the run.
        data: how it is cut and packed.
        replicas: N.
        shards: M, of one replica.
        step: micro-steps that this replica has done before.
        replica: this rank's place on the replica axis.
        shard: this rank's place on the shard axis.
        first_row: row of the replica that step 0 would begin with.

    Raises:
        DataError: an id that the tokenizer does not have.
    """
    files = [part.train for part in corpus.parts]
    layout = Layout(
        num_sequences=sum(count_sequences(len(file), data.sequence) for file in files),
        sequence=data.sequence,
        batch=data.batch,
        replicas=replicas,
        shards=shards,
        seed=data.seed,
    )
    place = {"step": step, "replica": replica, "shard": shard, "first_row": first_row}
    if len(files) == 1:
        inputs, targets = batch_for(files[0].ids, layout, **place)
    else:
        weights = [part.weight for part in corpus.parts]
        inputs, targets = mixed_batch_for([f.ids for f in files], weights, layout, **place)
    _check_ids(inputs, targets, files)
    end = corpus.tokenizer.end_of_text
    return packed(inputs, targets, packing=data.packing, end_of_text=end)


def read_held_out(corpus: Corpus, data: DataConfig, count: int) -> Batch[np.ndarray]:
    """At most ``count`` held-out sequences, always the same ones; (rows, T) int64 each.

    Of a mixture each source gives its share by weight, as far as it goes. Every source has a
    sequence, as ``Corpus.check`` makes sure, and gives one at least.
    """
    parts = corpus.parts
    shares = [max(1, n) for n in allotted(count, [part.weight for part in parts])]
    found = [
        held_out_batches(part.held_out.ids, data.sequence, batch=share, count=share)[0]
        for part, share in zip(parts, shares, strict=True)
    ]
    inputs, targets = (np.concatenate(column) for column in zip(*found, strict=True))
    _check_ids(inputs, targets, [part.held_out for part in parts])
    end = corpus.tokenizer.end_of_text
    return packed(inputs, targets, packing=data.packing, end_of_text=end)


def _check_ids(inputs: np.ndarray, targets: np.ndarray, files: list[TokenFile]) -> None:
    """A prepared folder is not read through when it is opened, so what is read is checked."""
    largest = max(int(inputs.max()), int(targets.max()))
    if largest < files[0].vocabulary:
        return
    raise DataError(
        f"token id {largest} is outside the vocabulary of {files[0].vocabulary}",
        where=", ".join(str(file.path) for file in files),
        likely="a file was damaged after it was prepared",
        next="twinshard data show on the folder, with --check true",
    )
