"""What one FX node, or a compute segment of several, will do: FLOPs, bytes, operators.

From the metadata of fake tensors; nothing is run. Formulas are torch's own. It has none for
the flash attention of CPUs, without which attention would look free: that one takes the
formula of its CUDA sibling, whose first arguments are the same. Causal attention skips the
tiles above the diagonal, hence counts half.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

_ATEN = torch.ops.aten
_SIBLING = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: (
        _ATEN._scaled_dot_product_flash_attention_backward
    ),
}
# Of their first argument these read only what they return.
_PICKS = {_ATEN.embedding, _ATEN.index, _ATEN.index_select, _ATEN.gather}


class Work(NamedTuple):
    """What is to be done; adds up over nodes."""

    flops: int = 0
    touched_bytes: int = 0  # read and written
    operators: int = 0


def flops_of(node: fx.Node) -> Work:
    """Work of one node by itself; none for views, ``getitem``, placeholders and the output.

    Raises:
        ValueError: a node without fake-tensor metadata.
    """
    if not _computes(node):
        return Work()
    read = sum(_bytes_read(node, source) for source in node.all_input_nodes)
    return Work(_flops(node), read + _bytes(_value(node)), 1)


def work_of(nodes: Sequence[fx.Node], *, fused: bool = False) -> Work:
    """Work of a compute segment.

    Args:
        nodes: of the segment.
        fused: count as inductor's kernels do: what only element-wise operators and
            reductions of the same segment exchange is never written to memory.

    Raises:
        ValueError: a node without fake-tensor metadata.
    """
    working = [node for node in nodes if _computes(node)]
    if not fused:
        each = [flops_of(node) for node in working]
        return Work(*(sum(column) for column in zip(*each, strict=True))) if each else Work()
    inside = {node for node in working if _formula(node) is None}  # the rest: libraries
    hidden = {node for node in inside if set(_readers(node)) <= inside}
    flops = touched = 0
    for node in working:
        sources = [s for s in node.all_input_nodes if not (node in inside and _base(s) in hidden)]
        flops += _flops(node)
        touched += sum(_bytes_read(node, source) for source in sources)
        touched += 0 if node in hidden else _bytes(_value(node))
    return Work(flops, touched, len(working) - len(hidden))


def _flops(node: fx.Node) -> int:
    """FLOPs by torch's formula; 0 for operators that have none."""
    formula = _formula(node)
    if formula is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), _value)
    flops = int(formula(*args, **kwargs, out_val=_value(node)))
    return flops // 2 if _is_causal(node) else flops


def _formula(node: fx.Node) -> Callable[..., int] | None:
    """Torch's formula for the operator of a node, if it has one."""
    packet: Any = getattr(node.target, "overloadpacket", None)
    return flop_registry.get(_SIBLING.get(packet, packet))


def _is_causal(node: fx.Node) -> bool:
    """Whether ``node`` is attention that masks what lies ahead."""
    schema: Any = node.target
    names = [argument.name for argument in schema._schema.arguments]
    if "is_causal" not in names:
        return False
    place = names.index("is_causal")
    return bool(node.args[place] if place < len(node.args) else node.kwargs.get("is_causal"))


def _computes(node: fx.Node) -> bool:
    """True for calls of operators that move or make data."""
    packet = getattr(node.target, "overloadpacket", None)
    if node.op != "call_function" or packet is None:
        return False
    # _unsafe_view is a view that autograd must not know as one.
    return not getattr(node.target, "is_view", False) and packet is not _ATEN._unsafe_view


def _base(node: fx.Node) -> fx.Node:
    """The node whose memory ``node`` is, or is a view of."""
    while node.op == "call_function" and not _computes(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Nodes that use the memory of ``node``, directly or through views."""
    for user in node.users:
        if user.op == "call_function" and not _computes(user):
            yield from _readers(user)
        else:
            yield user


def _value(node: fx.Node) -> Any:
    """Fake result of a node."""
    if "val" not in node.meta:
        raise ValueError(f"node {node.name} has no fake-tensor metadata")
    return node.meta["val"]


def _bytes_read(node: fx.Node, source: fx.Node) -> int:
    """Bytes that ``node`` reads of its input ``source``."""
    picks = getattr(node.target, "overloadpacket", None) in _PICKS
    return _bytes(_value(node) if picks and source is node.args[0] else _value(source))


def _bytes(value: Any) -> int:
    """Bytes behind a fake result; what an expanded dimension repeats counts once."""
    if isinstance(value, Tensor):
        pairs = zip(value.shape, value.stride(), strict=True)
        sizes: Iterable[int] = (size if stride or not size else 1 for size, stride in pairs)
        return int(prod(sizes)) * value.element_size()
    if isinstance(value, list | tuple):
        return sum(_bytes(part) for part in value)
    return 0
