"""The model computes Llama 3 as a plain NumPy program does, from weights that names decide."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from core_torch.config import ModelConfig, RopeScaling
from core_torch.models import Llama, build_model, generate, token_loss
from core_torch.models.build import draw
from core_torch.models.llama import RMSNorm, rope_frequencies, silu

F64 = torch.float64
VOCABULARY = 19
SMALL = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, hidden=24, context=512, init_std=0.2)
STRETCHED = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64)


def config(**changes: Any) -> ModelConfig:
    return replace(SMALL, **changes)


def model(settings: ModelConfig = SMALL, *, seed: int = 0, dtype: torch.dtype = F64) -> Llama:
    """A model whose gains are not 1, or a forgotten gain would pass."""
    built = build_model(settings, VOCABULARY, seed=seed, dtype=dtype)
    assert isinstance(built, Llama)
    with torch.no_grad():
        for name, p in built.named_parameters():
            if p.ndim == 1:
                p.copy_(1.0 + 0.3 * draw(name, p, seed=seed))
    return built


def tokens(length: int, *, rows: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(VOCABULARY, (rows, length), generator=generator)


# The same model again, from the papers' formulas, one sequence at a time, in float64.


def reference_logits(built: Llama, ids_T: np.ndarray) -> np.ndarray:
    """(T, V) logits by NumPy alone."""
    settings = built.config
    w = {name: p.detach().to(F64).numpy() for name, p in built.named_parameters()}
    angle_Ti = np.outer(np.arange(len(ids_T)), reference_frequencies(settings))
    turn_Ti = np.exp(1j * angle_Ti)
    x_TD = w["tok_embeddings.weight"][ids_T]
    for i in range(settings.layers):
        block = {
            name.removeprefix(f"layers.{i}."): value
            for name, value in w.items()
            if name.startswith(f"layers.{i}.")
        }
        h_TD = reference_norm(x_TD, block["attention_norm.weight"], settings.norm_eps)
        x_TD = x_TD + reference_attention(h_TD, block, settings, turn_Ti)
        h_TD = reference_norm(x_TD, block["ffn_norm.weight"], settings.norm_eps)
        gate_TF = h_TD @ block["feed_forward.w1.weight"].T
        up_TF = h_TD @ block["feed_forward.w3.weight"].T
        gate_TF = gate_TF / (1.0 + np.exp(-gate_TF))
        x_TD = x_TD + (gate_TF * up_TF) @ block["feed_forward.w2.weight"].T
    head_VD = w["tok_embeddings.weight"] if settings.tied else w["output.weight"]
    return np.asarray(reference_norm(x_TD, w["norm.weight"], settings.norm_eps) @ head_VD.T)


def reference_norm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    return np.asarray(gain * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps))


def reference_attention(
    h_TD: np.ndarray, block: dict[str, np.ndarray], settings: ModelConfig, turn_Ti: np.ndarray
) -> np.ndarray:
    width, length = settings.dim // settings.heads, len(h_TD)

    def head(kind: str, j: int) -> np.ndarray:
        rows = block[f"attention.{kind}.weight"][j * width : (j + 1) * width]
        return np.asarray(h_TD @ rows.T)

    def rotated(x_TE: np.ndarray) -> np.ndarray:
        z_Ti = (x_TE[:, 0::2] + 1j * x_TE[:, 1::2]) * turn_Ti
        return np.stack((z_Ti.real, z_Ti.imag), axis=-1).reshape(length, width)

    mixed = []
    for j in range(settings.heads):
        shared = j // (settings.heads // settings.kv_heads)
        score_TT = rotated(head("wq", j)) @ rotated(head("wk", shared)).T / math.sqrt(width)
        score_TT = np.where(np.tri(length, dtype=bool), score_TT, -np.inf)
        chance_TT = np.exp(score_TT - score_TT.max(axis=-1, keepdims=True))
        chance_TT /= chance_TT.sum(axis=-1, keepdims=True)
        mixed.append(chance_TT @ head("wv", shared))
    return np.asarray(np.concatenate(mixed, axis=-1) @ block["attention.wo.weight"].T)


def reference_frequencies(settings: ModelConfig) -> np.ndarray:
    """Radians per position of each pair, by wavelength."""
    width, scaling = settings.dim // settings.heads, settings.rope_scaling
    frequencies = []
    for i in range(width // 2):
        f = settings.rope_theta ** (-2.0 * i / width)
        wavelength = 2 * math.pi / f
        original = scaling.original_context
        if scaling.factor == 1 or wavelength < original / scaling.high_freq_factor:
            frequencies.append(f)
        elif wavelength > original / scaling.low_freq_factor:
            frequencies.append(f / scaling.factor)
        else:
            span = scaling.high_freq_factor - scaling.low_freq_factor
            s = (original / wavelength - scaling.low_freq_factor) / span
            frequencies.append((1 - s) * f / scaling.factor + s * f)
    return np.array(frequencies)


CASES = {
    "grouped": SMALL,
    "every head its own keys": config(kv_heads=4),
    "one head of keys": config(kv_heads=1),
    "tied": config(tied=True),
    "stretched": config(rope_scaling=STRETCHED, rope_theta=1000.0),
    "large eps": config(norm_eps=0.3),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_formulas(name: str) -> None:
    built, ids = model(CASES[name]), tokens(500)
    expected = reference_logits(built, ids[0].numpy())
    # Sums of at most 500 terms, a dozen of them one after the other: below 1e4 eps.
    close(built(ids)[0], torch.from_numpy(expected), 1e4 * 2.0**-52)


def test_a_float32_model_stays_as_near_as_its_rounding_up_to_the_last_position() -> None:
    built, ids = model(dtype=torch.float32), tokens(500)
    expected = torch.from_numpy(reference_logits(built, ids[0].numpy()))
    # The same bound; angles of a few hundred radians made in float32 would be 30 times off.
    close(built(ids)[0, -50:], expected[-50:], 1e2 * 2.0**-23)


def test_the_stretching_case_keeps_interpolates_and_divides() -> None:
    settings = CASES["stretched"]
    plain = rope_frequencies(8, settings.rope_theta, RopeScaling())
    ratio = rope_frequencies(8, settings.rope_theta, STRETCHED) / plain
    assert ratio[0] == 1 and 1 / 8 < ratio[1] < 1 and bool((ratio[2:] == 1 / 8).all())
    np.testing.assert_allclose(ratio * plain, reference_frequencies(settings), rtol=1e-15)
    assert plain.dtype == F64


def test_no_position_sees_a_later_one_and_sequences_are_independent() -> None:
    built, ids = model(), tokens(12, rows=2)
    changed = ids.clone()
    changed[0, 7:] = (changed[0, 7:] + 1) % VOCABULARY
    before, after = built(ids), built(changed)
    torch.testing.assert_close(before[0, :7], after[0, :7])
    torch.testing.assert_close(before[1], after[1])
    assert not torch.isclose(before[0, 7:], after[0, 7:]).all(dim=-1).any()


def test_parameters_have_the_names_and_shapes_of_meta() -> None:
    shapes = {name: tuple(p.shape) for name, p in model(config(layers=1)).named_parameters()}
    assert shapes == {
        "tok_embeddings.weight": (19, 32),
        "layers.0.attention_norm.weight": (32,),
        "layers.0.attention.wq.weight": (32, 32),
        "layers.0.attention.wk.weight": (16, 32),
        "layers.0.attention.wv.weight": (16, 32),
        "layers.0.attention.wo.weight": (32, 32),
        "layers.0.ffn_norm.weight": (32,),
        "layers.0.feed_forward.w1.weight": (24, 32),
        "layers.0.feed_forward.w2.weight": (32, 24),
        "layers.0.feed_forward.w3.weight": (24, 32),
        "norm.weight": (32,),
        "output.weight": (19, 32),
    }
    tied = model(config(tied=True))
    assert "output.weight" not in dict(tied.named_parameters())
    assert tied.output.weight is tied.tok_embeddings.weight


def test_the_loss_is_the_mean_negative_log_likelihood_of_all_positions() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(2, 6, VOCABULARY, generator=generator, dtype=F64)
    targets = tokens(6, rows=2)
    chances = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(axis=-1, keepdims=True)
    picked = np.take_along_axis(chances, targets.numpy()[..., None], axis=-1)
    assert token_loss(logits, targets).item() == pytest.approx(-np.log(picked).mean(), rel=1e-14)
    uniform = token_loss(torch.zeros(1, 3, VOCABULARY), targets[:1, :3])
    assert uniform.item() == pytest.approx(math.log(VOCABULARY), rel=1e-6)


def test_a_loss_of_bfloat16_logits_is_computed_and_kept_in_float32() -> None:
    logits = torch.randn(1, 5, VOCABULARY, generator=torch.Generator().manual_seed(1)).bfloat16()
    targets = tokens(5)
    loss = token_loss(logits, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(token_loss(logits.to(F64), targets).item(), rel=1e-6)


def test_norm_and_silu_of_bfloat16_are_rounded_once_from_float32() -> None:
    x = 3 * torch.randn(4, 257, generator=torch.Generator().manual_seed(2)).bfloat16()
    norm = RMSNorm(257, 1e-5).bfloat16()
    wide = x.to(F64)
    exact = wide / (wide.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    for got, expected in ((norm(x), exact), (silu(x), F.silu(wide))):
        assert got.dtype == torch.bfloat16
        # A float32 result may sit next to the middle of two bfloat16 values: 1 in 1000.
        assert (got != expected.bfloat16()).float().mean() < 1e-3


def test_initial_float32_weights_are_the_rounded_float64_ones() -> None:
    narrow, wide = (build_model(SMALL, 19, seed=3, dtype=d) for d in (torch.float32, F64))
    for (name, x), y in zip(narrow.named_parameters(), wide.parameters(), strict=True):
        assert x.dtype == torch.float32 and torch.equal(x, y.to(torch.float32)), name
    assert narrow.get_submodule("layers.0.attention.rotary").cos.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


def test_initial_weights_depend_on_seed_and_name_but_not_on_the_rest_of_the_model() -> None:
    torch.manual_seed(123)
    few = dict(build_model(SMALL, 19, seed=3).named_parameters())
    torch.manual_seed(456)
    many = dict(build_model(config(layers=5), 19, seed=3).named_parameters())
    for name in ("layers.1.attention.wq.weight", "tok_embeddings.weight", "output.weight"):
        assert torch.equal(few[name], many[name])
    other = dict(build_model(SMALL, 19, seed=4).named_parameters())
    matrices = [name for name, p in few.items() if p.ndim == 2]
    assert not any(torch.equal(few[name], other[name]) for name in matrices)


def test_no_two_rows_of_any_matrices_start_equal() -> None:
    built = build_model(config(hidden=32), 32, seed=0)
    rows = torch.cat([p.detach() / p.detach().std() for p in built.parameters() if p.ndim == 2])
    distances = torch.cdist(rows, rows) + 100 * torch.eye(len(rows))
    assert distances.min() > 1.0


def test_initial_matrices_have_the_planned_spread_and_gains_are_one() -> None:
    built = build_model(config(layers=8, init_std=0.02), 500, seed=0)
    for name, p in built.named_parameters():
        if p.ndim == 1:
            assert bool((p == 1).all())
            continue
        writes = name.endswith(("wo.weight", "w2.weight"))
        std = 0.02 / math.sqrt(16) if writes else 0.02
        # The standard deviation of n draws is known to 1 / sqrt(2 n); five of those.
        assert p.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * p.numel())), name


def test_the_likeliest_tokens_come_out_as_one_forward_after_the_other_gives_them() -> None:
    built, prompt = model(config(context=16)), tokens(10)[0]
    out = generate(built, prompt, count=20, temperature=0.0, seed=0)
    ids = prompt.tolist()
    for _ in range(20):
        logits = reference_logits(built, np.array(ids[-16:]))  # at most the context
        ids.append(int(logits[-1].argmax()))
    assert out.tolist() == ids and out.dtype == torch.int64
    assert torch.equal(out, generate(built, prompt, count=20, temperature=0.0, seed=99))


def test_samples_depend_on_the_seed_alone_and_follow_the_temperature() -> None:
    built, prompt = model(), tokens(4)[0]

    def sample(seed: int, temperature: float = 1.0) -> list[int]:
        torch.manual_seed(seed + 7 * int(temperature))  # of no effect
        ids: list[int] = generate(
            built, prompt, count=12, temperature=temperature, seed=seed
        ).tolist()
        return ids

    torch.manual_seed(0)
    assert sample(1) == sample(1) != sample(2)
    assert sample(1, 1e-6) == sample(2, 0.0)


def test_sampled_tokens_come_as_often_as_the_model_says() -> None:
    built, prompt = model(config(layers=1)), tokens(3)[0]
    temperature, draws = 3.0, 200
    logits = built(prompt[None])[0, -1].detach() / temperature
    chance = torch.softmax(logits, dim=-1)
    counts = torch.zeros(VOCABULARY, dtype=F64)
    for seed in range(draws):
        counts[generate(built, prompt, count=1, temperature=temperature, seed=seed)[-1]] += 1
    spread = (draws * chance * (1 - chance)).sqrt()
    assert bool(((counts - draws * chance).abs() <= 4.5 * spread).all())


def test_no_new_token_gives_the_prompt_back_and_the_model_keeps_no_gradient() -> None:
    built, prompt = model(), tokens(3)[0]
    assert torch.equal(generate(built, prompt, count=0, temperature=1.0, seed=0), prompt)
    generate(built, prompt, count=2, temperature=1.0, seed=0)
    assert all(p.grad is None and p.requires_grad for p in built.parameters())


def test_an_empty_prompt_and_a_negative_temperature_are_refused() -> None:
    with pytest.raises(ValueError, match="the prompt has no token"):
        generate(model(), tokens(0)[0], count=1, temperature=0.0, seed=0)
    with pytest.raises(ValueError, match="temperature must be at least 0, got -1"):
        generate(model(), tokens(2)[0], count=1, temperature=-1.0, seed=0)


def close(x: Tensor, y: Tensor, tolerance: float) -> None:
    """Asserts that no element is off by more than ``tolerance`` of the largest one."""
    assert x.shape == y.shape
    error = (x.detach().to(F64) - y).abs().max() / y.abs().max()
    assert error <= tolerance, f"{error:.3g} of the largest logit"
