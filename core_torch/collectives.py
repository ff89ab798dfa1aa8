"""Collectives over one named mesh axis, spelled like their jax.lax counterparts.

Every byte that Twinshard sends passes through this file and is entered in a ledger where
the collective is dispatched; FSDP2's own gathers and scatters come here through its public
``set_custom_all_gather`` and ``set_custom_reduce_scatter``.

What counts as the bytes of an operation is its payload on this rank: the buffer of an
all-reduce, the gathered result of an all-gather, the full input of a reduce-scatter. That is
also what an operand or result shape says in compiled HLO, so both cores can be compared. It
is not what a wire carries: a ring all-reduce moves up to twice its buffer.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Dispatch(NamedTuple):
    """One collective as this rank dispatched it."""

    axis: str
    op: str  # all_reduce, all_gather, reduce_scatter
    dtype: str
    numel: int  # elements of the payload
    scope: str  # what asked for it: a unit's name, "norms", "metrics", ...


@dataclass(slots=True)
class Ledger:
    """Bytes and calls per (axis, op). Each dispatch goes to ``trace`` and ``listener`` if set."""

    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    trace: list[Dispatch] | None = None
    listener: Callable[[Dispatch], None] | None = None

    def enter(self, axis: str, op: str, payload: Tensor, scope: str) -> None:
        """Records one dispatch with ``payload`` as its operand or result."""
        self.bytes[axis, op] += payload.numel() * payload.element_size()
        self.calls[axis, op] += 1
        if self.trace is None and self.listener is None:
            return
        dtype = str(payload.dtype).removeprefix("torch.")
        dispatch = Dispatch(axis, op, dtype, payload.numel(), scope)
        if self.trace is not None:
            self.trace.append(dispatch)
        if self.listener is not None:
            self.listener(dispatch)

    def reset(self) -> None:
        """Forgets everything, for another run on the same mesh."""
        self.bytes.clear()
        self.calls.clear()
        self.trace = None if self.trace is None else []

    def bytes_over(self, axis: str) -> int:
        """Payload bytes of all operations over ``axis`` so far."""
        return sum(n for (name, _), n in self.bytes.items() if name == axis)


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the device mesh, seen from this rank. An absent axis has size 1, no group."""

    name: str
    group: dist.ProcessGroup | None
    size: int
    index: int
    ledger: Ledger


class Pending(NamedTuple):
    """A sum in flight; ``wait()`` gives the result."""

    total: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        """Blocks until the sum is there (on CUDA: makes the current stream wait for it)."""
        if self.work is not None:
            self.work.wait()
        return self.total


def start_psum(x: Tensor, axis: Axis, *, scope: str) -> Pending:
    """Starts summing ``x`` over ``axis`` **in place**; do not touch ``x`` before ``wait()``."""
    if axis.size == 1 or x.numel() == 0:  # an empty shard is empty on every replica
        return Pending(x, None)
    axis.ledger.enter(axis.name, "all_reduce", x, scope)
    return Pending(x, dist.all_reduce(x, group=axis.group, async_op=True))


class PendingRows(NamedTuple):
    """Rows from all other ranks in flight, to be added to this rank's own."""

    own: Tensor
    received: Tensor
    work: dist.Work
    place: int  # of this rank

    def wait(self) -> Tensor:
        """The sum over all ranks, added in rank order, in memory of its own."""
        self.work.wait()
        rows = list(self.received)
        rows.insert(self.place, self.own)
        total = rows[0] + rows[1]
        for row in rows[2:]:
            total += row
        return total


def start_all_gather(x: Tensor, axis: Axis, *, scope: str) -> Pending:
    """Starts stacking each rank's ``x`` along a new leading dimension of ``axis.size``."""
    if axis.size == 1:
        return Pending(x[None], None)
    gathered = x.new_empty((axis.size, *x.shape))
    axis.ledger.enter(axis.name, "all_gather", gathered, scope)
    work = dist.all_gather_single(gathered.view(-1), x.reshape(-1), group=axis.group, async_op=True)
    return Pending(gathered, work)


def rows_sent(axis: Axis) -> list[int]:
    """Ranks in the order in which ``start_reduce_scatter`` wants their rows: this one last."""
    return [r for r in range(axis.size) if r != axis.index] + [axis.index]


