"""Somebody's own module, as ``--model.build`` gets it: nothing here knows of the project's models.

Its layers are called so that no name of the project's fits, one weight is shared by two modules,
and one parameter is a vector. Imports no jax.
"""

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor


class Mixer(nn.Module):
    """Mean of all earlier positions, then a two-layer network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.into = nn.Linear(width, 2 * width)
        self.out = nn.Linear(2 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        count_T1 = torch.arange(1, x_BTD.shape[1] + 1, dtype=x_BTD.dtype)[:, None]
        mean_BTD = x_BTD.cumsum(dim=1) / count_T1
        return x_BTD + self.out(torch.tanh(self.into(mean_BTD * self.scale)))


class Mean(nn.Module):
    """A language model without attention."""

    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.mixers = nn.ModuleList(Mixer(width) for _ in range(depth))
        self.words = nn.Linear(width, vocabulary, bias=False)
        self.words.weight = self.table.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.table(ids_BT)
        for mixer in self.mixers:
            x_BTD = mixer(x_BTD)
        logits_BTV: Tensor = self.words(x_BTD)
        return logits_BTV


def build(config: Any, vocabulary: int) -> Any:
    """The module, and its units: the shared weight's two modules are one."""
    module = Mean(vocabulary, config.dim, config.layers)
    mixers = {f"mixer {i}": [f"mixers.{i}"] for i in range(config.layers)}
    return module, {"words": ["table", "words"], **mixers}
