"""Wrapping: which parameters form a unit, the piece that is unsharded and synchronised as one.

Pure: reads names, touches no process group. Every parameter belongs to exactly one unit; a
tied embedding and head share theirs.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.nn as nn

from core_torch.errors import ConfigError
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


Units = Mapping[str, Sequence[str]] | Sequence[str | Sequence[str] | type[nn.Module]] | None


def units_of(module: nn.Module, units: Units = None) -> dict[str, list[str]]:
    """Names of each unit's parameters, in order of ``named_parameters``; tied ones once.

    Args:
        module: any model.
        units: module names by unit; or module names, lists of module names (one unit each) and
            module classes (a unit for each instance), in any mixture; what they leave over
            forms a unit of each child of the root. None: the elements of every module list, and
            each other child.

    Raises:
        ConfigError: a name that is no module, or a parameter in two units.
    """
    groups = _default_groups(module) if units is None else _groups(module, units)
    found: dict[str, list[str]] = {name: [] for name in groups}
    for param, _ in module.named_parameters():
        owners = [n for n, held in groups.items() if any(_is_inside(param, m) for m in held)]
        if len(owners) > 1:
            raise ConfigError(f"parameter {param} is in {len(owners)} units: {', '.join(owners)}")
        rest = param.partition(".")[0] if "." in param else "root"
        found.setdefault(owners[0] if owners else rest, []).append(param)
    return {name: held for name, held in found.items() if held}


def _is_inside(param: str, module: str) -> bool:
    return not module or param.startswith(module + ".")


def _default_groups(module: nn.Module) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name, child in module.named_children():
        is_list = isinstance(child, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        inner = [f"{name}.{key}" for key, _ in child.named_children()] if is_list else [name]
        groups |= {key: [key] for key in inner}
    return groups


def _groups(
    module: nn.Module, units: Mapping[str, Sequence[str]] | Sequence[Any]
) -> dict[str, list[str]]:
    known = dict(module.named_modules())
    groups: dict[str, list[str]] = {}
    pairs = units.items() if isinstance(units, Mapping) else ((None, unit) for unit in units)
    for unit_name, unit in pairs:
        if isinstance(unit, type):
            groups |= {name: [name] for name, m in known.items() if isinstance(m, unit)}
            continue
        held = [unit] if isinstance(unit, str) else list(unit)
        for name in held:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"units: no module is called {name!r}{hint}")
        groups[unit_name or held[0]] = held
    return groups
