"""What is measured of a variant, on one rank.

Time        of a step: forward, backward and AdamW, from when all ranks are ready.
Blocked     wall time less the CPU time of the main thread. A rank computes in that one thread,
            so this is how long it stood still: for the network, for another rank, or for a
            core that something else had.
Memory      what the process grew by at the highest during forward and backward. Gradients are
            in it, weights and AdamW's state are not; neither are buffers that stay allocated
            from one step to the next.
Collectives as torch's profiler sees them start, one way for all variants, and their
            payload; ``collectives.py`` says what counts as payload.
"""

import gc
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

_FLOAT32_BYTES = 4  # every payload of this benchmark is float32
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
# gloo's operations, and the payload of one for what this rank puts in, among R ranks.
_PAYLOAD: dict[str, Callable[[int, int], int]] = {
    "gloo:all_gather": lambda given, ranks: given * ranks,
    "gloo:all_reduce": lambda given, ranks: given,  # its reduce-scatter is one of these inside
    "gloo:reduce_scatter": lambda given, ranks: given,
    # Reduce-scatters of ours, which leave out the rank's own row.
    "gloo:all_to_all": lambda given, ranks: given * ranks // max(ranks - 1, 1),
    "gloo:broadcast": lambda given, ranks: given,
}
_BACKWARD = "twinshard::backward"  # our mark in the profile


class Timing(NamedTuple):
    """One step on one rank."""

    seconds: float
    blocked: float
    loss: float  # on this rank's own tokens


class Traffic(NamedTuple):
    """Collectives of one direction."""

    calls: int
    bytes: int


class Contestant:
    """One variant with its optimizer."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        params = [param for param in module.parameters() if param.requires_grad]
        self._optimizer = torch.optim.AdamW(params, lr=1e-3, foreach=True)

    def step(self, tokens_BT: Tensor, targets_BT: Tensor) -> Timing:
        """One training step, started together with the other ranks."""
        dist.barrier()
        wall, cpu = time.perf_counter(), time.thread_time()
        self._optimizer.zero_grad()
        loss = self.module(tokens_BT, targets_BT)
        loss.backward()
        self._optimizer.step()
        seconds, busy = time.perf_counter() - wall, time.thread_time() - cpu
        return Timing(seconds, seconds - busy, float(loss.detach()))

    def peak_bytes(self, tokens_BT: Tensor, targets_BT: Tensor) -> int | None:
        """Growth of this process during one forward and backward; None if unknown."""
        self._optimizer.zero_grad()
        gc.collect()
        dist.barrier()
        before = _reset_peak()
        self.module(tokens_BT, targets_BT).backward()
        peak = None if before is None else _status_bytes("VmHWM") - before
        self._optimizer.zero_grad()
        return peak

    def traffic(self, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Traffic, Traffic]:
        """Collectives of one forward and of one backward."""
        self._optimizer.zero_grad()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as p:
            loss = self.module(tokens_BT, targets_BT)
            with record_function(_BACKWARD):
                loss.backward()
            dist.barrier()  # only what has ended is recorded
        events = p.events() or ()
        [border] = [event.time_range.start for event in events if event.name == _BACKWARD]
        seen = [event for event in events if event.name in _PAYLOAD]
        forward = [event for event in seen if event.time_range.start < border]
        backward = [event for event in seen if event.time_range.start >= border]
        return counted(forward), counted(backward)


def counted(events: Sequence[Any]) -> Traffic:
    """Number and payload of profiled collectives."""
    ranks = dist.get_world_size()
    elements = [
        _PAYLOAD[event.name](sum(math.prod(shape) for shape in event.input_shapes), ranks)
        for event in events
    ]
    return Traffic(len(elements), sum(elements) * _FLOAT32_BYTES)


def batch_of(
    vocabulary: int, shape: tuple[int, int], *, seed: int, step: int, rank: int
) -> tuple[Tensor, Tensor]:
    """(B, T) tokens and targets: random, the low numbers more often, so that a loss can fall."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_009 + rank)
    drawn = torch.rand(shape[0], shape[1] + 1, generator=generator)
    tokens = (vocabulary * drawn**3).long().clamp_(max=vocabulary - 1)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _reset_peak() -> int | None:
    """Makes the kernel forget this process's highest memory; bytes that it holds now."""
    try:
        _CLEAR.write_text("5")
        return _status_bytes("VmRSS")
    except OSError:
        return None  # not Linux


def _status_bytes(name: str) -> int:
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(lines[name].split()[0]) * 1024
