"""When a program's instructions would run, what they would wait for, what memory they hold.

Two machines: a compute stream that takes instructions one by one, and a link that serves
collectives in the order of issue and carries both directions at once. A start puts its
collective on the link and goes on; a wait blocks the compute stream until it is through.
A sync round's exchanges have a link of their own, as fast, and do not queue with the rest.
Blocked time is the *exposed* communication: total = compute + exposed.

Memory is counted by liveness, as ``execute`` lets go of values: a storage exists while any
value refers to it. What the caller holds is the caller's and not counted.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from core_torch.shard.cost import Costs, wire_bytes
from core_torch.shard.program import Instruction, Kind, Link, Op, Program


class Span(NamedTuple):
    """One instruction on the compute stream."""

    program: str
    kind: Kind
    name: str
    begin: float  # seconds since the start of the first program
    end: float
    blocked: float  # of these seconds, waiting for the link
    peak_bytes: int  # live while it runs, at most
    live_bytes: int  # live afterwards


class Transfer(NamedTuple):
    """One collective on the link."""

    program: str
    name: str
    op: Op
    payload_bytes: int
    wire_bytes: float  # each way, on this rank
    issued: float  # seconds
    begin: float
    end: float
    awaited: float  # when the compute stream came to the wait
    exposed: float  # how long it was blocked there
    link: Link = "shard"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What a simulation found. Seconds and bytes of one rank."""

    spans: tuple[Span, ...]
    transfers: tuple[Transfer, ...]  # in order of issue
    seconds: float
    compute_seconds: float
    link_seconds: float  # for which links are occupied
    exposed_seconds: float
    peak_bytes: int
    peak_at: int  # number of the span; -1: before the first
    start_bytes: int  # live before the first


_Storage = tuple[int, int]  # number of the program, number of the value that owns it


@dataclass(slots=True)
class _Memory:
    """Live storages, and who refers to them."""

    sizes: dict[_Storage, int] = field(default_factory=dict)
    references: Counter[_Storage] = field(default_factory=Counter)
    uncounted: set[_Storage] = field(default_factory=set)  # the caller's
    live_bytes: int = 0

    def take(self, storage: _Storage, nbytes: int) -> None:
        self.references[storage] += 1
        if self.references[storage] == 1 and storage not in self.uncounted:
            self.sizes[storage] = nbytes
            self.live_bytes += nbytes

    def drop(self, storage: _Storage) -> None:
        self.references[storage] -= 1
        if not self.references[storage]:
            self.live_bytes -= self.sizes.pop(storage, 0)


@dataclass(slots=True)
class _Machine:
    """State of both machines; programs run on it one after the other."""

    costs: Costs
    memory: _Memory
    now: float = 0.0
    link_free: dict[Link, float] = field(default_factory=lambda: {"shard": 0.0, "replica": 0.0})
    spans: list[Span] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)

    def compute(self, seconds: float) -> None:
        """Advances the stream by work that is slower while a link is busy."""
        slowdown = self.costs.compute_slowdown
        busy = max(*self.link_free.values(), self.now) - self.now
        if seconds * slowdown <= busy:
            self.now += seconds * slowdown
        else:
            self.now += busy + (seconds - busy / slowdown)

    def issue(self, program: str, start: Instruction) -> int:
        """Queues a collective; returns its number among the transfers."""
        if start.op is None:
            raise ValueError(f"start {start.name} of {program} names no operation")
        seconds = self.costs.link_seconds(start.op, start.payload_bytes, start.ranks)
        begin = max(self.now, self.link_free[start.link])
        end = begin + seconds
        self.link_free[start.link] = end
        wire = wire_bytes(start.op, start.payload_bytes, start.ranks)
        size, times = start.payload_bytes, (self.now, begin, end, end, 0.0)
        transfer = Transfer(program, start.name, start.op, size, wire, *times, start.link)
        self.transfers.append(transfer)
        return len(self.transfers) - 1

    def wait(self, number: int) -> float:
        """Blocks the stream until a transfer is through; returns for how long."""
        transfer = self.transfers[number]
        exposed = max(transfer.end - self.now, 0.0)
        self.transfers[number] = transfer._replace(awaited=self.now, exposed=exposed)
        self.now = max(self.now, transfer.end)
        return exposed

    def timeline(self, start_bytes: int) -> Timeline:
        """Sums up."""
        peaks = [start_bytes, *(span.peak_bytes for span in self.spans)]
        exposed = sum(span.blocked for span in self.spans)
        return Timeline(
            spans=tuple(self.spans),
            transfers=tuple(self.transfers),
            seconds=self.now,
            compute_seconds=sum(span.end - span.begin - span.blocked for span in self.spans),
            link_seconds=sum(transfer.end - transfer.begin for transfer in self.transfers),
            exposed_seconds=exposed,
            peak_bytes=max(peaks),
            peak_at=peaks.index(max(peaks)) - 1,
            start_bytes=start_bytes,
        )


