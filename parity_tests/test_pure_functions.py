"""Every mirrored formula gives the same numbers in both cores, and each fault in one is noticed.

Locked: both sides get the same inputs in every round, so that a difference is of this round.
"""

import importlib
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch

import core_torch.schedules as core_schedules
import core_torch.sync.penalty as core_penalty
import core_torch.sync.wire as core_wire
import reference_jax.schedules as reference_schedules
import reference_jax.sync.penalty as reference_penalty
import reference_jax.sync.wire as reference_wire
from parity_tests.harness import codec, jax_bridge, mutants, torch_bridge
from parity_tests.harness.tolerances import EXACT, OPTIMIZER, STATE, Tolerance
from parity_tests.harness.ulps import ErrorTable

PENALTY, OUTER, WIRE = "sync.penalty", "sync.outer", "sync.wire"
PURE = [
    name
    for name, mutant in mutants.MUTANTS.items()
    if mutant.target.partition(":")[0].removeprefix("core_torch.")
    in (PENALTY, OUTER, WIRE, "adamw", "schedules")
]
UNITS, REPLICAS, ROUNDS = 3, 4, 30
JUDGE = dict(z_threshold=3.0, warmup_rounds=10, spike_ratio=100.0, rearm_after=3, eps=1e-6)
NAN, INF = float("nan"), float("inf")
ANSWERED: dict[bytes, tuple[np.ndarray, ...]] = {}


class Record(NamedTuple):
    """A NamedTuple of either core by the name of its class."""

    kind: str
    fields: tuple[np.ndarray, ...]


class Results(NamedTuple):
    """What a function gave in both cores, tuples taken apart."""

    core: tuple[np.ndarray, ...]
    reference: tuple[np.ndarray, ...]


def both(module: str, function: str, *args: Any, **keywords: Any) -> Results:
    """Calls a mirrored function in both cores with copies of the same arrays."""
    core = importlib.import_module(f"core_torch.{module}")
    reference = importlib.import_module(f"reference_jax.{module}")
    core_args = [sent(core, a, torch_bridge.to_torch) for a in args]
    # Inputs come from the reference, so its answers serve every mutant of the core.
    plain = [list(a.fields) if isinstance(a, Record) else a for a in args]
    asked = codec.encode([module, function, plain, keywords])
    if asked not in ANSWERED:
        reference_args = [sent(reference, a, jax_bridge.to_jax) for a in args]
        ANSWERED[asked] = received(getattr(reference, function)(*reference_args, **keywords))
    return Results(received(getattr(core, function)(*core_args, **keywords)), ANSWERED[asked])


def sent(module: Any, value: Any, convert: Callable[[np.ndarray], Any]) -> Any:
    """``value`` as one core wants it."""
    if isinstance(value, Record):
        return getattr(module, value.kind)(*map(convert, value.fields))
    return convert(value) if isinstance(value, np.ndarray) else value


def received(result: Any) -> tuple[np.ndarray, ...]:
    """Arrays of a result of either core."""
    parts = result if isinstance(result, tuple) else (result,)
    arrays = []
    for x in parts:
        assert isinstance(x, torch.Tensor | jax.Array)
        arrays.append(
            torch_bridge.to_numpy(x) if isinstance(x, torch.Tensor) else jax_bridge.to_numpy(x)
        )
    return tuple(arrays)


def agree(errors: ErrorTable, quantity: str, got: Results, tolerance: Tolerance) -> Any:
    """Compares floats in u, all else exactly; returns the reference's arrays."""
    assert len(got.core) == len(got.reference)
    for x, y in zip(got.core, got.reference, strict=True):
        if y.dtype.kind in "bi":
            np.testing.assert_array_equal(x, y, err_msg=quantity)
        else:
            errors.check(quantity, x, y, tolerance)
    return got.reference if len(got.reference) > 1 else got.reference[0]


def norms_of_round(k: int, dtype: str) -> np.ndarray:
    """(UNITS, REPLICAS) norms, with everything in them that the penalty has a rule for."""
    norm_UR = np.random.default_rng(k).lognormal(0.0, 0.1, (UNITS, REPLICAS))
    norm_UR[0, 0] *= 1e4 if k == 2 else 1.0  # a spike while statistics are cold
    norm_UR[1, 1] *= 50.0 if k in (14, 20, 21, 22, 23) else 1.0  # flagged; a new regime
    norm_UR[1, 2] *= 0.01 if k == 16 else 1.0  # small is fine
    norm_UR[2, 3] = {5: NAN, 6: 1e30, 17: INF, 18: 1e30}.get(k, norm_UR[2, 3])
    if k in (9, 24):
        norm_UR[2] = NAN  # a rollback
    return norm_UR.astype(dtype)


