"""From a traced graph to a program under a plan of buckets, and the choice of the plan."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.fx import Graph, GraphModule, Node

from core_torch.errors import ConfigError
from core_torch.shard.auto_wrap import Need, Problem, candidates
from core_torch.shard.cost import Costs
from core_torch.shard.flops import Work, work_of
from core_torch.shard.lower import CompileSegment, Run, lower
from core_torch.shard.operators import gather, plan_of, scatter
from core_torch.shard.passes.bucket import bucket
from core_torch.shard.passes.exchange import carry_round
from core_torch.shard.passes.nodes import Parameter, nodes_of, parameter_of, unit_of
from core_torch.shard.passes.reorder import reorder
from core_torch.shard.plan import best, check_plan
from core_torch.shard.program import Program
from core_torch.shard.timeline import Timeline, simulate_step

Backend = Literal["inductor", "aot_eager"]
Wrap = Literal["none", "manual", "auto"]
_MOST_SCORED = 12  # candidates whose real programs are simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """How a graph is scheduled and what makes its kernels."""

    backend: Backend = "inductor"  # aot_eager: the same graph, PyTorch's own kernels
    wrap: Wrap | Sequence[Sequence[str]] = "manual"  # or parameter names, one list per bucket
    ahead: int = 1  # gathers in flight before the one that is waited for; 0: none
    behind: int = 1  # scatters that start before an earlier one is waited for
    keep_last_unit: bool = True  # do not reshard what the backward begins with
    save_memory: bool = True  # recompute in the backward all that is cheap to compute
    costs: Costs = field(default_factory=Costs.typical)  # for wrap auto; equal on all ranks
    memory_limit_bytes: int | None = None  # of a step besides the shards, for wrap auto


@dataclass(frozen=True, slots=True)
class Graphs:
    """What the partitioner made, and which results of the forward the backward takes."""

    forward: GraphModule
    backward: GraphModule

    @property
    def carried(self) -> dict[int, int]:
        """Place among the backward's inputs -> place among the forward's outputs."""
        places = {node: i for i, node in enumerate(_outputs(self.forward.graph))}
        by_name = {node.name: i for node, i in places.items() if node is not None}
        inputs = [n for n in self.backward.graph.nodes if n.op == "placeholder"]
        return {i: by_name[n.name] for i, n in enumerate(inputs) if n.name in by_name}


def scheduled(
    module: GraphModule,
    name: str,
    buckets: Sequence[Sequence[Parameter]],
    options: CompileOptions,
    compile_segment: CompileSegment | None,
    donated: Sequence[int] = (),
    exchanged: int | None = None,
) -> Program:
    """Bucket, reorder, lower; changes the graph of ``module``.

    Args:
        module: forward or backward.
        name: of the program.
        buckets: parameters that share a collective.
        options: how far collectives move.
        compile_segment: see ``lower``.
        donated: see ``lower``.
        exchanged: number of the plan whose units are exchanged on the way.
    """
    bucket(module.graph, buckets)
    reorder(module.graph, ahead=options.ahead, behind=options.behind)
    if exchanged is not None:
        carry_round(module.graph, exchanged)
    module.graph.lint()  # every value is defined before it is used
    return lower(module, name=name, compile_segment=compile_segment, donated=donated)


def buckets_of(graphs: Graphs, options: CompileOptions) -> list[list[Parameter]]:
    """The plan that ``options`` ask for, the same on every rank.

    Raises:
        ConfigError: a plan of names that leaves one out, repeats one or invents one.
    """
    parameters = _parameters(graphs)
    if options.wrap == "none":
        return [[parameter] for parameter in parameters]
    if options.wrap == "manual":
        return _by_units(parameters)
    if options.wrap == "auto":
        return _chosen(graphs, parameters, options)
    by_name = {p.name: p for p in parameters}
    plan = [list(names) for names in options.wrap]
    check_plan(plan, by_name)
    return [[by_name[name] for name in names] for names in plan]


def simulated(
    graphs: Graphs, buckets: Sequence[Sequence[Parameter]], options: CompileOptions
) -> Timeline:
    """The timeline of a step under a plan; leaves the graphs as they are."""
    programs = []
    segment = _no_kernel if options.backend == "inductor" else None
    for name, module in (("forward", graphs.forward), ("backward", graphs.backward)):
        twin = copied(module)
        programs.append(scheduled(twin, name, buckets, options, segment))
    return timeline_of(programs[0], programs[1], graphs.carried, options.costs)


def timeline_of(
    forward: Program, backward: Program, carried: dict[int, int], costs: Costs
) -> Timeline:
    """The timeline of a step. ``carried``: see ``Graphs``."""
    numbers = {
        backward.inputs[i]: out
        for i, o in carried.items()
        if (out := forward.outputs[o]) is not None
    }
    return simulate_step(forward, backward, costs, carried=numbers)


def _chosen(
    graphs: Graphs, parameters: list[Parameter], options: CompileOptions
) -> list[list[Parameter]]:
    """The best of all candidates by the timeline of their real programs."""
    problem, limit = problem_of(graphs, parameters, options), options.memory_limit_bytes
    by_name = {_full_name(p): p for p in parameters}
    plans = candidates(problem, options.costs, memory_limit=limit)[:_MOST_SCORED]
    manual = [[_full_name(p) for p in unit] for unit in _by_units(parameters)]
    if manual not in plans:
        plans.append(manual)

    def score(plan: list[list[str]]) -> tuple[float, int]:
        found = simulated(graphs, [[by_name[n] for n in names] for names in plan], options)
        return found.seconds, found.peak_bytes

    choice = best(plans, score, memory_limit=limit)
    return [[by_name[name] for name in names] for names in choice.plan]


def problem_of(graphs: Graphs, parameters: list[Parameter], options: CompileOptions) -> Problem:
    """The numbers that the planner works on."""
    fused = options.backend == "inductor"
    forward = _work_before(graphs.forward.graph, gather, fused=fused)
    backward = _work_before(graphs.backward.graph, scatter, fused=fused)
    needs = []
    for parameter in parameters:
        plan = plan_of(parameter.plan)
        layout = plan.layouts[parameter.name]
        numel = layout.chunk_numel * layout.shards
        size = _itemsize(graphs.forward.graph, parameter)
        has_gradient = parameter in backward
        unit = unit_of(parameter)
        needs.append(Need(_full_name(parameter), unit, numel * size, numel * size * has_gradient))
    activations = _saved_bytes(graphs)
    live = tuple(activations * (i + 1) // len(needs) for i in range(len(needs)))

    def seconds(work: dict[Parameter, Work]) -> tuple[float, ...]:
        return tuple(options.costs.compute_seconds(*work.get(p, Work())) for p in parameters)

    return Problem(
        needs=tuple(needs),
        forward_seconds=seconds(forward),
        backward_seconds=seconds(backward),
        forward_bytes=live,
        backward_bytes=live,
        ranks=plan_of(parameters[0].plan).shard.size,
    )


def _work_before(graph: Graph, target: object, *, fused: bool) -> dict[Parameter, Work]:
    """Work around each gather or scatter.

    For gathers: between one and the next. For scatters: from the one before up to it.
    """
    found: dict[Parameter, Work] = {}
    stretch: list[Node] = []
    current: Parameter | None = None
    for node in graph.nodes:
        if node.target is not target:
            if node.op == "call_function" and node.target not in (gather, scatter):
                stretch.append(node)
            continue
        owner = parameter_of(node) if target is scatter else current
        if owner is not None:
            found[owner] = work_of(stretch, fused=fused)
        current, stretch = parameter_of(node), []
    if target is gather and current is not None:
        found[current] = work_of(stretch, fused=fused)
    return found


def _parameters(graphs: Graphs) -> list[Parameter]:
    """In order of first use in the forward; then those that only the backward mentions."""
    nodes = nodes_of(graphs.forward.graph, gather) + nodes_of(graphs.backward.graph, scatter)
    return list(dict.fromkeys(parameter_of(node) for node in nodes))


def _by_units(parameters: list[Parameter]) -> list[list[Parameter]]:
    groups: dict[tuple[int, str], list[Parameter]] = {}
    for p in parameters:
        groups.setdefault((p.plan, unit_of(p)), []).append(p)
    return list(groups.values())


def _full_name(parameter: Parameter) -> str:
    return f"{parameter.plan}:{parameter.name}"


def _itemsize(graph: Graph, parameter: Parameter) -> int:
    for node in nodes_of(graph, gather):
        if parameter_of(node) == parameter:
            return int(node.meta["val"].dtype.itemsize)
    raise ConfigError(f"parameter {parameter.name} is never read")


def _saved_bytes(graphs: Graphs) -> int:
    """Memory of what the forward hands to the backward, inputs apart."""
    outputs = _outputs(graphs.forward.graph)
    kept = [outputs[o] for o in graphs.carried.values()]
    tensors = [n.meta["val"] for n in kept if n is not None and n.op != "placeholder"]
    storages = {
        x.untyped_storage()._cdata: x.untyped_storage().nbytes()
        for x in tensors
        if isinstance(x, torch.Tensor)
    }
    return sum(storages.values())


def _outputs(graph: Graph) -> list[Node | None]:
    [output] = [node for node in graph.nodes if node.op == "output"]
    results = output.args[0]
    assert isinstance(results, tuple | list)
    return [x if isinstance(x, Node) else None for x in results]


def copied(module: GraphModule) -> GraphModule:
    """The same graph, for a pass to change."""
    twin = Graph()
    twin.output(twin.graph_copy(module.graph, {}))
    return GraphModule(module, twin)


def _no_kernel(*segment: object) -> Run:
    """In place of a kernel where a program is only looked at."""

    def run(given: list[object]) -> tuple[object, ...]:
        raise AssertionError("a program without kernels")

    return run
