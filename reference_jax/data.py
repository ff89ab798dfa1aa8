"""Chapter 3. Data: who reads which tokens.

You learn how N x M ranks share one stream of sequences without talking to each other.

    (B1) sequence i is the tokens [i T, i T + T]; inputs drop the last one, targets the first
    (B2) draw q is entry q mod Q of epoch q div Q. Epoch e reads all Q sequences once, in the
         order that sorts the first Q raw outputs of the generator Philox 4x64, key (seed, e)
    (B3) replica n, shard m, sequence b of micro-batch ``step`` takes draw
         (step * M * B + m * B + b) * N + n

By (B3) the draws of replica n are those with q mod N = n, *whatever* its step count: replicas
never read the same sequence in one epoch, even when one of them is faster. The batch is a
pure function of the seed and of counters, so resuming needs no iterator state.

Who communicates: nobody; every rank computes its own draws.
"""

from pathlib import Path

import numpy as np


def read_tokens(path: str | Path, *, held_out: float = 0.0) -> np.ndarray:
    """Bytes of a file as token ids 0..255, without the last ``held_out`` share of it."""
    tokens = np.frombuffer(Path(path).read_bytes(), np.uint8).astype(np.int64)
    return tokens[: len(tokens) - int(held_out * len(tokens))]


def sequence_of_draw(draw: int, *, sequences: int, seed: int) -> int:
    """(B2) which sequence a draw reads."""
    epoch, entry = divmod(draw, sequences)
    generator = np.random.Philox(key=np.array([seed, epoch], np.uint64))
    order = np.argsort(generator.random_raw(sequences), kind="stable")
    return int(order[entry])


def batch_for(
    tokens: np.ndarray,
    *,
    step: int,
    replica: int,
    shard: int,
    replicas: int,
    shards: int,
    batch: int,
    sequence: int,
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """(B1..B3) one rank's ([B, T], [B, T]) inputs and targets of micro-batch ``step``, int64."""
    sequences = (len(tokens) - 1) // sequence
    rows = []
    for b in range(batch):
        draw = (step * shards * batch + shard * batch + b) * replicas + replica
        start = sequence * sequence_of_draw(draw, sequences=sequences, seed=seed)
        rows.append(np.asarray(tokens[start : start + sequence + 1], np.int64))
    return np.stack(rows)[:, :-1], np.stack(rows)[:, 1:]


def batch_of_all(
    tokens: np.ndarray, *, step: int, replicas: int, shards: int, **layout: int
) -> tuple[np.ndarray, np.ndarray]:
    """([R, S, B, T], [R, S, B, T]) of every rank; ``layout`` is batch, sequence and seed."""
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
