"""``twinshard parity mine``: a user's own torch model beside the reference.

The user's weights are brought into the reference's names and layout; both sides get the same
tokens and the same AdamW; both write a trace, and the traces are compared. Needs JAX.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core_torch.config import ModelConfig
from parity_tests.harness.tolerances import EPS
from parity_tests.instrument import own_module
from parity_tests.instrument.diff import Comparison, compare
from parity_tests.instrument.divergence import first_divergence
from parity_tests.instrument.files import Trace, read_trace
from parity_tests.instrument.guess import explanation
from parity_tests.instrument.names import NameMap, name_modules, name_parameters
from parity_tests.instrument.own_module import OPTIM, Batch, Layout
from parity_tests.instrument.recording import hash_of
from parity_tests.instrument.results import CellResult, cell_result
from parity_tests.instrument.sizes import sizes_of
from parity_tests.instrument.verdict import advise
from parity_tests.instrument.widen import Widening, default_dtype

SHORT = 64  # positions from which a wrong rotary embedding is plain to see
FLOAT32_INSIDE = 1e-5  # relative: from here on it is no rounding of float32
WIDENED = (
    "They were given float64, so that their formulas can be judged; --dtype float32 judges what "
    "they really compute."
)
LEFT = (
    "They round to about 1e-8 whatever the formula; without --as-is they are given float64, and "
    "--dtype float32 judges what they really compute."
)
ADVICE = {
    "init": "The weights changed between being read and the first step: does a module rewrite its "
    "own when it is called?",
    "data": "The module was given other tokens than it was handed: do hooks change its inputs?",
    "forward": "Tokens, weights and all that comes before {unit} agree. Read your {unit} beside "
    "reference_jax/model.py: layout, theta and scaling of the rotary embedding, eps of norms, "
    "scale of scores, mask, which heads share keys and values, order of norm and residual.",
    "backward": "The forward agrees, the derivative of {unit}'s output does not: look for detach, "
    "a backward written by hand, or a loss over other tokens.",
    "grad": "Derivatives of outputs agree and {parameter} gets another gradient: is it used twice, "
    "detached, or changed by a hook?",
    "optim": "Gradients agree, and AdamW is torch's own: does something else write to {parameter}?",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How to run the two."""

    dtype: str = "float64"
    steps: int = 1
    batch: int = 2  # sequences
    sequence: int = SHORT  # positions
    seed: int = 0  # of tokens and of what gains are moved by
    keep_gains: bool = False
    as_is: bool = False  # in float64, leave narrower dtypes that are asked for by name


@dataclass(frozen=True, slots=True)
class Computed:
    """What the user's module is and computed."""

    model: ModelConfig
    rotary: str
    weights: dict[str, Tensor]  # before the first step, under the reference's names
    units: frozenset[str]  # whose outputs were seen
    narrowed: tuple[str, ...]  # parts that asked for a dtype narrower than float64
    batches: list[Batch]  # of all steps
    logits: Tensor  # (B, T, V) of the first


@dataclass(frozen=True, slots=True)
class Found:
    """What came of it."""

    cell: CellResult
    comparison: Comparison
    notes: tuple[str, ...]  # what a reader should know before believing the verdict


def examine(
    build: Callable[[], Any], told: NameMap, folder: Path, settings: Settings, *, name: str
) -> Found:
    """Builds the module, runs it and the reference, and compares.

    Args:
        build: makes the module.
        told: the map of its names.
        folder: for both traces, ``mine`` and ``reference``; must hold none.
        settings: how to run.
        name: of the model, for tables.

    Raises:
        ConfigError: the map and the module do not fit, or the module cannot be run.
    """
    module = compute(build, told, folder / "mine", settings, name=name)
    record_reference(folder / "reference", module.model, module.weights, module.batches)
    comparison = compare(read_trace(folder / "mine"), read_trace(folder / "reference"))
    notes = notes_of(comparison.mine, module, settings)
    advice = advice_of(comparison, module, settings)
    cell = cell_result(comparison, model=name, advice=advice, note=" ".join(notes))
    return Found(cell, comparison, tuple(notes))


def compute(
    build: Callable[[], Any], told: NameMap, folder: Path, settings: Settings, *, name: str
) -> Computed:
    """Builds the module and runs it; arguments and errors as those of ``examine``."""
    is_wide = settings.dtype == "float64" and not settings.as_is
    dtype = getattr(torch, settings.dtype)
    widening = Widening(is_active=is_wide)
    with widening, default_dtype(dtype if is_wide else torch.get_default_dtype()):
        module = own_module.built(build)
    module.to(dtype)
    model = sizes_of(told, getattr(module, "config", None))
    names = name_parameters(told, *own_module.shapes_of(module), model)
    modules = name_modules(told, [x for x, _ in module.named_modules() if x], model)
    if not settings.keep_gains:
        own_module.move_gains(module, names, seed=settings.seed)
    layout = Layout(model, told.rotary)
    weights = own_module.weights_of(module, names, layout)
    batches = own_module.tokens_for(
        module,
        model.vocabulary,
        (settings.batch, settings.sequence),
        steps=settings.steps,
        seed=settings.seed,
    )
    logits = own_module.record(
        module,
        folder,
        batches,
        names=names,
        modules=modules,
        layout=layout,
        widening=widening,
        meta=meta_of(model, weights, settings, name),
    )
    return Computed(
        model=model,
        rotary=told.rotary,
        weights=weights,
        batches=batches,
        logits=logits,
        units=frozenset(modules.values()) | {"head"},
        narrowed=tuple(widening.where) if settings.dtype == "float64" else (),
    )


