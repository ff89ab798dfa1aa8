"""Learning-rate schedules: pure functions of tokens seen, so a run resumes or grows exactly.

Each returns a factor for the peak learning rate; plain Python floats in and out. Mirror:
reference_jax/schedules.py. Equations (S1)..(S3) in docs/algorithms/synchronous.md.
"""

import math

SHAPES = ("constant", "linear", "cosine", "wsd")


def warmup_factor(tokens: int, *, warmup_tokens: int) -> float:
    """Linear rise from 0 (excluded) to 1 over ``warmup_tokens``; 1 if that is 0. (S1)

    ``tokens`` counts those seen *including* the coming step, so the first step already moves.
    """
    return min(1.0, tokens / warmup_tokens) if warmup_tokens > 0 else 1.0


def decay_factor(progress: float, *, shape: str, final_ratio: float, decay_share: float) -> float:
    """Factor at ``progress`` in [0, 1] between the end of the warm-up and the end. (S2)

    Args:
        progress: 0 right after the warm-up, 1 at the end; clipped to that range.
        shape: ``constant``, ``linear``, ``cosine`` or ``wsd`` (stays at 1, then falls
            linearly over the last ``decay_share``).
        final_ratio: factor at the end, except for ``constant``.
        decay_share: share of the way on which ``wsd`` falls, in (0, 1].

    Raises:
        ValueError: an unknown shape.
    """
    progress = min(1.0, max(0.0, progress))
    if shape == "constant":
        return 1.0
    if shape == "linear":
        remaining = 1.0 - progress
    elif shape == "cosine":
        remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    elif shape == "wsd":
        remaining = min(1.0, (1.0 - progress) / decay_share)
    else:
        raise ValueError(f"schedule shape {shape!r} is not one of {', '.join(SHAPES)}")
    return final_ratio + (1.0 - final_ratio) * remaining


def learning_rate(
    tokens: int,
    *,
    peak: float,
    shape: str,
    warmup_tokens: int,
    total_tokens: int,
    final_ratio: float,
    decay_share: float,
) -> float:
    """Learning rate of the step that ends at ``tokens`` tokens over all replicas. (S3)"""
    if tokens < warmup_tokens:
        return peak * warmup_factor(tokens, warmup_tokens=warmup_tokens)
    progress = (tokens - warmup_tokens) / max(1, total_tokens - warmup_tokens)
    return peak * decay_factor(
        progress, shape=shape, final_ratio=final_ratio, decay_share=decay_share
    )
