"""A modelled link, for machines on which none can be emulated: a process group that is late.

It is a backend like any other, registered through torch's public ``register_backend``, so that
every variant goes through it, whoever dispatches. gloo does the work over loopback; what it
has finished counts as handed to the link then, and is held back for as long as its bytes
would take. Costs are those of rings, see ``Cost``. Unlike an emulated link it knows neither
packets nor windows, and the two directions of a line are one. Results say "modelled".
"""

# torch declares overloads that only callers meet.
# mypy: disable-error-code="override"

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from core_torch.config import MeshConfig
from core_torch.mesh import Mesh, RankInfo, build_mesh

BACKEND = "twinshard_late"


_F = TypeVar("_F", bound=Callable[..., Any])


def hidden(function: _F) -> _F:
    """``function``, into which no compiler looks."""
    return torch.compiler.disable(function)


class Cost(NamedTuple):
    """What one operation asks of a rank's line."""

    nbytes: float  # that this rank sends
    hops: int  # that follow each other


def gather_cost(payload: int, ranks: int) -> Cost:
    """An all-gather whose result has ``payload`` bytes: a ring."""
    return Cost(payload * (ranks - 1) / ranks, ranks - 1)


def reduce_cost(payload: int, ranks: int) -> Cost:
    """An all-reduce of ``payload`` bytes, or gloo's reduce-scatter: two rings."""
    return Cost(2 * payload * (ranks - 1) / ranks, 2 * (ranks - 1))


def exchange_cost(payload: int, ranks: int) -> Cost:
    """An all-to-all of ``payload`` bytes: straight to each of the others."""
    return Cost(payload * (ranks - 1) / ranks, 1 if ranks > 1 else 0)


CostOf = Callable[[int, int], Cost]  # of payload bytes and number of ranks


class Line:
    """This rank's line: one transfer after the other, each ``delay`` per hop on its way."""

    def __init__(self, rate: float, delay: float) -> None:
        self._seconds_per_byte = 8.0 / rate
        self._delay = delay
        self._free = 0.0
        self._lock = threading.Lock()
        self._late: queue.SimpleQueue[tuple[float, LateWork]] = queue.SimpleQueue()
        threading.Thread(target=self._deliver, daemon=True).start()

    def send(self, work: "LateWork") -> None:
        """Takes a transfer that can begin now; ``work`` is told when it has arrived."""
        with self._lock:
            begin = max(time.monotonic(), self._free)
            self._free = begin + work.cost.nbytes * self._seconds_per_byte
            self._late.put((self._free + work.cost.hops * self._delay, work))

    def _deliver(self) -> NoReturn:
        while True:
            due, work = self._late.get()
            time.sleep(max(0.0, due - time.monotonic()))
            work.future.set_result(work.results)


class LateWork(dist.Work):
    """A collective of gloo that is over once the line has carried it as well."""

    def __init__(self, inner: list[dist.Work], cost: Cost, results: list[Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self.cost = cost
        self.results = results
        self.future: torch.futures.Future[list[Tensor]] = torch.futures.Future()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.future.wait()
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self.future


class LateGroup(dist.ProcessGroup):
    """gloo behind a line."""

    def __init__(self, gloo: Any, line: Line) -> None:  # torch declares it in part
        super().__init__(gloo.rank(), gloo.size())  # type: ignore[call-arg]
        self._gloo = gloo
        self._line = line
        self._name = ""
        self._started: queue.SimpleQueue[LateWork] = queue.SimpleQueue()
        threading.Thread(target=self._follow, daemon=True).start()

    def getBackendName(self) -> str:
        return BACKEND

    def setGroupName(self, name: str) -> None:  # kept here: the base class has nowhere to
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    @hidden
    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> LateWork:
        return self._late([self._gloo.allreduce(tensors, opts)], reduce_cost, tensors, tensors)

    @hidden
    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any) -> LateWork:
        return self.all_gather_single_coalesced([output], [given], opts)

    @hidden
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], given: Sequence[Tensor], opts: Any
    ) -> LateWork:
        pairs = zip(outputs, given, strict=True)
        works = [self._gloo._allgather_base(into, each, opts) for into, each in pairs]
        return self._late(works, gather_cost, outputs, outputs)

    @hidden
    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any) -> LateWork:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    @hidden
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], given: Sequence[Tensor], opts: Any
    ) -> LateWork:
        pairs = zip(outputs, given, strict=True)
        works = [self._gloo._reduce_scatter_base(into, each, opts) for into, each in pairs]
        return self._late(works, reduce_cost, given, outputs)

    @hidden
    def all_to_all_single(
        self, output: Tensor, given: Tensor, to: Sequence[int], of: Sequence[int], opts: Any
    ) -> LateWork:
        work = self._gloo.alltoall_base(output, given, to, of, opts)
        return self._late([work], exchange_cost, [given], [output])

    @hidden
    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> LateWork:
        return self._late([self._gloo.broadcast(tensors, opts)], exchange_cost, tensors, tensors)

    @hidden
    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], given: Sequence[Tensor], opts: Any
    ) -> LateWork:
        work = self._gloo.allgather(outputs, given, opts)
        flat = [output for row in outputs for output in row]
        return self._late([work], gather_cost, flat, flat)

    @hidden
    def barrier(self, opts: Any) -> dist.Work:  # only used to start a measurement
        return self._gloo.barrier(opts)

    def _late(
        self,
        works: list[dist.Work],
        cost: CostOf,
        payload: Sequence[Tensor],
        results: Sequence[Tensor],
    ) -> LateWork:
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in payload)
        late = LateWork(works, cost(nbytes, self.size()), list(results))
        self._started.put(late)
        return late

    def _follow(self) -> NoReturn:
        """Hands to the line what gloo has finished, in order."""
        while True:
            late = self._started.get()
            try:
                for work in late.inner:
                    work.wait()
            except RuntimeError as error:  # a peer is gone
                late.future.set_exception(error)  # type: ignore[arg-type]  # torch's mistake
            else:
                self._line.send(late)


@contextmanager
def joined_late(
    config: MeshConfig, info: RankInfo, init_method: str | None, *, rate: float, delay: float
) -> Iterator[Mesh]:
    """Like ``mesh.joined`` on CPUs, with a modelled line in front of each rank.

    Args:
        config: shape and deadline.
        info: place of this process.
        init_method: ``file://...`` of the ranks' store.
        rate: bits per second.
        delay: seconds, one way.
    """
    line = Line(rate, delay)  # one for all groups

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> LateGroup:
        return LateGroup(dist.ProcessGroupGloo(store, rank, size, timeout=timeout), line)

    dist.Backend.register_backend(BACKEND, make, devices=["cpu"])
    dist.init_process_group(
        BACKEND,
        init_method=init_method,
        rank=info.rank,
        world_size=info.world,
        timeout=timedelta(seconds=config.deadline_seconds),
    )
    try:
        yield build_mesh(config, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
