"""A user's own module: found by name, built here, and traced for a few steps of AdamW.

``pkg:build`` comes from the command line and from nowhere else. What ``build`` and the forward
raise is told as an error of the user's code, with its line.
"""

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from core_torch.config import ModelConfig
from core_torch.errors import ConfigError, TwinshardError
from core_torch.taps import trace
from core_torch.taps.module import tensor_of
from parity_tests.harness.names import Shapes, unit_of
from parity_tests.instrument.widen import Widening

Batch = tuple[np.ndarray, np.ndarray]  # inputs and targets, (B, T) each
GAIN_NOISE = 0.1
PREFIX = "own."  # where ``Examined`` holds the module
OPTIM = dict(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-4, weight_decay=0.1)


def find(spec: str) -> Callable[[], Any]:
    """The function that ``pkg.module:name`` means, from the current folder or the path.

    Raises:
        ConfigError: there is none.
    """
    module, _, name = spec.partition(":")
    if module.endswith(".py") or "/" in module:
        dotted = module.removesuffix(".py").strip("./").replace("/", ".")
        raise ConfigError(
            f"model: {module!r} is a file; a module is named as Python imports it",
            next=f"--model {dotted}:{name or 'build'}",
        )
    if not module or not name:
        raise ConfigError(f"model: must be module:function, such as my_model:build, got {spec!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    with _blamed(f"importing {module}"):
        found = importlib.import_module(module)
    if not callable(function := getattr(found, name, None)):
        raise ConfigError(f"model: {module} has no function {name!r}", where=str(found.__file__))
    return function


def built(build: Callable[[], Any]) -> nn.Module:
    """The module, in evaluation mode and on the CPU.

    Raises:
        ConfigError: it is none, has a parameter without gradient, or ``build`` raised.
    """
    with _blamed("build()"):
        module = build()
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model: build() gave {type(module).__name__}, not a torch.nn.Module")
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    if frozen:
        raise ConfigError(
            f"model: {frozen[0]} is frozen, and its gradient is to be compared",
            next="call requires_grad_(True) in build()",
        )
    return module.to("cpu").eval()


def shapes_of(module: nn.Module) -> tuple[Shapes, dict[str, str]]:
    """Shapes of parameters by name, and second names of the same ones."""
    first = {id(p): name for name, p in module.named_parameters()}
    everything = module.named_parameters(remove_duplicate=False)
    aliases = {name: first[id(p)] for name, p in everything if name != first[id(p)]}
    return {name: tuple(p.shape) for name, p in module.named_parameters()}, aliases


class Output:
    """What the taps look for in a result."""

    def __init__(self, logits: Tensor, loss: Tensor) -> None:
        self.logits, self.loss = logits, loss


class Examined(nn.Module):
    """The user's module with the loss behind it: mean cross entropy over all tokens."""

    def __init__(self, own: nn.Module, vocabulary: int) -> None:
        super().__init__()
        self.own, self._vocabulary = own, vocabulary

    def forward(self, inputs_BT: Tensor, *, targets: Tensor) -> Output:
        with _blamed("the forward"):
            found = self.own(inputs_BT)
        logits_BTV = tensor_of(found)
        shape = (*inputs_BT.shape, self._vocabulary)
        if logits_BTV is None or tuple(logits_BTV.shape) != shape:
            told = type(found).__name__ if logits_BTV is None else list(logits_BTV.shape)
            raise ConfigError(
                f"model: logits must be {list(shape)}, got {told}",
                likely="tokens go in as (sequences, positions); logits, or an object with .logits, "
                "come out with the vocabulary last",
            )
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets.flatten())
        return Output(logits_BTV, loss)


@dataclass(frozen=True, slots=True)
class Layout:
    """How rows of wq and wk lie in the user's module, and how the reference wants them."""

    model: ModelConfig
    rotary: str

    def __call__(self, name: str, x: Tensor) -> Tensor:
        """Pairs of neighbouring rows turn in the reference; ``name`` is the model's."""
        heads = {"wq": self.model.heads, "wk": self.model.kv_heads}
        which = name.split(".")[-2] if name.endswith(".weight") else ""
        if self.rotary == "pairs" or which not in heads:
            return x
        return pairs_of_halves(x, heads[which])


