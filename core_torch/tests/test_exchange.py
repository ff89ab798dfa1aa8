"""Rounds in a forward: every unit is exchanged before it is gathered, in one order, a few at once.

No ranks: an exchange here multiplies a unit's rows by a number of its own, in place.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from core_torch.shard.cost import Costs
from core_torch.shard.exchange import Exchange
from core_torch.shard.lower import lower
from core_torch.shard.operators import ShardPlan, gather
from core_torch.shard.passes import nodes as calls
from core_torch.shard.passes.bucket import bucket
from core_torch.shard.passes.exchange import carry_round
from core_torch.shard.passes.nodes import Parameter, nodes_of, parameter_of, place, source_of
from core_torch.shard.passes.reorder import reorder
from core_torch.shard.program import Program, execute
from core_torch.shard.schedule import CompileOptions, buckets_of, scheduled, timeline_of
from core_torch.shard.segments import extract
from core_torch.tests.graph_cases import (
    Traced,
    alone,
    copied,
    drawn,
    examples,
    executed,
    parameters_of,
    random_buckets,
    same_bits,
    traced_llama,
)

quick = settings(deadline=None, max_examples=25, derandomize=True)
SEEDS = st.integers(0, 10_000)
HALVES = [
    [f"layers.{i}.{name}.weight" for i in range(4) for name in names]
    for names in (
        ("attention_norm", "attention.wq", "attention.wk", "attention.wv", "attention.wo"),
        ("ffn_norm", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
    )
]
ENDS = ["output.weight", "tok_embeddings.weight", "norm.weight"]
PLANS: dict[str, CompileOptions] = {
    "none": CompileOptions(backend="aot_eager", wrap="none"),
    "manual": CompileOptions(backend="aot_eager"),
    "across units": CompileOptions(backend="aot_eager", wrap=[*HALVES, ENDS], ahead=0),
    "far ahead": CompileOptions(backend="aot_eager", ahead=2),
}


@pytest.fixture(scope="module", autouse=True)
def without_ranks() -> Iterator[None]:
    with alone():
        yield


@pytest.fixture(scope="module")
def llama() -> Traced:
    return traced_llama()


def plan(of: Traced, how: str) -> list[list[Parameter]]:
    """Its buckets."""
    return buckets_of(of.graphs, PLANS[how])


class Engine:
    """Multiplies unit u's rows by u + 2, and keeps a log."""

    def __init__(self, plan: ShardPlan, units: dict[str, list[str]], limit: int) -> None:
        self.rows: dict[str, Tensor] = {}  # by parameter
        self.log: list[str] = []
        self.units = units
        plan.exchange = Exchange(
            units=units,
            limit=limit,
            begin=lambda: True,
            start=lambda u: self.log.append(f"start {u}"),
            finish=self.finish,
            end=lambda: None,
            payload_bytes=[100 * (u + 1) for u in range(len(units))],
            ranks=3,
        )

    def finish(self, u: int) -> None:
        self.log.append(f"finish {u}")
        for name in list(self.units.values())[u]:
            if name in self.rows:
                self.rows[name].mul_(u + 2)

    def run(self, module: GraphModule, program: Program, inputs: Sequence[Any]) -> list[Any]:
        """Results of a program whose exchanges change its inputs."""
        own = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
        self.rows = rows_of(module.graph, own)
        with torch.no_grad():
            return execute(program, own)

    def applied(self, graph: Graph, inputs: Sequence[Any]) -> list[Any]:
        """Inputs as all exchanges leave them."""
        own = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
        self.rows = rows_of(graph, own)
        for u in range(len(self.units)):
            self.finish(u)
        self.log.clear()
        return own


def rows_of(graph: Graph, inputs: Sequence[Any]) -> dict[str, Tensor]:
    """A traced graph's inputs by the parameter that they hold."""
    places = [node for node in graph.nodes if node.op == "placeholder"]
    found = {}
    for node in nodes_of(graph, gather):
        source = source_of(node)
        while source.op != "placeholder":
            source = source_of(source)
        found[parameter_of(node).name] = inputs[places.index(source)]
    return found


def in_round(of: Traced, how: str, limit: int = 2) -> tuple[Engine, GraphModule]:
    """The forward's graph with a round in it."""
    engine = Engine(of.plan, of.plan.units, limit)
    module = copied(of.graphs.forward)
    bucket(module.graph, plan(of, how))
    reorder(module.graph, ahead=PLANS[how].ahead, behind=PLANS[how].behind)
    carry_round(module.graph, of.plan.number)
    module.graph.lint()
    return engine, module


def exchanges(graph: Graph) -> list[str]:
    """Starts and finishes of exchanges in the order of a graph."""
    names = {calls.start_exchange: "start", calls.finish_exchange: "finish"}
    return [f"{names[n.target]} {n.args[2]}" for n in graph.nodes if n.target in names]


