"""Programs for tests of the timeline: written by hand, or scheduled from a planning problem."""

from collections.abc import Sequence
from typing import Any

from core_torch.shard.auto_wrap import Problem
from core_torch.shard.cost import Costs
from core_torch.shard.plan import Plan
from core_torch.shard.program import Instruction, Kind, Op, Program, Value


def costs(**changed: Any) -> Costs:
    """One FLOP and one touched byte take a second, a collective a second and 0.1 per byte."""
    numbers: dict[str, Any] = dict(
        flops_per_second=1.0,
        bytes_per_second=1.0,
        seconds_per_operator=0.0,
        latency_seconds=1.0,
        link_bytes_per_second=10.0,
    )
    return Costs(**numbers | changed)


class Writer:
    """Collects values and instructions; every method returns the number of its value."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.instructions: list[Instruction] = []
        self.inputs: list[int] = []

    def input(self, nbytes: int = 0) -> int:
        self.inputs.append(self._value(nbytes))
        return self.inputs[-1]

    def view(self, of: int) -> int:
        self.values.append(Value(self.values[of].nbytes, self.values[of].storage))
        self._add("view", "view", (of,), len(self.values) - 1)
        return len(self.values) - 1

    def compute(self, name: str, reads: Sequence[int], nbytes: int = 0, **more: Any) -> int:
        return self._add("compute", name, reads, self._value(nbytes), **more)

    def start(
        self, name: str, reads: Sequence[int] = (), nbytes: int = 0, *, op: Op, **more: Any
    ) -> int:
        return self._add("start", name, reads, self._value(nbytes), op=op, **more)

    def wait(self, name: str, flight: int, nbytes: int = 0, *, op: Op, **more: Any) -> int:
        return self._add("wait", name, (flight,), self._value(nbytes), op=op, **more)

    def program(self, name: str, outputs: Sequence[int], held: Sequence[int] = ()) -> Program:
        """The program; each value that is no output is freed by the last to read it."""
        needed = set(outputs)
        freeing = []
        for instruction in reversed(self.instructions):
            frees = tuple(dict.fromkeys(i for i in instruction.inputs if i not in needed))
            needed |= set(frees)
            freeing.append(_replace(instruction, frees))
        return Program(
            name=name,
            instructions=tuple(reversed(freeing)),
            values=tuple(self.values),
            inputs=tuple(self.inputs),
            outputs=tuple(outputs),
            held=frozenset(held),
        )

    def _value(self, nbytes: int) -> int:
        self.values.append(Value(nbytes, len(self.values)))
        return len(self.values) - 1

    def _add(self, kind: Kind, name: str, reads: Sequence[int], result: int, **more: Any) -> int:
        self.instructions.append(
            Instruction(
                kind=kind,
                name=name,
                run=lambda given: tuple(given),
                inputs=tuple(reads),
                outputs=(result,),
                **more,
            )
        )
        return result


def _replace(instruction: Instruction, frees: tuple[int, ...]) -> Instruction:
    names = [name for name in Instruction.__slots__ if name != "frees"]
    return Instruction(**{name: getattr(instruction, name) for name in names}, frees=frees)


def programs_of(problem: Problem, plan: Plan) -> tuple[Program, Program]:
    """Forward and backward of a plan with one second per FLOP, gathers one bucket ahead."""
    return _scheduled(problem, plan, backward=False), _scheduled(problem, plan, backward=True)


def _scheduled(problem: Problem, plan: Plan, *, backward: bool) -> Program:
    of = {need.name: i for i, need in enumerate(problem.needs)}
    runs = [[of[name] for name in bucket] for bucket in plan][:: -1 if backward else 1]
    seconds = problem.backward_seconds if backward else problem.forward_seconds
    memory = problem.backward_bytes if backward else problem.forward_bytes
    gather = [sum(problem.needs[i].payload_bytes for i in run) for run in runs]
    scatter = [sum(problem.needs[i].gradient_bytes for i in run) for run in runs]
    n, writer = problem.ranks, Writer()
    flights: dict[int, int] = {}
    leaving: dict[int, int] = {}
    results: list[int] = []

    def start(i: int, **more: Any) -> None:
        size = gather[i]
        more |= dict(payload_bytes=size, ranks=n)
        flights[i] = writer.start(f"{i}", (), size + size // n, op="all_gather", **more)

    def reduce(i: int, **more: Any) -> None:
        if i in leaving:
            flight = leaving.pop(i)
            results.append(
                writer.wait(f"{i}", flight, scatter[i] // n, op="reduce_scatter", **more)
            )

    start(0)
    for i, run in enumerate(runs):
        base = dict(scratch_bytes=max(memory[j] for j in run))
        if i + 1 < len(runs):
            start(i + 1, **base)
        full = writer.wait(f"{i}", flights[i], gather[i], op="all_gather", **base)
        made = scatter[i] if backward else 0
        gradient = writer.compute(f"{i}", (full,), made, flops=sum(seconds[j] for j in run), **base)
        if made:
            more: dict[str, Any] = dict(payload_bytes=made, ranks=n, **base)
            nbytes = 2 * made - made // n
            leaving[i] = writer.start(f"{i}", (gradient,), nbytes, op="reduce_scatter", **more)
        reduce(i - 1, **base)
    reduce(len(runs) - 1, **base)
    return writer.program("backward" if backward else "forward", results)
