"""How far two events are apart, in u: ulps of the reference's own size, from sums and sketches.

With signs s_k(i) as good as random, the mean over k of (sum_i s_k(i) (x_i - y_i))^2 estimates
|x - y|^2 without bias; sixteen sketches give |x - y| to about a fifth, which no verdict hangs on.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from parity_tests.instrument.files import Event

INF = math.inf


class Distance(NamedTuple):
    """How far apart, and what of the event that is."""

    relative: float  # of the reference's size; u are this over eps
    detail: str = ""  # for messages: the field of a value, or what else differs
    is_exact: bool = False  # of things that are equal or not: no tolerance applies


def distance_of(x: Event, y: Event, *, replicas: int, floor: float = 0.0) -> list[Distance]:
    """One distance of two tensors; of values, one for each field.

    Args:
        x: what is examined.
        y: the same event of the reference, whose size is the yardstick.
        replicas: among which a round's weights are shared out.
        floor: the least yardstick of a tensor: below it there are roundings only.
    """
    if x.value is not None and y.value is not None:
        return list(_of_values(x.value, y.value, replicas))
    if x.sketch is None or y.sketch is None:
        return [Distance(INF, "a tensor against a value", is_exact=True)]
    if x.shape != y.shape:
        return [Distance(INF, f"shape {list(x.shape)} against {list(y.shape)}", is_exact=True)]
    if x.bad != y.bad:
        return [Distance(INF, f"{x.bad} elements are not finite, against {y.bad}", is_exact=True)]
    detail = "" if same_kind(x.dtype, y.dtype) else f"{x.dtype} against {y.dtype}"
    is_exact = "float" not in y.dtype
    with np.errstate(over="ignore", invalid="ignore"):
        gap = float(np.sqrt(np.square(x.sketch - y.sketch).mean()))
    if is_exact:
        return [Distance(0.0 if gap == 0 and x.sum2 == y.sum2 else INF, detail, is_exact=True)]
    return [Distance(_ratio(gap, max(y.norm, floor)), detail)]


def same_kind(x: str, y: str) -> bool:
    """Whether two dtypes are equal, or both whole numbers, of whatever width."""
    return x == y or ("float" not in x and "float" not in y)


def sketch_norm(sketch: np.ndarray) -> float:
    """Estimate of the L2 norm of what was sketched."""
    return float(np.sqrt(np.square(sketch).mean()))


def _ratio(gap: float, size: float) -> float:
    if gap == 0:
        return 0.0
    return gap / size if size > 0 and math.isfinite(gap) else INF


def _of_values(x: Mapping[str, Any], y: Mapping[str, Any], replicas: int) -> Iterator[Distance]:
    """Floats by their ratio; switches, counts and words must be equal."""
    for field in sorted({*x, *y}):
        if field not in x or field not in y:
            who = "only the reference tells it" if field in y else "the reference does not tell it"
            yield Distance(INF, f"{field}: {who}", is_exact=True)
            continue
        mine, theirs = _number(x[field]), _number(y[field])
        detail = f"{field} {_shown(x[field])} against {_shown(y[field])}"
        if mine is None or theirs is None or not math.isfinite(mine + theirs):
            is_same = _plain(x[field]) == _plain(y[field])
            yield Distance(0.0 if is_same else INF, detail, is_exact=True)
        elif field == "var":  # a spread is a difference from the mean, and rounds with it
            mean = _number(y.get("mean")) or 0.0
            gap = abs(math.sqrt(max(mine, 0.0)) - math.sqrt(max(theirs, 0.0)))
            yield Distance(_ratio(gap, math.hypot(mean, math.sqrt(max(theirs, 0.0)))), detail)
        else:
            size = abs(theirs)
            if field == "weight":  # they sum to one, so an even share is what one is measured by
                size = max(size, 1 / replicas)
            yield Distance(_ratio(abs(mine - theirs), size), detail)


def _number(x: Any) -> float | None:
    """A float; None for what must be equal: counts, switches, words."""
    if isinstance(x, float):
        return x
    if isinstance(x, str) and x in ("nan", "inf", "-inf"):
        return float(x)
    return None


def _plain(x: Any) -> Any:
    """So that a float that is written as a word equals itself, and 3.0 equals 3."""
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def _shown(x: Any) -> str:
    return f"{x:.17g}" if isinstance(x, float) else str(x)
