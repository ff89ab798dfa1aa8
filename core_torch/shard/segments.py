"""Compute segments as functions that inductor has compiled, equal ones once."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from core_torch.shard import compat
from core_torch.shard.compat import TracingContext, detect_fake_mode, tracing

Run = Callable[[list[Any]], tuple[Any, ...]]


class Donations(NamedTuple):
    """What inductor reads of the metadata of a graph."""

    bw_donated_idxs: list[int]
    static_input_indices: tuple[int, ...] = ()


class SegmentCompiler:
    """Compiles segments; a second one with the same operators and shapes costs nothing.

    The key is the segment's own text with names that depend on nothing outside it, and the
    metadata of its inputs. So block 7 runs the kernels of block 1. Segments hold no collective
    and no rank number: their kernels are the same on all ranks, and inductor's cache on disk
    serves all of them.
    """

    def __init__(self) -> None:
        self._known: dict[str, Run] = {}
        self.compiled = 0
        self.reused = 0
        self.seconds = 0.0

    def __call__(
        self,
        nodes: Sequence[Node],
        inputs: Sequence[Node],
        outputs: Sequence[Node],
        donated: tuple[int, ...] = (),
    ) -> Run:
        """One function of ``inputs`` that gives ``outputs`` and may overwrite the donated ones."""
        module = extract(nodes, inputs, outputs, donated)
        examples = [node.meta["val"] for node in inputs]
        facts = (*map(_describe, examples), *map(_of, outputs))
        key = "\n".join((str(module.graph), *facts))
        if key in self._known:
            self.reused += 1
            return self._known[key]
        began = time.perf_counter()
        run = self._known[key] = _compiled(module, examples, donated)
        self.compiled += 1
        self.seconds += time.perf_counter() - began
        return run


def extract(
    nodes: Sequence[Node],
    inputs: Sequence[Node],
    outputs: Sequence[Node],
    donated: Sequence[int] = (),
) -> GraphModule:
    """A graph of its own for a segment; its names follow from the segment alone.

    Donated inputs have names of their own: inductor's cache on disk looks at the graph only, and
    would hand a kernel that overwrites its input to a segment that must not.
    """
    graph = Graph()
    twin: dict[Node, Node] = {}
    for i, node in enumerate(inputs):
        twin[node] = graph.placeholder(f"own_{i}" if i in donated else f"kept_{i}")
        twin[node].meta["val"] = node.meta["val"]
    for node in nodes:
        args = torch.fx.node.map_arg(node.args, twin.__getitem__)
        kwargs = torch.fx.node.map_arg(node.kwargs, twin.__getitem__)
        twin[node] = graph.create_node(node.op, node.target, args, kwargs)
        twin[node].meta = {k: v for k, v in node.meta.items() if k in ("val", "tensor_meta")}
    result = graph.output(tuple(twin[node] for node in outputs))
    # The next segment was traced with these strides, so inductor must not choose others.
    result.meta["user_visible_output_idxs"] = list(range(len(outputs)))
    result.meta["original_output_strides"] = [_stride(node) for node in outputs]
    return GraphModule(torch.nn.Module(), graph)


def _compiled(module: GraphModule, examples: list[Any], donated: tuple[int, ...]) -> Run:
    # A tracing context of its own, because the surrounding one speaks of the whole graph. Only of
    # backward graphs does inductor ask which inputs it may overwrite.
    context = TracingContext(detect_fake_mode(examples))
    context.fw_metadata = Donations(list(donated))  # type: ignore[assignment]
    with tracing(context):
        no = compat.BoxedBool(False)
        compiled = compat.compile_fx_inner(module, examples, cudagraphs=no, is_backward=True)

    def run(given: list[Any]) -> tuple[Any, ...]:
        return tuple(compiled(given))  # frees its inputs as it goes

    return run


def _stride(node: Node) -> tuple[int, ...] | None:
    value = node.meta["val"]
    return value.stride() if isinstance(value, Tensor) else None


def _of(node: Node) -> str:
    return _describe(node.meta["val"])


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()}"
    return repr(value)
