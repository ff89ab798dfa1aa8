"""Ranks as threads of one process, whose collectives meet in memory instead of on a wire.

Everything above ``torch.distributed`` runs as shipped: engine, votes, ledger. A group checks
that its ranks bring the same operation, and the room knows at once when nobody can go on any
more: a hang is an error, not a timeout.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from unittest import mock

import torch
from torch import Tensor

from core_torch import collectives
from core_torch.collectives import Axis, Ledger
from core_torch.mesh import Mesh


class Hang(AssertionError):
    """Ranks wait for each other, or brought different operations."""


class Room:
    """Threads that meet. One runs at a time, so nothing else needs a lock, or waits for the GIL."""

    def __init__(self) -> None:
        self.turn = threading.Lock()  # held by the thread that runs
        self.alive = 0
        self.asleep: list[threading.Event] = []  # what each waiting thread waits for
        self.failure: BaseException | None = None

    def run(self, work: Callable[[int], Any], ranks: int) -> list[Any]:
        """``work(rank)`` on a thread for each rank; the results, or the first error."""
        results: list[Any] = [None] * ranks
        self.alive = ranks

        def body(rank: int) -> None:
            with self.turn:
                try:
                    results[rank] = work(rank)
                except BaseException as error:
                    self.fail(error)
                self.alive -= 1
                self.look()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(ranks)]
        with mock.patch.object(collectives, "dist", FakeDist()):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if self.failure is not None:
            raise self.failure
        return results

    def sleep(self, event: threading.Event) -> None:
        """Lets others run until ``event``.

        Raises:
            Hang: nobody is left who could bring it about.
        """
        self.asleep.append(event)
        self.look()
        self.turn.release()
        event.wait()
        self.turn.acquire()
        self.asleep.remove(event)
        if self.failure is not None:
            raise self.failure

    def fail(self, error: BaseException) -> None:
        """Ends everybody's wait; the first error counts."""
        self.failure = self.failure or error
        for event in self.asleep:
            event.set()

    def look(self) -> None:
        """Fails if all that are left wait for each other."""
        waiting = sum(not event.is_set() for event in self.asleep)
        if waiting and waiting == self.alive:
            self.fail(Hang("every rank that is left waits for one that has gone"))


class Group:
    """Ranks of one axis; each takes part in one operation at a time."""

    def __init__(self, room: Room, size: int) -> None:
        self.room, self.size = room, size
        self.brought: dict[int, tuple[object, Any]] = {}
        self.met: list[Any] = []
        self.arrived = threading.Event()

    def meet(self, index: int, kind: object, value: Any) -> list[Any]:
        """What all ranks of the group brought, in order; waits for them.

        Raises:
            Hang: they brought different kinds, or will never come.
        """
        self.brought[index] = kind, value
        if len(self.brought) < self.size:
            self.room.sleep(self.arrived)
            return self.met
        kinds = {kind for kind, _ in self.brought.values()}
        if len(kinds) > 1:
            self.room.fail(Hang(f"ranks brought {kinds}"))
            raise Hang(f"ranks brought {kinds}")
        self.met = [self.brought[i][1] for i in range(self.size)]
        self.brought = {}
        self.arrived.set()
        self.arrived = threading.Event()
        return self.met


@dataclass(frozen=True)
class Seat:
    """One rank's place in a group; stands for a process group."""

    group: Group
    index: int


class Arrived(NamedTuple):
    """An operation that is over as soon as it is begun."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


class FakeDist:
    """The two operations of ``torch.distributed`` that rounds use."""

    def all_reduce(self, x: Tensor, *, group: Seat, async_op: bool = False) -> Arrived:
        """Sum in rank order, in place."""
        kind = ("all_reduce", x.dtype, x.shape)
        everyone = group.group.meet(group.index, kind, x.clone())
        x.copy_(torch.stack(everyone).sum(dim=0))
        return Arrived()

    def all_gather_single(
        self, out: Tensor, x: Tensor, *, group: Seat, async_op: bool = False
    ) -> Arrived:
        """Rows of all ranks, one after the other."""
        kind = ("all_gather", x.dtype, x.shape)
        torch.cat(group.group.meet(group.index, kind, x.clone()), out=out)
        return Arrived()


class World(NamedTuple):
    """All ranks of a mesh of replicas x shards."""

    room: Room
    meshes: list[Mesh]  # by rank
    everyone: list[Seat]  # by rank, in the group of the whole world


def make_world(replicas: int, shards: int = 1) -> World:
    """Meshes of threads; ledgers write traces."""
    room = Room()
    columns = [Group(room, replicas) for _ in range(shards)]
    rows = [[Group(room, shards) for _ in range(replicas)] for _ in range(2)]
    whole = Group(room, replicas * shards)
    meshes = []
    for n in range(replicas):
        for m in range(shards):
            ledger = Ledger(trace=[])

            def axis(name: str, group: Group, index: int, ledger: Ledger = ledger) -> Axis:
                return Axis(name, cast(Any, Seat(group, index)), group.size, index, ledger)

            axes = {
                "replica": axis("replica", columns[m], n),
                "shard": axis("shard", rows[0][n], m),
            }
            own = axis("shard", rows[1][n], m)
            meshes.append(Mesh(cast(Any, None), axes, own, torch.device("cpu"), ledger))
    return World(room, meshes, [Seat(whole, rank) for rank in range(len(meshes))])
