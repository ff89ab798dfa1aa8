"""What all configurations share: how a problem is told, and checks of numbers.

Standard library only.
"""

import math
from typing import Any, NamedTuple


class Problem(NamedTuple):
    """One thing that cannot work: the field's dotted path and a sentence with the value."""

    path: str
    message: str


def at_least(low: float, config: Any, *names: str) -> list[Problem]:
    """Problems of the named numeric fields that are below ``low``, infinite or NaN."""
    values = {name: getattr(config, name) for name in names}
    wrong = {name: v for name, v in values.items() if not low <= v < math.inf}
    return [Problem(name, f"must be at least {low}, got {v}") for name, v in wrong.items()]


def above(low: float, config: Any, *names: str) -> list[Problem]:
    """Problems of the named numeric fields that are not above ``low``, or infinite or NaN."""
    values = {name: getattr(config, name) for name in names}
    wrong = {name: v for name, v in values.items() if not low < v < math.inf}
    return [Problem(name, f"must be above {low}, got {v}") for name, v in wrong.items()]
