"""Passes: each collective in one bucket, the same results to the last bit, starts before waits."""

import itertools
import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from core_torch.shard.layout import Layout
from core_torch.shard.lower import lower
from core_torch.shard.operators import ShardPlan, gather, plan_of, scatter
from core_torch.shard.passes import nodes as calls
from core_torch.shard.passes.bucket import bucket
from core_torch.shard.passes.joint import merge_gathers, merge_scatters, tag_gathers
from core_torch.shard.passes.nodes import Parameter, ancestors, nodes_of, parameter_of, place, sort
from core_torch.shard.passes.reorder import reorder
from core_torch.shard.schedule import CompileOptions, buckets_of
from core_torch.tests.graph_cases import (
    ATEN,
    Builder,
    Drawn,
    Traced,
    alone,
    axis,
    carried_by,
    copied,
    drawn,
    evaluated,
    examples,
    executed,
    order_of,
    parameters_of,
    random_buckets,
    same_bits,
    traced_llama,
)

quick = settings(deadline=None, max_examples=25, derandomize=True)
SEEDS = st.integers(0, 10_000)
GATHER = (calls.start_gather, calls.wait_gather)
SCATTER = (calls.start_scatter, calls.wait_scatter)
REPLICAS = (calls.start_replica_sum, calls.wait_replica_sum)


@pytest.fixture(scope="module", autouse=True)
def without_ranks() -> Iterator[None]:
    with alone():
        yield


@pytest.fixture(scope="module")
def llama() -> Traced:
    return traced_llama()


def by_units(traced: Traced) -> list[list[Parameter]]:
    return buckets_of(traced.graphs, CompileOptions(wrap="manual"))


# Bucketing.


@quick
@given(SEEDS)
def test_every_gather_and_every_scatter_is_in_exactly_one_bucket(seed: int) -> None:
    of = drawn(seed)
    found = {target: nodes_of(of.module.graph, target) for target in (gather, scatter)}
    before = {t: sorted(parameter_of(n).name for n in nodes) for t, nodes in found.items()}
    bucket(of.module.graph, random_buckets(parameters_of(of.module.graph), seed))
    for single, start in ((gather, calls.start_gather), (scatter, calls.start_scatter)):
        after = itertools.chain.from_iterable(carried_by(of.module.graph, start))
        assert sorted(after) == before[single]
        assert not nodes_of(of.module.graph, single)


@quick
@given(SEEDS, st.integers(1, 2), st.integers(0, 2), st.integers(0, 2))
def test_bucketed_reordered_and_lowered_a_graph_computes_the_same_bits(
    seed: int, replicas: int, ahead: int, behind: int
) -> None:
    of = drawn(seed, replicas=replicas)
    wanted = evaluated(of.module, of.inputs)
    bucket(of.module.graph, random_buckets(parameters_of(of.module.graph), seed))
    assert same_bits(evaluated(of.module, of.inputs), wanted)
    reorder(of.module.graph, ahead=ahead, behind=behind)
    assert same_bits(evaluated(of.module, of.inputs), wanted)
    program = lower(of.module, name="backward", compile_segment=None)
    assert same_bits(executed(program, of.inputs), wanted)


@quick
@given(SEEDS, st.integers(0, 2), st.integers(0, 2))
def test_no_pass_puts_a_node_before_what_it_needs(seed: int, ahead: int, behind: int) -> None:
    of = drawn(seed, replicas=2)
    bucket(of.module.graph, random_buckets(parameters_of(of.module.graph), seed))
    reorder(of.module.graph, ahead=ahead, behind=behind)
    seen: set[Node] = set()
    for node in of.module.graph.nodes:
        assert seen.issuperset(node.all_input_nodes)
        seen.add(node)


@quick
@given(SEEDS)
def test_parameters_of_one_bucket_have_one_dtype_and_are_all_cut_or_none_is(seed: int) -> None:
    of = drawn(seed)
    bucket(of.module.graph, [parameters_of(of.module.graph)])
    for start in (calls.start_gather, calls.start_scatter):
        for node in nodes_of(of.module.graph, start):
            assert len({source.meta["val"].dtype for source in node.all_input_nodes}) == 1
            cuts = {of.plan.layouts[str(name)].shards for name in node.args[2]}  # type: ignore[union-attr]
            assert len(cuts) == 1