def check_penalty(errors: ErrorTable, dtype: str) -> None:
    """Thirty rounds of judging, weighing and statistics."""
    zeros, none = np.zeros((UNITS, REPLICAS), dtype), np.zeros((UNITS, REPLICAS), np.int64)
    stats = Record("NormStats", (zeros, zeros, none, none))
    seen = np.zeros((4, UNITS, REPLICAS), bool)
    rollbacks = 0
    for k in range(ROUNDS):
        norm_UR = norms_of_round(k, dtype)
        got = both(PENALTY, "judge", norm_UR, stats, **JUDGE)
        verdict = Record("Verdict", agree(errors, "verdict", got, EXACT))
        anomaly_UR = verdict.fields[3]
        seen |= np.stack([~verdict.fields[0], *verdict.fields[1:]])
        rollbacks += int(anomaly_UR.all(axis=-1).sum())
        for relative in (False, True):
            settings = dict(temperature=0.5, relative=relative)
            got = both(PENALTY, "mixing_weights", norm_UR, anomaly_UR, **settings)
            weight_UR = agree(errors, "weights", got, STATE)
        steps_R = np.random.default_rng(k).integers(0, 9, REPLICAS)
        for share in (0.0, 0.5):
            got = both(PENALTY, "step_weights", weight_UR, steps_R, anomaly_UR, share=share)
            agree(errors, "weights by steps", got, STATE)
        agree(errors, "effective replicas", both(PENALTY, "effective_replicas", weight_UR), STATE)
        got = both(PENALTY, "median_over_replicas", norm_UR, ~anomaly_UR)
        agree(errors, "median of norms", got, STATE)
        got = both(PENALTY, "update_stats", norm_UR, verdict, stats, ema_alpha=0.05)
        stats = Record("NormStats", agree(errors, "norm statistics", got, STATE))
    assert seen.any(axis=(1, 2)).all() and rollbacks == 2, "a rule was not exercised"


def check_uniform_weights(errors: ErrorTable, dtype: str) -> None:
    """Equal weights for any number of replicas left out."""
    anomaly_UR = np.array(list(product([False, True], repeat=REPLICAS)))
    core = core_penalty.uniform_weights(
        torch_bridge.to_torch(anomaly_UR), dtype=torch_bridge.TORCH_DTYPES[dtype]
    )
    reference = reference_penalty.uniform_weights(jax_bridge.to_jax(anomaly_UR), dtype=dtype)
    agree(errors, "uniform weights", Results(received(core), received(reference)), EXACT)


def check_round(errors: ErrorTable, dtype: str) -> None:
    """Weighing, clipping and the outer step, accepted or not, and healing."""
    rng = np.random.default_rng(1)
    anchor, velocity, delta = (rng.normal(size=(7, 5)).astype(dtype) for _ in range(3))
    delta[0, 0] = NAN
    for weight in (0.0, 0.3):
        got = both(PENALTY, "weigh", delta, np.array(weight, dtype))
        agree(errors, "weighed pseudo-gradient", got, EXACT)
    for norm in (0.0, 1e-7, 3.0, 10.0, 10.000001, 1e6, INF):
        got = both(PENALTY, "clip_coefficient", np.array(norm, dtype), max_norm=10.0, eps=1e-6)
        agree(errors, "clip coefficient", got, STATE)
    delta[0, 0] = 1.0
    for accept, (lr, momentum) in product((True, False), ((0.8, 0.85), (0.7, 0.9), (1.0, 0.0))):
        arrays = anchor, velocity, delta, np.array(accept)
        got = both(OUTER, "nesterov_step", *arrays, lr=lr, momentum=momentum)
        agree(errors, "outer step", got, STATE)
    for is_bad in (True, False):
        agree(errors, "healed moment", both(OUTER, "heal", delta, np.array(is_bad)), EXACT)


def check_delayed(errors: ErrorTable, dtype: str) -> None:
    """The outer step on a stale gradient, its gap, and mixing."""
    rng = np.random.default_rng(3)
    anchor, velocity, delta = (rng.normal(size=(7, 5)).astype(dtype) for _ in range(3))
    for norms in ((0.0, 0.0), (3.0, 2.0), (1e-7, 1e-7), (1.0, INF)):
        got = both(OUTER, "staleness_gap", *(np.array(x, dtype) for x in norms), eps=1e-6)
        gap = agree(errors, "staleness gap", got, STATE)
        for accept, clip in product((True, False), (0.3, 100.0)):
            arrays = anchor, velocity, delta, np.array(accept), gap
            settings = dict(lr=0.7, momentum=0.9, clip=clip)
            agree(errors, "momentum step", both(OUTER, "momentum_step", *arrays, **settings), STATE)
    for alpha in (0.0, 0.3, 1.0):
        got = both(OUTER, "mix", anchor, delta, alpha=alpha)
        agree(errors, "mixed parameters", got, STATE if alpha == 0.3 else EXACT)


