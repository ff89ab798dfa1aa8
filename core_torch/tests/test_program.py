"""Programs: values have numbers and die at their last use; equal blocks are one segment."""

import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Node

from core_torch.shard.lower import lower
from core_torch.shard.operators import ShardPlan
from core_torch.shard.passes import nodes as calls
from core_torch.shard.passes.bucket import bucket
from core_torch.shard.passes.reorder import reorder
from core_torch.shard.plan import plan_hash
from core_torch.shard.program import Instruction, Program, Value, execute
from core_torch.shard.schedule import CompileOptions, buckets_of, scheduled, simulated
from core_torch.shard.segments import SegmentCompiler, extract
from core_torch.tests.graph_cases import (
    Traced,
    alone,
    copied,
    drawn,
    evaluated,
    examples,
    executed,
    parameters_of,
    random_buckets,
    same_bits,
    traced_llama,
)

quick = settings(deadline=None, max_examples=20, derandomize=True)
SEEDS = st.integers(0, 10_000)
AOT = CompileOptions(backend="aot_eager")


@pytest.fixture(scope="module", autouse=True)
def without_ranks() -> Iterator[None]:
    with alone():
        yield


@pytest.fixture(scope="module")
def llama() -> Traced:
    return traced_llama(ranks=4)


class Recorder:
    """Takes segments instead of a compiler; as text, they can be compared."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(
        self, nodes: Sequence[Node], given: Sequence[Node], made: Sequence[Node], *more: Any
    ) -> Any:
        module = extract(nodes, given, made)
        shapes = [str(tuple(node.meta["val"].shape)) for node in given]
        self.texts.append(str(module.graph) + " ".join(shapes))
        return lambda values: tuple(module(*values))


def program_of(traced: Traced, name: str, compile_segment: Any = None) -> Program:
    """Under the manual plan."""
    module = copied(getattr(traced.graphs, name))
    return scheduled(module, name, buckets_of(traced.graphs, AOT), AOT, compile_segment)


def random_program(seed: int) -> tuple[Program, list[Tensor]]:
    of = drawn(seed)
    bucket(of.module.graph, random_buckets(parameters_of(of.module.graph), seed))
    reorder(of.module.graph)
    program = lower(of.module, name="backward", compile_segment=None)
    KEPT.append(of)  # its plan is found by number only
    return program, of.inputs


KEPT: list[Any] = []


@quick
@given(SEEDS)
def test_every_value_is_made_once_before_it_is_read_and_freed_after_it_is_read_last(
    seed: int,
) -> None:
    program, _ = random_program(seed)
    alive, ever = set(program.inputs), set(program.inputs)
    for instruction in program.instructions:
        assert alive.issuperset(instruction.inputs)
        assert not ever & set(instruction.outputs), "a number is given once"
        alive |= set(instruction.outputs)
        ever |= set(instruction.outputs)
        assert alive.issuperset(instruction.frees)
        alive -= set(instruction.frees)
    wanted = {number for number in program.outputs if number is not None}
    unread = {n for n in program.inputs if all(n not in i.inputs for i in program.instructions)}
    assert alive == wanted | unread
    assert max(ever) < len(program.values)
    assert all(program.values[v.storage].storage == v.storage for v in program.values)


@quick
@given(SEEDS)
def test_memory_is_dropped_at_the_last_use_and_not_later(seed: int) -> None:
    program, inputs = random_program(seed)
    watched: dict[int, weakref.ref[Tensor]] = {}
    places = range(len(program.instructions))
    watching = tuple(_watching(program, place, watched) for place in places)
    executed(replace(program, instructions=watching), inputs)
    assert watched


def _watching(program: Program, place: int, watched: dict[int, weakref.ref[Tensor]]) -> Instruction:
    """The same instruction; checks first that what was freed before it is gone."""
    instruction = program.instructions[place]
    before = program.instructions[:place]
    freed = {number for earlier in before for number in earlier.frees}
    alive = {number for earlier in before for number in earlier.outputs} - freed
    shared = {program.values[n].storage for n in (*alive, *program.inputs, *instruction.inputs)}
    gone = [n for n in freed if program.values[n].storage not in shared]  # no view lives on

    def run(given: list[Any]) -> tuple[Any, ...]:
        late = [n for n in gone if n in watched and watched[n]() is not None]
        assert not late, f"{instruction.name} finds {late} alive"
        results = instruction.run(given)
        for number, value in zip(instruction.outputs, results, strict=True):
            if isinstance(value, Tensor):
                watched[number] = weakref.ref(value)
        return results

    return replace(instruction, run=run)


def by_hand(*steps: Instruction, inputs: int, outputs: tuple[int | None, ...]) -> Program:
    count = inputs + len(steps)
    return Program(
        name="forward",
        instructions=steps,
        values=tuple(Value(0, i) for i in range(count)),
        inputs=tuple(range(inputs)),
        outputs=outputs,
    )


def test_inputs_are_gone_when_their_last_reader_lets_go() -> None:
    seen = []

    def run(given: list[Any]) -> tuple[Any, ...]:
        reference = weakref.ref(given[0])
        given.clear()
        seen.append(reference())
        return (torch.ones(1),)

    step = Instruction(kind="compute", name="a", run=run, inputs=(0,), outputs=(1,), frees=(0,))
    args = [torch.ones(1)]
    [result] = execute(by_hand(step, inputs=1, outputs=(1,)), args)
    assert seen == [None], "nothing but the instruction held it"
    assert result == 1.0 and args == []


def test_a_result_of_no_use_is_freed_at_once() -> None:
    made: list[weakref.ref[Tensor]] = []
    seen = []

    def make(given: list[Any]) -> tuple[Any, ...]:
        value = torch.ones(1)
        made.append(weakref.ref(value))
        return (value,)

    def look(given: list[Any]) -> tuple[Any, ...]:
        seen.append(made[0]())
        return (None,)

    first = Instruction(kind="compute", name="a", run=make, inputs=(), outputs=(0,), frees=(0,))
    second = Instruction(kind="compute", name="b", run=look, inputs=(), outputs=(1,))
    execute(by_hand(first, second, inputs=0, outputs=(1,)), [])
    assert seen == [None]


def test_a_result_that_is_none_and_an_input_that_is_a_result_come_back_in_place() -> None:
    assert execute(by_hand(inputs=1, outputs=(None, 0, 0)), [7]) == [None, 7, 7]


def test_each_instruction_is_timed_if_somebody_asks(llama: Traced) -> None:
    program = program_of(llama, "forward")
    seconds: list[float] = []
    with torch.no_grad():
        execute(program, examples(llama.graphs.forward), seconds=seconds)
    assert len(seconds) == len(program.instructions) and min(seconds) >= 0


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_segments_compute_the_same_bits_as_single_operators(llama: Traced, name: str) -> None:
    module = getattr(llama.graphs, name)
    inputs = examples(module)
    wanted = evaluated(copied(module), inputs)
    assert same_bits(executed(program_of(llama, name, Recorder()), inputs), wanted)


def test_inner_blocks_are_one_segment_in_each_direction(llama: Traced) -> None:
    counts = {}
    for name in ("forward", "backward"):
        recorder = Recorder()
        program_of(llama, name, recorder)
        counts[name] = (len(recorder.texts), len(set(recorder.texts)))
    # All, different. Forward: rotary tables, embedding, four blocks, head. The first block also
    # cuts the tables and the last one saves less: 1 and 2 are equal. Backward: two of the head,
    # then two for each block, equal in 2, 1 and 0.
    assert counts == {"forward": (7, 6), "backward": (10, 6)}


def test_names_in_a_segment_follow_from_the_segment_alone(
    llama: Traced,
) -> None:
    recorder = Recorder()
    program_of(llama, "forward", recorder)
    assert all(re.search(r"placeholder\[target=kept_0\]", text) for text in recorder.texts)
    assert not any("primals" in text or "layers" in text for text in recorder.texts)


def test_equal_segments_are_compiled_once_with_inductor() -> None:
    of = traced_llama(layers=1, ranks=2)
    compiler = SegmentCompiler()
    nodes = [n for n in of.graphs.forward.graph.nodes if n.op == "call_function"]
    chosen = [n for n in nodes if n.target is torch.ops.aten.pow.Tensor_Scalar][:1]
    given = chosen[0].all_input_nodes
    first, second = (compiler(chosen, given, chosen) for _ in range(2))
    assert first is second and (compiler.compiled, compiler.reused) == (1, 1)
    x = torch.full(given[0].meta["val"].shape, 3.0)
    assert torch.equal(first([x])[0], torch.full_like(x, 9.0))


def test_a_segment_that_may_overwrite_an_input_is_another_text(llama: Traced) -> None:
    nodes = [n for n in llama.graphs.forward.graph.nodes if n.target is torch.ops.aten.mul.Tensor]
    chosen, given = nodes[:1], nodes[0].all_input_nodes
    keeping, donated = (str(extract(chosen, given, chosen, d).graph) for d in ((), (0,)))
    assert keeping != donated, "inductor's cache on disk knows a segment by its text alone"


@quick
@given(SEEDS, st.sampled_from([1, 3]))
def test_no_segment_may_overwrite_a_parameter_that_gathering_does_not_copy(
    seed: int, ranks: int
) -> None:
    of = drawn(seed, ranks=ranks)
    bucket(of.module.graph, random_buckets(parameters_of(of.module.graph), seed))
    reorder(of.module.graph)
    free: list[Node] = []

    def take(
        nodes: Sequence[Node], given: Sequence[Node], made: Sequence[Node], places: tuple[int, ...]
    ) -> Any:
        free.extend(given[i] for i in places)
        return lambda values: ()

    lower(of.module, name="backward", compile_segment=take)
    lent = [node for node in free if is_lent(node, of.plan)]
    assert not lent
    assert free or ranks == 1, "what has been copied is free"


def is_lent(node: Node, plan: ShardPlan) -> bool:
    """True for a parameter's own memory as a gathered parameter."""
    source, place = node.args[0], node.args[1] if len(node.args) > 1 else 0
    if not isinstance(source, Node) or source.target is not calls.wait_gather:
        return False
    start = source.args[0]
    assert isinstance(start, Node)
    names: Any = start.args[2]
    return plan.layouts[names[place]].shards == 1


