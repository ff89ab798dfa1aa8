"""One compiled graph: torch.compile with passes of our own between tracing and kernels.

joint graph    merge what reads a parameter twice; gather again in the backward
partition      forward and backward, with recomputation where it saves memory
plan           which parameters share a collective (schedule.py)
bucket         one collective for many parameters
reorder        collectives run while something else is computed
round          a second forward from the same graph, with a sync round's exchanges in it
lower          a program: segments of compute, and collectives between them
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.fx import GraphModule

from core_torch.collectives import Axis
from core_torch.errors import ConfigError, TwinshardError
from core_torch.shard import compat
from core_torch.shard.compat import donated_inputs, recompute_what_is_cheap
from core_torch.shard.exchange import Exchange
from core_torch.shard.operators import ShardPlan, plan_of
from core_torch.shard.parametrise import plans_in
from core_torch.shard.passes.joint import (
    merge_gathers,
    merge_scatters,
    save_random,
    tag_gathers,
)
from core_torch.shard.passes.nodes import Parameter
from core_torch.shard.plan import plan_hash
from core_torch.shard.program import Program, execute
from core_torch.shard.schedule import CompileOptions, Graphs, buckets_of, copied, scheduled
from core_torch.shard.segments import SegmentCompiler


class PlansDiffer(TwinshardError):
    """Ranks planned different buckets and would wait for each other for ever."""


@dataclass(slots=True)
class Compilation:
    """What was compiled, for people, reports and tests."""

    options: CompileOptions
    module: nn.Module
    exchanging: ShardPlan | None = None  # whose units are exchanged in forwards
    programs: list[Program] = field(default_factory=list)  # in order of compilation
    buckets: list[list[Parameter]] = field(default_factory=list)
    carried: dict[int, int] = field(default_factory=dict)  # see schedule.Graphs
    segments: SegmentCompiler = field(default_factory=SegmentCompiler)
    seconds: float = 0.0  # spent in passes and kernels, tracing apart
    timings: dict[str, list[list[float]]] | None = None  # {}: time every instruction from now on

    def program(self, name: str) -> Program:
        """The first "forward", "round" or "backward"."""
        return next(program for program in self.programs if program.name == name)

    def attach(self, exchange: Exchange) -> None:
        """Lets training forwards carry sync rounds. Call it before the first of them.

        Two forward programs are then made where there was one, from the same graph and with the
        same kernels: so a round compiles nothing, and rounds that are due change no bit of
        what is computed.

        Raises:
            ConfigError: the forward is compiled already, the module is not the whole of one
                sharded model, an engine is there already, or units do not fit the parameters.
        """
        if any(program.name == "forward" for program in self.programs):
            raise ConfigError(
                "the forward has been compiled without exchanges",
                next="attach before the first training step",
            )
        plan = _whole_plan(self.module)
        if plan.exchange is not None:
            raise ConfigError("another engine exchanges the units of this model already")
        trained = [
            name
            for child, names in plans_in(self.module)[plan].items()
            for key, name in names.items()
            if (p := child._parameters[key]) is not None and p.requires_grad
        ]
        exchange.check(plan.layouts, dict.fromkeys(trained))
        plan.exchange, self.exchanging = exchange, plan


def compile_model(module: nn.Module, options: CompileOptions | None = None) -> Compilation:
    """Compiles ``module`` in place; the first forward and the first backward do the work.

    Args:
        module: sharded by ``simple_fsdp``, or holding modules that are.
        options: see ``CompileOptions``.

    Returns:
        The compilation, filled when the graphs are there.
    """
    compilation = Compilation(options or CompileOptions(), module)
    module.compile(
        backend=_Backend(compilation),
        fullgraph=True,
        dynamic=False,
        isolate_recompiles=True,  # torch's limit on recompilations is for one model, not for all
    )
    return compilation


def partitioned(
    joint: GraphModule, inputs: Sequence[Any], options: CompileOptions, **more: Any
) -> Graphs:
    """Forward and backward of a joint graph: what a plan of buckets is made for.

    Args:
        joint: as traced; changed.
        inputs: its examples.
        options: see ``CompileOptions``.
        more: what torch hands to a partitioner.
    """
    merge_gathers(joint.graph)
    merge_scatters(joint.graph)
    tag_gathers(joint.graph, keep_last_unit=options.keep_last_unit)
    save_random(joint.graph)
    joint.recompile()
    with recompute_what_is_cheap() if options.save_memory else nullcontext():
        return Graphs(*compat.min_cut_rematerialization_partition(joint, inputs, **more))


class _Backend:
    """What torch.compile calls with a traced graph."""

    def __init__(self, compilation: Compilation) -> None:
        self._result = compilation
        options = compilation.options
        self._compile = compat.aot_autograd(
            fw_compiler=self._compiler("forward"),
            bw_compiler=self._compiler("backward"),
            inference_compiler=self._compiler("inference"),
            partition_fn=self._partition,
            decompositions=compat.select_decomp_table() if options.backend == "inductor" else None,
            keep_inference_input_mutations=True,
        )

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return self._compile(module, inputs)

    def _partition(
        self, joint: GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **more: Any
    ) -> tuple[GraphModule, GraphModule]:
        began, result = time.perf_counter(), self._result
        graphs = partitioned(joint, inputs, result.options, num_fwd_outputs=num_fwd_outputs, **more)
        result.buckets = buckets_of(graphs, result.options)
        result.carried = graphs.carried
        result.seconds += time.perf_counter() - began
        return graphs.forward, graphs.backward

    def _compiler(self, name: str) -> Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]:
        def compile_graph(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            began, result = time.perf_counter(), self._result
            segments = result.segments if result.options.backend == "inductor" else None
            how = (result.buckets, result.options, segments)
            donated = donated_inputs() if name == "backward" else []
            plan = result.exchanging if name == "forward" else None
            twin = None if plan is None else copied(module)  # scheduling changes a graph
            programs = [scheduled(module, name, *how, donated)]
            if plan is not None and twin is not None:
                programs.append(scheduled(twin, "round", *how, exchanged=plan.number))
            result.programs += programs
            result.seconds += time.perf_counter() - began
            return _runner(*programs, result=result)

        return compile_graph


def _runner(
    ordinary: Program, in_round: Program | None = None, *, result: Compilation
) -> Callable[[list[Any]], list[Any]]:
    """A compiled graph as torch calls it: the program with a round where the engine says so."""
    agreed: list[bool] = []

    def run(args: list[Any]) -> list[Any]:
        if not agreed:
            agree(result.buckets)
            agreed.append(True)
        exchange = None if result.exchanging is None else result.exchanging.exchange
        if in_round is None or exchange is None or not exchange.begin():
            return _executed(ordinary, args, result)
        results = _executed(in_round, args, result)
        exchange.end()
        return results

    run._boxed_call = True  # type: ignore[attr-defined]  # inputs come in a list, to be emptied
    return run


def _executed(program: Program, args: list[Any], result: Compilation) -> list[Any]:
    if result.timings is None:
        return execute(program, args)
    seconds: list[float] = []
    result.timings.setdefault(program.name, []).append(seconds)
    return execute(program, args, seconds=seconds)


def _whole_plan(module: nn.Module) -> ShardPlan:
    """The plan of the one sharded model that a compiled module holds, all of it.

    Raises:
        ConfigError: the module is a part of a model, or holds several or none.
    """
    found = plans_in(module)
    whole = [p for p, held in found.items() if _names(held.values()) == set(p.layouts)]
    if len(found) == len(whole) == 1:
        return whole[0]
    raise ConfigError(
        f"{type(module).__name__} holds {len(found)} sharded models, {len(whole)} of them whole",
        likely="blocks compiled by themselves cannot carry a sync round: the first would do "
        "what others have to wait for",
        next="compile the whole model as one graph, or keep rounds between steps",
    )


def _names(held: Iterable[dict[str, str]]) -> set[str]:
    return {name for names in held for name in names.values()}


def agree(buckets: Sequence[Sequence[Parameter]]) -> None:
    """Compares the plan with the other ranks' before anybody waits for a bucket.

    Raises:
        PlansDiffer: on all ranks, with each rank's hash.
    """
    if not buckets:
        return
    digest = plan_hash([[p.name for p in held] for held in buckets])
    axes: dict[int, Axis] = {p.plan: plan_of(p.plan).shard for held in buckets for p in held}
    for axis in axes.values():
        if axis.size == 1 or dist.get_backend(axis.group) == "fake":
            continue
        mine = torch.tensor([int(digest[:15], 16)])
        if dist.get_backend(axis.group) == "nccl":
            mine = mine.cuda()
        hashes = mine.new_empty(axis.size)
        dist.all_gather_single(hashes, mine, group=axis.group)
        if len(set(hashes.tolist())) > 1:
            raise PlansDiffer(
                f"ranks of the {axis.name} axis planned different buckets: {hashes.tolist()}",
                likely="costs or options differ between ranks",
                next="the same CompileOptions on all ranks; measured costs must be agreed first",
            )
