"""SimpleFSDP is chapter `fsdp` bit for bit or to rounding, with the messages that it claims."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from reference_jax import fsdp
from reference_jax.ddp import average_over_replicas
from reference_jax.fsdp import place, rank_loss, replicate, to_host
from reference_jax.mesh import PER_REPLICA, make_mesh, put
from reference_jax.model import Arrays, LlamaConfig, init_params, shapes
from reference_jax.simple_fsdp import (
    Loss,
    Mode,
    Wrapping,
    gather,
    gradients,
    losses,
    manual_buckets,
    read,
    read_bucket,
    simple_fsdp,
    store,
    total,
    traffic,
)
from reference_jax.tests.cases import Host

MODEL = LlamaConfig(vocabulary=257, dim=16, layers=2, heads=2, kv_heads=1, hidden=27, init_std=0.3)
TIED = dataclasses.replace(MODEL, tied=True)
SHALLOW, SHALLOW_TIED = (dataclasses.replace(x, layers=1) for x in (MODEL, TIED))
# On 4 ranks: 2 rows each and one of padding; one each and an empty rank; one row in all.
TOY = {"matrix": (7, 5), "gain": (3,), "bias": (1,)}
TOY_ROWS = {k: shape[0] for k, shape in TOY.items()}
TOY_BUCKETS = (("matrix", "bias"), ("gain",))
# Kernels of XLA's default kind: with the older one of conftest.py, what a sum is fused with moves
# its last bit, and a bucket changes what is fused.
SAME_KERNELS = {"xla_cpu_use_fusion_emitters": True}


def rows_of(config: LlamaConfig) -> dict[str, int]:
    return {k: shape[0] for k, shape in shapes(config).items()}


def loss_of(config: LlamaConfig) -> Loss:
    return functools.partial(rank_loss, config=config, compute=None)


def params_of(config: LlamaConfig, replicas: int, *, dtype: str = "float64") -> Host:
    """One set of random parameters, gains included, on every replica."""
    rng = np.random.default_rng(1)
    drawn = init_params(config, seed=0, dtype=dtype)
    moved = {k: np.asarray(x) * (1 + 0.1 * rng.normal(size=x.shape)) for k, x in drawn.items()}
    return replicate({k: x.astype(dtype) for k, x in moved.items()}, replicas)


def tokens_on(mesh: Mesh) -> jax.Array:
    tokens = np.random.default_rng(0).integers(0, 257, (*mesh.devices.shape, 2, 6))
    return put(tokens, mesh, PER_REPLICA)


def host_gradients(
    config: LlamaConfig, params_R: Host, mesh: Mesh, how: Wrapping
) -> tuple[np.ndarray, Host]:
    """[R, S] losses and unpadded gradients of the model."""
    run = functools.partial(gradients, loss_of(config), rows=rows_of(config), how=how)
    with jax.set_mesh(mesh):
        tokens = tokens_on(mesh)
        compiled = jax.jit(run, compiler_options=SAME_KERNELS)
        loss_RS, grads = compiled(store(params_R, mesh, how), tokens, tokens)
        return np.asarray(loss_RS), to_host(grads, config, axis=1)


def linear_toy(full: Arrays, *slopes: jax.Array) -> jax.Array:
    """Its gradient is ``slopes``, whatever the parameters."""
    parts = [(full[k] * slope).sum() for k, slope in zip(TOY, slopes, strict=True)]
    return jnp.stack(parts).sum()


def toy_slopes(replicas: int, shards: int) -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [rng.normal(size=(replicas, shards, *shape)) for shape in TOY.values()]


def toy_params(mesh: Mesh, how: Wrapping) -> Arrays:
    rng = np.random.default_rng(3)
    host = {k: rng.normal(size=(mesh.devices.shape[0], *shape)) for k, shape in TOY.items()}
    return store(host, mesh, how)


CELLS: list[tuple[Mode, int, int, LlamaConfig, bool]] = [
    ("fully_shard", 1, 4, MODEL, False),
    ("fully_shard", 2, 2, SHALLOW_TIED, True),
    ("hybrid_shard", 2, 4, SHALLOW, True),
    ("replicate", 2, 2, SHALLOW_TIED, False),
]


@pytest.mark.parametrize(("mode", "replicas", "shards", "config", "in_buckets"), CELLS)
def test_gradients_are_those_of_chapter_fsdp(
    mode: Mode, replicas: int, shards: int, config: LlamaConfig, in_buckets: bool
) -> None:
    mesh, params_R = make_mesh(replicas, shards), params_of(config, replicas)
    if mode == "fully_shard":  # where replicas are strangers
        params_R = {
            k: np.stack([(1 + n / 10) * x for n, x in enumerate(x_R)])
            for k, x_R in params_R.items()
        }
    how = Wrapping(mode=mode, buckets=manual_buckets(config) if in_buckets else None)
    loss_RS, ours = host_gradients(config, params_R, mesh, how)
    with jax.set_mesh(mesh):
        tokens = tokens_on(mesh)
        run = jax.jit(fsdp.gradients, static_argnames="config")
        loss_R, grads = run(place(params_R, mesh, axis=1), tokens, tokens, config=config)
        grads = grads if mode == "fully_shard" else average_over_replicas(grads)
    np.testing.assert_allclose(loss_RS.mean(axis=1), loss_R, rtol=1e-14)
    allowed = 4 * math.sqrt(config.layers * config.vocabulary) * 2.0**-52
    for name, theirs in to_host(grads, config, axis=1).items():
        distance = np.linalg.norm(ours[name] - theirs) / np.linalg.norm(theirs)
        assert distance <= allowed, name


@pytest.mark.parametrize("buckets", [None, TOY_BUCKETS])
@pytest.mark.parametrize("mode", ["fully_shard", "replicate", "hybrid_shard"])
def test_a_gradient_is_the_mean_over_ranks_of_uneven_and_tiny_tensors(
    mode: Mode, buckets: tuple[tuple[str, ...], ...] | None
) -> None:
    mesh, how = make_mesh(2, 4), Wrapping(mode=mode, buckets=buckets)
    slopes = toy_slopes(2, 4)
    with jax.set_mesh(mesh):
        batch = [put(x, mesh, PER_REPLICA) for x in slopes]
        params = toy_params(mesh, how)
        run = functools.partial(gradients, linear_toy, rows=TOY_ROWS, how=how)
        _, grads = jax.jit(run)(params, *batch)
    for (name, rows), slope_RS in zip(TOY_ROWS.items(), slopes, strict=True):
        mean_R = slope_RS.mean(axis=1)
        if mode != "fully_shard":
            mean_R = np.broadcast_to(mean_R.mean(axis=0), mean_R.shape)
        found_R = np.asarray(grads[name])
        np.testing.assert_allclose(found_R[:, :rows], mean_R, rtol=1e-14, err_msg=name)
        assert found_R.shape == params[name].shape and not found_R[:, rows:].any()


@pytest.mark.parametrize("buckets", [None, TOY_BUCKETS])
def test_padding_never_reaches_the_model(buckets: tuple[tuple[str, ...], ...] | None) -> None:
    mesh, how = make_mesh(1, 4), Wrapping(buckets=buckets)

    def norm(full: Arrays, _: jax.Array) -> jax.Array:
        return jnp.stack([(x**2).sum() for x in full.values()]).sum()

    with jax.set_mesh(mesh):
        params = toy_params(mesh, how)
        host = {k: np.array(x) for k, x in params.items()}
        for name, rows in TOY_ROWS.items():
            host[name][:, rows:] = np.nan
        assert np.isnan(host["bias"]).sum() == 3
        spoiled = {k: put(x, mesh, how.spec) for k, x in host.items()}
        batch = put(np.zeros((1, 4)), mesh, PER_REPLICA)
        run = jax.jit(functools.partial(gradients, norm, rows=TOY_ROWS, how=how))
        (loss_RS, grads), (found_RS, found) = run(params, batch), run(spoiled, batch)
    np.testing.assert_array_equal(loss_RS, found_RS)
    for name, grad in grads.items():
        np.testing.assert_array_equal(grad, found[name])


def on_one_replica(
    program: Callable[..., Arrays], mesh: Mesh, params: Arrays, *batch: jax.Array
) -> Arrays:
    """``program`` on each rank, for results placed like parameters [1, rows, ...]."""

    def one_rank(params: Arrays, *batch: jax.Array) -> Arrays:
        found = program({k: x[0] for k, x in params.items()}, *(x[0, 0] for x in batch))
        return {k: x[None] for k, x in found.items()}

    mapped = jax.shard_map(one_rank, out_specs=PER_REPLICA, check_vma=False)
    with jax.set_mesh(mesh):
        found: Arrays = jax.jit(mapped)(params, *batch)
    return found


def test_autodiff_of_a_bare_gather_would_be_the_sum() -> None:
    mesh, how = make_mesh(1, 4), Wrapping()
    bare = functools.partial(gather, how=how)
    batch = [put(x, mesh, PER_REPLICA) for x in toy_slopes(1, 4)]

    def grads_of(reader: Loss) -> Arrays:
        def loss(shards: Arrays, *slopes: jax.Array) -> jax.Array:
            full = {k: reader(x, rows=TOY_ROWS[k]) for k, x in shards.items()}
            return linear_toy(full, *slopes)

        return on_one_replica(jax.grad(loss), mesh, toy_params(mesh, how), *batch)

    summed, mean = grads_of(bare), grads_of(functools.partial(read, how=how))
    for name, grad in mean.items():
        assert np.abs(grad).max() > 0.1
        np.testing.assert_array_equal(np.asarray(summed[name]), 4 * np.asarray(grad))


def test_a_bucket_reads_and_scatters_the_same_bits() -> None:
    mesh, how = make_mesh(1, 4), Wrapping(compute="float32")
    batch = [put(x.astype(np.float32), mesh, PER_REPLICA) for x in toy_slopes(1, 4)]
    params = toy_params(mesh, how)

    def both(shards: Arrays, *slopes: jax.Array) -> Arrays:
        full, back = jax.vjp(functools.partial(read_bucket, rows=TOY_ROWS, how=how), shards)
        found = {f"bucket {k}": x for k, x in full.items()}
        [grads] = back(dict(zip(TOY, slopes, strict=True)))
        found |= {f"bucket d{k}": x for k, x in grads.items()}
        for k, slope in zip(TOY, slopes, strict=True):
            one, back = jax.vjp(functools.partial(read, rows=TOY_ROWS[k], how=how), shards[k])
            found |= {f"single {k}": one, f"single d{k}": back(slope)[0]}
        return found

    found = on_one_replica(both, mesh, params, *batch)
    for name in TOY:
        for kind, dtype in ((name, "float32"), (f"d{name}", "float64")):
            x, y = found[f"bucket {kind}"], found[f"single {kind}"]
            assert x.dtype == y.dtype == dtype and np.abs(x).max() > 0.1
            np.testing.assert_array_equal(x, y, err_msg=kind)
    whole = np.asarray(found["bucket matrix"])[0].reshape(4, 7, 5)  # each rank's own copy
    for copy in whole:
        np.testing.assert_array_equal(copy, np.asarray(params["matrix"])[0, :7].astype("f4"))


@pytest.mark.parametrize("config", [SHALLOW, SHALLOW_TIED], ids=["untied", "tied"])
def test_neither_buckets_nor_resharding_change_a_bit_of_a_gradient(config: LlamaConfig) -> None:
    mesh, params_R = make_mesh(1, 4), params_of(config, 1)
    plain = host_gradients(config, params_R, mesh, Wrapping(reshard_after_forward=False))
    for how in (Wrapping(), Wrapping(buckets=manual_buckets(config))):
        loss_RS, grads = host_gradients(config, params_R, mesh, how)
        np.testing.assert_array_equal(loss_RS, plain[0])
        for name, grad in grads.items():
            np.testing.assert_array_equal(grad, plain[1][name], err_msg=f"{name}, {how}")


Sent = Counter[tuple[str, int]]


def messages(config: LlamaConfig, how: Wrapping, *, dtype: str = "float32") -> tuple[Sent, Sent]:
    """Traffic of forward and backward on 2 x 4."""
    mesh = make_mesh(2, 4)
    with jax.set_mesh(mesh):
        params = store(params_of(config, 2, dtype=dtype), mesh, how)
        forward, both = (
            traffic(
                functools.partial(program, loss_of(config), rows=rows_of(config), how=how),
                params,
                tokens_on(mesh),
                tokens_on(mesh),
            )
            for program in (losses, gradients)
        )
    assert not forward - both
    return forward, both - forward


def padded_bytes(config: LlamaConfig, *, ranks: int, itemsize: int, skip: str = "") -> int:
    """Bytes of all parameters but ``skip``, with rows rounded up to a multiple of ``ranks``."""
    sizes = {k: -(-s[0] // ranks) * ranks * math.prod(s[1:]) for k, s in shapes(config).items()}
    return itemsize * sum(size for k, size in sizes.items() if k != skip)


TABLE = "tok_embeddings.weight"


@pytest.mark.parametrize(
    ("config", "in_buckets", "calls"),
    [
        (MODEL, False, (21, 20, 21)),
        (MODEL, True, (4, 3, 4)),
        (TIED, False, (20, 20, 20)),  # the table of a tied model is needed again, by the head
        (TIED, True, (3, 3, 3)),
    ],
)
def test_buckets_make_messages_fewer_but_not_larger_in_all(
    config: LlamaConfig, in_buckets: bool, calls: tuple[int, int, int]
) -> None:
    buckets = manual_buckets(config) if in_buckets else None
    forward, backward = messages(config, Wrapping(buckets=buckets))
    size = padded_bytes(config, ranks=4, itemsize=4)
    again = padded_bytes(config, ranks=4, itemsize=4, skip="" if config.tied else TABLE)
    assert total(forward, "all-gather") == (calls[0], size)
    assert total(backward, "all-gather") == (calls[1], again)
    assert total(backward, "reduce-scatter") == (calls[2], size)
    assert sum(forward.values()) == calls[0] and sum(backward.values()) == calls[1] + calls[2]
    # Padding: 3 rows of each table of 257 and 1 of each hidden matrix of 27, 16 wide.
    tables, hidden = (1 if config.tied else 2), 2 * config.layers
    unpadded = padded_bytes(config, ranks=1, itemsize=4)
    assert size - unpadded == 4 * 16 * (3 * tables + 1 * hidden)


def test_a_bucket_gathers_again_as_a_whole_what_the_backward_needs_in_part() -> None:
    unit = manual_buckets(MODEL)
    joined = (unit[0] + unit[1], *unit[2:])
    _, backward = messages(MODEL, Wrapping(buckets=joined))
    assert total(backward, "all-gather") == (3, padded_bytes(MODEL, ranks=4, itemsize=4))


def test_without_resharding_the_backward_gathers_nothing() -> None:
    for buckets, calls in ((None, 21), (manual_buckets(MODEL), 4)):
        how = Wrapping(buckets=buckets, reshard_after_forward=False)
        forward, backward = messages(MODEL, how)
        assert total(forward, "all-gather")[0] == calls
        assert total(backward, "all-gather") == (0, 0)
        assert total(backward, "reduce-scatter")[0] == calls


def test_hybrid_adds_an_all_reduce_of_each_shard_and_replicate_has_nothing_else() -> None:
    for buckets, calls in ((None, 21), (manual_buckets(MODEL), 4)):
        forward, backward = messages(MODEL, Wrapping(mode="hybrid_shard", buckets=buckets))
        size = padded_bytes(MODEL, ranks=4, itemsize=4)
        assert total(forward, "all-gather") == (calls, size)
        assert total(backward, "reduce-scatter") == (calls, size)
        assert total(backward, "all-reduce") == (calls, size // 4)
        forward, backward = messages(MODEL, Wrapping(mode="replicate", buckets=buckets))
        assert not forward and sum(backward.values()) == calls
        assert total(backward, "all-reduce") == (calls, padded_bytes(MODEL, ranks=1, itemsize=4))


@pytest.mark.parametrize("in_buckets", [False, True])
def test_parameters_are_cast_before_they_travel(in_buckets: bool) -> None:
    buckets = manual_buckets(MODEL) if in_buckets else None
    size = padded_bytes(MODEL, ranks=4, itemsize=4)
    how = Wrapping(compute="bfloat16", buckets=buckets)
    forward, backward = messages(MODEL, how)
    assert total(forward, "all-gather")[1] == size // 2
    assert total(backward, "reduce-scatter")[1] == size
    _, backward = messages(MODEL, dataclasses.replace(how, reduce="bfloat16"))
    assert total(backward, "reduce-scatter")[1] == size // 2


def test_bfloat16_gradients_are_averaged_in_the_stored_dtype() -> None:
    mesh, params_R = make_mesh(1, 4), params_of(SHALLOW, 1, dtype="float32")
    how = Wrapping(compute="bfloat16", buckets=manual_buckets(SHALLOW))
    _, ours = host_gradients(SHALLOW, params_R, mesh, how)
    _, rounded = host_gradients(
        SHALLOW, params_R, mesh, dataclasses.replace(how, reduce="bfloat16")
    )
    with jax.set_mesh(mesh):
        tokens = tokens_on(mesh)
        run = jax.jit(fsdp.gradients, static_argnames=("config", "compute"))
        params = place(params_R, mesh, axis=1)
        _, grads = run(params, tokens, tokens, config=SHALLOW, compute="bfloat16")
    unit = 2.0**-7
    for name, theirs in to_host(grads, SHALLOW, axis=1).items():
        assert ours[name].dtype == rounded[name].dtype == np.float32
        size = np.linalg.norm(theirs)
        assert np.linalg.norm(ours[name] - theirs) <= 4 * math.sqrt(SHALLOW.layers) * unit * size
        assert 0 < np.linalg.norm(ours[name] - rounded[name]) <= unit * size, name


def test_a_plan_must_hold_every_parameter_once() -> None:
    for buckets in ((("matrix", "gain"),), (("matrix", "gain"), ("bias", "gain"))):
        with pytest.raises(ValueError, match="in exactly one bucket"):
            simple_fsdp(linear_toy, rows=TOY_ROWS, how=Wrapping(buckets=buckets))
