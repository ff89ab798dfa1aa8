"""Taps of anybody's module and torch optimizer.

    with trace(model, optimizer, "trace/", names=names, modules=modules):
        for batch in data:
            loss = model(batch).loss         # or whatever the loop does
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

An inner step ends with ``optimizer.step()``; forwards between two of them are its micro-batches.
Gradients are written as the optimizer gets them: what clips them has acted by then. Forwards
without gradients are not written.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from core_torch import __version__
from core_torch.errors import ConfigError
from core_torch.shard.access import is_sharded, local_shard, rows_of_shard
from core_torch.shard.wrap import units_of
from core_torch.taps.recorder import Named, Recorder, Shards
from core_torch.trace import Tracer, dtype_name

Canonical = Callable[[str, Tensor], Tensor]
PHASES = "init data forward backward grad optim".split()


def trace(
    model: nn.Module,
    optimizer: Optimizer,
    folder: Path | str,
    *,
    names: Mapping[str, str] | None = None,
    modules: Mapping[str, str] | None = None,
    units: Mapping[str, str] | None = None,
    canonical: Canonical | None = None,
    keep_tensors: bool = False,
    meta: Mapping[str, Any] | None = None,
) -> "ModuleTaps":
    """Writes a trace of a training loop, from now until the block is left.

    With ``torch.distributed`` all ranks are taken as shards of one replica, which see different
    sequences and average gradients: FSDP2, SimpleFSDP or DDP. Do not compile the model: a
    compiled forward has no modules to tap.

    Args:
        model: any module; its units may return a tensor, a tuple that begins with one, or an
            object with ``logits`` or ``last_hidden_state``.
        optimizer: of its parameters.
        folder: of the trace, the same on all ranks; it must hold none.
        names: parameter -> name in the trace; others keep their own.
        modules: module -> unit whose output it computes, "" for the model itself. None: each
            element of a module list and each other child is a unit of its own name.
        units: parameter by its name in the trace -> unit, for those that no module in
            ``modules`` holds, or that belong elsewhere.
        canonical: called with the name in the trace and a whole tensor in the parameter's
            shape (weights, gradient, update or moment); returns what is written instead, for
            example with the rows of rotary pairs in another order.
        keep_tensors: see ``Tracer``.
        meta: more for ``meta.json``.

    Raises:
        ConfigError: a name that is no parameter or module, a name given twice, a parameter that
            is cut in another way than rows, or a canonical tensor of another shape.
        TraceError: the folder holds a trace.
    """
    _check_names("names", names or {}, [name for name, _ in model.named_parameters()])
    _check_names("modules", modules or {}, [name for name, _ in model.named_modules()])
    if modules is None:
        known = dict(model.named_modules())
        modules = {unit: unit for unit in units_of(model) if unit in known}
    params = list(named(model, names or {}, modules, units or {}))
    for one in params:  # before any file is open
        whole_of(one, one.param.detach(), canonical)
    shards = Shards(dist.get_world_size(), dist.get_rank()) if _is_distributed() else Shards(1, 0)
    tracer = Tracer(
        folder,
        shards.index,
        describe(model, params, shards) | dict(meta or {}),
        keep_tensors=keep_tensors,
    )
    return ModuleTaps(model, optimizer, tracer, shards, params, dict(modules), canonical)


class ModuleTaps:
    """Writes the trace of a module; see ``trace``."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        tracer: Tracer,
        shards: Shards,
        params: list[Named],
        modules: Mapping[str, str],
        canonical: Canonical | None,
    ) -> None:
        self._tracer, self._shards, self._canonical = tracer, shards, canonical
        self._recorder = Recorder(tracer, 0, shards, step=0)
        self._optimizer, self._params = optimizer, params
        self._k, self._tokens, self._is_in_forward = 0, 0, False
        self._losses: list[Tensor] = []
        self._handles = self._hooks(model, modules)
        for one in params:
            self._recorder.of_parameter("init", one, "", self._held(one, one.param.detach()))
        self._recorder.step = 1

    def loss(self, value: Tensor) -> None:
        """Tells of the loss of a micro-batch, if you wish it in the trace and no output has one.

        Args:
            value: () mean over this rank's micro-batch.
        """
        self._losses.append(value.detach())

    def close(self) -> None:
        """Removes the hooks and closes the files."""
        for handle in self._handles:
            handle.remove()
        self._tracer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _hooks(self, model: nn.Module, modules: Mapping[str, str]) -> list[RemovableHandle]:
        handles = [model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)]
        for name, unit in modules.items():
            handles.append(model.get_submodule(name).register_forward_hook(self._saw(unit)))
        handles.append(model.register_forward_hook(self._end))
        return handles + self._recorder.watch(
            self._optimizer, self._params, self._before_step, self._after_step, self._held
        )

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._is_in_forward = torch.is_grad_enabled()
        if not self._is_in_forward:
            return
        labels = ("labels", "targets")
        given = {"inputs": [*args, *(x for name, x in kwargs.items() if name not in labels)]}
        given["targets"] = [kwargs[name] for name in labels if name in kwargs]
        for name, values in given.items():
            x = next((v for v in values if is_ids(v)), None)
            if x is not None:
                self._recorder.of_batch("data", None, f"{name}.{self._k}", x)
                self._tokens += x.numel() * self._shards.count if name == "inputs" else 0

    def _saw(self, unit: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            x = tensor_of(output)
            if self._is_in_forward and x is not None:
                self._recorder.output(unit, self._k, x)

        return hook

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_in_forward:
            found = getattr(output, "loss", None)
            if isinstance(found, Tensor):
                self.loss(found)
            self._k += 1
            self._is_in_forward = False

    @torch.no_grad()
    def _before_step(self) -> None:
        if self._losses and self._shards.count == 1:  # of other ranks nothing is known
            mean = torch.stack([x.double() for x in self._losses]).mean()
            self._recorder.of_replica("forward", "loss", loss=float(mean))
        for one in self._params:
            if one.param.grad is not None:
                self._recorder.of_parameter("grad", one, "", self._held(one, one.param.grad))

    def _after_step(self) -> None:
        rate = float(self._optimizer.param_groups[0]["lr"])
        self._recorder.of_replica("optim", "rate", lr=rate, tokens=self._tokens)
        self._recorder.step += 1
        self._k = 0
        self._losses.clear()

    def _held(self, one: Named, x: Tensor) -> Tensor:
        """What is written of a tensor in the shape of a parameter: this rank's rows."""
        if self._canonical is None:
            return local_shard(x)
        whole = whole_of(one, x, self._canonical)
        if not is_sharded(one.param):
            return whole
        start, count = rows_of_shard(x.shape[0], self._shards.count, self._shards.index)
        return whole[start : start + count]


def whole_of(one: Named, x: Tensor, canonical: Canonical | None) -> Tensor:
    """``x``, in the shape of a parameter, in its canonical layout and gathered for it.

    Raises:
        ConfigError: the layout has another shape.
    """
    if canonical is None:
        return x
    whole = canonical(one.name, x.full_tensor() if isinstance(x, DTensor) else x)
    if whole.shape != x.shape:
        raise ConfigError(
            f"canonical gave {one.name} the shape {tuple(whole.shape)}, not {tuple(x.shape)}"
        )
    return whole


def named(
    model: nn.Module,
    names: Mapping[str, str],
    modules: Mapping[str, str],
    units: Mapping[str, str],
) -> Iterator[Named]:
    """The trained parameters of a module under the names and in the units of the trace.

    Args:
        model: any.
        names: see ``trace``.
        modules: see ``trace``; the innermost around a parameter says its unit.
        units: see ``trace``. What neither says is in a unit of its outermost module's name.

    Raises:
        ConfigError: two parameters of one name, or one that is cut in another way than rows.
    """
    taken: dict[str, str] = {}
    for own, p in model.named_parameters():
        name = names.get(own, own)
        if name in taken:
            raise ConfigError(f"names: {taken[name]} and {own} are both called {name}")
        taken[name] = own
        if isinstance(p, DTensor) and (p.device_mesh.ndim > 1 or any(map(_is_odd, p.placements))):
            raise ConfigError(f"{own} is placed as {p.placements}; only whole rows can be traced")
        around = [m for m in modules if m and own.startswith(m + ".")]
        unit = modules[max(around, key=len)] if around else own.partition(".")[0]
        if p.requires_grad:
            yield Named(units.get(name, unit), name, p)


def tensor_of(output: Any) -> Tensor | None:
    """The tensor that a module's result is about, if there is one."""
    for field in ("logits", "last_hidden_state"):
        if isinstance(found := getattr(output, field, None), Tensor):
            return found
    if isinstance(output, tuple | list) and output:
        output = output[0]
    return output if isinstance(output, Tensor) else None


def is_ids(value: Any) -> bool:
    """True for a tensor of whole numbers with a dimension of sequences."""
    return (
        isinstance(value, Tensor)
        and value.ndim > 1
        and not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    )


def describe(model: nn.Module, params: list[Named], shards: Shards) -> dict[str, Any]:
    """What ``meta.json`` says of a module."""
    digest = hashlib.sha256()
    for one in params:
        digest.update(one.name.encode())
        digest.update(local_shard(one.param).cpu().contiguous().view(torch.uint8).numpy().tobytes())
    whole = not any(is_sharded(one.param) for one in params)
    dtypes = sorted({dtype_name(one.param) for one in params})
    lists = [len(m) for m in model.modules() if isinstance(m, nn.ModuleList)]
    return {
        "core": "torch module",
        "versions": {"twinshard": __version__, "torch": torch.__version__},
        "method": "synchronous",
        "mesh": {"replicas": 1, "shards": shards.count},
        "dtype": dtypes[0] if len(dtypes) == 1 else ", ".join(dtypes),
        "compute": "same",
        "config": {"module": type(model).__name__},
        "config_hash": "",
        "weights_hash": digest.hexdigest() if whole else "",
        "data_hash": "",
        "model": {
            "layers": max(lists, default=1),
            "width": max((max(one.param.shape, default=1) for one in params), default=1),
        },
        "taps": PHASES,
        "flags": {},
    }


def _is_odd(placement: Any) -> bool:
    return placement.is_partial() or (placement.is_shard() and not placement.is_shard(0))


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _check_names(what: str, given: Mapping[str, str], known: list[str]) -> None:
    wrong = [name for name in given if name not in known]
    if wrong:
        raise ConfigError(f"{what}: the model has no {wrong[0]!r}", likely="a name of its wrapper")
