"""What both kinds of taps write: parameters, batches, what units compute, optimizer steps.

Tensors are written as the part of this rank: of a parameter its rows; of anything that has the
sequences of a batch in its first dimension, the sequences of this rank's batch, as a part of
those of all shards.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from core_torch.shard.access import is_sharded, local_shard, rows_of_shard
from core_torch.trace import Key, Part, Tracer


class Named(NamedTuple):
    """A parameter under the name and in the unit that the trace gives it."""

    unit: str
    name: str
    param: Tensor


@dataclass(frozen=True, slots=True)
class Shards:
    """Over how many ranks a replica is cut, and which one this is."""

    count: int
    index: int


@dataclass(slots=True)
class Recorder:
    """Writes what a replica computes.

    Args:
        tracer: of this rank.
        replica: its index.
        shards: of the replica.
    """

    tracer: Tracer
    replica: int
    shards: Shards
    step: int = 0  # under way, or the last one

    def part(self, x: Tensor, like: Tensor) -> Part:
        """This rank's part of a tensor that is cut as the parameter ``like`` is.

        Args:
            x: this rank's rows, or a DTensor.
            like: the parameter. One that every rank holds whole is written by the first.
        """
        local, shape = local_shard(x), tuple(like.shape)
        if is_sharded(like):
            rows = rows_of_shard(shape[0], self.shards.count, self.shards.index)
            assert local.shape == (rows.rows, *shape[1:]), "rows are not those of torch.chunk"
            return Part(local, shape, rows.start * like.shape[1:].numel())
        if self.shards.index > 0:
            return Part(local.reshape(-1)[:0], shape, local.numel())
        return Part(local, shape)

    def of_parameter(self, phase: str, named: Named, suffix: str, x: Tensor) -> None:
        """Writes ``x`` of the inner step as that of a parameter; see ``part``."""
        key = Key(self.step, phase, named.unit, named.name + suffix, self.replica)
        self.tracer.tensor(key, self.part(x, named.param))

    def of_batch(self, phase: str, unit: str | None, name: str, x: Tensor) -> None:
        """Writes ``x`` (sequences of this rank, ...) of the inner step."""
        shape = (x.shape[0] * self.shards.count, *x.shape[1:])
        part = Part(x, shape, x.numel() * self.shards.index)
        self.tracer.tensor(Key(self.step, phase, unit, name, self.replica), part)

    def of_replica(self, phase: str, name: str, **value: Any) -> None:
        """Writes plain numbers of the inner step that are true for the whole replica."""
        if self.shards.index == 0:
            self.tracer.value(Key(self.step, phase, None, name, self.replica), value)

    def output(self, unit: str, k: int, x: Tensor) -> None:
        """Writes what a unit computed from micro-batch k, and in the backward its gradient.

        That is of the mean loss over the replica's shards, while this rank's backward begins at
        its own mean.
        """
        self.of_batch("forward", unit, f"output.{k}", x)

        def backward(gradient: Tensor) -> None:
            self.of_batch("backward", unit, f"gradient.{k}", gradient / self.shards.count)

        if x.requires_grad:
            x.register_hook(backward)

    def watch(
        self,
        optimizer: Optimizer,
        params: Iterable[Named],
        before: Callable[[], None],
        after: Callable[[], None],
        held: Callable[[Named, Tensor], Tensor] = lambda named, x: local_shard(x),
    ) -> list[RemovableHandle]:
        """Writes what each step of ``optimizer`` adds to parameters, and its state after it.

        Args:
            optimizer: any of torch, or one like them.
            params: of the trace.
            before: called before a step.
            after: called when all of it is written.
            held: what of a parameter or something like it is written.
        """
        begun: dict[str, Tensor] = {}
        watched = list(params)

        def pre(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            before()
            begun.update((n.name, held(n, n.param.detach()).clone()) for n in watched)

        @torch.no_grad()
        def post(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            for named in watched:
                moved = held(named, named.param.detach()) - begun.pop(named.name)
                self.of_parameter("optim", named, "/update", moved)
                for key, value in moments(optimizer.state.get(named.param, {}), named).items():
                    self.of_parameter("optim", named, f"/{key}", held(named, value))
            after()

        return [
            optimizer.register_step_pre_hook(pre),
            optimizer.register_step_post_hook(post),
        ]


def moments(state: Mapping[str, Any], named: Named) -> dict[str, Tensor]:
    """What an optimizer keeps in the shape of the parameter."""
    shape = named.param.shape
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == shape
    }
