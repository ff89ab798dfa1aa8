"""A model whose layers are spread over several devices is the model, and sends what it claims."""

import dataclasses
import functools

import jax
import numpy as np
from jax import Array
from jax.stages import Compiled

from reference_jax.ledger import bytes_per_axis
from reference_jax.mesh import put
from reference_jax.model import Arrays, LlamaConfig, forward, init_params, shapes
from reference_jax.tensor_parallel import (
    WHOLE,
    cut,
    join,
    kind,
    logits_and_loss,
    loss_and_gradients,
    make_mesh,
    place,
    plain_loss,
    to_host,
)

NUMBER = 8  # bytes of a float64
# Sizes divide over tp; the pieces, of 15 and 11 rows, do not divide over the shards.
CONFIG = LlamaConfig(
    vocabulary=30, dim=8, layers=1, heads=4, kv_heads=2, hidden=22, init_std=0.3, rope_theta=100.0
)
TOKENS, TARGETS = np.random.default_rng(0).integers(0, 30, (2, 4, 6))  # [B, T] each


def drawn(config: LlamaConfig) -> Arrays:
    """Parameters with gains other than 1."""
    params = init_params(config, seed=0, dtype=np.float64)
    return {k: x * 1.3 + 0.1 if x.ndim == 1 else x for k, x in params.items()}


@functools.cache
def compiled(config: LlamaConfig) -> tuple[Compiled, tuple[Arrays, Array, Array]]:
    """``loss_and_gradients`` on 2 x 2, and its arguments."""
    mesh = make_mesh(2, 2)
    with jax.set_mesh(mesh):
        inputs, targets = (put(x.reshape(2, 2, 6), mesh, WHOLE) for x in (TOKENS, TARGETS))
        args = (place(drawn(config), mesh), inputs, targets)
        step = jax.jit(functools.partial(loss_and_gradients, config=config))
        return step.lower(*args).compile(), args


def test_loss_and_gradients_are_those_of_the_plain_model() -> None:
    program, args = compiled(CONFIG)
    loss, grads = program(*args)
    plain = jax.jit(jax.value_and_grad(plain_loss), static_argnames="config")
    expected, truth = plain(drawn(CONFIG), TOKENS, TARGETS, config=CONFIG)
    np.testing.assert_allclose(loss, expected, rtol=1e-15)
    assert {k: jax.typeof(g) for k, g in grads.items()} == {
        k: jax.typeof(x) for k, x in args[0].items()
    }
    host = to_host(grads, CONFIG)
    for name, shape in shapes(CONFIG).items():
        assert host[name].shape == shape
        off = np.linalg.norm(host[name] - truth[name]) / np.linalg.norm(truth[name])
        assert off < 3e-15, name


def test_logits_are_those_of_the_plain_model_and_types_say_who_holds_what() -> None:
    mesh, types = make_mesh(2, 2), dict[str, str]()
    with jax.set_mesh(mesh):
        batch = [put(x.reshape(2, 2, 6), mesh, WHOLE) for x in (TOKENS, TARGETS)]

        def tell(name: str, x: Array) -> None:
            types[name] = str(jax.typeof(x))

        told = jax.jit(functools.partial(logits_and_loss, config=CONFIG, tell=tell))
        logits, _ = told(place(drawn(CONFIG), mesh), *batch)
    whole = np.moveaxis(np.asarray(logits), 0, -2).reshape(4, 6, 30)
    plain = jax.jit(forward, static_argnames="config")(drawn(CONFIG), TOKENS, config=CONFIG)
    np.testing.assert_allclose(whole, plain, rtol=1e-13, atol=1e-14)
    assert types["x, the same on both"] == "float64[2@shard,2,6,8]"
    assert types["half of the heads"] == "float64[2@tp,2@shard,2,6,4]"
    assert types["half of the sum"] == "float64[2@tp,2@shard,2,6,8]"
    assert types["half of the logits"] == "float64[2@tp,2@shard,2,6,15]"


def test_a_layer_sends_four_activations_over_tp_and_fsdp_gathers_only_what_a_device_needs() -> None:
    mesh, activation, per_token = make_mesh(2, 2), 2 * 6 * 8 * NUMBER, 2 * 6 * NUMBER
    for layers in (1, 2):
        config = dataclasses.replace(CONFIG, layers=layers)
        sent = bytes_per_axis(compiled(config)[0], mesh)
        head = activation + 3 * per_token
        assert sent["tp"] == {"all-reduce": 4 * layers * activation + head}
        pieces = 0
        for name, shape in shapes(config).items():
            rows = shape[0] // (2 if kind(name) == "column" else 1)
            rest = int(np.prod(shape[1:])) // (2 if kind(name) == "row" else 1)
            pieces += (rows + rows % 2) * rest * NUMBER
        assert sent["shard"]["all-gather"] == pieces
        assert sent.keys() == {"tp", "shard"}


def test_cutting_and_joining_are_inverse() -> None:
    for name, shape in shapes(CONFIG).items():
        x = np.random.default_rng(1).normal(size=shape)
        np.testing.assert_array_equal(join(cut(x, name, 2), name), x)
    assert kind("layers.0.attention.wo.weight") == "row"
    assert kind("layers.0.attention_norm.weight") == kind("tok_embeddings.weight") == "whole"
