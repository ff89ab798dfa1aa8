"""Rounds inside a forward: the one file that registers hooks.

In a forward that carries a round, unit u's exchange is completed just before u is unsharded,
while later ones are on their way behind the compute of earlier units:

    exchange   |- 0 -|- 1 -|- 2 -|- 3 -|
    compute          |..0..|..1..|..2..|..3..|

Eager models get forward pre-hooks, which only call the engine's verbs; a compiled graph has the
same verbs as nodes (shard/exchange.py). A forward carries a round only if it is a training one:
the module is in training mode and gradients are on. So evaluation does not, and activations
that are computed again in the backward find the round done. The gradient is that of the loss at
the anchor, and the inner optimizer starts from it. (R5, R6)
"""

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from core_torch.collectives import Fence
from core_torch.shard.base import Sharded
from core_torch.shard.exchange import Exchange
from core_torch.shard.fsdp2 import Fsdp2
from core_torch.shard.model import Simple
from core_torch.sync.coded import code_bytes
from core_torch.sync.engine import LocalSGD


def hook_forward(
    sync: LocalSGD, module: nn.Module, *, lookahead: int = 0, fence: Fence | None = None
) -> list[RemovableHandle]:
    """Lets ``sync`` perform its rounds inside the forwards of an eager ``module``.

    Args:
        sync: with ``rules.layerwise``.
        module: sharded; hold no other layer-wise engine.
        lookahead: units that the sharding gathers before their turn (FSDP2's explicit forward
            prefetch): their round must be complete when the one that prefetches begins.
        fence: on CUDA makes FSDP2's gathers wait for parameters that a round has written.

    Returns:
        Handles that remove the hooks.
    """
    last = len(sync.units) - 1
    handles = []
    for child, u in _places(sync, module).items():
        until = min(u + lookahead, last)

        def before(child: nn.Module, args: Any, until: int = until) -> None:
            if child.training and torch.is_grad_enabled():
                sync.begin_forward()
                sync.reach(until)
                if fence is not None:
                    fence.record()

        handles.append(child.register_forward_pre_hook(before, prepend=True))

    def after(root: nn.Module, args: Any, result: Any) -> None:
        if root.training and torch.is_grad_enabled():
            sync.end_forward()

    handles.append(module.register_forward_hook(after, always_call=False))
    return handles


def _places(sync: LocalSGD, module: nn.Module) -> dict[nn.Module, int]:
    """The modules whose forward first needs a unit, and the last unit that each needs.

    A parameter is unsharded by the module that holds it, or by the FSDP2 module around that one.
    """
    unit_of = {id(p): u for u, unit in enumerate(sync.units) for p in unit.params}
    places: dict[nn.Module, int] = {}

    def visit(child: nn.Module, around: nn.Module | None) -> None:
        around = child if isinstance(child, FSDPModule) else around
        needed = [unit_of[id(p)] for p in child.parameters(recurse=False) if id(p) in unit_of]
        for place in (child, around):
            if needed and place is not None:
                places[place] = max(*needed, places.get(place, 0))
        for inner in child.children():
            visit(inner, around)

    visit(module, None)
    return places


def exchange_of(sync: LocalSGD) -> Exchange:
    """The same verbs for a compiled forward."""
    axis, wire = sync.axes.replica, sync.rules.wire
    coded = wire != "fp32" and axis.size > 1
    payloads = []
    for unit in sync.units:
        shards = unit.shards()
        numel = sum(x.numel() for x in shards)
        whole = numel * shards[0].element_size()
        payloads.append(code_bytes(numel, wire) * axis.size if coded else whole)
    return Exchange(
        units={unit.name: list(unit.names) for unit in sync.units},
        limit=sync.rules.prefetch_units,
        begin=sync.begin_forward,
        start=sync.start,
        finish=sync.complete,
        end=sync.end_forward,
        payload_bytes=payloads,
        ranks=axis.size,
        op="all_gather" if coded else "all_reduce",
    )


def carry_rounds(sync: LocalSGD, sharded: Sharded) -> None:
    """Lets the rounds of ``sync`` run inside the forwards of a sharded model."""
    if isinstance(sharded, Simple) and sharded.compilation is not None:
        sharded.compilation.attach(exchange_of(sync))
        return
    fence = sharded.fence if isinstance(sharded, Fsdp2) else None
    hook_forward(sync, sharded.module, lookahead=sharded.lookahead, fence=fence)
