"""Graphs for tests of the passes: drawn at random, or traced from a small Llama; no ranks.

Collectives are replaced by deterministic stand-ins that need nobody else, so that a graph can
be executed before and after a pass and its results compared bit by bit.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from core_torch.collectives import Axis, Ledger, Pending
from core_torch.config import MeshConfig, ModelConfig
from core_torch.models import build_model
from core_torch.shard import operators
from core_torch.shard.compat import FakeTensorMode
from core_torch.shard.layout import Layout
from core_torch.shard.operators import ShardPlan, gather, scatter
from core_torch.shard.passes.nodes import Parameter, nodes_of, parameter_of
from core_torch.shard.preview import WithLoss, pretended, traced_step
from core_torch.shard.program import Program, execute
from core_torch.shard.schedule import CompileOptions, Graphs
from core_torch.shard.simple_fsdp import plan_of_module, simple_fsdp
from core_torch.shard.wrap import plan_units

ATEN = torch.ops.aten
TINY = ModelConfig(vocabulary=31, dim=16, layers=4, heads=2, kv_heads=1, hidden=24, context=16)


@contextmanager
def alone() -> Iterator[None]:
    """Collectives that this process answers by itself, differently for every rank's row."""

    def gathered(x: Tensor, axis: Axis, *, scope: str) -> Pending:
        return Pending(torch.stack([x * (r + 1) for r in range(axis.size)]), None)

    def reduced(x: Tensor, axis: Axis, *, scope: str) -> Pending:
        return Pending(x[-1] * 3 - x[0], None)  # the last row is this rank's own

    def summed(x: Tensor, axis: Axis, *, scope: str) -> Pending:
        return Pending(x.mul_(axis.size + 0.5), None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "start_all_gather", gathered)
        patch.setattr(operators, "start_reduce_scatter", reduced)
        patch.setattr(operators, "start_psum", summed)
        yield


def axis(name: str, size: int, index: int = 0) -> Axis:
    """An axis without a group."""
    return Axis(name, None, size, index, Ledger())


class Drawn(NamedTuple):
    """A graph, real inputs for it, and the plan that must live as long as it does."""

    module: GraphModule
    inputs: list[Tensor]
    plan: ShardPlan


def drawn(seed: int, *, ranks: int = 3, replicas: int = 1, count: int = 6) -> Drawn:
    """A graph of ``count`` parameters with uneven, tiny and scalar shapes, used in random order.

    Every parameter is gathered; most have a gradient that is scattered; some are of float64.
    """
    random = Random(seed)
    names = [f"p{i}" for i in range(count)]
    shapes = [random.choice([(7, 2), (2, 3), (4,), (1,), (), (6, 1)]) for _ in names]
    layouts = {
        name: Layout(name, torch.Size(shape), ranks if shape else 1)
        for name, shape in zip(names, shapes, strict=True)
    }
    plan = ShardPlan(layouts, {"u": names}, axis("shard", ranks), axis("replica", replicas))
    builder = Builder()
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for name in names:
        dtype = random.choice([torch.float32, torch.float32, torch.float64])
        shape = layouts[name].local_shape(0)
        inputs.append(torch.randn(shape, generator=generator, dtype=dtype))
    shards = [builder.placeholder(x) for x in inputs]
    inputs.append(torch.randn(3, generator=generator, dtype=torch.float64))
    values = [builder.placeholder(inputs[-1])]
    gradients = []
    for i in random.sample(range(count), count):
        source = shards[i]
        if random.random() < 0.3:  # what is gathered may be a view of an input
            sizes = list(source.meta["val"].shape)
            source = builder.call(ATEN.view.default, source, sizes)
        full = builder.call(gather, source, plan.number, names[i])
        weight = builder.call(ATEN.sum.default, full)
        mixed = builder.call(ATEN.mul.Tensor, random.choice(values), weight)
        values.append(builder.call(ATEN.add.Tensor, mixed, random.choice(values)))
        if random.random() < 0.8:
            scale = builder.call(ATEN.sum.default, random.choice(values))
            made = builder.call(ATEN.mul.Tensor, full, scale)
            made = builder.call(ATEN._to_copy.default, made, dtype=source.meta["val"].dtype)
            dtype = source.meta["val"].dtype
            gradients.append(builder.call(scatter, made, plan.number, names[i], dtype))
    return Drawn(builder.module([*values[1:], None, *gradients]), inputs, plan)


class Builder:
    """Writes a graph node by node, with the metadata that tracing would give."""

    def __init__(self) -> None:
        self.graph = Graph()
        self._mode = FakeTensorMode()

    def placeholder(self, like: Tensor) -> Node:
        node = self.graph.placeholder(f"primals_{len(self.graph.nodes)}")
        node.meta["val"] = self._mode.from_tensor(like)
        return node

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        given = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
        with self._mode:
            node.meta["val"] = target(*given, **kwargs)
        return node

    def module(self, results: Sequence[Node | None]) -> GraphModule:
        self.graph.output(tuple(results))
        return GraphModule(torch.nn.Module(), self.graph)


