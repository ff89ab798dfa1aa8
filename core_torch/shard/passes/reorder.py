"""Reordering: collectives run while something else is computed.

    start(k); wait(k); compute(k)    ->   start(k + 1); wait(k); compute(k)
    start(k); wait(k)  [scatter]     ->   start(k); ...; start(k + 1); wait(k)

Nothing else moves, so the memory of activations does not change; what is added is ``ahead``
gathered buckets and ``behind`` buckets of gradients in flight.
"""

from torch.fx import Graph, Node

from core_torch.shard.passes import nodes as calls
from core_torch.shard.passes.nodes import ancestors, descendants, nodes_of, place


def reorder(graph: Graph, *, ahead: int = 1, behind: int = 1) -> None:
    """Starts gathers earlier and waits for scatters later.

    Args:
        graph: bucketed; changed in place.
        ahead: buckets whose gather is in flight before the one that is waited for.
        behind: scatters that start before an earlier one is waited for.
    """
    _start_earlier(graph, ahead)
    for starts, waits in (
        (calls.start_scatter, calls.wait_scatter),
        (calls.start_replica_sum, calls.wait_replica_sum),
    ):
        _wait_later(graph, nodes_of(graph, starts), nodes_of(graph, waits), behind)


def _start_earlier(graph: Graph, ahead: int) -> None:
    waits = nodes_of(graph, calls.wait_gather)
    if not waits or not ahead:
        return
    starts = [start for wait in waits if isinstance(start := wait.args[0], Node)]
    sources = ancestors(starts)  # inputs, and views of them
    first = [n for n in graph.nodes if n.op == "placeholder" or n in sources]
    rest = [n for n in graph.nodes if n not in {*first, *starts}]
    before: dict[Node, list[Node]] = {}
    for k, start in enumerate(starts):
        anchor = waits[k - ahead] if k >= ahead else rest[0]
        before.setdefault(anchor, []).append(start)
    place(graph, first + [x for node in rest for x in (*before.get(node, ()), node)])


def _wait_later(graph: Graph, starts: list[Node], waits: list[Node], behind: int) -> None:
    wait_of = {wait.args[0]: wait for wait in waits}
    for k, start in enumerate(starts):
        moved = [wait_of[start], *descendants(wait_of[start])]
        chosen = set(moved)
        if any(node in chosen for node in starts[k + 1 : k + 1 + behind]):
            continue  # a later scatter needs this one's result
        order = list(graph.nodes)
        tail = [node for node in order if node in chosen]
        rest = [node for node in order if node not in chosen]
        after = starts[k + behind] if k + behind < len(starts) else rest[-2]
        at = rest.index(after) + 1
        place(graph, rest[:at] + tail + rest[at:])
