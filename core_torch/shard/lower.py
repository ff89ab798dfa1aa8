"""From a scheduled graph to a program: which nodes are one instruction, and what memory is whose.

Between two collectives lies a *segment* of compute. With a kernel compiler each segment is
compiled by itself; blocks of a model give equal segments, which are compiled once. Without, each
operator is an instruction of its own.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from core_torch.shard.flops import work_of
from core_torch.shard.operators import plan_of
from core_torch.shard.passes import nodes as calls
from core_torch.shard.passes.nodes import (
    STARTS,
    WAITS,
    feeds_only_starts,
    is_item,
    source_of,
    subject_of,
)
from core_torch.shard.program import Instruction, Kind, Program, Value

Run = Callable[[list[Any]], tuple[Any, ...]]
Segment = tuple[Sequence[Node], Sequence[Node], Sequence[Node]]  # nodes, inputs, outputs
CompileSegment = Callable[[*Segment, tuple[int, ...]], Run]  # and which inputs it may overwrite
_VIEWS = {
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.permute.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
    operator.getitem,
}


def lower(
    module: GraphModule,
    *,
    name: str,
    compile_segment: CompileSegment | None,
    donated: Iterable[int] = (),
) -> Program:
    """The program of a scheduled graph.

    Args:
        module: bucketed and reordered.
        name: "forward", "round" (a forward that carries one) or "backward".
        compile_segment: makes one function of a segment's nodes, given with its inputs, its
            outputs, and the places of inputs whose memory it may use again; None: every
            operator runs by itself.
        donated: places of the program's inputs that nobody needs after their last use here.
    """
    lowering = _Lowering(module, compile_segment)
    return lowering.program(name, frozenset(donated))


class _Lowering:
    """Numbers values and cuts the graph; used once."""

    def __init__(self, module: GraphModule, compile_segment: CompileSegment | None) -> None:
        self._module = module
        self._nodes = list(module.graph.nodes)
        self._compile = compile_segment
        self._number = {node: i for i, node in enumerate(self._nodes)}
        self._dummies = 0  # results of lists that nobody reads
        self._instructions: list[Instruction] = []
        self._segment: list[Node] = []
        self._segments: dict[str, Segment] = {}  # by name of the instruction

    def program(self, name: str, donated: frozenset[int]) -> Program:
        """Cuts, numbers and frees."""
        inputs = [node for node in self._nodes if node.op == "placeholder"]
        [output] = [node for node in self._nodes if node.op == "output"]
        for node in self._nodes:
            self._take(node)
        self._flush()
        results = [x if isinstance(x, Node) else None for x in _flat(output.args[0])]
        numbers = tuple(None if node is None else self._number[node] for node in results)
        held = frozenset(self._number[n] for n in inputs if _is_held(n, name))
        values = _values(self._nodes, self._number)
        values += [Value(0, len(values) + i) for i in range(self._dummies)]
        instructions = _with_frees(self._instructions, keep=numbers)
        if self._compile is not None:
            kept = [self._number[n] for i, n in enumerate(inputs) if i not in donated]
            instructions = self._with_kernels(instructions, values, kept)
        return Program(
            name=name,
            instructions=tuple(instructions),
            values=tuple(values),
            inputs=tuple(self._number[node] for node in inputs),
            outputs=numbers,
            held=held,
        )

    def _take(self, node: Node) -> None:
        if node.op in ("placeholder", "output") or is_item(node):
            return
        if node.target in STARTS or node.target in WAITS or node.target is calls.mean_shards:
            self._flush()
            self._collective(node)
        elif node.op == "get_attr":
            self._constant(node)
        elif self._compile is None or feeds_only_starts(node) or _follows_mean(node):
            self._operator(node)
        else:
            self._segment.append(node)

    def _collective(self, node: Node) -> None:
        subject = subject_of(node)
        op = subject.op(node.target)
        kind: Kind = "start" if node.target in STARTS else "wait" if op else "view"
        self._instructions.append(
            Instruction(
                kind=kind,
                name=subject.scope,
                run=_runner(node, unpack=node.target in calls.LISTS),
                inputs=self._inputs(node),
                outputs=self._outputs(node),
                op=op,
                payload_bytes=subject.payload_bytes(op) if op and kind == "start" else 0,
                ranks=subject.ranks(op) if op else 1,
                link=subject.link,
                scratch_bytes=subject.scratch_bytes(node.target),
                touched_bytes=subject.touched_bytes(node.target),
                operators=subject.size,
            )
        )

    def _constant(self, node: Node) -> None:
        value = self._module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        self._instructions.append(
            Instruction(
                kind="view",
                name=str(node.target),
                run=lambda given: (value,),
                inputs=(),
                outputs=(self._number[node],),
            )
        )

    def _operator(self, node: Node) -> None:
        is_view = node.target in _VIEWS
        work = work_of([node])
        self._instructions.append(
            Instruction(
                kind="view" if is_view else "compute",
                name=str(node.name),
                run=_runner(node, unpack=False),
                inputs=self._inputs(node),
                outputs=(self._number[node],),
                **work._asdict(),
            )
        )

    def _flush(self) -> None:
        nodes, self._segment = self._segment, []
        if not nodes:
            return
        inside = set(nodes)
        inputs = list(dict.fromkeys(s for n in nodes for s in n.all_input_nodes if s not in inside))
        outputs = [n for n in nodes if any(user not in inside for user in n.users)]
        if not outputs:
            return
        work = work_of(nodes, fused=True)
        name = f"compute {len(self._segments)}"
        self._segments[name] = (nodes, inputs, outputs)
        self._instructions.append(
            Instruction(
                kind="compute",
                name=name,
                run=_not_compiled,
                inputs=tuple(self._number[n] for n in inputs),
                outputs=tuple(self._number[n] for n in outputs),
                **work._asdict(),
            )
        )

    def _with_kernels(
        self, instructions: Sequence[Instruction], values: Sequence[Value], kept: Sequence[int]
    ) -> list[Instruction]:
        """Compiles segments; each may overwrite inputs that it frees and that nothing shares."""
        assert self._compile is not None
        everything = (*kept, *(i for x in instructions for i in x.outputs))
        users = Counter(values[i].storage for i in everything)  # living values of each storage
        done = []
        for instruction in instructions:
            segment = self._segments.get(instruction.name)
            if segment is not None and instruction.kind == "compute":
                free = set(instruction.frees)
                free = {i for i in free if i not in kept and users[values[i].storage] <= 1}
                places = tuple(k for k, i in enumerate(instruction.inputs) if i in free)
                instruction = replace(instruction, run=self._compile(*segment, places))
            done.append(instruction)
        return done

    def _inputs(self, node: Node) -> tuple[int, ...]:
        return tuple(self._number[source] for source in node.all_input_nodes)

    def _outputs(self, node: Node) -> tuple[int, ...]:
        if node.target not in calls.LISTS:
            return (self._number[node],)
        items = {user.args[1]: self._number[user] for user in node.users}
        count = subject_of(node).size
        return tuple(items[i] if i in items else self._dummy() for i in range(count))

    def _dummy(self) -> int:
        self._dummies += 1
        return len(self._nodes) + self._dummies - 1


def _not_compiled(given: list[Any]) -> tuple[Any, ...]:
    raise AssertionError("a segment without a kernel")


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _follows_mean(node: Node) -> bool:
    """True for a view of a finished gradient shard."""
    if node.target not in _VIEWS:
        return False
    [source] = node.all_input_nodes
    return _is_mean(source) or _follows_mean(source)


def _is_mean(node: Node) -> bool:
    source = node.args[0] if is_item(node) else None
    return isinstance(source, Node) and source.target is calls.mean_shards


def _lender(node: Node) -> Node | None:
    """The parameter's rows that a gathered parameter is itself, where nothing had to be copied.

    A kernel must not use such memory again.
    """
    if not is_item(node) or source_of(node).target is not calls.wait_gather:
        return None
    sources: Any
    number: Any
    names: Any
    sources, number, names = source_of(source_of(node)).args
    place: Any = node.args[1]
    rows = sources[place]
    is_lent = plan_of(number).lends(names[place], rows.meta["val"].dtype)
    return rows if is_lent else None


def _is_held(node: Node, name: str) -> bool:
    """Whether the caller keeps an input alive: parameters, buffers and the batch."""
    return name != "backward" or str(node.target).startswith("primals")


def _values(nodes: Sequence[Node], number: dict[Node, int]) -> list[Value]:
    """Memory of every node's result; views share what fake tensors say they share."""
    owners: dict[int, int] = {}
    values = []
    for node in nodes:
        value = node.meta.get("val")
        if node.target in STARTS or node.target is calls.wait_scatter:
            values.append(Value(subject_of(node).result_bytes(node.target), number[node]))
        elif _is_mean(node):
            flat = source_of(source_of(node))
            values.append(Value(values[number[flat]].nbytes, values[number[flat]].storage))
            owners[_storage(node.meta["val"])] = values[-1].storage
        elif (lender := _lender(node)) is not None:
            values.append(values[number[lender]])
            owners[_storage(node.meta["val"])] = values[-1].storage
        elif node.target is calls.wait_replica_sum:
            flight = values[number[source_of(node)]]
            values.append(Value(flight.nbytes, flight.storage))
        elif isinstance(value, Tensor):
            owner = owners.setdefault(_storage(value), number[node])
            values.append(Value(value.untyped_storage().nbytes(), owner))
        else:
            values.append(Value(0, number[node]))
    return values


