"""Which modules belong together: from names, classes or nothing to groups by name. Pure."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn as nn

from core_torch.errors import ConfigError

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
Wrap = Mapping[str, Sequence[str]] | Sequence[str | Sequence[str] | type[nn.Module]] | None
Groups = dict[str, list[str]]  # unit -> names of modules


def groups_of(module: nn.Module, wrap: Wrap) -> Groups:
    """Modules by unit.

    Args:
        module: any model.
        wrap: module names by unit; or module names, lists of module names (one unit each) and
            module classes (a unit for each instance), in any mixture. None: the elements of
            every module list, and each other child.

    Raises:
        ConfigError: a name that is no module.
    """
    return _default_groups(module) if wrap is None else _groups(module, wrap)


def is_inside(param: str, module: str) -> bool:
    """Whether a parameter's name lies below a module's; all lie below the root, ``""``."""
    return not module or param.startswith(module + ".")


def _default_groups(module: nn.Module) -> Groups:
    groups: Groups = {}
    for name, child in module.named_children():
        inner = [name]
        if isinstance(child, LISTS):
            inner = [f"{name}.{key}" for key, _ in child.named_children()]
        groups |= {key: [key] for key in inner}
    return groups


def _groups(module: nn.Module, wrap: Mapping[str, Sequence[str]] | Sequence[Any]) -> Groups:
    known = dict(module.named_modules())
    groups: Groups = {}
    pairs = wrap.items() if isinstance(wrap, Mapping) else ((None, unit) for unit in wrap)
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
