"""What to try next: a sentence or two, from where a comparison parted and in which cells."""

from collections.abc import Callable, Sequence
from typing import Protocol

from parity_tests.instrument.diff import Comparison
from parity_tests.instrument.divergence import Divergence

ALL_NEAR = "Nothing to do: every event is within its tolerance."
ADVICE = {  # where the first divergence is: which function to read, and where it is explained
    "init": "The weights differ before the first step. Copy them from one file to both sides, "
    "and compare names and layout ([out, in]).",
    "data": "The tokens differ. Read batch_for in core_torch/data/batches.py: draws are a function "
    "of seed, step, replica and shard.",
    "forward": "Inputs and weights agree, so one operation of {unit} is at fault. Read it in "
    "core_torch/models/llama.py beside reference_jax/model.py: eps, mask, scale and layout of the "
    "rotary embedding, dtype of softmax.",
    "backward": "The forward agrees and the derivative of {unit}'s output does not. Read "
    "token_loss in core_torch/models/loss.py (mean over which tokens?) and what is cast or "
    "recomputed in {unit}.",
    "grad": "Derivatives of outputs agree and {parameter} gets another gradient: look at how it is "
    "averaged (shard axis, replica axis, micro-batches). Read core_torch/shard and "
    "docs/architecture.md.",
    "clip": "Gradients agree, their norm or factor does not. Read apply_gradients in "
    "core_torch/train.py: the norm goes over all parameters and shards of one replica.",
    "optim": "Gradients and clip agree. Read adamw_update in core_torch/adamw.py (eps, bias "
    "correction, which tensors decay) and learning_rate in core_torch/schedules.py.",
    "sync.delta": "Inner steps agree, the pseudo-gradient does not: the anchor was taken at "
    "another step, or not moved by the last round. Read core_torch/sync/sync_round.py and "
    "docs/algorithms.",
    "sync.vote": "Pseudo-gradients agree, the verdict on them does not. Read judge and "
    "mixing_weights in core_torch/sync/penalty.py; a norm must cover all shards of a unit.",
    "sync.merge": "Votes agree, the weighted sum does not. Read weigh in "
    "core_torch/sync/penalty.py and start in core_torch/sync/sync_round.py: over which replicas, "
    "with which wire format.",
    "sync.clip": "The sum agrees, its norm, clip factor or gap does not. Read clip_coefficient in "
    "core_torch/sync/penalty.py and staleness_gap in core_torch/sync/outer.py.",
    "sync.outer": "The clipped sum agrees, the outer step does not. Read nesterov_step and "
    "momentum_step in core_torch/sync/outer.py: sign, learning rate, momentum.",
    "sync.params": "The anchor agrees, what replicas took from it does not. Read finish in "
    "core_torch/sync/sync_round.py and mix in core_torch/sync/outer.py.",
    "sync.end": "The round agrees, what it left for the next does not. Read update_stats in "
    "core_torch/sync/penalty.py: a forced round leaves statistics alone.",
}
MISSING = (
    "One side has no such event: it stopped earlier, met at another step, or taps less than its "
    "meta.json says. Compare the event logs and the configurations."
)
NON_FINITE = "One side has a NaN or infinity that the other lacks: look at what divides or masks."
CAST = "The dtypes differ here: look for a cast."
NEAR_TOLERANCE = (
    "It grew slowly, no single event stands out: look for a sum in a narrower dtype, or a "
    "tolerance whose model does not hold here, before you look for a wrong formula."
)
SLOW = 30.0  # times what came before; a wrong formula is thousands of times in float64


class Cell(Protocol):
    """What ``advise_cells`` needs of a result."""

    @property
    def method(self) -> str: ...
    @property
    def mesh(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def core(self) -> str: ...
    @property
    def ok(self) -> bool: ...


def advise(comparison: Comparison, divergence: Divergence | None) -> str:
    """For one comparison."""
    if divergence is None:
        return ALL_NEAR
    found = divergence.found
    told = "".join(f"Note that {note}. " for note in comparison.notes)
    if found.mine is None or found.theirs is None:
        return told + MISSING
    if found.mine.dtype != found.theirs.dtype and found.theirs.dtype.startswith(("float", "bf")):
        told += f"{CAST} "
    if found.mine.bad != found.theirs.bad:
        return told + NON_FINITE
    if divergence.before > 0 and divergence.amplification < SLOW and found.share < SLOW:
        return told + NEAR_TOLERANCE
    unit = found.key.unit or "the model"
    parameter = found.key.name.partition("/")[0]
    usual = "Read what this tap records on both sides."
    return told + ADVICE.get(found.key.phase, usual).format(unit=unit, parameter=parameter)


PATTERNS: tuple[tuple[str, Callable[[Cell], str], Callable[[set[str]], str]], ...] = (
    (
        "dtype",
        lambda cell: cell.dtype,
        lambda dtypes: (
            "Formulas agree in wider dtypes: look for a cast, or a sum that is not in float32."
            if "float64" not in dtypes
            else "Only float64 differs: something is computed in float32 whatever the dtype."
        ),
    ),
    (
        "mesh",
        lambda cell: cell.mesh,
        lambda meshes: (
            "Look at the scope of a reduction: shard axis, replica axis, or a norm of one shard."
        ),
    ),
    (
        "core",
        lambda cell: cell.core,
        lambda cores: "The algorithm is right elsewhere: look at how this core shards or compiles.",
    ),
    (
        "method",
        lambda cell: cell.method,
        lambda methods: "Inner steps are right: look at the rounds of this method.",
    ),
    (
        "model",
        lambda cell: cell.model,
        lambda models: "Look at what only this model has: odd sizes, tied weights, grouped heads.",
    ),
)


def advise_cells(cells: Sequence[Cell]) -> str:
    """For a matrix: what the cells that differ have in common and the others lack."""
    failed, passed = [c for c in cells if not c.ok], [c for c in cells if c.ok]
    if not failed:
        return ALL_NEAR
    if not passed:
        return (
            "Every cell differs: begin with synchronous, 1x1, float64, tiny, and its first "
            "divergence."
        )
    told = []
    for name, value_of, advice in PATTERNS:
        values = {value_of(cell) for cell in failed}
        if len(values) < 3 and not values & {value_of(cell) for cell in passed}:
            told.append(f"Only {name} {' and '.join(sorted(values))} differs. {advice(values)}")
    first = "The cells that differ have nothing in common: begin with the first in the table."
    return " ".join(told[:2]) or first
