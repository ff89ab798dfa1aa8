"""The model computes what its equations say; the data reaches everybody once."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reference_jax.data import batch_for, batch_of_all, read_tokens
from reference_jax.model import (
    LlamaConfig,
    forward,
    init_params,
    rope_angles,
    shapes,
    to_flat,
    to_nested,
    token_loss,
    units,
)
from reference_jax.tests.cases import MODEL

TOKENS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def logits_by_hand(params: dict[str, np.ndarray], tokens: np.ndarray, c: LlamaConfig) -> np.ndarray:
    """(T, V) logits of one sequence, position by position and head by head."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        size = np.sqrt((x * x).mean(-1, keepdims=True) + c.norm_eps)
        return np.asarray(x / size * params[name + ".weight"])

    def turn(x: np.ndarray, position: int) -> np.ndarray:
        pairs = x[0::2] + 1j * x[1::2]
        speed = c.rope_theta ** (-np.arange(len(pairs)) / len(pairs))
        pairs = pairs * np.exp(1j * position * speed)
        return np.stack([pairs.real, pairs.imag], axis=-1).reshape(-1)

    width, shared = c.dim // c.heads, c.heads // c.kv_heads
    x = params["tok_embeddings.weight"][tokens]
    for i in range(c.layers):
        w = {k.removeprefix(f"layers.{i}."): v for k, v in params.items()}
        h = norm(x, f"layers.{i}.attention_norm")
        q, k, v = (h @ w[f"attention.{n}.weight"].T for n in ("wq", "wk", "wv"))
        mixed = np.zeros_like(x)
        for head in range(c.heads):
            mine, theirs = (slice(j * width, (j + 1) * width) for j in (head, head // shared))
            for t in range(len(x)):
                at = turn(q[t, mine], t)
                scores = [at @ turn(k[s, theirs], s) / math.sqrt(width) for s in range(t + 1)]
                share = np.exp(scores) / np.exp(scores).sum()
                mixed[t, mine] = share @ v[: t + 1, theirs]
        x = x + mixed @ w["attention.wo.weight"].T
        h = norm(x, f"layers.{i}.ffn_norm")
        gate, up = (h @ w[f"feed_forward.{n}.weight"].T for n in ("w1", "w3"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["feed_forward.w2.weight"].T
    head_name = "tok_embeddings" if c.tied else "output"
    return np.asarray(norm(x, "norm") @ params[head_name + ".weight"].T)


@pytest.mark.parametrize("tied", [False, True])
def test_the_forward_pass_agrees_with_loops_written_by_hand(tied: bool) -> None:
    config = dataclasses.replace(MODEL, tied=tied)
    params = init_params(config, seed=0, dtype=jnp.float64)
    params |= {k: v * 1.3 + 0.1 for k, v in params.items() if v.ndim == 1}  # gains other than 1
    logits = jax.jit(forward, static_argnames="config")(params, TOKENS, config=config)
    host = {k: np.asarray(v) for k, v in params.items()}
    by_hand = [logits_by_hand(host, row, config) for row in TOKENS]
    np.testing.assert_allclose(logits, by_hand, rtol=1e-12, atol=1e-13)


def test_names_are_those_of_the_core_and_every_parameter_is_in_one_unit() -> None:
    names = [name for _, of_unit in units(MODEL) for name in of_unit]
    assert len(set(names)) == len(names) and set(names) == set(shapes(MODEL))
    assert [unit for unit, _ in units(MODEL)] == ["embedding", "layers.0", "head"]
    assert shapes(MODEL)["layers.0.attention.wk.weight"] == (4, 8)
    tied = dataclasses.replace(MODEL, tied=True)
    assert units(tied)[0] == ("embedding", ("tok_embeddings.weight", "norm.weight"))
    assert "output.weight" not in shapes(tied)


def test_flat_and_nested_parameters_are_the_same() -> None:
    flat = {"layers.10.attention.wq.weight": 1, "layers.2.ffn_norm.weight": 2, "norm.weight": 3}
    assert to_flat(to_nested(flat)) == flat


def test_rotary_frequencies_are_stretched_where_llama_3_stretches_them() -> None:
    plain = rope_angles(dataclasses.replace(MODEL, dim=32, heads=1), 2)[1]
    scaled_config = dataclasses.replace(
        MODEL,
        dim=32,
        heads=1,
        rope_factor=8.0,
        rope_low_freq_factor=1.0,
        rope_high_freq_factor=4.0,
        rope_original_context=64,
    )
    ratio = rope_angles(scaled_config, 2)[1] / plain
    wavelength = 2 * math.pi / plain
    np.testing.assert_array_equal(ratio[wavelength < 16], 1)
    np.testing.assert_allclose(ratio[wavelength > 64], 1 / 8)
    between = ratio[(wavelength > 16) & (wavelength < 64)]
    assert between.size and ((between > 1 / 8) & (between < 1)).all()


def test_the_loss_of_equal_logits_is_the_log_of_the_vocabulary() -> None:
    loss = token_loss(jnp.zeros((2, 5, 29), jnp.bfloat16), jnp.asarray(TOKENS))
    assert loss.dtype == jnp.float32 and float(loss) == pytest.approx(math.log(29))


def test_one_epoch_shows_every_sequence_once_and_replicas_never_meet() -> None:
    tokens, seen = np.arange(24 * 4 + 1), []
    layout: dict[str, Any] = {"replicas": 2, "shards": 3, "batch": 2, "sequence": 4, "seed": 5}
    for step in range(2):
        inputs, targets = batch_of_all(tokens, step=step, **layout)
        assert inputs.shape == (2, 3, 2, 4)
        np.testing.assert_array_equal(targets, inputs + 1)
        one_rank = batch_for(tokens, step=step, replica=1, shard=2, **layout)
        np.testing.assert_array_equal(one_rank[0], inputs[1, 2])
        seen += (inputs[..., 0] // 4).ravel().tolist()
    assert sorted(seen) == list(range(24))


def test_a_file_is_read_as_bytes_without_its_held_out_end(tmp_path: object) -> None:
    path = f"{tmp_path}/text"
    with open(path, "wb") as file:
        file.write(bytes(range(100)))
    assert read_tokens(path, held_out=0.25).tolist() == list(range(75))
