"""Tensor parallel with sequence parallel: the matrices of a replica are cut over the axis tp.

    tensor_parallel(model, mesh)          # in place, before shard_model

Between blocks each rank holds the positions of its slice of the sequence; inside attention and
feed-forward it holds all positions, and its slice of the heads or of the hidden width:

    positions / tp  --norm, gather-->  all positions  --wq wk wv, attention-->  heads / tp
    positions / tp  <----- wo, reduce-scatter -----------------------------------------'

Embedding and head are cut by tokens. The head's logits are gathered, so the loss is that of one
process and equal on all ranks of tp. Gains and the biases of wo and w2 lie on every rank of tp
whole: their gradients are summed over tp, and norms of a replica count them once
(``access.copies_of``).

The cuts are torch's own (``torch.distributed.tensor.parallel``), and what they send is not in
the ledger. docs/parallel.md tells the whole.
"""

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from core_torch.errors import ConfigError
from core_torch.mesh import Mesh
from core_torch.models.decoder import Decoder, Model

POSITIONS, HEADS = Shard(1), 2  # of (B, T, D), and the dimension of heads in (B, T, H, E)


def tensor_parallel(model: Model, mesh: Mesh) -> None:
    """Cuts ``model`` over ``mesh.tp`` in place; its parameters become DTensors on that axis.

    Args:
        model: full weights, equal on all ranks. Each keeps its part and nothing is sent.
        mesh: with an axis tp that divides heads, widths and positions, see config_parallel.py.

    Raises:
        ConfigError: no model of core_torch/models, so nobody knows how its modules belong together.
    """
    if not isinstance(model, Decoder):
        raise ConfigError(
            f"mesh.tp: {mesh.tp.size} ranks cannot cut {type(model).__name__}",
            likely="only the architectures of core_torch/models have a plan of cuts",
            next="--mesh.tp 1, with more --mesh.shards",
        )
    model.to(mesh.device)
    for module in [model, *model.layers]:
        _cut(module, mesh, plan_of(module))
    if model.config.tied:  # both are cut by tokens, and torch has made two of one
        model.output.weight = model.tok_embeddings.weight


def plan_of(module: nn.Module) -> dict[str, list[ParallelStyle]]:
    """Styles of the modules that a block, or the frame around the blocks, has; applied in turn."""
    table = RowwiseParallel(input_layouts=Replicate(), output_layouts=POSITIONS)
    scattered = RowwiseParallel(output_layouts=POSITIONS)
    heads = SequenceParallel(sequence_dim=HEADS, use_local_output=True)
    known: dict[str, list[ParallelStyle]] = {
        "tok_embeddings": [table],
        "pos_embeddings": [table],
        "norm": gathered_norm(),
        "output": [ColwiseParallel(output_layouts=Replicate())],
        "attention_norm": gathered_norm(),
        "attention.wq": [ColwiseParallel()],
        "attention.wk": [ColwiseParallel()],
        "attention.wv": [ColwiseParallel()],
        "attention.q_norm": [heads],
        "attention.k_norm": [heads],
        "attention.wo": [scattered],
        "ffn_norm": gathered_norm(),
        "feed_forward.w1": [ColwiseParallel()],
        "feed_forward.w3": [ColwiseParallel()],
        "feed_forward.w2": [scattered],
    }
    owners = {name.rpartition(".")[0] for name, _ in module.named_parameters()}
    if isinstance(module, Decoder) and module.config.tied:
        owners.add("output")  # named once
    return {name: styles for name, styles in known.items() if name in owners}


def gathered_norm() -> list[ParallelStyle]:
    """Norms this rank's positions, then gathers all. One gather for all products that follow,
    and one reduce-scatter of the sum of their gradients, for the result stays a DTensor.
    """
    gather = PrepareModuleOutput(
        output_layouts=POSITIONS, desired_output_layouts=Replicate(), use_local_output=False
    )
    return [SequenceParallel(), gather]


def _cut(module: nn.Module, mesh: Mesh, plan: dict[str, list[ParallelStyle]]) -> None:
    axis = mesh.torch_mesh["tp"]
    for name, styles in plan.items():
        for style in styles:
            parallelize_module(module.get_submodule(name), axis, style, src_data_rank=None)
