"""Wrapping: which parameters form a unit, the piece that is unsharded and synchronised as one.

Pure: reads names, touches no process group. Every parameter belongs to exactly one unit; a
tied embedding and head share theirs.
"""

from typing import NamedTuple

import torch.nn as nn

from core_torch.errors import ConfigError
from core_torch.models.decoder import Model
from core_torch.models.units import Wrap, groups_of, is_inside

Units = Wrap


class UnitPlan(NamedTuple):
    """One unit: its name and the modules whose parameters it holds, in order of their use."""

    name: str
    modules: tuple[str, ...]


def plan_units(model: Model) -> list[UnitPlan]:
    """The units of a model, in the order of the forward."""
    return [UnitPlan(name, held) for name, held in model.units.items()]


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


def units_of(module: nn.Module, units: Units = None) -> dict[str, list[str]]:
    """Names of each unit's parameters, in order of ``named_parameters``; tied ones once.

    Args:
        module: any model.
        units: see ``groups_of``; what they leave over forms a unit of each child of the root.

    Raises:
        ConfigError: a name that is no module, or a parameter in two units.
    """
    groups = groups_of(module, units)
    found: dict[str, list[str]] = {name: [] for name in groups}
    for param, _ in module.named_parameters():
        owners = [n for n, held in groups.items() if any(is_inside(param, m) for m in held)]
        if len(owners) > 1:
            raise ConfigError(f"parameter {param} is in {len(owners)} units: {', '.join(owners)}")
        rest = param.partition(".")[0] if "." in param else "root"
        found.setdefault(owners[0] if owners else rest, []).append(param)
    return {name: held for name, held in found.items() if held}
