"""Chapter 3. Data: who reads which tokens.

You learn how N x M ranks share one stream of sequences without talking to each other.

    (B1) sequence i is the tokens [i T, i T + T]; inputs drop the last one, targets the first
    (B2) draw q is entry q mod Q of epoch q div Q. Epoch e reads all Q sequences once, in the
         order that sorts the first Q raw outputs of the generator Philox 4x64, key (seed, e)
    (B3) replica n, shard m, sequence b of micro-batch ``step`` takes draw
         (first_row + step * M * B + m * B + b) * N + n
         first_row is 0 until a run goes on with another N, M or B: then every replica goes on
         with the row after its last one

    (B4) if rows are packed by documents, each of which ends with the token ``end_of_text``: a
         token's document is the number of ends before it in its row, attention stays inside of
         it, and the target of an end of text, the next document's first token, does not count
    (B5) a mixture of sources j with weights w_j deals its draws in blocks of 1024. Source j has
         K_j of each: the whole part of 1024 w_j / sum w, and what is left goes to the largest
         remainders. Block c is K_1 times 1, K_2 times 2, ..., in the order that sorts the first
         1024 raw outputs of Philox with key (seed, c) and counter 2^128
    (B6) the source's own draw is c K_j + (entries j of block c before this one), and reads a
         sequence by (B2), but that source j = 0, 1, ... begins its generator at counter j 2^192

By (B3) the draws of replica n are those with q mod N = n, *whatever* its step count: replicas
never read the same sequence in one epoch, even when one of them is faster. The batch is a
pure function of the seed and of counters, so resuming needs no iterator state.

Who communicates: nobody; every rank computes its own draws.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reference_jax.model import IGNORE

BLOCK = 1024  # draws in which every source of a mixture has its share


def read_tokens(path: str | Path, *, held_out: float = 0.0) -> np.ndarray:
    """Bytes of a file as token ids 0..255, without the last ``held_out`` share of it."""
    tokens = np.frombuffer(Path(path).read_bytes(), np.uint8).astype(np.int64)
    return tokens[: len(tokens) - int(held_out * len(tokens))]


def sequence_of_draw(draw: int, *, sequences: int, seed: int, source: int = 0) -> int:
    """(B2, B6) which sequence a draw reads."""
    epoch, entry = divmod(draw, sequences)
    key = np.array([seed, epoch], np.uint64)
    generator = np.random.Philox(key=key, counter=source * 2**192)
    order = np.argsort(generator.random_raw(sequences), kind="stable")
    return int(order[entry])


def source_of_draw(draw: int, *, weights: Sequence[float], seed: int) -> tuple[int, int]:
    """(B5, B6) which source a draw reads, and which draw of that source it is."""
    exact = [BLOCK * w / sum(weights) for w in weights]
    shares = [int(x) for x in exact]
    by_remainder = sorted(range(len(exact)), key=lambda j: (shares[j] - exact[j], j))
    for j in by_remainder[: BLOCK - sum(shares)]:
        shares[j] += 1
    block, entry = divmod(draw, BLOCK)
    generator = np.random.Philox(key=np.array([seed, block], np.uint64), counter=2**128)
    in_order = [j for j, share in enumerate(shares) for _ in range(share)]
    shuffled = [in_order[i] for i in np.argsort(generator.random_raw(BLOCK), kind="stable")]
    source = shuffled[entry]
    return source, block * shares[source] + shuffled[:entry].count(source)


def batch_for(
    tokens: np.ndarray | Sequence[np.ndarray],
    *,
    step: int,
    replica: int,
    shard: int,
    replicas: int,
    shards: int,
    batch: int,
    sequence: int,
    seed: int,
    first_row: int = 0,
    weights: Sequence[float] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """(B1..B3) one rank's ([B, T], [B, T]) inputs and targets of micro-batch ``step``, int64.

    With ``weights`` there are several ``tokens``, mixed by (B5, B6).
    """
    rows = []
    for b in range(batch):
        draw = (first_row + step * shards * batch + shard * batch + b) * replicas + replica
        source, draw = source_of_draw(draw, weights=weights, seed=seed) if weights else (0, draw)
        ids = np.asarray(tokens[source] if weights else tokens)
        sequences = (len(ids) - 1) // sequence
        place = sequence_of_draw(draw, sequences=sequences, seed=seed, source=source)
        rows.append(ids[sequence * place : sequence * (place + 1) + 1].astype(np.int64))
    return np.stack(rows)[:, :-1], np.stack(rows)[:, 1:]


def by_documents(
    inputs: np.ndarray, targets: np.ndarray, *, end_of_text: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(B4) inputs, targets and documents, [..., T] each."""
    is_end = inputs == end_of_text
    return inputs, np.where(is_end, IGNORE, targets), np.cumsum(is_end, axis=-1) - is_end


def batch_of_all(
    tokens: np.ndarray | Sequence[np.ndarray],
    *,
    step: int,
    replicas: int,
    shards: int,
    **layout: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """([R, S, B, T], [R, S, B, T]) of every rank; ``layout``: the rest."""
    sides = [
        [
            batch_for(
                tokens, step=step, replica=n, shard=m, replicas=replicas, shards=shards, **layout
            )
            for m in range(shards)
        ]
        for n in range(replicas)
    ]
    pairs = np.array(sides)  # [R, S, 2, B, T]
    return pairs[:, :, 0], pairs[:, :, 1]


def main() -> None:
    """Which sequence each of 2 x 2 ranks reads, and that nobody reads the same."""
    tokens = np.arange(16 * 8 + 1)
    for step in range(2):
        inputs, targets = batch_of_all(
            tokens, step=step, replicas=2, shards=2, batch=2, sequence=8, seed=0
        )
        for n in range(2):
            starts = inputs[n, :, :, 0] // 8
            print(f"micro-batch {step}, replica {n}: sequences of its shards {starts.tolist()}")
    print("inputs ", inputs[0, 0, 0], "\ntargets", targets[0, 0, 0])


if __name__ == "__main__":
    main()
