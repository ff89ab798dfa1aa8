"""Modules whose parameters are gathered when they are read.

A sharded module's class gets a property for each of its parameters; the parameters themselves
stay in ``_parameters`` under their names. Nothing that concerns one model stands on the class:
mesh and precision are found through the instance, so a second model cannot inherit the first
one's policy.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, NoReturn, Self

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.multiprocessing.reductions import StorageWeakRef

from core_torch.errors import ConfigError, TwinshardError
from core_torch.shard.access import local_shard
from core_torch.shard.operators import ShardPlan, gather


class Inside(NamedTuple):
    """How tensor parallelism has placed a parameter, or a view of one."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, param: DTensor) -> "Inside":
        """What to remember of ``param``."""
        return cls(param.device_mesh, tuple(param.placements), param.shape, param.stride())

    def around(self, local: Tensor) -> DTensor:
        """The DTensor of which ``local`` is this rank's part."""
        mesh, placements, shape, stride = self
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=shape, stride=stride
        )


@dataclass(frozen=True, slots=True)
class Sharding:
    """What a module's properties need, kept on the instance."""

    plan: ShardPlan
    names: dict[str, str]  # attribute -> name of the parameter in the root
    inside: dict[str, Inside]  # of parameters that tensor parallelism has cut as well

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def read(self, module: nn.Module, key: str) -> Tensor:
        """The full parameter (G2); on the tensor-parallel mesh a DTensor again."""
        param = module._parameters[key]
        assert isinstance(param, DTensor)
        full = gather(param.to_local(), self.plan.number, self.names[key])
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            _GATHERED.enter(full, _Source(param, self, key))
        return self.inside[key].around(full) if key in self.inside else full


class _Source(NamedTuple):
    """Where a gathered parameter was read from."""

    param: DTensor
    sharding: Sharding
    key: str


class _Gathered:
    """Which living memory holds which parameter. Autograd hands out tensors without names."""

    def __init__(self) -> None:
        self._sources: dict[int, tuple[StorageWeakRef, _Source]] = {}

    def enter(self, full: Tensor, source: _Source) -> None:
        """Remembers what ``full`` and its views hold, for as long as they live."""
        self._sources = {k: v for k, v in self._sources.items() if not v[0].expired()}
        ref = StorageWeakRef(full.untyped_storage())
        self._sources[ref.cdata] = (ref, source)

    def find(self, saved: Tensor) -> _Source | None:
        """The parameter that ``saved`` is, or a view of."""
        found = self._sources.get(StorageWeakRef(saved.untyped_storage()).cdata)
        return None if found is None or found[0].expired() else found[1]


_GATHERED = _Gathered()


class Regather(NamedTuple):
    """A gathered parameter that the backward needs, as the way to get it again."""

    source: _Source
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    inside: Inside | None  # of the view, under tensor parallelism

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Gathers once more and takes the same view.

        Raises:
            ParameterChanged: the parameter is not what it was in the forward.
        """
        param, sharding, key = self.source
        if _version(param) != self.version:
            raise ParameterChanged(
                f"parameter {sharding.names[key]} was changed in place between its forward and "
                "its backward",
                next="call backward() before optimizer.step()",
            )
        full = gather(param.to_local(), sharding.plan.number, sharding.names[key])
        view = full.as_strided(self.size, self.stride, self.offset)
        return view if self.inside is None else self.inside.around(view)


class ParameterChanged(TwinshardError):
    """The backward would use other weights than the forward did."""


def _pack(saved: Tensor) -> Tensor | Regather:
    if torch.compiler.is_compiling():
        return saved
    inside = Inside.of(saved) if isinstance(saved, DTensor) else None
    local = local_shard(saved) if inside is not None else saved
    if type(local) not in (Tensor, nn.Parameter):
        return saved
    source = _GATHERED.find(local)
    if source is None:
        return saved
    place = (local.size(), local.stride(), int(local.storage_offset()))
    return Regather(source, _version(source.param), *place, inside)


def _version(param: DTensor) -> int:
    """Changes with every write to the parameter, be it to its rows alone."""
    return param._version + local_shard(param)._version


def _unpack(packed: Tensor | Regather) -> Tensor:
    return packed() if isinstance(packed, Regather) else packed


def resharding(plan: ShardPlan) -> AbstractContextManager[Any]:
    """Around an eager forward: what autograd saves of gathered parameters is not kept.

    A compiled graph does the same by recomputation (passes/recompute.py).
    """
    if torch.compiler.is_compiling() or not plan.reshard_after_forward:
        return nullcontext()
    return saved_tensors_hooks(_pack, _unpack)


class _ShardedModule:
    """What every sharded module can and cannot do, whatever its own class."""

    _sharding: Sharding
    __dict__: dict[str, Any]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._sharding.names and value is not self._parameters[name]:  # type: ignore[attr-defined]
            raise ConfigError(
                f"parameter {self._sharding.names[name]} is sharded and cannot be replaced",
                likely="an assignment would put a full, unsharded parameter in its place",
                next="load_state_dict, or write to the parameter in place under torch.no_grad()",
            )
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            f"a sharded {self.__class__.__name__} cannot be pickled: its rows mean nothing "
            "without the process groups of this run",
            next="save state_dict() with a checkpoint instead",
        )


def _reader(key: str) -> property:
    def get(self: Any) -> Tensor:
        return self._sharding.read(self, key)

    return property(get, doc=f"The full {key}, gathered.")


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if dtype is not None and is_float else value


def _root_forward(base: type[nn.Module]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        plan = self._sharding.plan
        args = tuple(_cast(value, plan.compute_dtype) for value in args)
        kwargs = {name: _cast(value, plan.compute_dtype) for name, value in kwargs.items()}
        with resharding(plan):
            return base.forward(self, *args, **kwargs)

    return forward


@cache
def sharded_class(base: type[nn.Module], keys: tuple[str, ...], *, is_root: bool) -> type:
    """A subclass of ``base`` that reads the parameters ``keys`` through their sharding."""
    body: dict[str, Any] = {key: _reader(key) for key in keys}
    if is_root:
        body["forward"] = _root_forward(base)
    return type(f"Sharded{base.__name__}", (_ShardedModule, base), body)


def plans_in(module: nn.Module) -> dict[ShardPlan, dict[nn.Module, dict[str, str]]]:
    """Plans of the sharded models in ``module``: by module, attribute -> name in its root."""
    found: dict[ShardPlan, dict[nn.Module, dict[str, str]]] = {}
    for child in module.modules():
        if is_sharded_class(type(child)):
            sharding: Sharding = child._sharding  # type: ignore[assignment]
            found.setdefault(sharding.plan, {})[child] = sharding.names
    return found


def is_sharded_class(kind: type) -> bool:
    """True for a class that ``sharded_class`` has made."""
    return issubclass(kind, _ShardedModule)
