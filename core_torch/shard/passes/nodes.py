"""What passes see: the nodes of collectives, and the order of a graph."""

import heapq
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from core_torch.collectives import Pending, PendingRows
from core_torch.shard import operators
from core_torch.shard.exchange import Exchange
from core_torch.shard.operators import GatherInFlight, ShardPlan, plan_of
from core_torch.shard.program import Link, Op


def start_gather(shards: Sequence[Tensor], plan: int, names: Sequence[str]) -> GatherInFlight:
    """Starts gathering a bucket."""
    return operators.start_gather(list(shards), plan_of(plan), names)


def wait_gather(flight: GatherInFlight) -> list[Tensor]:
    """The full parameters of a bucket."""
    return flight.wait()


def start_scatter(
    gradients: list[Tensor], plan: int, names: Sequence[str]
) -> Pending | PendingRows:
    """Starts summing a bucket's full gradients over the shard axis; empties the list."""
    return operators.start_scatter(gradients, plan_of(plan), names)


def wait_scatter(flight: Pending | PendingRows) -> Tensor:
    """This rank's flat part of the sum."""
    return flight.wait()


def start_replica_sum(flat: Tensor, plan: int, names: Sequence[str]) -> Pending:
    """Starts summing a bucket's flat part over the replica axis."""
    return operators.start_replica_sum(flat, plan_of(plan), names)


def wait_replica_sum(flight: Pending) -> Tensor:
    """The flat sum over both axes."""
    return flight.wait()


def mean_shards(flat: Tensor, plan: int, names: Sequence[str], dtype: torch.dtype) -> list[Tensor]:
    """This rank's rows of a bucket's mean gradients."""
    return operators.mean_shards(flat, plan_of(plan), names, dtype)


def start_exchange(shards: Sequence[Tensor], plan: int, unit: int) -> list[Tensor]:
    """Starts a sync unit's exchange over replicas; gives its rows, which are still the old."""
    exchange_of(plan).start(unit)
    return list(shards)


def finish_exchange(flight: list[Tensor], plan: int, unit: int) -> list[Tensor]:
    """The same rows, as the exchange has overwritten them."""
    exchange_of(plan).finish(unit)
    return flight


def exchange_of(plan: int) -> Exchange:
    """What a sync engine has attached to a plan."""
    exchange = plan_of(plan).exchange
    assert exchange is not None
    return exchange


# The operations that a plan decides. An exchange's is its engine's: see ``ExchangedUnit``.
STARTS: dict[Any, Op] = {
    start_gather: "all_gather",
    start_scatter: "reduce_scatter",
    start_replica_sum: "all_reduce",
    start_exchange: "all_reduce",
}
WAITS: dict[Any, Op] = {
    wait_gather: "all_gather",
    wait_scatter: "reduce_scatter",
    wait_replica_sum: "all_reduce",
    finish_exchange: "all_reduce",
}
LISTS = (wait_gather, mean_shards, finish_exchange)  # results are lists, taken apart by getitem


class Parameter(NamedTuple):
    """What a gather or scatter node is about."""

    plan: int
    name: str


def parameter_of(node: Node) -> Parameter:
    """The parameter of a gather or scatter node."""
    plan, name = node.args[1], node.args[2]
    assert isinstance(plan, int) and isinstance(name, str)
    return Parameter(plan, name)


def unit_of(parameter: Parameter) -> str:
    """Name of the unit that a parameter belongs to."""
    units = plan_of(parameter.plan).units
    [name] = [unit for unit, held in units.items() if parameter.name in held]
    return name


def source_of(node: Node) -> Node:
    """The node's first argument."""
    source = node.args[0]
    assert isinstance(source, Node)
    return source


class Subject(NamedTuple):
    """The bucket that a collective's node is about, and what it costs in bytes."""

    plan: ShardPlan
    names: tuple[str, ...]
    itemsize: int  # of what is sent
    result_itemsize: int  # of a parameter's gradient

    @classmethod
    def of(cls, node: Node) -> "Subject":
        """Read from the start that a wait or a later node goes back to."""
        while node.target not in (start_gather, start_scatter):
            node = source_of(node)
        sources: Any
        names: Any
        sources, number, names = node.args
        assert isinstance(number, int)
        some = sources[0].meta["val"]
        plan = plan_of(number)
        sent = plan.compute_dtype if node.target is start_gather else plan.reduce_dtype
        sent = sent or some.dtype
        return cls(plan, tuple(names), sent.itemsize, some.dtype.itemsize)

    @property
    def scope(self) -> str:
        """For people: the unit, or the parameter."""
        return self.plan.scope(self.names)

    @property
    def size(self) -> int:
        """Number of parameters."""
        return len(self.names)

    @property
    def link(self) -> Link:
        """On which it is sent; a graph's own sums over replicas queue with the rest."""
        return "shard"

    def op(self, target: Any) -> Op | None:
        """Of a start or a wait; None for a mean."""
        return STARTS.get(target) or WAITS.get(target)

    @property
    def shards(self) -> int:
        """Ranks over which the parameters are cut."""
        return self.plan.layouts[self.names[0]].shards

    @property
    def chunk_bytes(self) -> int:
        """One rank's part of the bucket, as sent."""
        return self.itemsize * sum(self.plan.layouts[n].chunk_numel for n in self.names)

    def payload_bytes(self, op: str) -> int:
        """As the ledger counts it."""
        return self.chunk_bytes * (1 if op == "all_reduce" else self.shards)

    def ranks(self, op: str) -> int:
        """Ranks that take part."""
        return self.plan.replica.size if op == "all_reduce" else self.plan.shard.size

    def result_bytes(self, target: Any) -> int:
        """Memory that a start holds until its wait, or that a wait's flat result takes."""
        chunk, m = self.chunk_bytes, self.shards
        if target is start_gather:
            return chunk * (m + 1)  # what is sent, and the buffer of all ranks' parts
        if target is start_scatter:
            return chunk * (2 * m - 1)  # what is sent and kept, and what the others send
        return chunk

    def scratch_bytes(self, target: Any) -> int:
        """Memory in use inside the call above what lives before it and its results.

        A scatter's start frees each gradient as soon as it is copied, so of its buffers only
        one gradient's worth comes on top of the gradients at any moment.
        """
        if target is not start_scatter:
            return 0
        largest = max(self.plan.layouts[n].shape.numel() for n in self.names)
        every = sum(self.plan.layouts[n].shape.numel() for n in self.names)
        return (largest - every) * self.result_itemsize

    def touched_bytes(self, target: Any) -> int:
        """Memory read and written by packing, unpacking and adding."""
        chunk, m = self.chunk_bytes, self.shards
        if target is start_gather:
            return 2 * chunk
        if target in (wait_gather, start_scatter):
            return 2 * chunk * m
        return (m + 1) * chunk if target is wait_scatter else chunk


