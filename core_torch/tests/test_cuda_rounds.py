"""On a GPU: a round never makes the host wait, and its event is read one round late.

Skipped where there is none. One process is enough: what would wait is in the engine, not in the
process group.
"""

from typing import Any, cast

import pytest
import torch
import torch.nn as nn

from core_torch.collectives import Axis, Ledger
from core_torch.config import SyncConfig
from core_torch.mesh import Mesh
from core_torch.sync.engine import LocalSGD
from core_torch.sync.forward_sync import hook_forward
from core_torch.sync.methods import rules_of
from core_torch.sync.trigger import make_trigger
from core_torch.sync.units import sync_units

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def alone(device: torch.device) -> Mesh:
    """A mesh of this process only."""
    ledger = Ledger()
    axes = {name: Axis(name, None, 1, 0, ledger) for name in ("replica", "shard")}
    return Mesh(cast(Any, None), axes, axes["shard"], device, ledger)


@needs_gpu
@pytest.mark.parametrize("settings", [{}, {"layerwise": False}, {"offload": True}], ids=str)
def test_no_step_and_no_round_makes_the_host_wait(settings: dict[str, Any]) -> None:
    device = torch.device("cuda")
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(device)
    groups = {name: [f"{name}.weight", f"{name}.bias"] for name in ("0", "1")}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = SyncConfig(method="edit", every=2, **settings)
    units = sync_units(model, groups, kind="units")
    rules, trigger = rules_of(config), make_trigger(config, lambda: 0)
    sync = LocalSGD(units, optimizer, alone(device), rules=rules, trigger=trigger)
    if rules.layerwise:
        hook_forward(sync, model)
    x = torch.randn(8, 64, device=device)
    events = []
    torch.cuda.synchronize()
    for step in range(6):
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        # From the second round on an event is read here, of a round that is long over.
        events.append(_quiet(sync) if step < 3 else sync.after_step())
    told = [event.round for event in events if event is not None] + [
        event.round for event in sync.finish()
    ]
    assert told == list(range(1, len(told) + 1)) and len(told) >= 3


def _quiet(sync: LocalSGD) -> Any:
    torch.cuda.set_sync_debug_mode("error")
    try:
        return sync.after_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
