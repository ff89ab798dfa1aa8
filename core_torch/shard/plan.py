"""A plan of buckets: names of parameters whose collectives are merged. Checked, hashed, chosen.

Ranks that bucket differently wait for each other for ever, hence one hash to compare, and a
choice that depends on nothing but scores and plans.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from core_torch.errors import ConfigError

Plan = list[list[str]]


class Choice(NamedTuple):
    """The plan that won, and its score."""

    plan: Plan
    seconds: float
    peak_bytes: int
    fits: bool  # within the memory limit; False: no plan is, and this one needs least


def plan_hash(plan: Plan) -> str:
    """16 hexadecimal digits that are equal for equal plans, in any process."""
    return hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:16]


def check_plan(plan: Plan, names: Iterable[str]) -> None:
    """Demands that every parameter of ``names`` is in exactly one bucket.

    Raises:
        ConfigError: with every unknown, repeated and missing parameter and every empty bucket.
    """
    text = [bucket for bucket in plan if isinstance(bucket, str)]
    if text:
        raise ConfigError(
            f"a plan is a list of lists of names, but holds the bare name {text[0]}",
            where="wrap",
            next=f'write ["{text[0]}"] for a bucket of one parameter',
        )
    known = list(names)
    counts = Counter(name for bucket in plan for name in bucket)
    problems = [f"{name} is no sharded parameter" for name in counts if name not in set(known)]
    problems += [f"{name} is listed {n} times" for name, n in counts.items() if n > 1]
    problems += [f"{name} is in no bucket" for name in known if name not in counts]
    problems += [f"bucket {i} is empty" for i, bucket in enumerate(plan) if not bucket]
    if problems:
        raise ConfigError(
            "the plan of buckets does not fit the model: " + "; ".join(problems),
            where="wrap",
            likely="the plan was written for another model, or a parameter was renamed",
            next="list every parameter that requires a gather exactly once",
        )


def best(
    candidates: Sequence[Plan],
    score: Callable[[Plan], tuple[float, int]],
    *,
    memory_limit: int | None = None,
    tolerance: float = 0.0,
) -> Choice:
    """The fastest plan within the memory limit; if none is, the one with least memory.

    Ties go to less memory, then to fewer buckets, then to the plan that comes first in order
    of its names, so the order of the candidates does not matter.

    Args:
        candidates: at least one.
        score: seconds and peak bytes of a plan; called once for each.
        memory_limit: bytes; None: any.
        tolerance: plans slower than the fastest by no more than this fraction count as tied,
            since an estimate is no more exact than that.

    Raises:
        ValueError: no candidates.
    """
    if not candidates:
        raise ValueError("no candidates to choose from")
    scored = [(plan, *score(plan)) for plan in candidates]
    limit = float("inf") if memory_limit is None else memory_limit
    choices = [Choice(plan, seconds, peak, peak <= limit) for plan, seconds, peak in scored]
    fitting = [choice for choice in choices if choice.fits]
    if not fitting:
        least = min(choice.peak_bytes for choice in choices)
        fitting = [choice for choice in choices if choice.peak_bytes == least]
    enough = min(choice.seconds for choice in fitting) * (1 + tolerance)
    tied = [choice for choice in fitting if choice.seconds <= enough]
    # Seconds count again last but one: within the tolerance, less memory first.
    return min(tied, key=lambda c: (c.peak_bytes, c.seconds, len(c.plan), c.plan))