def meta_of(
    model: ModelConfig, weights: Mapping[str, Tensor], settings: Settings, name: str
) -> dict[str, Any]:
    """What the module's trace says besides what the taps know."""
    from reference_jax.model import shapes

    order = shapes(reference_model(model))
    return {
        "weights_hash": hash_of({key: weights[key].numpy() for key in order}),
        "dtype": settings.dtype,
        "model": {
            "name": name,
            "layers": model.layers,
            "width": max(model.vocabulary, model.hidden, settings.batch * settings.sequence),
        },
    }


def reference_model(model: ModelConfig) -> Any:
    """The same sizes as the reference configures them."""
    from reference_jax.model import LlamaConfig

    fields = ("vocabulary", "dim", "layers", "heads", "kv_heads", "head_dim", "hidden")
    same = {key: getattr(model, key) for key in (*fields, "norm_eps", "rope_theta", "tied")}
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_context")
    rope = {f"rope_{key}": getattr(model.rope_scaling, key) for key in keys}
    return LlamaConfig(**same, **rope)


def record_reference(
    folder: Path, model: ModelConfig, weights: Mapping[str, Tensor], batches: list[Batch]
) -> None:
    """Runs the reference on one device and writes its trace."""
    from reference_jax import trace
    from reference_jax.fsdp import Inner
    from reference_jax.methods import TrainConfig

    inner: dict[str, Any] = {key: x for key, x in OPTIM.items() if key != "lr"}
    config = TrainConfig(
        model=reference_model(model),
        method="synchronous",
        replicas=1,
        shards=1,
        steps=len(batches),
        inner=Inner(**inner, max_norm=0.0),
        lr=OPTIM["lr"],
        shape="constant",
    )

    def batch(step: int) -> Batch:
        inputs, targets = batches[step]
        return inputs[None, None], targets[None, None]

    trace.write(folder, config, batch, params={key: x.numpy() for key, x in weights.items()})


def notes_of(mine: Trace, module: Computed, settings: Settings) -> list[str]:
    """What the comparison could not see, or had to change to see anything."""
    notes = []
    if module.narrowed:
        parts = ", ".join(module.narrowed)
        notes.append(
            f"These ask for a dtype narrower than float64 by name: {parts}. "
            + (LEFT if settings.as_is else WIDENED)
        )
    still = [e.key.name for e in mine.events if e.key.phase == "grad" and e.sum2 == 0]
    if still:
        shown = ", ".join(dict.fromkeys(still))
        notes.append(f"The gradient is 0 throughout, so the use of these is not tested: {shown}.")
    gains = [x for name, x in module.weights.items() if name.endswith("norm.weight")]
    if all(bool((x == 1).all()) for x in gains):
        notes.append("All gains of norms are 1, so one that is left out cannot be seen.")
    if settings.sequence < SHORT:
        notes.append(f"Below {SHORT} positions a wrong rotary embedding can pass for rounding.")
    units = ("embedding", *(f"layers.{i}" for i in range(module.model.layers)))
    if unseen := [unit for unit in units if unit not in module.units]:
        notes.append(f"[modules] names none for {', '.join(unseen)}: only what follows was seen.")
    return notes


def advice_of(comparison: Comparison, module: Computed, settings: Settings) -> str:
    """What to try next; of a first forward that differs, a setting with which it would not."""
    first = first_divergence(comparison)
    if first is None or (key := first.found.key).phase not in ADVICE:
        return advise(comparison, first)
    if settings.as_is and module.narrowed and first.found.ulps * EPS["float64"] < FLOAT32_INSIDE:
        return (
            "This is how far float32 is from float64, and parts of the module compute in float32 "
            "by name: leave out --as-is to judge its formulas, or take --dtype float32."
        )
    if key.phase == "forward" and key.number == 1:
        inputs = torch.from_numpy(module.batches[0][0])
        told = explanation(module.model, module.rotary, module.weights, inputs, module.logits)
        if told:
            return f"With {told} they agree: correct the map, or your module."
    unit, parameter = key.unit or "the model", key.name.partition("/")[0]
    return ADVICE[key.phase].format(unit=unit, parameter=parameter)
