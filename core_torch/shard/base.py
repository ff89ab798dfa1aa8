"""What training asks of a sharded model, whichever way it was sharded."""

from dataclasses import dataclass

import torch.nn as nn
from torch import Tensor


@dataclass(slots=True)
class Sharded:
    """A model sharded over the shard axis, and the switches of its gradient reduction."""

    module: nn.Module
    units: dict[str, list[str]]  # unit -> parameter names, in order of the forward
    mean_over_replicas: bool = False  # synchronous training
    lookahead: int = 0  # units that are gathered before their turn in a forward
    elsewhere: tuple[str, ...] = ()  # parameters on other stages of a pipeline

    def logits(self, inputs_BT: Tensor, **known: Tensor) -> Tensor | None:
        """(B, T, V) of a forward, in which all ranks of a replica take part; None on ranks
        without the last stage of a pipeline. ``known``: ``documents_BT``, if there are.
        """
        logits_BTV: Tensor = self.module(inputs_BT, **known)
        return logits_BTV

    def free(self) -> None:
        """Call after forwards without a backward: they may have kept what they gathered."""

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Call before each forward of an inner step. The replica axis is reduced once a step."""

    def finish_gradients(self) -> None:
        """Call after the last backward of an inner step, before gradients are read."""
