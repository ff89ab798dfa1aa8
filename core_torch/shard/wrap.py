"""Wrapping: which parameters form a unit, the piece that is unsharded and synchronised as one.

Pure: reads names, touches no process group. Every parameter belongs to exactly one unit; a
tied embedding and head share theirs.
"""

from typing import NamedTuple

import torch.nn as nn

from core_torch.models.llama import Llama


class UnitPlan(NamedTuple):
    """One unit: its name and the modules whose parameters it holds, in order of their use."""

    name: str
    modules: tuple[str, ...]


def plan_units(model: Llama) -> list[UnitPlan]:
    """Embedding, each block, then final norm with head, in the order of the forward.

    A tied head belongs to the embedding's unit, and the final norm with it, so that the
    unit is gathered once and a sync round reaches it before its first use.
    """
    blocks = [UnitPlan(f"layers.{i}", (f"layers.{i}",)) for i in range(len(model.layers))]
    if model.config.tied:
        return [UnitPlan("embedding", ("tok_embeddings", "norm", "output")), *blocks]
    embedding = UnitPlan("embedding", ("tok_embeddings",))
    return [embedding, *blocks, UnitPlan("head", ("norm", "output"))]


def unit_parameters(model: nn.Module, plan: list[UnitPlan]) -> dict[str, list[str]]:
    """Names of each unit's parameters, in ``named_parameters`` order; tied ones once.

    Raises:
        ValueError: a parameter that no unit or more than one unit holds.
    """
    found: dict[str, list[str]] = {unit.name: [] for unit in plan}
    for name, _ in model.named_parameters():
        owners = [u.name for u in plan if any(name.startswith(m + ".") for m in u.modules)]
        if len(owners) != 1:
            raise ValueError(f"parameter {name} belongs to {len(owners)} units: {owners}")
        found[owners[0]].append(name)
    return found
