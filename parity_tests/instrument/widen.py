"""Where a module asks for a narrow dtype by name, and what it would compute if it did not.

Norms, softmax and rotary tables are often written ``x.to(torch.float32)``, whatever the dtype of
the model. In float64 such a module is off by 1e-8 from the first layer on, and no formula could
be judged. While a ``Widening`` is active, who asks for a narrower dtype gets float64, and where
that happened is kept.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

NARROW = (torch.float32, torch.bfloat16, torch.float16)
METHODS = (torch.Tensor.float, torch.Tensor.bfloat16, torch.Tensor.half)


class Widening(TorchFunctionMode):
    """Gives float64 to whoever asks for less.

    Args:
        is_active: False only keeps who asked.
    """

    def __init__(self, *, is_active: bool) -> None:
        super().__init__()
        self.where: dict[str, None] = {}  # modules that asked, blocks by number
        self._is_active, self._around = is_active, list[str]()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        asks = func in METHODS or any(
            x in NARROW for x in [*args, *kwargs.values()] if _is_dtype(x)
        )
        if not asks:
            return func(*args, **kwargs)
        if self._around:  # what is asked while the module is built is of no interest
            self.where[re.sub(r"\.\d+(?=\.|$)", ".{i}", self._around[-1], count=1)] = None
        if not self._is_active:
            return func(*args, **kwargs)
        wide = [_widened(x) for x in args]
        func = torch.Tensor.double if func in METHODS else func
        return func(*wide, **{name: _widened(x) for name, x in kwargs.items()})

    @contextmanager
    def over(self, model: nn.Module) -> Iterator[None]:
        """Active, and knowing which part of ``model`` is computing."""
        handles: list[RemovableHandle] = []
        for name, part in model.named_modules():
            handles.append(part.register_forward_pre_hook(self._enter(name)))
            handles.append(part.register_forward_hook(self._leave))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self._around.append(name or type(module).__name__)

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._around.pop()


def _is_dtype(x: Any) -> bool:
    return isinstance(x, torch.dtype)


def _widened(x: Any) -> Any:
    return torch.float64 if _is_dtype(x) and x in NARROW else x


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What new tensors have."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