def test_programs_of_two_ranks_differ_in_nothing_but_their_rows() -> None:
    described = []
    for rank in (0, 3):
        of = traced_llama(rank=rank, ranks=4, layers=1)
        recorder = Recorder()
        names = [
            (i.kind, i.op, i.name, i.inputs, i.outputs, i.payload_bytes)
            for name in ("forward", "backward")
            for i in program_of(of, name, recorder).instructions
        ]
        assert not [name for *_, name, _, _, _ in names if re.search(r"rank|@3|_3_of", name)]
        plan = [[p.name for p in held] for held in buckets_of(of.graphs, AOT)]
        described.append((names, recorder.texts, plan_hash(plan)))
    assert described[0] == described[1]


# Plans from the planner, on traced graphs.


@pytest.fixture(scope="module")
def rank_3() -> Traced:
    return traced_llama(rank=3, ranks=4)


def auto(limit: int | None = None) -> CompileOptions:
    return CompileOptions(backend="aot_eager", wrap="auto", memory_limit_bytes=limit)


def names_of(traced: Traced, options: CompileOptions) -> list[list[str]]:
    return [[p.name for p in held] for held in buckets_of(traced.graphs, options)]


def test_the_automatic_plan_is_the_same_on_ranks_0_and_3(llama: Traced, rank_3: Traced) -> None:
    assert llama.plan.shard.index == 0 and rank_3.plan.shard.index == 3
    assert names_of(llama, auto()) == names_of(rank_3, auto())


