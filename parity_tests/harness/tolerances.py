"""All tolerances of the parity tests, each with the reason for its size; none was tuned.

In u, the ulps of a tensor's own size (``ulps.py``). The model behind them: a result is made by
n roundings of relative size at most eps/2 with signs as good as random, so it is off by about
sqrt(n) eps/2 in norm, and two cores that round independently differ by sqrt(2) times that. The
factor 4 leaves room for what the model leaves out (sums of unequal terms, eps in exp and
rsqrt). A wrong formula is off by 1e4 u or more in float64, so the gap is wide on both sides.

========================  ====================  =============================================
quantity                  tolerance             why
========================  ====================  =============================================
forward, gradient         4 sqrt(L K)           L layers in sequence, each a chain of dot
                                                products of K terms; backward is as deep
the same in bfloat16      4 sqrt(p L)           products accumulate in float32, so only the
                                                cast after each layer's operations rounds; a
                                                gradient went through p=2 passes, one after
                                                the other
optimizer, locked         16                    about a dozen elementwise roundings, of which
                                                the two cores share most
states, locked            25                    a round: subtraction (exact by nature), a
                                                norm, softmax, sum over replicas, outer step
free-running AdamW        5 kappa               see ``free_running_adamw``
free-running updates      4 sqrt(t) (r +        each of t steps rounds the parameters, which
                          sqrt(L K))            are r times as large as the update, and adds
                                                a gradient's error
free-running bfloat16     4 sqrt(p t L) s       the casts of t steps, one after the other;
                                                s of an update: see ``adamw_slope``, else 1 and
                                                s times what parameters have moved by
sums of equal numbers     4 sqrt(n)             n additions in float64, in another order
========================  ====================  =============================================

Float32 and bfloat16 have a second test, ``as_accurate``: neither core may be much further from
the float64 result than the other. It does not depend on how well a model is conditioned.
"""

import math
from typing import NamedTuple

import numpy as np

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7}
OPTIMIZER_ULPS = 16.0
STATE_ULPS = 25.0
FREE_RUNNING_CAP = 1e-12  # relative, float64, after 20 steps; 1e-14 was seen over 400
NOISE_SHARE = 1e-3  # one rounding of the parameters as a share of an update: that is no update
ACCURACY_RATIO = 3.0


class Tolerance(NamedTuple):
    """How much is allowed, and why, for the table and for messages."""

    value: float
    reason: str


EXACT = Tolerance(0.0, "bitwise")
OPTIMIZER = Tolerance(OPTIMIZER_ULPS, "16: a dozen elementwise roundings")
STATE = Tolerance(STATE_ULPS, "25: one round from equal inputs")


def of_update(base: Tolerance, params: float, update: float) -> Tolerance:
    """For an update, which is what is left when parameters of these norms are subtracted.

    Both cores round the new parameters once more, which is ``params / update`` times as much
    in ulps of the update.
    """
    if update == 0:
        return base
    return Tolerance(base.value + params / update, f"{base.reason}, + |params| / |update|")


def model(dtype: str, *, layers: int, width: int, passes: int = 1) -> Tolerance:
    """For losses, logits and gradients of one forward and backward from equal inputs.

    Args:
        dtype: of the computation.
        layers: L, transformer blocks.
        width: K, terms of the longest dot product: the largest of the model's widths,
            the vocabulary and, for gradients, the tokens of a batch.
        passes: p, through all layers: 1 of a forward, 2 of a gradient. Matters in bfloat16,
            where nothing but the casts in sequence rounds.
    """
    if dtype == "bfloat16":
        return Tolerance(4 * math.sqrt(passes * layers), f"4 sqrt({_passes(passes)}L={layers})")
    return Tolerance(4 * math.sqrt(layers * width), f"4 sqrt(L={layers} K={width})")