def lengths(dtype: str) -> np.ndarray:
    """A vector whose blocks are ordinary, full of ties, tiny, zero and huge, the last not full."""
    rng = np.random.default_rng(4)
    ties = np.concatenate([[127.0], np.arange(-31.5, 31.5)])
    far = 10.0 ** rng.uniform(-44, 18, 64)
    blocks = [rng.normal(size=64), ties, 1e-39 * ties, 0.0 * ties, far * rng.normal(size=64)]
    return np.concatenate([*blocks, rng.lognormal(size=17)]).astype(dtype)


def by_int8(wire: Any, x: Any, dtype: Any) -> Any:
    """``x`` after a journey as int8, in either core."""
    return wire.dequantise(*wire.quantise(x, block=64), size=x.shape[0], dtype=dtype)


def by_bfloat16(wire: Any, x: Any, dtype: Any) -> Any:
    """``x`` after a journey as bfloat16, in either core."""
    return wire.decode_bfloat16(wire.encode_bfloat16(x), dtype=dtype)


def check_wire(errors: ErrorTable, dtype: str) -> None:
    """What is sent, what is read and what remains: the same bits, compiled together or not."""
    x = lengths(dtype)
    for got in (both(WIRE, "quantise", x, block=64), both(WIRE, "encode_bfloat16", x)):
        for core, reference in zip(got.core, got.reference, strict=True):
            np.testing.assert_array_equal(core.astype("float32"), reference.astype("float32"))
    # XLA on CPU flushes differences that are no normal numbers.
    meant = np.where(np.abs(x) < 1e-30, 0, x).astype(dtype)
    for journey in (by_int8, by_bfloat16):
        core = journey(core_wire, torch_bridge.to_torch(x), torch_bridge.TORCH_DTYPES[dtype])
        compiled = jax.jit(partial(journey, reference_wire, dtype=dtype))
        decoded = torch_bridge.to_numpy(core)
        reference = jax_bridge.to_numpy(compiled(jax_bridge.to_jax(x)))
        np.testing.assert_array_equal(decoded, reference, err_msg=journey.__name__)
        assert not np.array_equal(decoded, x)
        for weight in (0.0, 0.3):
            arrays = meant, decoded, np.full_like(x, 7.0), np.array(weight, dtype)
            agree(errors, "residual", both(WIRE, "residual", *arrays), EXACT)


def check_adamw(errors: ErrorTable, dtype: str) -> None:
    """Updates, not parameters, over steps enough to see both bias corrections and decay."""
    rng = np.random.default_rng(2)
    param = rng.normal(size=(6, 4)).astype(dtype)
    state = (np.zeros_like(param), np.zeros_like(param), np.zeros((), dtype))
    scalars = dict(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    for _ in range(4):
        sizes = 10.0 ** rng.uniform(-9, 1, param.shape)
        grad = (rng.normal(size=param.shape) * sizes).astype(dtype)
        got = both("adamw", "adamw_update", param, grad, *state, **scalars)
        agree(errors, "AdamW moments", Results(got.core[1:], got.reference[1:]), OPTIMIZER)
        share = float(np.linalg.norm(param) / np.linalg.norm(got.reference[0] - param))
        allowed = Tolerance(OPTIMIZER.value + share, "16 + |param| / |update|, its rounding")
        moved = Results((got.core[0] - param,), (got.reference[0] - param,))
        agree(errors, "AdamW update", moved, allowed)
        param, *rest = got.reference
        state = (rest[0], rest[1], rest[2])


def check_schedules(errors: ErrorTable, dtype: str) -> None:
    """Learning rates are Python floats and equal to the last bit, whatever the dtype."""
    for shape, warmup, tokens in product(core_schedules.SHAPES, (0, 100), range(1, 1301, 37)):
        settings: dict[str, Any] = dict(peak=3e-4, shape=shape, warmup_tokens=warmup)
        settings |= dict(total_tokens=1200, final_ratio=0.1, decay_share=0.3)
        core = core_schedules.learning_rate(tokens, **settings)
        assert core == reference_schedules.learning_rate(tokens, **settings)


CHECKS = [
    check_penalty,
    check_uniform_weights,
    check_round,
    check_delayed,
    check_wire,
    check_adamw,
    check_schedules,
]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
def test_both_cores_compute_the_same(
    errors: ErrorTable, check: Callable[[ErrorTable, str], None], dtype: str
) -> None:
    check(errors, dtype)


@pytest.mark.parametrize("name", PURE)
def test_a_fault_in_a_formula_is_noticed(name: str) -> None:
    with mutants.applied(name), pytest.raises(AssertionError):
        for check in CHECKS:
            check(ErrorTable(), "float64")