def _storage(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def _runner(node: Node, *, unpack: bool) -> Run:
    """Calls the node's target with inputs given as a list in order of ``all_input_nodes``."""
    target, places = node.target, {n: i for i, n in enumerate(node.all_input_nodes)}
    assert callable(target)
    if node.target is calls.start_scatter and len(places) == len(_flat(node.args[0])):
        number, names = node.args[1:]
        return lambda given: (target(given, number, names),)  # empties ``given``
    rest, kwargs = node.args[len(places) :], node.kwargs
    if tuple(places) == node.args[: len(places)] and not _holds_nodes((rest, kwargs)):
        if unpack:
            return lambda given: tuple(target(*given, *rest, **kwargs))
        return lambda given: (target(*given, *rest, **kwargs),)

    def run(given: list[Any]) -> tuple[Any, ...]:
        args = map_arg(node.args, lambda n: given[places[n]])
        named = map_arg(node.kwargs, lambda n: given[places[n]])
        result = target(*args, **named)
        return tuple(result) if unpack else (result,)

    return run


def _holds_nodes(value: Any) -> bool:
    found: list[Node] = []
    map_arg(value, found.append)
    return bool(found)


def _with_frees(instructions: list[Instruction], keep: Sequence[int | None]) -> list[Instruction]:
    """The same instructions; each drops what it is the last to need, and results of no use."""
    alive = {number for number in keep if number is not None}
    done = []
    for instruction in reversed(instructions):
        needed = dict.fromkeys((*instruction.inputs, *instruction.outputs))
        frees = tuple(number for number in needed if number not in alive)
        alive.update(instruction.inputs)
        done.append(replace(instruction, frees=frees))
    return done[::-1]
