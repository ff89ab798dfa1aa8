"""Generation with keys and values kept: the tokens of a model that sees its window anew."""

from typing import Any

import pytest
import torch
from torch import Tensor

from core_torch.config import ModelConfig
from core_torch.models import Model, build_model, generate
from core_torch.models.attention import Past
from core_torch.models.generate import likeliest, next_logits_of

CONTEXT, VOCABULARY = 12, 29
F64 = torch.float64
# Terms of the longest sum, times roundings on the way through two layers; logits are below 8.
BOUND = 8 * VOCABULARY * 2 * torch.finfo(F64).eps


def model(kind: Any) -> Model:
    """A model whose weights are large enough for likely and unlikely tokens."""
    sizes = ModelConfig(
        kind=kind, dim=16, layers=2, heads=4, kv_heads=2, hidden=24, context=CONTEXT, init_std=0.3
    )
    return build_model(sizes, VOCABULARY, seed=0, dtype=F64)


def ids(length: int) -> Tensor:
    return torch.arange(length) * 7 % VOCABULARY


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_kept_keys_and_values_give_the_logits_and_tokens_of_whole_windows(kind: str) -> None:
    built, grown = model(kind), ids(CONTEXT + 5)
    kept, anew = next_logits_of(built, cached=True), next_logits_of(built, cached=False)
    with torch.no_grad():
        for length in range(3, CONTEXT + 6):  # the window moves in the last five
            mine, theirs = kept(grown[:length]), anew(grown[:length])
            assert (mine - theirs).abs().max() <= BOUND
    how: dict[str, Any] = dict(count=2 * CONTEXT, temperature=1.0, seed=3)
    tokens = generate(built, ids(3), **how)
    assert torch.equal(tokens, generate(built, ids(3), cached=False, **how))
    assert len(tokens.unique()) > 5


def test_each_token_costs_one_position_until_the_context_is_full() -> None:
    built, seen = model("llama"), []
    built.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    generate(built, ids(4), count=CONTEXT, temperature=0.0, seed=0)
    assert seen == [4, *[1] * (CONTEXT - 4), *[CONTEXT] * 3]


def test_several_new_positions_see_each_other_causally() -> None:
    past, key = Past(CONTEXT), torch.randn(1, 4, 2, 3)
    assert past.extend(key, key)[2] is None
    keys, _, mask = past.extend(key[:, :2], key[:, :2])
    assert mask is not None and keys.shape == (1, 6, 2, 3)
    assert mask[0, 0].tolist() == [[True] * 5 + [False], [True] * 6]


def test_only_the_likeliest_tokens_are_drawn() -> None:
    chance = torch.tensor([0.1, 0.4, 0.2, 0.3])
    assert likeliest(chance, top_k=2, top_p=1.0).nonzero()[:, 0].tolist() == [1, 3]
    assert likeliest(chance, top_k=0, top_p=0.69).nonzero()[:, 0].tolist() == [1, 3]
    assert likeliest(chance, top_k=0, top_p=0.71).nonzero()[:, 0].tolist() == [1, 2, 3]
    assert likeliest(chance, top_k=3, top_p=1e-9).nonzero()[:, 0].tolist() == [1]
    greedy = generate(model("llama"), ids(3), count=9, temperature=0.0, seed=0)
    how: dict[str, Any] = dict(count=9, temperature=1.0, seed=4)
    assert torch.equal(generate(model("llama"), ids(3), top_k=1, **how), greedy)
    assert torch.equal(generate(model("llama"), ids(3), top_p=1e-9, **how), greedy)


@pytest.mark.parametrize("wrong", [{"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}], ids=str)
def test_impossible_choices_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="top_k must be at least 0 and top_p in"):
        generate(model("llama"), ids(3), count=1, temperature=1.0, seed=0, **wrong)