def two_dtypes(order: str = "abcd") -> tuple[Builder, ShardPlan]:
    """Parameters a, b of float32, c of float64, d a scalar; gathered and scattered in order."""
    builder = Builder()
    shapes: dict[str, tuple[int, ...]] = {"a": (4, 2), "b": (4,), "c": (4,), "d": ()}
    layouts = {n: Layout(n, torch.Size(s), 2 if s else 1) for n, s in shapes.items()}
    plan = ShardPlan(layouts, {"u": list(shapes)}, axis("shard", 2), axis("replica", 1))
    results = []
    shards = {
        name: builder.placeholder(
            torch.ones(layout.local_shape(0), dtype=torch.float64 if name == "c" else torch.float32)
        )
        for name, layout in layouts.items()
    }
    for name in order:
        full = builder.call(gather, shards[name], plan.number, name)
        made = builder.call(ATEN.mul.Tensor, full, 2.0)
        dtype = shards[name].meta["val"].dtype
        results.append(builder.call(scatter, made, plan.number, name, dtype))
    builder.graph.output(tuple(results))
    return builder, plan


def test_another_dtype_and_what_is_not_cut_get_buckets_of_their_own() -> None:
    builder, plan = two_dtypes()
    bucket(builder.graph, [[Parameter(plan.number, name) for name in "abcd"]])
    for start in (calls.start_gather, calls.start_scatter):
        assert carried_by(builder.graph, start) == [("a", "b"), ("c",), ("d",)]


def test_a_parameter_that_the_plan_forgets_gets_its_own_bucket() -> None:
    builder, plan = two_dtypes()
    bucket(builder.graph, [[Parameter(plan.number, "a")]])
    assert carried_by(builder.graph, calls.start_gather) == [("a",), ("b",), ("c",), ("d",)]


def test_a_bucket_is_packed_in_the_order_of_the_model_whatever_the_plan_says() -> None:
    builder, plan = two_dtypes("badc")
    bucket(builder.graph, [[Parameter(plan.number, name) for name in "ba"]])
    for start in (calls.start_gather, calls.start_scatter):
        assert carried_by(builder.graph, start)[0] == ("a", "b")


# A Llama of four layers: numbers and order.


def test_a_manual_plan_has_one_collective_per_unit_and_direction(llama: Traced) -> None:
    units = [tuple(held) for held in llama.plan.units.values()]
    assert len(units) == 6
    forward, backward = (copied(m).graph for m in (llama.graphs.forward, llama.graphs.backward))
    bucket(forward, by_units(llama))
    bucket(backward, by_units(llama))
    assert carried_by(forward, calls.start_gather) == units
    # Nothing of the embedding is needed again, and the head is kept.
    assert carried_by(backward, calls.start_gather) == units[-2:0:-1]
    assert carried_by(backward, calls.start_scatter) == units[::-1]


def test_before_bucketing_there_is_one_collective_per_parameter(llama: Traced) -> None:
    forward, backward = llama.graphs.forward.graph, llama.graphs.backward.graph
    assert len(nodes_of(forward, gather)) == len(llama.plan.layouts) == 39
    assert (len(nodes_of(backward, gather)), len(nodes_of(backward, scatter))) == (36, 39)


@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize("ahead", [1, 2])
def test_the_next_gather_starts_before_one_is_waited_for(
    llama: Traced, name: str, ahead: int
) -> None:
    graph = copied(getattr(llama.graphs, name)).graph
    bucket(graph, by_units(llama))
    reorder(graph, ahead=ahead)
    order = order_of(graph, *GATHER)
    for k, (start, wait, use) in enumerate(order):
        assert start < wait < use
        for later in order[k + 1 : k + 1 + ahead]:
            assert later[0] < wait, "in flight already"
        for later in order[k + 1 + ahead :]:
            assert later[0] > wait, "no more than that: each takes memory"


@pytest.mark.parametrize("behind", [1, 2])
def test_a_scatter_is_waited_for_after_the_next_has_started(llama: Traced, behind: int) -> None:
    graph = copied(llama.graphs.backward).graph
    bucket(graph, by_units(llama))
    reorder(graph, behind=behind)
    order = order_of(graph, *SCATTER)
    assert len(order) == 6
    for k, (start, wait, use) in enumerate(order):
        assert start < wait < use
        assert all(later[0] < wait for later in order[k + 1 : k + 1 + behind])
        assert all(later[0] > wait for later in order[k + 1 + behind :])


