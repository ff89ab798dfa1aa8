"""What training asks of a sharded model, whichever way it was sharded."""

from dataclasses import dataclass

import torch.nn as nn


@dataclass(slots=True)
class Sharded:
    """A model sharded over the shard axis, and the switches of its gradient reduction."""

    module: nn.Module
    units: dict[str, list[str]]  # unit -> parameter names, in order of the forward
    mean_over_replicas: bool = False  # synchronous training
    lookahead: int = 0  # units that are gathered before their turn in a forward

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Call before each forward of an inner step. The replica axis is reduced once a step."""

    def finish_gradients(self) -> None:
        """Call after the last backward of an inner step, before gradients are read."""
