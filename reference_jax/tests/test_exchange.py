"""Coded exchanges lose nothing, cut blocks where the core cuts them, and send few bytes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.typing import ArrayLike

from reference_jax.diloco import diloco_round
from reference_jax.edit import Penalty, edit_round
from reference_jax.exchange import Wire, exchange, nothing_owed, wire_of
from reference_jax.fsdp import local_rows, place
from reference_jax.ledger import bytes_per_axis
from reference_jax.mesh import EVERYWHERE, make_mesh, put
from reference_jax.sync.wire import decode_bfloat16, dequantise, encode_bfloat16, quantise
from reference_jax.tests.cases import (
    MODEL,
    TOY_MODEL,
    TOY_SHAPES,
    TOY_UNITS,
    Host,
    cut,
    draw,
    toy,
)

TOY_ROWS = tuple((k, shape[0]) for k, shape in TOY_SHAPES.items())
# Rank 1 of 2 has 252 real numbers of the matrix, then padding, then a gain that begins in the
# first block if the padding is out of its way.
WIDE_SHAPES = {"matrix": (57, 9), "gain": (9,)}
coded = pytest.mark.parametrize("format", ["bf16", "int8"])


def coded_by_hand(vector: np.ndarray, format: str) -> np.ndarray:
    """What the others read of a rank's vector."""
    if format == "bf16":  # round to a multiple of 2^(exponent - 7)
        _, exponent = np.frexp(vector)
        return np.ldexp(np.rint(np.ldexp(vector, 8 - exponent)), exponent - 8)
    blocks = [vector[i : i + 256] for i in range(0, len(vector), 256)]
    return np.concatenate([scaled_by_hand(block) for block in blocks])


def scaled_by_hand(block: np.ndarray) -> np.ndarray:
    """One block, through 255 levels."""
    scale = float(np.float32(np.abs(block).max()) * np.float32(1 / 127)) or 1.0
    return np.clip(np.rint(block / scale), -127, 127) * scale


@coded
@pytest.mark.parametrize("shards", [1, 2])
def test_an_exchange_is_the_loop_by_hand_over_the_rows_of_each_rank(
    format: str, shards: int
) -> None:
    rng, mesh = np.random.default_rng(0), make_mesh(2, shards)
    d, e = ({k: rng.normal(size=(2, *s)) for k, s in WIDE_SHAPES.items()} for _ in range(2))
    weights = np.array([0.25, 0.75])
    wire = Wire(format, tuple((k, s[0]) for k, s in WIDE_SHAPES.items()))
    send = jax.jit(functools.partial(exchange, units=TOY_MODEL, wire=wire))
    with jax.set_mesh(mesh):
        placed = [place(x, mesh, axis=1) for x in (d, e)]
        combined, owed = send(*placed, put(weights[None], mesh, EVERYWHERE))
    for m in range(shards):
        mine = {k: local_rows(s[0], shards=shards, shard=m) for k, s in WIDE_SHAPES.items()}
        totals = [
            np.concatenate([(d[k][n] + e[k][n])[rows].ravel() for k, rows in mine.items()])
            for n in range(2)
        ]
        read = [coded_by_hand(total, format) for total in totals]
        of_rank = {k: local_slice(combined[k], m, shards, rows) for k, rows in mine.items()}
        np.testing.assert_allclose(flat(of_rank), weights @ np.stack(read), rtol=1e-14)
        for n in range(2):
            left = {
                k: local_slice(np.asarray(owed[k])[n], m, shards, rows) for k, rows in mine.items()
            }
            np.testing.assert_array_equal(flat(left), totals[n] - read[n])


def local_slice(x: ArrayLike, m: int, shards: int, rows: slice) -> np.ndarray:
    """The real rows of rank m of a padded array."""
    host = np.asarray(x)
    piece = len(host) // shards
    return host[m * piece : m * piece + rows.stop - rows.start]


def flat(arrays: Host) -> np.ndarray:
    return np.concatenate([x.ravel() for x in arrays.values()])


