"""Activation checkpointing: blocks whose activations are computed again in the backward.

Full keeps a block's input only. Selective keeps also what is dear to compute and small to
keep: the results of attention, and of every second matrix product.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.nn as nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default}
_ATTENTION = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
}


def recompute_activations(
    module: nn.Module, kinds: Sequence[type[nn.Module]], mode: Literal["selective", "full"]
) -> None:
    """Makes every module of ``kinds`` in ``module`` recompute its forward, in place.

    Names of modules and parameters stay as they are. Call it before sharding.

    Args:
        module: the model.
        kinds: classes of the blocks.
        mode: what is kept; see above.
    """
    for child in list(module.modules()):
        if isinstance(child, tuple(kinds)):
            child.__class__ = _recomputing(type(child), mode)  # type: ignore[arg-type]


@cache
def _recomputing(base: type[nn.Module], mode: str) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        again = partial(base.forward, self)
        return checkpoint(again, *args, use_reentrant=False, **_contexts(mode), **kwargs)

    return type(f"Recomputing{base.__name__}", (base,), {"forward": forward})


def _contexts(mode: str) -> dict[str, Any]:
    return {} if mode == "full" else {"context_fn": _selective_contexts}


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy())


def _policy() -> Callable[..., CheckpointPolicy]:
    """A fresh policy, because it counts the products of one block."""
    products = {"forward": 0, "recompute": 0}

    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in _PRODUCTS:
            phase = "recompute" if ctx.is_recompute else "forward"
            products[phase] += 1
            keep = products[phase] % 2 == 1
        else:
            keep = operator in _ATTENTION
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