def test_without_reordering_every_wait_follows_its_start_at_once(llama: Traced) -> None:
    graph = copied(llama.graphs.backward).graph
    bucket(graph, by_units(llama))
    reorder(graph, ahead=0, behind=0)
    order = [node.target for node in graph.nodes if node.target in {*GATHER, *SCATTER}]
    assert len(order) == 20 and {*zip(order[::2], order[1::2], strict=True)} == {GATHER, SCATTER}


def test_the_order_of_compute_is_left_alone(llama: Traced) -> None:
    graph = copied(llama.graphs.backward).graph
    bucket(graph, by_units(llama))
    before = computing(graph.nodes)
    reorder(graph)
    assert computing(graph.nodes) == before


def computing(nodes: Any) -> list[str]:
    """Names of what is neither a collective nor hangs on a finished gradient."""
    targets = {*calls.STARTS, *calls.WAITS, calls.mean_shards}
    return [
        node.name
        for node in nodes
        if node.op == "call_function"
        and node.target not in targets
        and node.target is not operator.getitem
        and not targets & {source.target for source in ancestors([node])} - {*GATHER}
    ]


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_llama_computes_the_same_bits_under_any_plan(llama: Traced, seed: int | None) -> None:
    for name in ("forward", "backward"):
        module = copied(getattr(llama.graphs, name))
        inputs = examples(module)
        wanted = evaluated(module, inputs)
        parameters = parameters_of(module.graph)
        bucket(module.graph, by_units(llama) if seed is None else random_buckets(parameters, seed))
        reorder(module.graph)
        program = lower(module, name=name, compile_segment=None)
        assert same_bits(executed(program, inputs), wanted)


# Replicas.


def test_hybrid_adds_a_sum_over_replicas_between_the_scatter_and_the_mean() -> None:
    of = traced_llama(ranks=2, replicas=2, layers=2)
    graph = copied(of.graphs.backward).graph
    bucket(graph, by_units(of))
    reorder(graph)
    assert carried_by(graph, calls.start_replica_sum) == carried_by(graph, calls.start_scatter)
    assert len(carried_by(graph, calls.start_replica_sum)) == 4
    for mean in nodes_of(graph, calls.mean_shards):
        chain = [mean]
        while chain[-1].target is not calls.start_scatter:
            assert isinstance(source := chain[-1].args[0], Node)
            chain.append(source)
        assert [n.target for n in chain[1:]] == [*REPLICAS[::-1], *SCATTER[::-1]]
    for shards, replicas in itertools.pairwise(
        sorted((*order_of(graph, *REPLICAS), *order_of(graph, *REPLICAS)))[::2]
    ):
        assert replicas[0] < shards[1], "the next sum starts before this one is waited for"


# Over the joint graph.