def test_the_automatic_plan_keeps_the_memory_limit_where_some_plan_does(llama: Traced) -> None:
    free = simulated(llama.graphs, buckets_of(llama.graphs, auto()), auto())
    alone = buckets_of(llama.graphs, CompileOptions(wrap="none"))
    least = simulated(llama.graphs, alone, auto()).peak_bytes
    assert least < free.peak_bytes, "or there is nothing to choose"
    limit = (least + free.peak_bytes) // 2
    found = simulated(llama.graphs, buckets_of(llama.graphs, auto(limit)), auto(limit))
    assert found.peak_bytes <= limit and found.seconds >= free.seconds


def test_the_automatic_plan_is_no_slower_and_has_no_more_collectives_than_the_manual_one(
    llama: Traced,
) -> None:
    manual = buckets_of(llama.graphs, CompileOptions(wrap="manual"))
    chosen = buckets_of(llama.graphs, auto())
    times = [simulated(llama.graphs, plan, auto()).seconds for plan in (chosen, manual)]
    assert times[0] <= times[1] and len(chosen) <= len(manual)


def test_simulating_leaves_the_graphs_as_they_are(llama: Traced) -> None:
    before = [str(m.graph) for m in (llama.graphs.forward, llama.graphs.backward)]
    simulated(llama.graphs, buckets_of(llama.graphs, AOT), AOT)
    assert before == [str(m.graph) for m in (llama.graphs.forward, llama.graphs.backward)]
