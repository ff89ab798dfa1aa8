"""Which source of a mixture a draw reads: a pure function of weights, seed and draw.

The rule, complete enough to restate it elsewhere, with draws q and T as in batches.py, sources j
in the order of the mixture, and S_j the sequences of source j:

    share     of source j: K_j of each block of 1024 draws. Of K_1 + K_2 + ... = 1024 each gets the
              whole part of 1024 * w_j / sum(w); what is left goes one by one to the largest
              remainders, of equal ones to the first
    block     c = q div 1024 is the list of K_1 times source 1, K_2 times source 2, ..., put in the
              order that sorts (stable) the first 1024 raw outputs of Philox 4x64 with key
              (seed, c) and counter 2**128
    source    of draw q is entry q mod 1024 of block q div 1024
    draw of   the source: k = c * K_j + (entries j of the block before this one), so that the
    source    draws of a source are numbered 0, 1, 2, ... without gaps
    sequence  of the source: that of draw k by batches.py, with S_j sequences, where the order of
              an epoch is drawn with counter j * 2**192 (j from 0)

So every source is shown epoch by epoch, each sequence once in each, whatever its weight; a source
with a large weight is simply shown more often. Nothing is remembered between draws. A mixture of
one source is that source: the same sequences in the same order as without a mixture.
"""

import functools
from collections.abc import Sequence

import numpy as np

from core_torch.config_data import BLOCK
from core_torch.data.batches import Layout, count_sequences, draws_of, rows_of

_BLOCKS = 1 << 128  # counter of the generator, away from those of epochs


def mixed_batch_for(
    tokens: Sequence[np.ndarray],
    weights: Sequence[float],
    layout: Layout,
    *,
    step: int,
    replica: int,
    shard: int,
    first_row: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """``batches.batch_for`` of several sources.

    Args:
        tokens: ids of the training split of each source.
        weights: above 0, one for each source.
        layout: as of one source; its ``num_sequences`` is that of all together.
        step: see ``batches.batch_for``, also for the counters after it.
        replica: this rank's.
        shard: this rank's.
        first_row: of the replica.

    Returns:
        ``(inputs, targets)``, both new (B, T) int64 arrays.
    """
    draw_B = draws_of(layout, step=step, replica=replica, shard=shard, first_row=first_row)
    source_B, own_draw_B = sources_of(draw_B, weights, layout.seed)
    inputs_BT = np.empty((layout.batch, layout.sequence), np.int64)
    targets_BT = np.empty_like(inputs_BT)
    for j in np.unique(source_B):
        rows = source_B == j
        available = count_sequences(len(tokens[j]), layout.sequence)
        inputs_BT[rows], targets_BT[rows] = rows_of(
            tokens[j],
            own_draw_B[rows],
            num_sequences=available,
            sequence=layout.sequence,
            seed=layout.seed,
            source=int(j),
        )
    return inputs_BT, targets_BT


def sources_of(
    draw_B: np.ndarray, weights: Sequence[float], seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Source of every draw, and which draw of that source it is; both (B,) int64."""
    counts = np.array(allotted(BLOCK, weights))
    block_B, entry_B = np.divmod(draw_B, BLOCK)
    source_B, own_draw_B = np.empty_like(draw_B), np.empty_like(draw_B)
    for block in np.unique(block_B):
        here = block_B == block
        sources, earlier = _block(tuple(counts.tolist()), seed, int(block))
        source_B[here] = sources[entry_B[here]]
        own_draw_B[here] = block * counts[source_B[here]] + earlier[entry_B[here]]
    return source_B, own_draw_B


def allotted(total: int, weights: Sequence[float]) -> list[int]:
    """``total`` in whole parts by weight, by largest remainders, of equal ones the first."""
    exact = [total * weight / sum(weights) for weight in weights]
    parts = [int(x) for x in exact]
    by_remainder = sorted(range(len(parts)), key=lambda j: (parts[j] - exact[j], j))
    for j in by_remainder[: total - sum(parts)]:
        parts[j] += 1
    return parts


@functools.lru_cache(maxsize=8)
def _block(counts: tuple[int, ...], seed: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Sources of a block's entries, and how often each has come before; (1024,) each."""
    key = np.array([seed, block], dtype=np.uint64)
    raw = np.random.Philox(key=key, counter=_BLOCKS).random_raw(BLOCK)
    sources = np.repeat(np.arange(len(counts)), counts)[np.argsort(raw, kind="stable")]
    earlier = np.empty_like(sources)
    for j, count in enumerate(counts):
        earlier[sources == j] = np.arange(count)
    return sources, earlier