class Traced(NamedTuple):
    """A Llama's graphs, and the module whose plan they refer to."""

    graphs: Graphs
    module: WithLoss
    plan: ShardPlan


def traced_llama(
    *,
    rank: int = 0,
    ranks: int = 4,
    replicas: int = 1,
    tied: bool = False,
    layers: int = TINY.layers,
    reshard_after_forward: bool = True,
    options: CompileOptions | None = None,
) -> Traced:
    """Forward and backward of a tiny Llama with its loss, as one of many ranks gets them."""
    config = ModelConfig(
        **{name: getattr(TINY, name) for name in TINY.__slots__} | {"layers": layers, "tied": tied}
    )
    options = options or CompileOptions(backend="aot_eager")
    torch.compiler.reset()  # dynamo counts models of the same code, and gives up at eight
    with pretended(MeshConfig(replicas=replicas, shards=ranks), rank=rank) as mesh:
        model = build_model(config, config.vocabulary, seed=0)
        simple_fsdp(
            model,
            mesh.torch_mesh if replicas > 1 else mesh.torch_mesh["shard"],
            mode="hybrid_shard" if replicas > 1 else "fully_shard",
            units={unit.name: unit.modules for unit in plan_units(model)},
            reshard_after_forward=reshard_after_forward,
            axes=(mesh.replica, mesh.shard),
        )
        module, tokens_BT = WithLoss(model), torch.zeros(2, 8, dtype=torch.int64)
        graphs = traced_step(module, (tokens_BT, tokens_BT), options)
        return Traced(graphs, module, plan_of_module(model))


def copied(module: GraphModule) -> GraphModule:
    """The same graph, for a pass to change."""
    return GraphModule(module, deepcopy(module.graph))


def evaluated(module: GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Results of a graph, which runs as Python; leaves ``inputs`` as they are."""
    module.recompile()
    with torch.no_grad():
        return list(module(*map(_own, inputs)))


def executed(program: Program, inputs: Sequence[Any]) -> list[Any]:
    """Results of a program; leaves ``inputs`` as they are."""
    with torch.no_grad():
        return execute(program, list(map(_own, inputs)))


def examples(module: GraphModule, seed: int = 0) -> list[Any]:
    """Real inputs of a traced graph."""
    generator = torch.Generator().manual_seed(seed)
    values = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    return [_filled(v, generator) if isinstance(v, Tensor) else v for v in values]


def _filled(like: Tensor, generator: torch.Generator) -> Tensor:
    if not like.dtype.is_floating_point:
        high = 2 if like.dtype is torch.bool else 8
        return torch.randint(0, high, like.shape, generator=generator).to(like.dtype)
    real = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    return real.copy_(torch.randn(like.shape, generator=generator, dtype=torch.float64))


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def same_bits(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two lists of results are equal to the last bit."""
    pairs = list(zip(one, other, strict=True))
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def parameters_of(graph: Graph) -> list[Parameter]:
    """Those that a graph gathers or scatters, in order."""
    found = nodes_of(graph, gather) + nodes_of(graph, scatter)
    return list(dict.fromkeys(map(parameter_of, found)))


def random_buckets(parameters: Sequence[Parameter], seed: int) -> list[list[Parameter]]:
    """A partition of some of them, in random order; what is left out is bucketed alone."""
    random = Random(seed)
    buckets: list[list[Parameter]] = [[] for _ in range(random.randint(1, len(parameters)))]
    for parameter in random.sample(list(parameters), len(parameters)):
        if random.random() < 0.9:
            random.choice(buckets).append(parameter)
    return buckets


def carried_by(graph: Graph, start: Callable[..., Any]) -> list[tuple[str, ...]]:
    """Parameters of every bucketed collective of a kind, in order of their starts."""
    return [tuple(node.args[2]) for node in nodes_of(graph, start)]  # type: ignore[arg-type]


def places(graph: Graph) -> dict[Node, int]:
    """Position of every node."""
    return {node: i for i, node in enumerate(graph.nodes)}


def order_of(
    graph: Graph, start: Callable[..., Any], wait: Callable[..., Any]
) -> list[tuple[int, int, int]]:
    """(start, wait, first use of a result) of every collective, in order of their waits."""
    at = places(graph)
    found = []
    for node in nodes_of(graph, wait):
        flight = node.args[0]
        assert isinstance(flight, Node) and flight.target is start
        found.append((at[flight], at[node], min(at[use] for use in _uses(node))))
    return found


def _uses(node: Node) -> Iterator[Node]:
    """Readers of a result, behind getitem."""
    for user in node.users:
        if user.target is operator.getitem:
            yield from _uses(user)
        else:
            yield user