def start_reduce_scatter(x: Tensor, axis: Axis, *, scope: str) -> Pending | PendingRows:
    """Starts a sum over ranks of which each gets one row.

    gloo's own reduce-scatter is an all-reduce of the whole buffer. An all-to-all followed by a
    local sum moves half the bytes and adds in rank order on every rank; this rank's row stays
    where it is. On other backends the native one is used.

    Args:
        x: (size, C), row i meant for rank ``rows_sent(axis)[i]``. Do not touch before ``wait()``.
        axis: to reduce over.
        scope: see ``Dispatch``.
    """
    if axis.size == 1:
        return Pending(x[0], None)
    axis.ledger.enter(axis.name, "reduce_scatter", x, scope)
    if dist.get_backend(axis.group) != "gloo":
        in_rank_order = torch.cat((x[: axis.index], x[-1:], x[axis.index : -1]))
        total = torch.empty_like(x[0])
        work = dist.reduce_scatter_single(
            total, in_rank_order.view(-1), group=axis.group, async_op=True
        )
        return Pending(total, work)
    received, width = torch.empty_like(x[:-1]), x[0].numel()
    splits = [0 if r == axis.index else width for r in range(axis.size)]
    work = dist.all_to_all_single(
        received.view(-1),
        x[:-1].view(-1),
        output_split_sizes=splits,
        input_split_sizes=splits,
        group=axis.group,
        async_op=True,
    )
    return PendingRows(x[-1], received, work, axis.index)


def psum(x: Tensor, axis: Axis, *, scope: str) -> Tensor:
    """Sum over the ranks of ``axis``; every one of them gets it. Does not modify ``x``."""
    return start_psum(x.clone(), axis, scope=scope).wait()


def all_gather(x: Tensor, axis: Axis, *, scope: str) -> Tensor:
    """Stacks each rank's ``x`` along a new leading dimension of length ``axis.size``."""
    if axis.size == 1:
        return x[None].clone()
    gathered = x.new_empty((axis.size, *x.shape))
    axis.ledger.enter(axis.name, "all_gather", gathered, scope)
    dist.all_gather_single(gathered.view(-1), x.reshape(-1), group=axis.group)
    return gathered


def gather_json(
    value: Any, *, device: torch.device, group: dist.ProcessGroup | None = None
) -> list[Any]:
    """JSON values of all ranks of the world, or of a group, in rank order, on every rank.

    For control messages outside training (a commit, a report); not in any axis' ledger. JSON,
    because what a peer sends must never be able to run code here.
    """
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=device)
    dist.all_gather_single(sizes, torch.tensor([data.numel()], device=device), group=group)
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    gathered = torch.empty(longest * sizes.numel(), dtype=torch.uint8, device=device)
    dist.all_gather_single(gathered, padded, group=group)
    rows = zip(gathered.view(-1, longest).cpu(), sizes.tolist(), strict=True)
    return [json.loads(bytes(row[:size].tolist())) for row, size in rows]


@dataclass(slots=True)
class Fence:
    """Parameters that were written on one CUDA stream and are about to be read on another.

    FSDP2 copies a unit's rows on a stream of its own, which waits for the optimizer but not for
    what is written during a forward. On a CPU there is nothing to wait for.
    """

    written: torch.cuda.Event | None = None

    def record(self) -> None:
        """Call on the stream that has written."""
        if torch.cuda.is_initialized():
            self.written = torch.cuda.Event()
            self.written.record()

    def wait(self) -> None:
        """Call on the stream that reads."""
        if self.written is not None:
            torch.cuda.current_stream().wait_event(self.written)


class PlainBuffers:
    """FSDP2 asks its communication object for buffers; plain ones do."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class CountedAllGather(PlainBuffers):
    """FSDP2's parameter all-gather, entered in the axis' ledger."""

    axis: Axis
    scope: str
    fence: Fence = field(default_factory=Fence)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer of a gather; FSDP2 asks for it on the stream that then reads the rows."""
        self.fence.wait()
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gathers this rank's flat shard of one unit; called by FSDP2."""
        self.axis.ledger.enter(self.axis.name, "all_gather", output_tensor, self.scope)
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


@dataclass(frozen=True, slots=True)
class CountedReduceScatter(PlainBuffers):
    """FSDP2's gradient reduce-scatter, entered in the axis' ledger."""

    axis: Axis
    scope: str

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduces one unit's flat gradient to this rank's shard; called by FSDP2."""
        self.axis.ledger.enter(self.axis.name, "reduce_scatter", input_tensor, self.scope)
        return dist.reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
