"""Somebody else's ``nn.Module`` as a model: found by name, built, checked, and wrapped.

    def build(config: ModelConfig, vocabulary: int) -> nn.Module: ...

or a pair of the module and its units, see ``units.groups_of``. ``pkg:build`` comes from the command
line or from Python and never from a file, for it is code that runs. Parameters keep their names
behind ``own.``, which is how checkpoints and exports know them.
"""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from core_torch.config import ModelConfig
from core_torch.errors import ConfigError
from core_torch.models.decoder import Model, Units
from core_torch.models.loss import summed_loss
from core_torch.models.units import LISTS, Groups, groups_of, is_inside

PREFIX = "own."
DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


class Own(Model):
    """A module that takes (B, T) ids and gives (B, T, V) logits.

    Args:
        config: what the builder got.
        vocabulary: token ids.
        module: whose whole forward is called; with ``documents_BT=`` where data are packed so.
        units: its units, by names of its modules.
    """

    def __init__(
        self, config: ModelConfig, vocabulary: int, module: nn.Module, units: Groups
    ) -> None:
        super().__init__(config, vocabulary)
        self.own = module
        self._units = {unit: tuple(PREFIX + m for m in held) for unit, held in units.items()}
        listed = (m for m in module.modules() if isinstance(m, LISTS))
        self._blocks = tuple({type(child) for one in listed for child in one.children()})

    @property
    def units(self) -> Units:
        """See ``Model``."""
        return self._units

    @property
    def blocks(self) -> tuple[type[nn.Module], ...]:
        """Classes of the elements of its module lists."""
        return self._blocks

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        *,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """See ``Decoder.forward``."""
        known = {} if documents_BT is None else {"documents_BT": documents_BT}
        logits_BTV: Tensor = self.own(tokens_BT, **known)
        return logits_BTV if targets_BT is None else summed_loss(logits_BTV, targets_BT)


def build_own(config: ModelConfig, vocabulary: int, *, seed: int) -> Own:
    """Calls ``config.build`` with torch's generator seeded, so that all ranks get equal weights.

    Raises:
        ConfigError: no such function; it gave something else, or a module that cannot be cut into
            units or resumed exactly.
    """
    function = find(config.build)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = function(config, vocabulary)
    module, wrap = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        told = f"{config.build} gave {type(made).__name__}, not a torch.nn.Module"
        raise ConfigError(told, next="return a module, or a module and its units")
    _check(module)
    units = groups_of(module, wrap)
    _check_units(module, units)
    return Own(config, vocabulary, module, units)


def find(spec: str) -> Callable[[ModelConfig, int], Any]:
    """The function that ``pkg.module:name`` means, from the current folder or the path.

    Raises:
        ConfigError: there is none.
    """
    name, _, attribute = spec.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"model.build: no module named {error.name!r}",
            likely="a mistyped name, or a folder that is neither here nor installed",
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"model.build: {name} has no function {attribute!r}")
    found: Callable[[ModelConfig, int], Any] = function
    return found


def _check(module: nn.Module) -> None:
    """Checks that parameters are all that a checkpoint has to hold."""
    params = dict(module.named_parameters(remove_duplicate=False))
    if not params:
        raise ConfigError("model.build: the module has no parameters")
    frozen = [name for name, p in params.items() if not p.requires_grad]
    if frozen:
        raise ConfigError(
            f"model.build: {frozen[0]} is frozen, and every parameter is trained",
            next="requires_grad_(True), or a buffer that is not persistent",
        )
    kept = [name for name in module.state_dict() if name not in params]
    if kept:
        raise ConfigError(
            f"model.build: {kept[0]} is a buffer of the state, which no checkpoint would hold",
            next="register_buffer(..., persistent=False) and fill it when building",
        )
    drops = [n for n, m in module.named_modules() if isinstance(m, DROPOUTS) and m.p > 0]
    if drops:
        raise ConfigError(
            f"model.build: {drops[0]} draws at random in the forward, which no resume repeats",
            next="p=0 in its dropout",
        )


def _check_units(module: nn.Module, units: Groups) -> None:
    """Checks that every parameter, by each of its names, lies in one and the same unit."""
    seen: dict[int, str] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        owners = [unit for unit, held in units.items() if any(is_inside(name, m) for m in held)]
        if len(owners) != 1:
            raise ConfigError(
                f"model.build: parameter {name} is in {len(owners)} units",
                next="return the module and a dict of unit -> names of its modules, each once",
            )
        if seen.setdefault(id(p), owners[0]) != owners[0]:
            raise ConfigError(
                f"model.build: {name} is shared by the units {seen[id(p)]} and {owners[0]}",
                next="name both modules in one unit",
            )
