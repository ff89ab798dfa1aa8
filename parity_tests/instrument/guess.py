"""Which single setting would explain what a user's model computes: each is tried.

The core stands in for the reference here: it computes the same, and needs no compiling.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from core_torch.config import ModelConfig, RopeScaling
from core_torch.models import Llama
from parity_tests.harness import tolerances
from parity_tests.instrument.own_module import halves_of_pairs, pairs_of_halves
from parity_tests.instrument.widen import default_dtype

EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12)
THETAS = (1e4, 5e5, 1e6)
Weights = Mapping[str, Tensor]


def explanation(
    model: ModelConfig, rotary: str, weights: Weights, inputs_BT: Tensor, logits_BTV: Tensor
) -> str:
    """The setting with which the model computes these logits, or nothing.

    Args:
        model: sizes, as the map tells them.
        rotary: layout, as the map tells it.
        weights: under the model's names, in the layout of pairs as that says.
        inputs_BT: tokens.
        logits_BTV: what the user's model made of them.
    """
    dtype = str(logits_BTV.dtype).removeprefix("torch.")
    width = max(model.vocabulary, model.hidden)
    allowed = tolerances.model(dtype, layers=model.layers, width=width)
    limit = allowed.value * tolerances.EPS[dtype]
    for told, changed, held in _candidates(model, rotary, weights):
        if changed == model and held is weights:
            continue  # what the map says already
        gap = _logits(changed, held, inputs_BT) - logits_BTV
        if float(gap.norm()) <= limit * float(logits_BTV.norm()):
            return told
    return ""


def _candidates(
    model: ModelConfig, rotary: str, weights: Weights
) -> Iterator[tuple[str, ModelConfig, Weights]]:
    """(what is changed, sizes, weights) of every model that is tried."""
    turn, other = (halves_of_pairs, "pairs") if rotary == "halves" else (pairs_of_halves, "halves")
    yield f'[layout] rotary = "{other}"', model, _turned(model, weights, turn)
    for eps in EPSILONS:
        yield f"norm_eps = {eps:g}", replace(model, norm_eps=eps), weights
    for theta in THETAS:
        yield f"rope_theta = {theta:g}", replace(model, rope_theta=theta), weights
    if model.rope_scaling.factor != 1:
        yield "rope_scaling.factor = 1", replace(model, rope_scaling=RopeScaling()), weights


def _turned(model: ModelConfig, weights: Weights, turn: Callable[[Tensor, int], Tensor]) -> Weights:
    heads = {"wq": model.heads, "wk": model.kv_heads}
    found = dict(weights)
    for name, x in weights.items():
        which = name.split(".")[-2]
        if which in heads:
            found[name] = turn(x, heads[which])
    return found


@torch.no_grad()
def _logits(model: ModelConfig, weights: Weights, inputs_BT: Tensor) -> Tensor:
    own = replace(model, context=max(model.context, inputs_BT.shape[1]))
    dtype = next(iter(weights.values())).dtype
    with default_dtype(dtype):  # of the rotary tables
        module = Llama(own, model.vocabulary)
    shared = {"output.weight": weights["tok_embeddings.weight"]} if model.tied else {}
    module.load_state_dict(dict(weights) | shared)
    found = module(inputs_BT)
    return found if math.isfinite(float(found.norm())) else torch.full_like(found, math.inf)
