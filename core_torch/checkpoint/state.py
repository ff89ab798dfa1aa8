"""What a checkpoint holds, from one rank's point of view, and how it goes back into tensors.

Everything here is in memory; files are the business of the modules beside this one.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from core_torch.errors import CheckpointMismatch

WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


class Layout(NamedTuple):
    """Place of a rank, and the ranks there are. Rank number: ``replica * shards + shard``."""

    replica: int
    shard: int
    replicas: int
    shards: int

    @property
    def rank(self) -> int:
        return self.replica * self.shards + self.shard


class Shard(NamedTuple):
    """This rank's rows of a tensor that the ranks of a replica hold together."""

    local: Tensor  # rows [start, start + len(local)); may be none
    shape: tuple[int, ...]  # of the whole tensor
    start: int  # first row held; 0 for a tensor without dimensions, which every rank holds

    @property
    def rows(self) -> int:
        """Rows held; 0 for a tensor without dimensions."""
        return self.local.shape[0] if self.local.ndim else 0


class SavedState(NamedTuple):
    """A rank's part of a run. Names are ``kind/parameter``, for example ``exp_avg/norm.weight``.

    Attributes:
        shared: equal on all replicas; replica 0 writes it.
        own: what each replica has for itself.
        scalars: JSON leaves (None, bool, int, float, str) in dicts and lists, equal on all
            ranks; rank 0 writes them. Floats come back exactly, NaN and infinities too.
            ``scalars["config_hash"]``, if there, also goes into the commit.
    """

    shared: dict[str, Shard]
    own: dict[str, Shard]
    scalars: dict[str, Any]


def canonical(name: str) -> str:
    """``name`` as in the plain model, whatever compiles, shards or parametrises it.

    Takes a parameter's name or ``kind/name``. ``_orig_mod.norm.weight`` and
    ``norm.parametrizations.weight.original`` both become ``norm.weight``.
    """
    kind, slash, rest = name.rpartition("/")
    parts = [p for p in rest.split(".") if p not in WRAPPERS]
    if len(parts) > 1 and parts[0] == "module":  # DistributedDataParallel
        parts = parts[1:]
    if len(parts) >= 3 and parts[-3] == "parametrizations" and parts[-1] == "original":
        parts = [*parts[:-3], parts[-2]]
    return kind + slash + ".".join(parts)


def with_canonical_names(shards: dict[str, Shard]) -> dict[str, Shard]:
    """The same shards under canonical names.

    Raises:
        ValueError: two names mean the same tensor.
    """
    renamed: dict[str, Shard] = {}
    for name, shard in shards.items():
        if canonical(name) in renamed:
            raise ValueError(f"{name!r} is a second tensor called {canonical(name)!r}")
        renamed[canonical(name)] = shard
    return renamed


@torch.no_grad()
def restore_into(targets: dict[str, Shard], saved: dict[str, Shard]) -> None:
    """Copies ``saved`` into the storage of ``targets``; all of them or, on an error, none.

    Raises:
        CheckpointMismatch: a tensor is missing, unexpected, or differs in shape, rows or dtype.
    """
    targets = with_canonical_names(targets)
    for name in sorted(targets.keys() | saved.keys()):
        want, have = _described(targets.get(name)), _described(saved.get(name))
        if want != have:
            raise CheckpointMismatch(
                f"{name}: saved {have}, now {want}",
                likely="the checkpoint belongs to another model, optimizer or method",
                next="resume with the configuration that wrote it (config.toml of its run)",
            )
    for name, target in targets.items():
        target.local.copy_(saved[name].local)


def _described(shard: Shard | None) -> str:
    if shard is None:
        return "absent"
    dtype = str(shard.local.dtype).removeprefix("torch.")
    text = f"{dtype} {list(shard.shape)}"
    if not shard.local.ndim:
        return text
    held = f"{text}, of it {list(shard.local.shape)} here"
    return f"{held} from row {shard.start}" if shard.rows else held
