"""Qwen 3, the class of GPT-2, heads of any width, and rows of several documents."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from core_torch.config import ModelConfig, RopeScaling, all_problems
from core_torch.models import Model, build_model
from core_torch.models.build import draw
from core_torch.models.gpt2 import LayerNorm, gelu
from core_torch.models.llama import RMSNorm
from core_torch.shard.recompute import recompute_activations
from core_torch.shard.wrap import plan_units, unit_parameters

F64 = torch.float64
VOCABULARY = 19
LLAMA = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, hidden=24, context=32, init_std=0.2)
QWEN = replace(LLAMA, kind="qwen3", head_dim=6)
GPT2 = replace(LLAMA, kind="gpt2", tied=True)
ALL = [LLAMA, QWEN, GPT2]
IDS = torch.randint(VOCABULARY, (3, 14), generator=torch.Generator().manual_seed(1))


def of_kind(sizes: ModelConfig) -> str:
    """Name of a case."""
    return sizes.kind


def model(sizes: ModelConfig, *, dtype: torch.dtype = F64) -> Model:
    """A model whose gains are not 1 and whose biases are not 0, or a forgotten one would pass."""
    built = build_model(sizes, VOCABULARY, seed=0, dtype=dtype)
    with torch.no_grad():
        for name, p in built.named_parameters():
            if p.ndim == 1:
                p.add_(0.3 * draw(name, p, seed=0))
    return built


# The same models again, one sequence at a time, by NumPy.

Weights = dict[str, np.ndarray]


def weights(built: Model) -> Weights:
    return {name: p.detach().numpy() for name, p in built.named_parameters()}


def by_hand(built: Model, ids_T: np.ndarray) -> np.ndarray:
    """(T, V) logits of a Qwen 3 or a GPT-2."""
    w, sizes = weights(built), built.config
    x_TD = w["tok_embeddings.weight"][ids_T]
    if sizes.kind == "gpt2":
        x_TD = x_TD + w["pos_embeddings.weight"][: len(ids_T)]
    for i in range(sizes.layers):
        own = {
            k.removeprefix(f"layers.{i}."): x for k, x in w.items() if k.startswith(f"layers.{i}.")
        }
        x_TD = x_TD + attention(norm(x_TD, own, "attention_norm", sizes), own, sizes)
        x_TD = x_TD + feed_forward(norm(x_TD, own, "ffn_norm", sizes), own, sizes)
    head_VD = w["tok_embeddings.weight"] if sizes.tied else w["output.weight"]
    return np.asarray(norm(x_TD, w, "norm", sizes) @ head_VD.T)


def norm(x: np.ndarray, w: Weights, name: str, sizes: ModelConfig) -> np.ndarray:
    if f"{name}.bias" in w:
        x = x - x.mean(axis=-1, keepdims=True)
    root = np.sqrt((x**2).mean(axis=-1, keepdims=True) + sizes.norm_eps)
    return np.asarray(w[f"{name}.weight"] * x / root + w.get(f"{name}.bias", 0.0))


def linear(x: np.ndarray, w: Weights, name: str) -> np.ndarray:
    return np.asarray(x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0))


def attention(h_TD: np.ndarray, w: Weights, sizes: ModelConfig) -> np.ndarray:
    width, length = sizes.head_dim or sizes.dim // sizes.heads, len(h_TD)
    turn_Ti = np.exp(1j * np.outer(np.arange(length), frequencies(width, sizes.rope_theta)))

    def head(kind: str, j: int) -> np.ndarray:
        x_TE = linear(h_TD, w, f"attention.{kind}")[:, j * width : (j + 1) * width]
        if sizes.kind == "gpt2" or kind == "wv":
            return x_TE
        x_TE = norm(x_TE, w, f"attention.{kind[1]}_norm", sizes)
        z_Ti = (x_TE[:, 0::2] + 1j * x_TE[:, 1::2]) * turn_Ti
        return np.stack((z_Ti.real, z_Ti.imag), axis=-1).reshape(length, width)

    mixed = []
    for j in range(sizes.heads):
        shared = j // (sizes.heads // sizes.kv_heads)
        score_TT = head("wq", j) @ head("wk", shared).T / math.sqrt(width)
        score_TT = np.where(np.tri(length, dtype=bool), score_TT, -np.inf)
        chance_TT = np.exp(score_TT - score_TT.max(axis=-1, keepdims=True))
        mixed.append(chance_TT / chance_TT.sum(axis=-1, keepdims=True) @ head("wv", shared))
    return linear(np.concatenate(mixed, axis=-1), w, "attention.wo")


def frequencies(width: int, theta: float) -> np.ndarray:
    return np.asarray(theta ** (-np.arange(0, width, 2) / width))


def feed_forward(h_TD: np.ndarray, w: Weights, sizes: ModelConfig) -> np.ndarray:
    z_TF = linear(h_TD, w, "feed_forward.w1")
    if sizes.kind == "gpt2":
        curve = np.tanh(math.sqrt(2 / math.pi) * (z_TF + 0.044715 * z_TF**3))
        return linear(0.5 * z_TF * (1 + curve), w, "feed_forward.w2")
    gated_TF = z_TF / (1 + np.exp(-z_TF)) * linear(h_TD, w, "feed_forward.w3")
    return linear(gated_TF, w, "feed_forward.w2")


@pytest.mark.parametrize(
    "sizes",
    [
        QWEN,
        replace(QWEN, head_dim=0, tied=True),
        replace(QWEN, head_dim=20, kv_heads=4),
        GPT2,
        replace(GPT2, tied=False, head_dim=7, kv_heads=4),
    ],
    ids=str,
)
def test_logits_are_those_of_a_plain_program(sizes: ModelConfig) -> None:
    built = model(sizes)
    with torch.no_grad():
        logits = built(IDS)
    assert logits.abs().max() > 1, "logits too small to tell anything"
    for ids_T, mine in zip(IDS.numpy(), logits.numpy(), strict=True):
        np.testing.assert_allclose(mine, by_hand(built, ids_T), rtol=0, atol=1e-12)


def test_heads_of_a_given_width_make_no_other_llama_if_it_is_theirs_anyway() -> None:
    one, two = model(LLAMA), model(replace(LLAMA, head_dim=8))
    assert torch.equal(one(IDS), two(IDS))


# Rows of several documents.


@pytest.mark.parametrize("sizes", ALL, ids=of_kind)
def test_attention_does_not_leave_a_document(sizes: ModelConfig) -> None:
    built = model(sizes)
    documents = torch.tensor([[0] * 5 + [1] * 9, [0] * 14, [0, 1] + [2] * 12])
    logits = built(IDS, documents_BT=documents)
    torch.testing.assert_close(logits[0, :5], built(IDS[:1, :5])[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(logits[1], built(IDS[1:2])[0], rtol=0, atol=1e-12)
    if sizes.kind != "gpt2":  # whose positions count from the start of the row
        torch.testing.assert_close(logits[0, 5:], built(IDS[:1, 5:])[0], rtol=0, atol=1e-12)
    other = IDS.clone()
    other[2, :2] = (other[2, :2] + 1) % VOCABULARY
    assert torch.equal(built(other, documents_BT=documents)[2, 2:], logits[2, 2:])


@pytest.mark.parametrize("sizes", ALL, ids=of_kind)
def test_one_document_is_what_no_documents_are_and_has_the_same_gradients(
    sizes: ModelConfig,
) -> None:
    found: list[list[Tensor]] = []
    for documents in (None, torch.full_like(IDS, 7)):
        built = model(sizes)
        logits = built(IDS, documents_BT=documents)
        logits.square().sum().backward()
        grads = [p.grad for p in built.parameters()]
        assert all(grad is not None for grad in grads), "a parameter without gradient"
        found.append([logits.detach(), *(grad for grad in grads if grad is not None)])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


# Initial weights, units, recomputation.


@pytest.mark.parametrize("sizes", ALL, ids=of_kind)
def test_gains_begin_at_one_biases_at_zero_and_what_writes_to_the_stream_is_smaller(
    sizes: ModelConfig,
) -> None:
    params = dict(build_model(replace(sizes, dim=64, hidden=64), 64, seed=0).named_parameters())
    for name, p in params.items():
        if p.ndim == 1:
            assert torch.all(p == (0.0 if name.endswith(".bias") else 1.0)), name
            continue
        is_writer = name.endswith(("wo.weight", "w2.weight"))
        wanted = 0.2 / math.sqrt(2 * sizes.layers) if is_writer else 0.2
        assert abs(p.std().item() / wanted - 1) < 0.1, name


def test_each_kind_has_its_own_parameters() -> None:
    names = {sizes.kind: {n for n, _ in model(sizes).named_parameters()} for sizes in ALL}
    more = names["qwen3"] - names["llama"]
    assert {n.removeprefix("layers.1.") for n in more if n.startswith("layers.1.")} == {
        "attention.q_norm.weight",
        "attention.k_norm.weight",
    }
    assert names["llama"] < names["qwen3"]
    assert {"pos_embeddings.weight", "norm.bias", "layers.0.attention.wq.bias"} <= names["gpt2"]
    assert "layers.0.attention.wk.bias" not in names["gpt2"], "softmax would not see it"
    assert not any("w3" in name or "output" in name for name in names["gpt2"])


def test_both_tables_of_gpt2_are_in_the_first_unit() -> None:
    tables = {"tok_embeddings.weight", "pos_embeddings.weight"}
    tied, untied = model(GPT2), model(replace(GPT2, tied=False))
    found = unit_parameters(untied, plan_units(untied))
    assert set(found["embedding"]) == tables
    assert set(found["head"]) == {"norm.weight", "norm.bias", "output.weight"}
    found = unit_parameters(tied, plan_units(tied))
    assert set(found["embedding"]) == tables | {"norm.weight", "norm.bias"}


@pytest.mark.parametrize("sizes", [QWEN, GPT2], ids=of_kind)
def test_blocks_that_are_computed_again_have_the_same_gradients(sizes: ModelConfig) -> None:
    plain, again = model(sizes), model(sizes)
    recompute_activations(again, again.blocks, "selective")
    assert len({type(layer) for layer in again.get_submodule("layers").children()}) == 1
    for built in (plain, again):
        built(IDS, documents_BT=torch.zeros_like(IDS)).square().sum().backward()
    for p, q in zip(plain.parameters(), again.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


# Numbers.


def test_a_layer_norm_takes_the_mean_away_and_computes_wide() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16() + 100
    found = LayerNorm(64, 1e-5).to(torch.bfloat16)(x)
    exact = LayerNorm(64, 1e-5).to(F64)(x.to(F64))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, exact.to(torch.bfloat16), rtol=0, atol=0)


def test_gelu_is_the_one_with_tanh_and_computes_wide() -> None:
    x = torch.linspace(-6, 6, 1001).bfloat16()
    assert torch.equal(gelu(x), gelu(x.float()).bfloat16())
    exact = 0.5 * x.double() * (1 + torch.erf(x.double() / math.sqrt(2)))
    difference = (gelu(x.double()) - exact).abs().max()
    assert 1e-4 < difference < 1e-3


def test_norms_of_heads_go_over_the_width_of_a_head() -> None:
    attention_of = model(QWEN).get_submodule("layers.0.attention")
    q_norm = attention_of.get_submodule("q_norm")
    assert isinstance(q_norm, RMSNorm) and q_norm.weight.shape == (6,)


# What a configuration may say.


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        (dict(kind="gpt2", rope_theta=1e4), "rope_theta", "gpt2 learns its positions"),
        (dict(kind="gpt2", rope_scaling=RopeScaling(factor=2.0)), "rope_scaling.factor", "gpt2"),
        (dict(kind="qwen3", head_dim=7), "head_dim", "7 must be even"),
        (dict(head_dim=7), "head_dim", "7 must be even"),
        (dict(kind="gpt3"), "kind", "must be one of llama, qwen3, gpt2, own"),
        (dict(kind="own"), "kind", "--model.build"),
    ],
)
def test_what_a_kind_does_not_have_is_refused(
    changes: dict[str, Any], path: str, words: str
) -> None:
    [problem] = all_problems(replace(LLAMA, **changes))
    assert problem.path == path and words in problem.message


@pytest.mark.parametrize(
    "changes",
    [
        dict(kind="gpt2", head_dim=7),
        dict(kind="gpt2", dim=12),  # heads of odd width
        dict(kind="qwen3", head_dim=10, heads=6, kv_heads=3),  # 6 does not divide 32
    ],
)
def test_what_only_rotary_heads_need_is_asked_of_them_alone(changes: dict[str, Any]) -> None:
    assert all_problems(replace(LLAMA, **changes)) == []
