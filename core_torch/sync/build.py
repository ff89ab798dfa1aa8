"""From a configuration to an engine: the row's units, its trigger, its place in the forward."""

from dataclasses import replace

from torch.optim import Optimizer

from core_torch.config import SyncConfig
from core_torch.mesh import Mesh
from core_torch.shard.base import Sharded
from core_torch.sync.engine import LocalSGD
from core_torch.sync.forward_sync import carry_rounds
from core_torch.sync.methods import rules_of
from core_torch.sync.trigger import Clock, make_trigger
from core_torch.sync.units import check_copies, sync_units


def build_engine(
    sharded: Sharded, optimizer: Optimizer, mesh: Mesh, config: SyncConfig, *, clock: Clock
) -> LocalSGD | None:
    """The engine of ``config.method`` on a sharded model; None for synchronous training.

    Args:
        sharded: the model, whose forwards carry rounds if the configuration says so.
        optimizer: the inner one.
        mesh: the replica axis, and the ranks of a replica.
        config: checked.
        clock: of time triggers, monotonic nanoseconds.
    """
    rules = rules_of(config)
    if mesh.pp.size > 1:  # no forward of a rank passes all units
        rules = replace(rules, layerwise=False)
    kind = rules.method.unit
    if kind == "none":
        return None
    units = sync_units(
        sharded.module,
        sharded.units,
        kind=kind,
        fragments=rules.fragments,
        holders=mesh.holders,
    )
    check_copies(units, rules.wire)
    sync = LocalSGD(units, optimizer, mesh, rules=rules, trigger=make_trigger(config, clock))
    if rules.layerwise:
        carry_rounds(sync, sharded)
    return sync