# Bits.


@pytest.mark.parametrize("how", PLANS)
def test_a_forward_with_a_round_computes_what_it_would_after_the_round(
    llama: Traced, how: str
) -> None:
    engine, module = in_round(llama, how)
    program = lower(module, name="round", compile_segment=None)
    forward = llama.graphs.forward
    inputs = examples(forward)
    found = engine.run(forward, program, inputs)
    ordinary = scheduled(copied(forward), "forward", plan(llama, how), PLANS[how], None)
    assert same_bits(found, executed(ordinary, engine.applied(forward.graph, inputs)))
    assert not same_bits(found, executed(ordinary, inputs))


@quick
@given(SEEDS, st.integers(0, 2), st.integers(1, 3))
def test_any_units_in_any_buckets_give_the_same_bits_as_the_round_before(
    seed: int, ahead: int, limit: int
) -> None:
    of, random = drawn(seed), Random(seed)
    names = random.sample(list(of.plan.layouts), len(of.plan.layouts))
    cut = sorted(random.sample(range(1, len(names)), 2))
    parts = [names[i:j] for i, j in zip([0, *cut], [*cut, len(names)], strict=True)]
    max(parts, key=len).pop()  # a parameter in no unit is gathered as it is
    engine = Engine(of.plan, {f"u{u}": part for u, part in enumerate(parts)}, limit)
    ordinary = bucketed(of.module, seed, ahead)
    wanted = executed(ordinary, engine.applied(of.module.graph, of.inputs))
    program = bucketed(of.module, seed, ahead, exchanged=of.plan.number)
    assert same_bits(engine.run(of.module, program, of.inputs), wanted)
    assert in_flight(engine.log) <= limit
    assert sorted(engine.log) == [f"{kind} {u}" for kind in ("finish", "start") for u in range(3)]


def bucketed(
    module: GraphModule, seed: int, ahead: int, *, exchanged: int | None = None
) -> Program:
    """The program of a drawn graph under drawn buckets."""
    twin = copied(module)
    bucket(twin.graph, random_buckets(parameters_of(twin.graph), seed))
    reorder(twin.graph, ahead=ahead)
    if exchanged is not None:
        carry_round(twin.graph, exchanged)
        twin.graph.lint()
    return lower(twin, name="round", compile_segment=None)


def in_flight(log: Sequence[str]) -> int:
    """The most exchanges that were started and not finished."""
    now, most = 0, 0
    for call in log:
        now += 1 if call.startswith("start") else -1
        most = max(most, now)
    return most


# Order.


@pytest.mark.parametrize("how", PLANS)
@pytest.mark.parametrize("limit", [1, 2, 3, 9])
def test_units_are_exchanged_in_their_order_with_a_limit_whatever_the_buckets_are(
    llama: Traced, how: str, limit: int
) -> None:
    _, module = in_round(llama, how, limit)
    found, units = exchanges(module.graph), range(6)
    for kind in ("start", "finish"):
        assert [call for call in found if call.startswith(kind)] == [f"{kind} {u}" for u in units]
    assert in_flight(found) == min(limit, 6)
    for u in range(6 - limit):  # the next starts as soon as there is room
        assert found[found.index(f"finish {u}") + 1] == f"start {u + limit}"
    first = next(n for n in module.graph.nodes if n.op == "call_function")
    assert first.target is calls.start_exchange, "before anything is computed"


@pytest.mark.parametrize("how", PLANS)
def test_a_gather_reads_what_the_exchanges_of_all_its_units_have_made(
    llama: Traced, how: str
) -> None:
    _, module = in_round(llama, how)
    order = list(module.graph.nodes)
    unit_of = {name: u for u, held in enumerate(llama.plan.units.values()) for name in held}
    for start in nodes_of(module.graph, calls.start_gather):
        sources, _, names = start.args
        assert isinstance(sources, list) and isinstance(names, tuple)
        for source, name in zip(sources, names, strict=True):
            finish = made_by(source)
            assert finish.target is calls.finish_exchange
            assert finish.args[2] == unit_of[str(name)]
            assert order.index(finish) < order.index(start)


def made_by(node: Node) -> Node:
    """The exchange's finish that a gathered tensor comes from."""
    while node.target is not calls.finish_exchange:
        node = source_of(node)
    return node


def test_a_unit_is_finished_no_earlier_than_its_gather_starts(llama: Traced) -> None:
    _, module = in_round(llama, "manual")
    kinds = {
        calls.finish_exchange: "finish",
        calls.start_gather: "gather",
        calls.wait_gather: "wait",
    }
    found = [kinds[n.target] for n in module.graph.nodes if n.target in kinds]
    ahead = ["finish", "gather", "wait"]
    assert found == ["finish", "gather", *ahead * 5, "wait"]


