"""Which tokens a rank sees at which step: pure functions of a seed and of counters.

There is no loader and so no loader state: a run resumes from its step counters alone. The rule,
complete enough to restate it elsewhere, with T = sequence, B = batch, N = replicas, M = shards
and S = num_sequences:

    sequence i    inputs tokens[i*T : i*T + T], targets tokens[i*T + 1 : i*T + T + 1]
    draw q        row b of replica n, shard m at micro-step ``step`` is
                  q = (first_row + step*M*B + m*B + b)*N + n
    first_row     0, until a run goes on with another N, M or B: then it is what makes ``step`` go
                  on with the row after the last one that was taken
    sequence of q entry q mod S of the order of epoch q div S
    order         of epoch e: argsort (stable) of the first S raw 64-bit outputs of the Philox
                  4x64 generator with counter 0 and key (seed, e)
    documents     with data.packing "documents": the number of a token's document is that of the
                  ends of text before it in its row, and the target after an end of text is IGNORE

Every draw belongs to one row of one rank at one step, and an epoch shows every sequence once. So
replicas see different sequences inside an epoch even when they have done different numbers of
steps. Raw generator outputs are used because NumPy promises never to change those.

Shape suffixes
    B    sequences of a batch
    T    tokens of a sequence; T1 = T + 1
    S    sequences of the training split
"""

import functools
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from core_torch.errors import DataError

LARGEST_SEED = 2**64 - 1
IGNORE = -100  # a target that does not count
Array = TypeVar("Array")  # of NumPy here, of torch in train.py


class Batch(NamedTuple, Generic[Array]):
    """What a rank reads in a micro-batch; (B, T) int64 each."""

    inputs: Array
    targets: Array  # IGNORE where the next token is not to be learnt
    documents: Array | None = None  # number of each input's document in its row; None: one row