@coded
def test_all_that_was_sent_and_what_is_owed_are_all_that_was_meant(format: str) -> None:
    mesh, wire = make_mesh(2, 2), Wire(format, TOY_ROWS)
    start = anchor = draw(0)
    velocity = {k: np.zeros_like(a) for k, a in anchor.items()}
    owed, sent, meant = dict[str, Array](), dict(velocity), dict(velocity)
    with jax.set_mesh(mesh):
        for r in range(4):
            moved_R = draw(10 + r, replicas=2)
            params_R = {k: anchor[k] - moved_R[k] for k in anchor}
            state, sync = toy(anchor, params_R, mesh, units=1, velocity=velocity)
            owed = owed or nothing_owed(state.params, wire)
            sync = sync._replace(owed=owed)
            state, sync, done = diloco_round(state, sync, units=TOY_MODEL, wire=wire)
            owed, combined = sync.owed, cut(done.combined, axis=0)
            anchor, velocity = cut(sync.anchor, axis=0), cut(sync.velocity, axis=0)
            sent = {k: sent[k] + combined[k] for k in sent}
            meant = {k: meant[k] + moved_R[k].mean(axis=0) for k in meant}
        left = {k: x.mean(axis=0) for k, x in cut(owed, axis=1).items()}
    for k in start:
        np.testing.assert_allclose(sent[k] + left[k], meant[k], rtol=0, atol=1e-14)
        assert np.abs(left[k]).max() > 1e-4  # something was left out
        assert not np.asarray(owed[k])[:, TOY_SHAPES[k][0] :].any()


def test_a_replica_that_is_left_out_keeps_what_it_owes_and_spoils_nobody() -> None:
    mesh, wire = make_mesh(3, 1), Wire("int8", TOY_ROWS)
    anchor, params_R = draw(0), draw(1, replicas=3)
    before_R = draw(2, replicas=3, scale=1e-3)
    params_R["matrix"][1, 0, 0] = np.nan
    state, sync = toy(anchor, params_R, mesh, units=2)
    with jax.set_mesh(mesh):
        sync = sync._replace(owed=place(before_R, mesh, axis=1))
        state, after, done = edit_round(state, sync, units=TOY_UNITS, penalty=Penalty(), wire=wire)
    assert np.asarray(done.measured.weight_UR)[0, 1] == 0
    owed_R = cut(after.owed, axis=1)
    np.testing.assert_array_equal(owed_R["matrix"][1], before_R["matrix"][1])
    assert (owed_R["gain"][1] != before_R["gain"][1]).any()  # that unit of it was let in
    assert all(
        np.isfinite(x).all() for x in (*owed_R.values(), *cut(state.params, axis=1).values())
    )


@pytest.mark.parametrize(("format", "expected"), [("bf16", 2 * 22 * 2), ("int8", 2 * (256 + 4))])
def test_what_travels_are_the_codes_of_all_replicas(format: str, expected: int) -> None:
    mesh, wire = make_mesh(2, 2), Wire(format, TOY_ROWS)
    with jax.set_mesh(mesh):
        d = place(draw(0, replicas=2), mesh, axis=1)
        half = put(np.full((1, 2), 0.5), mesh, EVERYWHERE)
        send = jax.jit(functools.partial(exchange, units=TOY_MODEL, wire=wire))
        compiled = send.lower(d, nothing_owed(d, wire), half).compile()
    assert bytes_per_axis(compiled, mesh) == {"replica": {"all-gather": expected}}


def test_one_replica_sends_nothing_so_nothing_is_coded() -> None:
    mesh, wire = make_mesh(1, 1), Wire("int8", TOY_ROWS)
    with jax.set_mesh(mesh):
        d = place(draw(0, replicas=1), mesh, axis=1)
        one = put(np.ones((1, 1)), mesh, EVERYWHERE)
        combined, _ = exchange(d, nothing_owed(d, wire), one, units=TOY_MODEL, wire=wire)
    for k, x in combined.items():
        np.testing.assert_array_equal(x, np.asarray(d[k])[0])


def test_a_format_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="'int4' is not one of fp32, bf16, int8"):
        wire_of("int4", MODEL)


def test_codes_of_awkward_numbers() -> None:
    x = jnp.array([0.0, -0.0, 1e-42, 1e-39, 127.0, 0.5, 1.5, -2.5, jnp.nan, 1.0, 3.0])
    values, scales = quantise(x, block=4)
    assert values.tolist()[:2] == [[0, 0, 0, 0], [127, 0, 2, -2]] and scales.tolist()[:2] == [1, 1]
    assert dequantise(values, scales, size=8, dtype=x.dtype).tolist()[4:] == [127, 0, 2, -2]
    tie = jnp.array([1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, 1e-40])
    there_and_back = jax.jit(lambda v: decode_bfloat16(encode_bfloat16(v), dtype=v.dtype))
    assert there_and_back(tie).tolist() == [1.0, 1.0 + 2.0**-6, 0.0]
