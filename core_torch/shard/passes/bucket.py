"""Bucketing: one collective for many parameters.

    gather(a), gather(b)    ->  flight = start([a, b]); wait(flight)[0], wait(flight)[1]
    scatter(a), scatter(b)  ->  flight = start([a, b]); mean(wait(flight))[0], ...[1]

A gather starts where its first parameter is needed, a scatter where its last gradient is
ready; reorder.py moves them from there.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Graph, Node

from core_torch.shard.operators import gather, plan_of, scatter
from core_torch.shard.passes import nodes as calls
from core_torch.shard.passes.nodes import Parameter, nodes_of, parameter_of, sort

Buckets = Sequence[Sequence[Parameter]]
_Key = tuple[Any, ...]


def bucket(graph: Graph, buckets: Buckets) -> None:
    """Replaces every gather and scatter by bucketed ones.

    Args:
        graph: forward or backward; changed in place.
        buckets: parameters that share a collective; one that is missing gets its own. Parameters
            of another dtype, or not sharded, form a bucket of their own inside it.
    """
    home = {p: i for i, held in enumerate(buckets) for p in held}
    for group in _groups(nodes_of(graph, gather), home):
        _gather_together(graph, group)
    for group in _groups(nodes_of(graph, scatter), home):
        _scatter_together(graph, group)
    sort(graph)
    graph.eliminate_dead_code()


def _groups(found: list[Node], home: dict[Parameter, int]) -> list[list[Node]]:
    """Nodes that can share a collective, each group in the order of the plan's parameters."""
    groups: dict[_Key, list[Node]] = {}
    for node in found:
        parameter = parameter_of(node)
        plan = plan_of(parameter.plan)
        value, source = node.meta["val"], node.args[0]
        assert isinstance(source, Node)
        is_cut = plan.layouts[parameter.name].shards > 1
        dtypes = (value.dtype, source.meta["val"].dtype)
        key = (home.get(parameter, parameter), parameter.plan, dtypes, is_cut)
        groups.setdefault(key, []).append(node)
    return [sorted(group, key=_place_in_plan) for group in groups.values()]


def _place_in_plan(node: Node) -> int:
    parameter = parameter_of(node)
    return list(plan_of(parameter.plan).layouts).index(parameter.name)


def _gather_together(graph: Graph, group: list[Node]) -> None:
    number, names = _subject(group)
    first = min(group, key=_positions(graph).__getitem__)
    for node in group:
        _hoist(graph, node)
    with graph.inserting_before(first):
        sources = [node.args[0] for node in group]
        start = _call(graph, calls.start_gather, sources, number, names)
        full = _call(graph, calls.wait_gather, start)
        _take_apart(graph, full, group)


def _scatter_together(graph: Graph, group: list[Node]) -> None:
    number, names = _subject(group)
    last = max(group, key=_positions(graph).__getitem__)
    with graph.inserting_before(last):
        sources = [node.args[0] for node in group]
        flat = _call(
            graph, calls.wait_scatter, _call(graph, calls.start_scatter, sources, number, names)
        )
        if plan_of(number).replica.size > 1:
            start = _call(graph, calls.start_replica_sum, flat, number, names)
            flat = _call(graph, calls.wait_replica_sum, start)
        dtype = group[0].meta["val"].dtype
        _take_apart(graph, _call(graph, calls.mean_shards, flat, number, names, dtype), group)


def _subject(group: list[Node]) -> tuple[int, tuple[str, ...]]:
    found = [parameter_of(node) for node in group]
    return found[0].plan, tuple(p.name for p in found)


def _call(graph: Graph, target: Callable[..., Any], *args: Any) -> Node:
    return graph.call_function(target, args)


def _take_apart(graph: Graph, parts: Node, group: list[Node]) -> None:
    for i, node in enumerate(group):
        item = graph.call_function(operator.getitem, (parts, i))
        item.meta = dict(node.meta)
        node.replace_all_uses_with(item)  # and is dead: erased at the end


def _positions(graph: Graph) -> dict[Node, int]:
    return {node: i for i, node in enumerate(graph.nodes)}


def _hoist(graph: Graph, node: Node) -> None:
    """Moves what a gather reads, views of an input, to the top: it can start at any time."""
    chain, source = [], node.args[0]
    while isinstance(source, Node) and source.op != "placeholder":
        assert len(source.all_input_nodes) == 1, f"a gather reads a computed value: {source}"
        chain.append(source)
        source = source.all_input_nodes[0]
    last_input = [n for n in graph.nodes if n.op == "placeholder"][-1]
    for link in chain:
        last_input.append(link)