@dataclass(frozen=True)
class Layout:
    """How the training tokens are cut and dealt; hashable, the same on all ranks."""

    num_sequences: int  # S, see ``count_sequences``
    sequence: int  # T, tokens
    batch: int  # B, sequences per rank and micro-step
    replicas: int  # N
    shards: int  # M, ranks of one replica; each draws sequences of its own
    seed: int  # order of the sequences

    def __post_init__(self) -> None:
        for name in ("num_sequences", "sequence", "batch", "replicas", "shards"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise ValueError(f"seed must lie in 0..{LARGEST_SEED}, got {self.seed}")


def count_sequences(num_tokens: int, sequence: int) -> int:
    """Whole sequences of ``sequence`` tokens whose targets, one token further, exist too."""
    return max(0, (num_tokens - 1) // sequence)


def batch_for(
    tokens: np.ndarray, layout: Layout, *, step: int, replica: int, shard: int, first_row: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ``(inputs, targets)``, both new (B, T) int64 arrays.

    Args:
        tokens: (count,) ids of the training split, e.g. ``TokenFile.ids``.
        layout: how tokens are cut and dealt.
        step: micro-steps that this replica has done before; with k micro-batches per inner step
            the j-th of inner step t (both from 0) is ``t * k + j``.
        replica: this rank's place on the replica axis, from 0.
        shard: this rank's place on the shard axis, from 0.
        first_row: row of the replica that step 0 would begin with; may be negative.

    Raises:
        DataError: the tokens are fewer than the layout's sequences need.
        ValueError: a counter outside its range.
    """
    draw_B = draws_of(layout, step=step, replica=replica, shard=shard, first_row=first_row)
    return rows_of(
        tokens,
        draw_B,
        num_sequences=layout.num_sequences,
        sequence=layout.sequence,
        seed=layout.seed,
    )


def draws_of(
    layout: Layout, *, step: int, replica: int, shard: int, first_row: int = 0
) -> np.ndarray:
    """(B,) draws of a rank's rows; see ``batch_for``.

    Raises:
        ValueError: a counter outside its range.
    """
    _check_counters(layout, step=step, replica=replica, shard=shard)
    first = first_row + step * layout.shards * layout.batch
    if first < 0:
        raise ValueError(f"first_row {first_row} lies before row 0 at step {step}")
    row_B = np.arange(layout.batch)
    return (first + shard * layout.batch + row_B) * layout.replicas + replica


def rows_of(
    tokens: np.ndarray,
    draw_B: np.ndarray,
    *,
    num_sequences: int,
    sequence: int,
    seed: int,
    source: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """``(inputs, targets)`` of draws, both new (B, T) int64 arrays.

    Args:
        tokens: (count,) ids of the training split.
        draw_B: from 0.
        num_sequences: S.
        sequence: T, tokens.
        seed: order of the sequences.
        source: place in a mixture, whose sources have orders of their own.

    Raises:
        DataError: the tokens are fewer than the sequences need.
    """
    need = num_sequences * sequence + 1
    if len(tokens) < need:
        raise DataError(
            f"{len(tokens)} tokens are fewer than the {need} that {num_sequences} "
            f"sequences of {sequence} need",
            likely="the tokens were prepared for another layout",
            next="use count_sequences(len(tokens), sequence)",
        )
    epoch_B, place_B = np.divmod(draw_B, num_sequences)
    index_B = np.empty_like(draw_B)
    for epoch in np.unique(epoch_B):  # one batch may reach into several
        order_S = _epoch_order(num_sequences, seed, int(epoch), source)
        index_B[epoch_B == epoch] = order_S[place_B[epoch_B == epoch]]
    return _cut(tokens, index_B, sequence)


def packed(
    inputs: np.ndarray, targets: np.ndarray, *, packing: str, end_of_text: int | None
) -> Batch[np.ndarray]:
    """Rows as ``data.packing`` wants them: as they are, or ``by_documents``.

    Args:
        inputs: (B, T) ids.
        targets: (B, T) ids that follow them.
        packing: "stream" or "documents".
        end_of_text: id after every document; None: the tokenizer has none.

    Raises:
        DataError: documents are wanted, and nothing says where one ends.
    """
    check_packing(packing, end_of_text)
    if packing == "stream" or end_of_text is None:
        return Batch(inputs, targets)
    return by_documents(inputs, targets, end_of_text)


def check_packing(packing: str, end_of_text: int | None) -> None:
    """Checks that documents can be told apart if they have to be.

    Raises:
        DataError: documents are wanted, and nothing says where one ends.
    """
    if packing == "documents" and end_of_text is None:
        raise DataError(
            "data.packing documents: the tokenizer has no end of text",
            likely="its file names none of the usual ones, e.g. <|endoftext|>",
            next="--data.packing stream, or a tokenizer with an end of text",
        )


def by_documents(inputs: np.ndarray, targets: np.ndarray, end_of_text: int) -> Batch[np.ndarray]:
    """Rows in which no document sees or foretells another.

    Args:
        inputs: (B, T) ids.
        targets: (B, T) ids that follow them.
        end_of_text: id after every document.

    Returns:
        The rows with numbers of documents, from 0 in each row; the target of an end of text,
        which is the next document's first token, is IGNORE.
    """
    ends = inputs == end_of_text
    documents = np.cumsum(ends, axis=1) - ends
    return Batch(inputs, np.where(ends, IGNORE, targets), documents)


def held_out_batches(
    tokens: np.ndarray, sequence: int, batch: int, count: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns ``(inputs, targets)`` batches of ``count`` sequences, always the same ones.

    The sequences are spread evenly over ``tokens``; there are fewer when the tokens hold fewer
    than ``count``. The last batch may be smaller than ``batch``. Arrays are (rows, T) int64.

    Raises:
        DataError: the tokens hold no whole sequence.
    """
    available = count_sequences(len(tokens), sequence)
    if available == 0:
        raise DataError(
            f"the held-out split of {len(tokens)} tokens holds no sequence of {sequence} tokens",
            likely="the text is too short",
            next="lower data.sequence, raise data.held_out or use more text",
        )
    count = min(count, available)
    index = np.arange(count) * available // count
    return [_cut(tokens, index[i : i + batch], sequence) for i in range(0, count, batch)]


def _check_counters(layout: Layout, *, step: int, replica: int, shard: int) -> None:
    if step < 0:
        raise ValueError(f"step must be at least 0, got {step}")
    if not 0 <= replica < layout.replicas:
        raise ValueError(f"replica must lie in 0..{layout.replicas - 1}, got {replica}")
    if not 0 <= shard < layout.shards:
        raise ValueError(f"shard must lie in 0..{layout.shards - 1}, got {shard}")


@functools.lru_cache(maxsize=16)  # a batch rarely touches more than two epochs of a source
def _epoch_order(num_sequences: int, seed: int, epoch: int, source: int) -> np.ndarray:
    """(S,) order in which an epoch shows the sequences."""
    key = np.array([seed, epoch], dtype=np.uint64)
    generator = np.random.Philox(key=key, counter=source << 192)
    return np.argsort(generator.random_raw(num_sequences), kind="stable")


def _cut(tokens: np.ndarray, index_B: np.ndarray, sequence: int) -> tuple[np.ndarray, np.ndarray]:
    """Copies the sequences ``index_B``; the results own their memory, nothing stays mapped."""
    position_BT1 = index_B[:, None] * sequence + np.arange(sequence + 1)
    window_BT1 = tokens[position_BT1].astype(np.int64)
    return window_BT1[:, :-1].copy(), window_BT1[:, 1:].copy()