def free_running(
    dtype: str, *, steps: int, layers: int, width: int, params: float, update: float
) -> Tolerance:
    """For updates and pseudo-gradients after ``steps`` steps of each core on its own.

    An update is what is left when parameters are subtracted, so it inherits their rounding,
    which is ``params / update`` times as large in its own ulps. In float64 never more than
    1e-12 of the update: beyond that a formula differs, not a rounding; unless the update is
    made of roundings itself, as that of a single replica which is put on its own mean.

    Args:
        dtype: of the parameters.
        steps: t, inner steps since both cores held the same values.
        layers: L, see ``model``.
        width: K, see ``model``.
        params: L2 norm of the parameters.
        update: L2 norm of the update or pseudo-gradient, above 0.
    """
    ratio = params / update
    value = 4 * math.sqrt(steps) * (ratio + math.sqrt(layers * width))
    reason = f"4 sqrt(t={steps}) (r={ratio:.3g} + sqrt(L={layers} K={width}))"
    cap = FREE_RUNNING_CAP / EPS["float64"]
    is_noise = ratio * EPS["float64"] > NOISE_SHARE
    if dtype == "float64" and value > cap and not is_noise:
        return Tolerance(cap, f"1e-12 of the update, below {reason}")
    return Tolerance(value, reason)


def free_running_mixed(
    *, steps: int, layers: int, passes: int = 1, slope: float = 1.0
) -> Tolerance:
    """For everything in a run that computes in bfloat16, in u of bfloat16.

    Args:
        steps: t, inner steps since both cores held the same values.
        layers: L, see ``model``.
        passes: p, see ``model``.
        slope: by how much it is larger than that of a forward: of an update, ``adamw_slope``;
            of what is computed from parameters that are apart, 1 and their distance.
    """
    value = 4 * math.sqrt(passes * steps * layers)
    reason = f"4 sqrt({_passes(passes)}t={steps} L={layers})"
    return Tolerance(value * slope, reason if slope == 1 else f"{reason} s, s={slope:.3g}")


def adamw_slope(*, mean: float, update: float, lr: float, eps: float) -> float:
    """How much larger the relative error of an AdamW update can be than that of its gradient.

    The update is lr m / (root + eps), which grows with m by lr / eps at most; so an error of
    norm d in m moves it by lr d / eps, which in ulps of the update is this many times d in ulps
    of m. The bound is reached where gradients are smaller than eps.

    Args:
        mean: L2 norm of the first moment, with its bias corrected.
        update: L2 norm of the update, above 0.
        lr: learning rate.
        eps: AdamW's.
    """
    return max(1.0, lr * mean / (eps * update))


def sums(dtype: str, *, terms: int) -> Tolerance:
    """For sums of the same numbers in another order, in u of ``dtype``; they are in float64.

    Args:
        dtype: of the numbers.
        terms: n, how many were added.
    """
    value = 4 * math.sqrt(max(terms, 1)) * EPS["float64"] / EPS[dtype]
    return Tolerance(value, f"4 sqrt(n={terms}) roundings of float64 in the sketch's sums")


def free_running_adamw(grad: np.ndarray, *, grad_ulps: float, dtype: str, eps: float) -> Tolerance:
    """For the first AdamW update, in u of that update, when gradients already differ.

    At step 1 the update is lr g / (|g| + eps). Its slope lr eps / (|g| + eps)^2 is steep where
    |g| is of the order of AdamW's eps, so noise s in the gradient moves such elements by up to
    2 lr, the distance from -lr to +lr. kappa is the root mean square of that movement over lr;
    in u it is divided by eps(dtype) and by the rms of the update itself.

    Args:
        grad: the gradient, clipped as the optimizer sees it.
        grad_ulps: tolerance of the gradient, from ``model``; gives s.
        dtype: of the computation.
        eps: AdamW's.
    """
    size = np.abs(grad.astype(np.float64))
    unit = EPS[dtype]
    noise = grad_ulps * unit * _rms(size)
    kappa = _rms(np.minimum(2.0, noise * eps / (size + eps) ** 2))
    update = _rms(size / (size + eps))
    value = OPTIMIZER_ULPS + (5 * kappa / (unit * update) if update > 0 else 0.0)
    return Tolerance(value, "16 + 5 kappa: step 1 amplifies noise where |g| ~ eps")


def as_accurate(error: float, other: float, *, floor: float = 1.0) -> bool:
    """True if ``error`` is at most three times ``other``: distances in u from float64 truth.

    Below ``floor`` u both are as good as exact and their ratio means nothing.
    """
    return error <= ACCURACY_RATIO * max(other, floor)


def _passes(passes: int) -> str:
    return f"p={passes} " if passes > 1 else ""


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.square(x).mean())) if x.size else 0.0
