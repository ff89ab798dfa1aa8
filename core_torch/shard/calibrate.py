"""Measures what computing and communicating cost here, and agrees on it with the other ranks.

Ranks must plan alike, so no rank uses a number of its own: seconds are averaged over the axis
before a model is fitted to them.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from core_torch.collectives import Axis, Ledger, rows_sent, start_all_gather, start_reduce_scatter
from core_torch.shard.compile import Compilation
from core_torch.shard.cost import ComputeSample, Costs, LinkSample, fit, wire_bytes

Sample = TypeVar("Sample", ComputeSample, LinkSample)

PAYLOADS = (1 << 16, 1 << 19, 1 << 21, 1 << 23)  # bytes
REPEATS = 7
_SHAPES = ((512, 256, 704), (512, 512, 1408), (1024, 512, 2048))  # of matrix products
_NUMELS = (1 << 17, 1 << 20, 1 << 22)  # of element-wise operators


def measured_costs(axis: Axis, device: torch.device) -> Costs:
    """Costs of this machine and of the link of ``axis``; takes a second or two on all ranks."""
    return fit(agreed(compute_samples(device), axis), agreed(link_samples(axis, device), axis))


def costs_of_run(compilation: Compilation, axis: Axis, device: torch.device) -> Costs:
    """Costs from the segments of a model that has run with ``Compilation.timings``.

    They hold what no isolated measurement sees: caches that others use, and cores that the
    network needs meanwhile.
    """
    compute = agreed(segment_samples(compilation), axis)
    return fit(compute, agreed(link_samples(axis, device), axis))


def compute_samples(device: torch.device) -> list[ComputeSample]:
    """Matrix products, element-wise operators and small operators, each by itself."""
    samples = []
    for rows, inner, columns in _SHAPES:
        a = torch.randn(rows, inner, device=device)
        b = torch.randn(inner, columns, device=device)
        touched = 4 * (a.numel() + b.numel() + rows * columns)
        seconds = _median(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
        samples.append(ComputeSample(2 * rows * inner * columns, touched, 1, seconds))
    for numel in _NUMELS:
        x = torch.randn(numel, device=device)
        seconds = _median(lambda x=x: x * 1.5, device)  # type: ignore[misc]
        samples.append(ComputeSample(numel, 8 * numel, 1, seconds))
    small = torch.randn(8, device=device)
    return [*samples, ComputeSample(8, 64, 1, _median(lambda: small * 1.5, device))]


def segment_samples(compilation: Compilation) -> list[ComputeSample]:
    """Medians of the compute instructions of forward and backward over all timed steps."""
    samples = []
    for name, steps in (compilation.timings or {}).items():
        medians = [statistics.median(x) for x in zip(*steps, strict=True)]
        for instruction, seconds in zip(
            compilation.program(name).instructions, medians, strict=True
        ):
            if instruction.kind == "compute" and seconds > 0 and instruction.flops > 0:
                work = (instruction.flops, instruction.touched_bytes, instruction.operators)
                samples.append(ComputeSample(*work, seconds))
    return samples


def link_samples(axis: Axis, device: torch.device) -> list[LinkSample]:
    """Gathers and scatters of several sizes, each alone on the link; none in the ledger's way."""
    if axis.size == 1:
        return [LinkSample(n, 1e-6 + n * 1e-12) for n in PAYLOADS]
    quiet = replace(axis, ledger=Ledger())
    samples = []
    for payload in PAYLOADS:
        part = torch.zeros(payload // 4 // axis.size, device=device)
        rows = torch.zeros(len(rows_sent(axis)), part.numel(), device=device)

        def gather(part: Tensor = part) -> Tensor:
            return start_all_gather(part, quiet, scope="calibration").wait()

        def scatter(rows: Tensor = rows) -> Tensor:
            return start_reduce_scatter(rows, quiet, scope="calibration").wait()

        sent = 4 * part.numel() * axis.size
        samples += [
            LinkSample(wire_bytes("all_gather", sent, axis.size), _median(gather, device)),
            LinkSample(wire_bytes("reduce_scatter", sent, axis.size), _median(scatter, device)),
        ]
    return samples


def agreed(samples: Sequence[Sample], axis: Axis) -> list[Sample]:
    """The same samples with their seconds averaged over the ranks of ``axis``."""
    if axis.size == 1 or dist.get_backend(axis.group) == "fake":
        return list(samples)
    seconds = torch.tensor([s.seconds for s in samples], dtype=torch.float64)
    if dist.get_backend(axis.group) == "nccl":
        seconds = seconds.cuda()
    dist.all_reduce(seconds, group=axis.group)
    means = (seconds / axis.size).tolist()
    return [s._replace(seconds=mean) for s, mean in zip(samples, means, strict=True)]


def _median(call: Callable[[], Tensor], device: torch.device) -> float:
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found)
