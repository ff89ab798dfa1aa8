"""What compilation would make of a model on many ranks, found by one process without memory.

The ranks are pretended: a process group that says it has them and moves nothing. Tensors are
fake: they have shapes and no contents. So a step of 64 ranks is traced on a laptop. What
comes out are the graphs that every rank would get, and estimates; nothing is measured.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.fx import GraphModule

from core_torch.config import MeshConfig, ModelConfig
from core_torch.mesh import Mesh, build_mesh
from core_torch.models import build_model, token_loss
from core_torch.models.decoder import Model
from core_torch.shard import compat
from core_torch.shard.compat import FakeTensorMode
from core_torch.shard.compile import partitioned
from core_torch.shard.recompute import recompute_activations
from core_torch.shard.schedule import CompileOptions, Graphs, buckets_of, simulated
from core_torch.shard.simple_fsdp import plan_of_module, simple_fsdp
from core_torch.shard.timeline import Timeline
from core_torch.shard.wrap import plan_units


class Stage(NamedTuple):
    """A step as it stands after one of the passes."""

    name: str  # traced, bucketed, reordered
    title: str
    buckets: list[list[str]]  # names of parameters
    timeline: Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """All stages of a step, in order of the passes."""

    stages: tuple[Stage, ...]
    owners: dict[str, str]  # parameter -> unit
    parameters: int  # elements, over all ranks


class WithLoss(nn.Module):
    """Tokens and targets to the loss, so that a graph holds a whole step."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return token_loss(self.model(tokens_BT), targets_BT)


@contextmanager
def pretended(config: MeshConfig, *, rank: int = 0) -> Iterator[Mesh]:
    """The mesh of one rank of many that are not there; its collectives move nothing.

    Args:
        config: shape of the mesh.
        rank: whose point of view.
    """
    dist.init_process_group("fake", store=compat.FakeStore(), rank=rank, world_size=config.ranks)
    try:
        yield build_mesh(config, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def traced_step(module: nn.Module, inputs: Sequence[Any], options: CompileOptions) -> Graphs:
    """Forward and backward of ``module``, before any bucket.

    Args:
        module: whose result can be differentiated, with sharded models inside. Compiled in
            place, to nothing that can be run.
        inputs: examples. Real ones are not computed with either.
        options: as for ``compile_model``.
    """
    found: list[Graphs] = []

    def partition(
        joint: GraphModule, examples: Sequence[Any], **more: Any
    ) -> tuple[GraphModule, GraphModule]:
        found.append(partitioned(joint, examples, options, **more))
        return found[-1].forward, found[-1].backward

    backend = compat.aot_autograd(
        fw_compiler=_hollow,
        bw_compiler=_hollow,
        partition_fn=partition,
        decompositions=compat.select_decomp_table() if options.backend == "inductor" else None,
        keep_inference_input_mutations=True,
    )
    module.compile(backend=backend, fullgraph=True, dynamic=False)
    module(*inputs)
    [graphs] = found
    return graphs


def _hollow(module: GraphModule, inputs: Sequence[Any]) -> Any:
    """A compiled graph that makes results of the right shapes only."""
    [output] = [node for node in module.graph.nodes if node.op == "output"]
    results = output.args[0]
    assert isinstance(results, tuple | list)

    def run(args: list[Any]) -> list[Any]:
        args.clear()
        return [None if node is None else _twin(node.meta["val"]) for node in results]

    run._boxed_call = True  # type: ignore[attr-defined]  # inputs come in a list, to be emptied
    return run


def _twin(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def preview(
    model: ModelConfig,
    *,
    ranks: int,
    batch: int,
    sequence: int,
    options: CompileOptions,
    recompute: Literal["none", "selective", "full"] = "none",
) -> Preview:
    """Traces a step of a model on one of ``ranks`` pretended ranks and applies pass after pass.

    Args:
        model: with a vocabulary.
        ranks: that share the model.
        batch: sequences on each rank.
        sequence: tokens of each.
        options: of the last stage; the earlier ones have less of it.
        recompute: activation checkpointing, see ``ShardConfig``.
    """
    with pretended(MeshConfig(shards=ranks)) as mesh, FakeTensorMode():
        built = build_model(model, model.vocabulary, seed=0)
        count = sum(p.numel() for p in built.parameters())
        if recompute != "none":
            recompute_activations(built, built.blocks, recompute)
        simple_fsdp(
            built,
            mesh.torch_mesh["shard"],
            units={unit.name: unit.modules for unit in plan_units(built)},
            axes=(mesh.axis("pp"), mesh.shard),
        )
        units = plan_of_module(built).units
        tokens_BT = torch.zeros(batch, sequence, dtype=torch.int64)
        graphs = traced_step(WithLoss(built), (tokens_BT, tokens_BT), options)
        return Preview(
            stages=tuple(stages_of(graphs, options)),
            owners={name: unit for unit, held in units.items() for name in held},
            parameters=count,
        )


def stages_of(graphs: Graphs, options: CompileOptions) -> Iterator[Stage]:
    """The timeline before the passes, after bucketing, and after reordering."""
    at_once = replace(options, ahead=0, behind=0)
    alone = buckets_of(graphs, replace(options, wrap="none"))
    together = buckets_of(graphs, options)
    for name, title, buckets, chosen in (
        ("traced", "As traced: a collective for every parameter", alone, at_once),
        ("bucketed", "Bucketed: a collective for many parameters", together, at_once),
        ("reordered", "Bucketed and reordered: computing meanwhile", together, options),
    ):
        names = [[parameter.name for parameter in bucket] for bucket in buckets]
        yield Stage(name, title, names, simulated(graphs, buckets, chosen))