@dataclass(slots=True)
class _Run:
    """One program on the machine. ``carried`` gives storages that exist already to inputs."""

    machine: _Machine
    program: Program
    place: int  # of the program among those that run
    carried: Mapping[int, _Storage] = field(default_factory=dict)
    live: set[int] = field(default_factory=set)  # numbers of values
    in_flight: dict[int, int] = field(default_factory=dict)  # output of a start: its transfer

    def storage(self, value: int) -> _Storage:
        """Which memory a value refers to."""
        owner = self.program.values[value].storage
        return self.carried.get(owner, (self.place, owner))

    def take(self, value: int) -> None:
        self.live.add(value)
        nbytes = self.program.values[self.program.values[value].storage].nbytes
        self.machine.memory.take(self.storage(value), nbytes)

    def drop(self, value: int) -> None:
        self.live.remove(value)
        self.machine.memory.drop(self.storage(value))

    def enter(self) -> None:
        """Takes the inputs."""
        for value in self.program.held:
            if value not in self.carried:
                self.machine.memory.uncounted.add(self.storage(value))
        for value in self.program.inputs:
            self.take(value)

    def run(self) -> None:
        """Runs every instruction.

        Raises:
            ValueError: a wait for nothing, or a start that nothing waits for.
        """
        for instruction in self.program.instructions:
            self.step(instruction)
        lost = {self.machine.transfers[number].name for number in self.in_flight.values()}
        if lost:
            raise ValueError(f"{self.program.name} never waits for {sorted(lost)}")

    def step(self, instruction: Instruction) -> None:
        """Runs one instruction."""
        machine, memory = self.machine, self.machine.memory
        begin, blocked, before = machine.now, 0.0, memory.live_bytes
        if instruction.kind == "wait":
            blocked = machine.wait(self._awaited(instruction))
        machine.compute(machine.costs.seconds_of(instruction, self.program.name))
        if instruction.kind == "start":  # packed first, then sent
            number = machine.issue(self.program.name, instruction)
            self.in_flight |= dict.fromkeys(instruction.outputs, number)
        for value in instruction.outputs:
            self.take(value)
        during = memory.live_bytes + instruction.scratch_bytes
        for value in set(instruction.frees) - self.program.held:
            self.drop(value)
        after = memory.live_bytes
        peak = max(before, during, after)
        kind, name = instruction.kind, instruction.name
        machine.spans.append(
            Span(self.program.name, kind, name, begin, machine.now, blocked, peak, after)
        )

    def _awaited(self, wait: Instruction) -> int:
        """Number of the transfer that a wait is for; takes it out of flight."""
        found = {self.in_flight[value] for value in wait.inputs if value in self.in_flight}
        if len(found) != 1:
            count = "no" if not found else "more than one"
            raise ValueError(f"{self.program.name} has a wait {wait.name} for {count} start")
        number = found.pop()
        self.in_flight = {v: n for v, n in self.in_flight.items() if n != number}
        return number


def simulate(program: Program, costs: Costs, *, resident_bytes: int = 0) -> Timeline:
    """Simulates one program; its outputs live to the end.

    Args:
        program: what to run.
        costs: of its instructions and of the link.
        resident_bytes: of what lives all along outside the program, added to all memory.

    Raises:
        ValueError: a start without its wait, or the reverse.
    """
    machine = _Machine(costs, _Memory(live_bytes=resident_bytes))
    run = _Run(machine, program, 0)
    run.enter()
    start_bytes = machine.memory.live_bytes
    run.run()
    return machine.timeline(start_bytes)


def simulate_step(
    forward: Program,
    backward: Program,
    costs: Costs,
    *,
    carried: Mapping[int, int],
    resident_bytes: int = 0,
) -> Timeline:
    """Simulates forward, then backward, as one timeline.

    Activations are outputs of the forward that the backward takes; they die in the backward,
    at their last use. All other outputs of the forward (logits, loss), and all of the
    backward (sharded gradients), live to the end.

    Args:
        forward: of the step.
        backward: of the step.
        costs: of instructions and of the link.
        carried: number of a backward input -> number of the forward output that it is.
        resident_bytes: of what lives all along outside, such as gradients accumulated before.

    Raises:
        ValueError: a start without its wait, the reverse, or a carried value that is not an
            output of the forward and an input of the backward.
    """
    strangers = sorted(set(carried) - set(backward.inputs))
    strangers += sorted(set(carried.values()) - set(forward.outputs))
    if strangers:
        raise ValueError(f"carried values that are no output or no input: {strangers}")
    machine = _Machine(costs, _Memory(live_bytes=resident_bytes))
    first = _Run(machine, forward, 0)
    first.enter()
    start_bytes = machine.memory.live_bytes
    first.run()
    storages = {b: first.storage(f) for b, f in carried.items()}
    second = _Run(machine, backward, 1, storages)
    second.enter()
    kept = Counter(forward.outputs) - Counter(carried.values())
    for value in sorted(first.live - set(kept)):
        first.drop(value)
    second.run()
    return machine.timeline(start_bytes)