def test_an_order_that_gathers_before_the_exchange_is_no_graph(llama: Traced) -> None:
    _, module = in_round(llama, "manual")
    order = list(module.graph.nodes)
    start = nodes_of(module.graph, calls.start_gather)[2]
    finish = made_by(start.all_input_nodes[0])
    order.remove(start)
    order.insert(order.index(finish), start)
    with pytest.raises(RuntimeError, match="before it has been defined"):
        place(module.graph, order)
        module.graph.lint()


def test_units_that_the_forward_does_not_reach_are_left_to_the_end(llama: Traced) -> None:
    units = dict(reversed(llama.plan.units.items())) | {"stranger": []}
    engine = Engine(llama.plan, units, 2)
    program = scheduled(
        copied(llama.graphs.forward),
        "round",
        plan(llama, "manual"),
        PLANS["manual"],
        None,
        exchanged=llama.plan.number,
    )
    engine.run(llama.graphs.forward, program, examples(llama.graphs.forward))
    # The first gather is that of the last unit, so all are finished before it, in their order.
    assert [call for call in engine.log if "finish" in call] == [f"finish {u}" for u in range(6)]
    assert in_flight(engine.log) == 2 and "start 6" not in engine.log


def test_tied_weights_are_exchanged_once_and_before_their_first_use() -> None:
    of = traced_llama(tied=True, layers=1)
    engine, module = in_round(of, "manual")
    program = lower(module, name="round", compile_segment=None)
    inputs = examples(of.graphs.forward)
    found = engine.run(of.graphs.forward, program, inputs)
    assert engine.log == ["start 0", "start 1", "finish 0", "finish 1"]
    ordinary, _ = programs(of)
    assert same_bits(found, executed(ordinary, engine.applied(of.graphs.forward.graph, inputs)))


# Programs.


def programs(
    of: Traced, compile_segment: Callable[..., Any] | None = None
) -> tuple[Program, Program]:
    """The ordinary forward and the one with a round."""
    Engine(of.plan, of.plan.units, 2)
    how = (plan(of, "manual"), PLANS["manual"], compile_segment)
    ordinary = scheduled(copied(of.graphs.forward), "forward", *how)
    forward = copied(of.graphs.forward)
    return ordinary, scheduled(forward, "round", *how, exchanged=of.plan.number)


def test_both_forwards_have_the_same_segments_in_the_same_order(llama: Traced) -> None:
    texts: list[str] = []

    def take(nodes: Any, inputs: Any, outputs: Any, donated: tuple[int, ...]) -> Any:
        texts.append(str(extract(nodes, inputs, outputs, donated).graph))
        return lambda given: ()

    programs(llama, take)
    half = len(texts) // 2
    assert half == 7 and texts[:half] == texts[half:]


def test_a_round_adds_its_exchanges_to_a_program_and_nothing_else(llama: Traced) -> None:
    ordinary, with_round = programs(llama)
    ordinary_steps, steps = (
        [i.name for i in program.instructions if i.kind != "view" and i.op != "all_reduce"]
        for program in (ordinary, with_round)
    )
    assert steps == ordinary_steps
    starts = [i for i in with_round.instructions if i.op == "all_reduce" and i.kind == "start"]
    assert [(i.name, i.payload_bytes, i.ranks) for i in starts] == [
        (unit, 100 * (u + 1), 3) for u, unit in enumerate(llama.plan.units)
    ]
    outside = {with_round.values[i].storage for i in with_round.inputs}
    finishes = [i for i in with_round.instructions if i.op == "all_reduce" and i.kind == "wait"]
    new = [value for finish in finishes for value in finish.outputs]
    assert len(new) == 39, "the new rows are the old memory, and the caller's"
    assert {with_round.values[value].storage for value in new} <= outside


def test_the_timeline_shows_what_a_round_costs(llama: Traced) -> None:
    ordinary, with_round = programs(llama)
    backward = scheduled(
        copied(llama.graphs.backward),
        "backward",
        plan(llama, "manual"),
        PLANS["manual"],
        None,
    )
    costs, carried = Costs.typical(), llama.graphs.carried
    plain, loaded = (timeline_of(p, backward, carried, costs) for p in (ordinary, with_round))
    exchanged = [t for t in loaded.transfers if t.op == "all_reduce"]
    assert [t.name for t in exchanged] == list(llama.plan.units)
    assert {t.link for t in loaded.transfers if t not in exchanged} == {"shard"}
    for before, after in itertools.pairwise(exchanged):  # they queue with each other only
        assert after.link == "replica" and after.begin == max(after.issued, before.end)
    assert loaded.seconds > plain.seconds and loaded.peak_bytes >= plain.peak_bytes
