"""What ``--model.build`` may find: modules that can be trained, and some that cannot."""

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from core_torch.config import ModelConfig


class Bag(nn.Module):
    """Table, a list of layers, head."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.steps = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        x_BTD = self.table(ids_BT)
        for step in self.steps:
            x_BTD = x_BTD + step(x_BTD).tanh()
        logits_BTV: Tensor = self.head(x_BTD)
        return logits_BTV if documents_BT is None else logits_BTV + documents_BT[..., None]


def build(config: ModelConfig, vocabulary: int) -> nn.Module:
    """A module, whose units follow from its children."""
    return Bag(vocabulary, config.dim)


def wrapped(config: ModelConfig, vocabulary: int) -> Any:
    """A module and its units, by names and classes."""
    return Bag(vocabulary, config.dim), [["table", "head"], nn.Linear]


def named(config: ModelConfig, vocabulary: int) -> Any:
    """A module and its units by name."""
    return Bag(vocabulary, config.dim), {"ends": ["table", "head"], "middle": ["steps"]}


def forgets(config: ModelConfig, vocabulary: int) -> Any:
    """Units that leave a parameter out."""
    return Bag(vocabulary, config.dim), ["table", "steps"]


def mistypes(config: ModelConfig, vocabulary: int) -> Any:
    """Units with a name that no module has."""
    return Bag(vocabulary, config.dim), ["table", "stepz", "head"]


def shares(config: ModelConfig, vocabulary: int) -> nn.Module:
    """A weight of two units."""
    module = Bag(vocabulary, config.dim)
    module.head.weight = module.table.weight
    return module


def freezes(config: ModelConfig, vocabulary: int) -> nn.Module:
    """A parameter without gradient."""
    module = Bag(vocabulary, config.dim)
    module.table.weight.requires_grad_(False)
    return module


def counts(config: ModelConfig, vocabulary: int) -> nn.Module:
    """A buffer that is part of the state."""
    module = Bag(vocabulary, config.dim)
    module.register_buffer("seen", torch.zeros(()))
    return module


def drops(config: ModelConfig, vocabulary: int) -> nn.Module:
    """A layer that draws at random."""
    module = Bag(vocabulary, config.dim)
    module.steps.append(nn.Dropout(0.1))
    return module


def nothing(config: ModelConfig, vocabulary: int) -> nn.Module:
    """A module without parameters."""
    return nn.Identity()


def text(config: ModelConfig, vocabulary: int) -> str:
    """No module."""
    return "a model"


NO_FUNCTION = 3
