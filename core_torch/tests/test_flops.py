"""Work of nodes and segments, counted by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from core_torch.shard.flops import Work, flops_of, work_of

ATEN = torch.ops.aten


def traced(fn: Callable[..., Any], *args: Tensor) -> list[fx.Node]:
    """Nodes with fake-tensor metadata."""
    return list(make_fx(fn, tracing_mode="fake")(*args).graph.nodes)


def called(nodes: list[fx.Node], packet: Any) -> fx.Node:
    """The one node that calls an operator."""
    [node] = [n for n in nodes if getattr(n.target, "overloadpacket", None) is packet]
    return node


def test_a_product_of_matrices_counts_two_flops_per_term_and_all_three_matrices() -> None:
    nodes = traced(torch.mm, torch.ones(4, 8), torch.ones(8, 16))
    assert flops_of(called(nodes, ATEN.mm)) == Work(2 * 4 * 8 * 16, 4 * (32 + 128 + 64), 1)


def test_inputs_views_and_items_are_no_work() -> None:
    nodes = traced(lambda x: x.t().view(2, 2, 3).split(1)[0], torch.ones(3, 4))
    assert {flops_of(node) for node in nodes} == {Work()}
    assert work_of(nodes) == work_of(nodes, fused=True) == work_of([]) == Work()


def test_what_an_expanded_dimension_repeats_is_read_once() -> None:
    nodes = traced(lambda x: x.expand(8, 4) + 1, torch.ones(1, 4))
    assert work_of(nodes) == Work(0, 4 * (4 + 32), 1)


def test_an_embedding_reads_the_rows_that_it_returns_not_the_table() -> None:
    table, ids = torch.ones(1000, 4), torch.zeros(3, dtype=torch.int64)
    nodes = traced(lambda w, i: F.embedding(i, w), table, ids)
    assert work_of(nodes) == Work(0, 48 + 3 * 8 + 48, 1)


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_on_cpus_counts_and_causal_attention_counts_half(is_causal: bool) -> None:
    q, k = torch.ones(1, 2, 6, 4), torch.ones(1, 2, 6, 4)
    attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)  # noqa: E731
    node = called(traced(attend, q, k, k), ATEN._scaled_dot_product_flash_attention_for_cpu)
    assert flops_of(node).flops == 2 * (2 * 2 * 6 * 6 * 4) // (2 if is_causal else 1)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_backward_of_attention_is_five_products(is_causal: bool) -> None:
    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, scale = ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)
        return ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, scale, 0.0, is_causal
        )

    q = torch.ones(1, 2, 6, 4)
    nodes = traced(backward, q, q, q, q)
    node = called(nodes, ATEN._scaled_dot_product_flash_attention_for_cpu_backward)
    assert flops_of(node).flops == 5 * (2 * 2 * 6 * 6 * 4) // (2 if is_causal else 1)


def test_fused_element_wise_operators_exchange_nothing_through_memory() -> None:
    def gate(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        return (F.silu(x) * g).t() @ w

    nodes = traced(gate, torch.ones(8, 4), torch.ones(8, 2), torch.ones(8, 4))
    flops, x, out = 2 * 4 * 8 * 2, 4 * 32, 4 * 8
    plain = (x + x) + (3 * x) + (x + 4 * 16 + out)  # silu, times, product
    assert work_of(nodes) == Work(flops, plain, 3)
    # silu's result stays in the kernel, which reads x and g and writes what the product reads.
    assert work_of(nodes, fused=True) == Work(flops, plain - 2 * x, 2)


def test_views_between_fused_operators_are_seen_through() -> None:
    nodes = traced(lambda x: x.exp().view(10).view(5, 2) + 1, torch.ones(2, 5))
    assert work_of(nodes, fused=True) == Work(0, 80, 1)


def test_what_leaves_a_segment_is_written_even_when_fused() -> None:
    nodes = traced(lambda x: (x + 1) * 2, torch.ones(5))
    first, second = (n for n in nodes if n.op == "call_function")
    assert work_of(nodes, fused=True) == Work(0, 40, 1)
    assert work_of([first], fused=True) == Work(0, 40, 1)
    assert work_of([second], fused=True) == Work(0, 40, 1)


def test_a_node_without_metadata_is_named() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    with pytest.raises(ValueError, match="node x has no fake-tensor metadata"):
        flops_of(graph.call_function(ATEN.relu.default, (x,)))


def test_a_step_of_llama_counts_attention_and_three_times_the_products_of_the_forward() -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        q = (x @ w).view(1, 6, 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).sum()

    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.requires_grad_(), w.requires_grad_()]
        return torch.autograd.grad(loss(x, w), leaves)

    product, attention = 2 * 6 * 8 * 8, 2 * 2 * 6 * 6 * 4 // 2
    found = work_of(traced(step, torch.ones(6, 8), torch.ones(8, 8)))
    assert found.flops == 3 * product + (2 + 5) * attention