class ExchangedUnit(NamedTuple):
    """The sync unit that an exchange's node is about; the same questions as for a bucket."""

    exchange: Exchange
    unit: int
    size: int  # number of parameters that the forward reads
    rows_bytes: int  # of them on this rank

    @classmethod
    def of(cls, node: Node) -> "ExchangedUnit":
        """Read from the exchange's start or its finish."""
        start = node if node.target is start_exchange else source_of(node)
        rows: Any
        number: Any
        unit: Any
        rows, number, unit = start.args
        tensors = [row.meta["val"] for row in rows]
        nbytes = sum(t.numel() * t.element_size() for t in tensors)
        return cls(exchange_of(number), unit, len(rows), nbytes)

    @property
    def scope(self) -> str:
        """For people: the unit."""
        return list(self.exchange.units)[self.unit]

    @property
    def link(self) -> Link:
        """On which it is sent."""
        return "replica"

    def op(self, target: Any) -> Op:
        """As the engine exchanges."""
        return self.exchange.op

    def payload_bytes(self, op: str) -> int:
        """As the ledger counts it."""
        return self.exchange.payload_bytes[self.unit]

    def ranks(self, op: str) -> int:
        """Replicas."""
        return self.exchange.ranks

    def result_bytes(self, target: Any) -> int:
        """Memory that a start holds until its finish: the pseudo-gradient."""
        return self.rows_bytes if target is start_exchange else 0

    def scratch_bytes(self, target: Any) -> int:
        """Nothing of a whole unit's size is made on top of that."""
        return 0

    def touched_bytes(self, target: Any) -> int:
        """Start: anchor - parameters. Finish: both and the velocity are read and written."""
        return (3 if target is start_exchange else 7) * self.rows_bytes


def subject_of(node: Node) -> Subject | ExchangedUnit:
    """What a collective's node is about."""
    is_exchange = node.target in (start_exchange, finish_exchange)
    return ExchangedUnit.of(node) if is_exchange else Subject.of(node)


def nodes_of(graph: Graph, target: Callable[..., Any]) -> list[Node]:
    """The graph's calls of ``target``, in order."""
    return [node for node in graph.nodes if node.target is target]


def is_item(node: Node) -> bool:
    """True for an element of a list that a collective's node returns."""
    if node.target is not operator.getitem:
        return False
    source = node.args[0]
    return isinstance(source, Node) and source.target in LISTS


def feeds_only_starts(node: Node) -> bool:
    """True for a view that only collectives read."""
    return bool(node.users) and all(
        user.target is start_gather or (user.op != "output" and feeds_only_starts(user))
        for user in node.users
    )


def place(graph: Graph, order: Sequence[Node]) -> None:
    """Puts the nodes of ``graph`` in this order; they must be all of them."""
    assert len(order) == len(graph.nodes), (len(order), len(graph.nodes))
    for before, node in zip(order, order[1:], strict=False):
        before.append(node)


def sort(graph: Graph) -> None:
    """Moves nodes as little as dependencies demand: the least stable topological order."""
    rank = {node: i for i, node in enumerate(graph.nodes)}
    missing = {node: len(node.all_input_nodes) for node in graph.nodes}
    ready = [i for node, i in rank.items() if not missing[node]]
    by_rank = list(graph.nodes)
    order = []
    heapq.heapify(ready)
    while ready:
        node = by_rank[heapq.heappop(ready)]
        order.append(node)
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, rank[user])
    place(graph, order)


def ancestors(nodes: Iterable[Node]) -> set[Node]:
    """Everything that ``nodes`` need, placeholders included."""
    found: set[Node] = set()
    left = list(nodes)
    while left:
        for node in left.pop().all_input_nodes:
            if node not in found:
                found.add(node)
                left.append(node)
    return found


def descendants(node: Node) -> set[Node]:
    """Everything that needs ``node``, the graph's output excepted."""
    found: set[Node] = set()
    left = [node]
    while left:
        for user in left.pop().users:
            if user not in found and user.op != "output":
                found.add(user)
                left.append(user)
    return found