def reads_twice(*, through_views: bool = False, ranks: int = 2) -> Drawn:
    """Parameters a and b are gathered twice; a is scattered twice, and its gradients are added."""
    builder = Builder()
    layouts = {n: Layout(n, torch.Size((4, 3)), ranks) for n in "ab"}
    plan = ShardPlan(layouts, {"u": ["a"], "v": ["b"]}, axis("shard", ranks), axis("replica", 1))
    inputs = [torch.arange(12.0).view(4, 3)[: 4 // ranks] + i for i in range(2)]
    a, b = (builder.placeholder(x) for x in inputs)
    full = [builder.call(gather, x, plan.number, n) for x, n in [(a, "a"), (b, "b")] * 2]
    gradients = []
    for i, (node, name) in enumerate(zip(full[:3], "aba", strict=True)):
        made = builder.call(ATEN.mul.Tensor, builder.call(ATEN.mul.Tensor, node, full[1]), i + 1)
        gradients.append(builder.call(scatter, made, plan.number, name, torch.float32))
        if through_views and i != 1:
            gradients[-1] = builder.call(ATEN.view.default, gradients[-1], [6])
    both = builder.call(ATEN.add.Tensor, gradients[0], gradients[2])
    return Drawn(builder.module([full[2], full[3], both, gradients[1]]), inputs, plan)


def test_a_parameter_that_is_read_twice_is_gathered_once() -> None:
    of = reads_twice()
    wanted = evaluated(of.module, of.inputs)
    merge_gathers(of.module.graph)
    assert [parameter_of(n).name for n in nodes_of(of.module.graph, gather)] == ["a", "b"]
    assert same_bits(evaluated(of.module, of.inputs), wanted)


@pytest.mark.parametrize("through_views", [False, True])
def test_gradients_of_both_readings_are_added_before_one_scatter(through_views: bool) -> None:
    of = reads_twice(through_views=through_views)
    wanted = evaluated(of.module, of.inputs)
    merge_scatters(of.module.graph)
    assert sorted(parameter_of(n).name for n in nodes_of(of.module.graph, scatter)) == ["a", "b"]
    assert same_bits(evaluated(of.module, of.inputs), wanted)  # small whole numbers: exact


def test_scatters_of_different_parameters_are_never_added() -> None:
    of = reads_twice()
    first, second = nodes_of(of.module.graph, scatter)[:2]
    with of.module.graph.inserting_after(second):
        total = of.module.graph.call_function(ATEN.add.Tensor, (first, second))
    total.meta["val"] = first.meta["val"]
    [output] = [node for node in of.module.graph.nodes if node.op == "output"]
    output.args = ((total,),)
    merge_scatters(of.module.graph)
    found = {parameter_of(node).name for node in nodes_of(of.module.graph, scatter)}
    assert found == {"a", "b"} and total.all_input_nodes == [first, second]


def test_a_tied_head_is_gathered_once_and_scattered_once() -> None:
    of = traced_llama(tied=True, layers=1)
    forward, backward = of.graphs.forward.graph, of.graphs.backward.graph
    for graph, target in ((forward, gather), (backward, scatter)):
        found = [parameter_of(node).name for node in nodes_of(graph, target)]
        assert found.count("tok_embeddings.weight") == 1 and len(set(found)) == len(found) == 11


def tags(*, reshard: bool, keep_last_unit: bool, ranks: int = 2) -> str:
    """R for gathered again, S for saved: of a, b, a and b."""
    of = reads_twice(ranks=ranks)
    of.plan.reshard_after_forward = reshard
    tag_gathers(of.module.graph, keep_last_unit=keep_last_unit)
    policies = [node.meta["recompute"] for node in nodes_of(of.module.graph, gather)]
    return "".join("R" if p is CheckpointPolicy.MUST_RECOMPUTE else "S" for p in policies)


def test_gathers_are_repeated_but_for_the_last_unit_or_where_the_model_keeps_all() -> None:
    assert tags(reshard=True, keep_last_unit=False) == "RRRR"
    assert tags(reshard=True, keep_last_unit=True) == "RSRS"  # the last to be read is b
    assert tags(reshard=False, keep_last_unit=False) == "SSSS"
    assert tags(reshard=False, keep_last_unit=True, ranks=1) == "RRRR", (
        "it is no copy: costs nothing"
    )


def test_a_model_that_keeps_its_parameters_gathers_nothing_in_the_backward() -> None:
    of = traced_llama(layers=1, reshard_after_forward=False)
    assert not nodes_of(of.graphs.backward.graph, gather)
    assert plan_of(of.plan.number) is of.plan


# Order.


@quick
@given(SEEDS)
def test_sorting_a_shuffled_graph_restores_its_dependencies_and_sorting_again_changes_nothing(
    seed: int,
) -> None:
    graph = drawn(seed).module.graph
    before = list(graph.nodes)
    sort(graph)
    assert list(graph.nodes) == before, "what is in order stays"


def test_an_order_that_leaves_a_node_out_is_refused_and_a_broken_one_found() -> None:
    graph = drawn(0).module.graph
    order = list(graph.nodes)
    with pytest.raises(AssertionError):
        place(graph, order[:-1])
    user = next(n for n in order if n.op == "call_function")
    at, source = order.index(user), order.index(user.all_input_nodes[0])
    order[at], order[source] = order[source], order[at]
    with pytest.raises(RuntimeError, match="before it has been defined"):
        place(graph, order)
        graph.lint()
