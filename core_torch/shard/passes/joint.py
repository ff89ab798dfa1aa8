"""Passes over the joint graph, before it is cut in forward and backward."""

import operator

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from core_torch.shard.operators import gather, plan_of, scatter
from core_torch.shard.passes.nodes import Parameter, nodes_of, parameter_of, unit_of

_NO_REGION = 1 << 20  # activation checkpointing numbers its regions from 0
_VIEWS = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}


def merge_gathers(graph: Graph) -> None:
    """One gather per parameter, however often a forward reads it (tied, or used twice)."""
    first: dict[Parameter, Node] = {}
    for node in nodes_of(graph, gather):
        kept = first.setdefault(parameter_of(node), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)


def merge_scatters(graph: Graph) -> None:
    """One scatter per parameter: the gradients of all its uses are added before, not after.

    Autograd adds what each reading of a parameter contributes; so ``scatter(a) + scatter(b)``
    becomes ``scatter(a + b)``, half the bytes, and the same sum that FSDP2 forms.
    """
    while (found := _sum_of_scatters(graph)) is not None:
        total, (first, second) = found
        a, b = first.args[0], second.args[0]
        assert isinstance(a, Node) and isinstance(b, Node)
        with graph.inserting_before(total):
            both = graph.call_function(torch.ops.aten.add.Tensor, (a, b))
            both.meta["val"] = a.meta["val"]
            merged = graph.call_function(scatter, (both, *first.args[1:]))
            merged.meta = dict(first.meta)
            shaped = graph.call_function(
                torch.ops.aten.view.default, (merged, list(total.meta["val"].shape))
            )
            shaped.meta["val"] = total.meta["val"]
        total.replace_all_uses_with(shaped)
        graph.eliminate_dead_code()


def _sum_of_scatters(graph: Graph) -> tuple[Node, tuple[Node, Node]] | None:
    for node in graph.nodes:
        if node.target not in (torch.ops.aten.add.Tensor, operator.add) or len(node.args) != 2:
            continue
        parts = [_behind_views(arg) for arg in node.args]
        if all(part is not None and part.target is scatter for part in parts):
            first, second = parts
            assert first is not None and second is not None
            if parameter_of(first) == parameter_of(second):
                return node, (first, second)
    return None


def _behind_views(node: object) -> Node | None:
    while isinstance(node, Node) and node.target in _VIEWS:
        node = node.args[0]
    return node if isinstance(node, Node) else None


def tag_gathers(graph: Graph, *, keep_last_unit: bool) -> None:
    """Marks gathers for repetition in the backward, or for keeping.

    A model that reshards frees parameters after their last use in the forward and gathers them
    again.

    Args:
        graph: joint.
        keep_last_unit: keep what the backward begins with: it would be freed only to be gathered
            at once, and memory is at its peak then with or without it.
    """
    gathers = nodes_of(graph, gather)
    if not gathers:
        return
    last = parameter_of(gathers[-1])
    kept = plan_of(last.plan).units[unit_of(last)]
    for node in gathers:
        number, name = parameter_of(node)
        again = plan_of(number).reshard_after_forward
        if keep_last_unit and number == last.plan and name in kept:
            again = False
        source = node.args[0]
        assert isinstance(source, Node)
        if plan_of(number).lends(name, source.meta["val"].dtype):
            again = True  # costs nothing, and what is saved a kernel may overwrite
        policy = CheckpointPolicy.MUST_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE
        node.meta["recompute"] = policy
        node.meta["ac_graph_id"] = _NO_REGION


def save_random(graph: Graph) -> None:
    """Keeps the results of operators that draw random numbers, even where all is recomputed.

    Attention returns a seed and an offset for its dropout. Where activation checkpointing would
    recompute it, torch 2.13 misorders the saved values of a graph that holds a device mesh.
    """
    for node in graph.nodes:
        seeded = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if seeded and "recompute" in node.meta:
            for kept in (node, *(u for u in node.users if u.target is operator.getitem)):
                kept.meta["recompute"] = CheckpointPolicy.MUST_SAVE
