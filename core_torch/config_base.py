"""What all configurations share: how a problem is told, and checks of numbers.

Standard library only.
"""

import math
import re
from typing import Any, NamedTuple

_SECONDS = re.compile(r"(\d+(?:\.\d+)?)s")


class Problem(NamedTuple):
    """One thing that cannot work: the field's dotted path and a sentence with the value."""

    path: str
    message: str


def seconds_of(value: int | str) -> float | None:
    """The seconds that an interval such as ``600s`` means; None if it counts steps or nothing."""
    found = _SECONDS.fullmatch(value) if isinstance(value, str) else None
    return None if found is None else float(found[1])


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