def pairs_of_halves(x: Tensor, heads: int) -> Tensor:
    """Rows j and j + E/2 of each head become 2j and 2j + 1."""
    return x.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(x.shape)


def halves_of_pairs(x: Tensor, heads: int) -> Tensor:
    """The inverse of ``pairs_of_halves``."""
    return x.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(x.shape)


@torch.no_grad()
def move_gains(module: nn.Module, names: Mapping[str, str], *, seed: int) -> None:
    """Makes gains of norms differ from each other and from 1, so that none can be left out."""
    draw = torch.Generator().manual_seed(seed)
    for name, p in module.named_parameters():
        if names[name].endswith("norm.weight"):
            noise = torch.randn(p.shape, generator=draw, dtype=torch.float64)
            p.add_((GAIN_NOISE * noise).to(p.dtype))


def weights_of(module: nn.Module, names: Mapping[str, str], layout: Layout) -> dict[str, Tensor]:
    """Copies of the parameters under the model's names and in its layout."""
    held = {names[name]: p.detach() for name, p in module.named_parameters()}
    return {name: layout(name, p).clone() for name, p in held.items()}


def tokens_for(
    module: nn.Module, vocabulary: int, shape: tuple[int, int], *, steps: int, seed: int
) -> list[Batch]:
    """Token batches of ``steps`` steps, without ids that an embedding pads with.

    An embedding gives the row of its padding no gradient, whatever a formula says.
    """
    embeddings = [m for m in module.modules() if isinstance(m, nn.Embedding)]
    padding = [m.padding_idx for m in embeddings if m.padding_idx is not None]
    ids = np.delete(np.arange(vocabulary), padding)
    drawn = np.random.default_rng(seed).choice(ids, size=(steps, shape[0], shape[1] + 1))
    return [(rows[:, :-1].copy(), rows[:, 1:].copy()) for rows in drawn.astype(np.int64)]


def record(
    module: nn.Module,
    folder: Path,
    batches: Sequence[Batch],
    *,
    names: Mapping[str, str],
    modules: Mapping[str, str],
    layout: Layout,
    widening: Widening,
    meta: Mapping[str, Any],
) -> Tensor:
    """Runs a step of AdamW for each batch and writes the trace.

    Returns:
        (B, T, V) logits of the first step.
    """
    examined = Examined(module, layout.model.vocabulary)
    params = list(module.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in params if p.ndim >= 2], "weight_decay": OPTIM["weight_decay"]},
            {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=OPTIM["lr"],
        betas=(OPTIM["beta1"], OPTIM["beta2"]),
        eps=OPTIM["eps"],
    )
    tied, first = layout.model.tied, None
    taps = trace(
        examined,
        optimizer,
        folder,
        names={PREFIX + own: name for own, name in names.items()},
        modules={"": "head"}
        | {PREFIX + own: unit for own, unit in modules.items() if unit != "head"},
        units={name: unit_of(name, tied=tied) for name in names.values()},
        canonical=layout,
        meta=meta,
    )
    with taps:
        for inputs, targets in batches:
            with widening.over(module):
                output = examined(torch.from_numpy(inputs), targets=torch.from_numpy(targets))
                output.loss.backward()
            first = output.logits.detach() if first is None else first
            optimizer.step()
            optimizer.zero_grad()
    assert first is not None, "no step"
    return first


@contextmanager
def _blamed(what: str) -> Iterator[None]:
    """Errors of the user's own code, with the line that they come from."""
    try:
        yield
    except TwinshardError:
        raise
    except Exception as error:
        libraries = str(Path(torch.__file__).parent)
        frames = traceback.extract_tb(error.__traceback__)
        not_theirs = (libraries, importlib.__file__, __file__, "<")
        own = [x for x in frames if not x.filename.startswith(not_theirs)]
        where = f"{own[-1].filename} line {own[-1].lineno}" if own else ""
        message = f"model: {what} raised {type(error).__name__}: {error}"
        raise ConfigError(message, where=where) from error
