"""A compiled graph as a list of instructions, and the loop that runs it.

What torch.compile traces becomes a *program*: compute segments, and between them the
collectives' starts and waits, in an order that the passes decide and nothing later changes.
Values are numbered. An instruction drops its inputs at their last use *before* it runs, so a
segment can free what it has consumed while it is still running.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Kind = Literal["compute", "view", "start", "wait"]
Op = Literal["all_gather", "reduce_scatter", "all_reduce"]
Link = Literal["shard", "replica"]


class Value(NamedTuple):
    """What is known of a value before it exists."""

    nbytes: int  # of its storage, on this rank; 0 for what is not a tensor
    storage: int  # number of the value that owns the memory; its own unless it is a view


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One call. ``run`` gets its inputs as a list that it may empty, and returns a tuple."""

    kind: Kind
    name: str  # of a bucket ("layers.0"), a segment ("compute 3") or a view's operator
    run: Callable[[list[Any]], tuple[Any, ...]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...] = ()  # inputs and outputs that nothing needs afterwards
    op: Op | None = None  # of a start or a wait
    payload_bytes: int = 0  # of a start: see collectives.py for what counts
    ranks: int = 1  # that take part in the collective
    link: Link = "shard"  # replicas have connections of their own for exchanges
    scratch_bytes: int = 0  # at the peak inside ``run``, above what lives before and its outputs
    flops: int = 0  # of a compute segment
    touched_bytes: int = 0  # read and written by a compute segment's operators
    operators: int = 0  # in a compute segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Instructions in order of execution. Inputs are dropped at their last use as well."""

    name: str  # "forward", "round" (a forward that carries one), "backward" or "inference"
    instructions: tuple[Instruction, ...]
    values: tuple[Value, ...]  # by number
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]  # None: a result that is None
    held: frozenset[int] = field(default=frozenset())  # inputs that the caller keeps alive


def execute(program: Program, args: list[Any], *, seconds: list[float] | None = None) -> list[Any]:
    """Runs ``program`` and returns its outputs.

    Args:
        program: what to run.
        args: one value per input; **emptied**, so that no reference stays behind.
        seconds: gets the duration of each instruction, if given.
    """
    env: list[Any] = [None] * len(program.values)
    for number, arg in zip(program.inputs, args, strict=True):
        env[number] = arg
    args.clear()
    arg = None
    for instruction in program.instructions:
        began = 0.0 if seconds is None else time.perf_counter()
        given = [env[i] for i in instruction.inputs]
        for i in instruction.frees:
            env[i] = None
        for i, value in zip(instruction.outputs, instruction.run(given), strict=True):
            env[i] = value
        value = None
        for i in instruction.frees:  # once more: a result of no use is freed as well
            env[i] = None
        if seconds is not None:
            seconds.append(time.perf_counter() - began)
    return [None if i is None else env[i] for i in program.outputs]
