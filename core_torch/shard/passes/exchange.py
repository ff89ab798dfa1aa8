"""A sync round inside a forward: each unit is exchanged before its parameters are gathered.

    start(0), start(1)                                  at the top: ``limit`` in flight
    ...
    new = finish(0); start(2)                           before the first gather of unit 0
    flight = start_gather([new[0], new[1]])             reads what the exchange has made
    ...

The gathers take their rows from the exchange's result, so an order that gathers too early is
not a graph. Units are started and finished in their own order whatever the buckets are, so
ranks whose plans differ still meet; a bucket of several units waits for the last of them.
"""

import operator

from torch.fx import Graph, Node

from core_torch.shard.operators import plan_of
from core_torch.shard.passes.nodes import (
    finish_exchange,
    nodes_of,
    source_of,
    start_exchange,
    start_gather,
)


def carry_round(graph: Graph, number: int) -> None:
    """Puts the exchanges of a plan's units into a forward.

    Units behind the last one that the forward reads are left to ``Exchange.end``.

    Args:
        graph: bucketed and reordered; changed in place.
        number: of a plan with an exchange.
    """
    exchange = plan_of(number).exchange
    assert exchange is not None
    starts = [node for node in nodes_of(graph, start_gather) if node.args[1] == number]
    units = {name: u for u, held in enumerate(exchange.units.values()) for name in held}
    inputs = _inputs_of(starts, units)
    reached = 1 + max((units[name] for name in inputs), default=-1)
    held = [[name for name in names if name in inputs] for names in exchange.units.values()]
    rows = dict(inputs)  # by parameter: the input, or once it is exchanged, the new rows
    flights: list[Node] = []

    def start(u: int) -> None:
        if u < reached:
            sources = [inputs[name] for name in held[u]]
            flights.append(graph.call_function(start_exchange, (sources, number, u)))

    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        for u in range(exchange.limit):
            start(u)
    finished = 0
    for gather in starts:
        needed = 1 + max((units.get(name, -1) for name, _ in _reads(gather)), default=-1)
        with graph.inserting_before(gather):
            for u in range(finished, needed):
                new = graph.call_function(finish_exchange, (flights[u], number, u))
                for i, name in enumerate(held[u]):
                    rows[name] = graph.call_function(operator.getitem, (new, i))
                    rows[name].meta = dict(inputs[name].meta)
                start(u + exchange.limit)
            finished = max(finished, needed)
            _read_from(graph, gather, rows)


def _reads(gather: Node) -> list[tuple[str, Node]]:
    """Parameters of a bucket, and where it takes their rows from."""
    sources, _, names = gather.args
    assert isinstance(sources, list | tuple) and isinstance(names, list | tuple)
    return [(str(n), s) for n, s in zip(names, sources, strict=True) if isinstance(s, Node)]


def _inputs_of(starts: list[Node], units: dict[str, int]) -> dict[str, Node]:
    """The graph's inputs that hold exchanged parameters."""
    found = {}
    for start in starts:
        for name, node in _reads(start):
            while node.op != "placeholder":
                node = source_of(node)
            if name in units:
                found[name] = node
    return found


def _read_from(graph: Graph, gather: Node, rows: dict[str, Node]) -> None:
    """Makes a bucket gather ``rows``, through the same views as before."""
    before = _reads(gather)
    sources = [_through(graph, node, rows[n]) if n in rows else node for n, node in before]
    gather.args = (sources, *gather.args[1:])
    for _, node in before:
        while node.op != "placeholder" and not node.users:
            view, node = node, source_of(node)
            graph.erase_node(view)


def _through(graph: Graph, node: Node, new: Node) -> Node:
    """The views that ``node`` is of an input, of ``new`` instead."""
    if node.op == "placeholder":
        return new
    source = _through(graph, source_of(node), new)
    return graph.node_copy(node, lambda _: source)
