"""The ledger reads communication off programs, and the programs send what they claim."""

import jax
import numpy as np
import pytest

from reference_jax.ddp import warmup_step
from reference_jax.edit import Penalty, edit_round
from reference_jax.fsdp import Inner, example, local_step
from reference_jax.ledger import bytes_per_axis, device_groups, payload_bytes
from reference_jax.local_sgd import replicas_are_equal, take_anchor
from reference_jax.mesh import PER_REPLICA, make_mesh, put
from reference_jax.model import units


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("replica_groups=mesh['axis_0'=2,'axis_1'=2,'axis_2'=1] {'axis_1'}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=2] {'axis_0'}", [[0, 2], [1, 3]]),
        (
            "replica_groups=mesh['a'=2,'b'=1,'c'=2], device_ids=([2,2]T(1,0)) {'a'}",
            [[0, 1], [2, 3]],
        ),
        ("replica_groups=[2,2]<=[4], dimensions={0}", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}", [[0, 2], [1, 3]]),
        ("replica_groups={{0,2},{1,3}}, to_apply=%add", [[0, 2], [1, 3]]),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
    ],
)
def test_every_spelling_of_device_groups_is_read(groups: str, expected: list[list[int]]) -> None:
    assert device_groups(f"%x = f32[2] all-gather(%y), {groups}").tolist() == expected


def test_an_unknown_spelling_of_groups_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot read the device groups"):
        device_groups("%x = f32[2] all-reduce(%y), replica_groups=mesh['a'=4] {'a':(1)2}")


def test_payloads_of_tuples_are_added() -> None:
    assert payload_bytes("(f64[1]{0}, bf16[1,6,2]{2,1,0}, pred[3]{0}, f32[])") == 8 + 24 + 3 + 4


def test_the_axis_of_a_collective_is_found() -> None:
    mesh = make_mesh(2, 4)
    asked = {
        "replica": lambda x: x.sum(axis=0),
        "shard": lambda x: x.sum(axis=1),
    }
    with jax.set_mesh(mesh):
        x = put(np.ones((2, 8, 3)), mesh, PER_REPLICA)
        sent = {k: bytes_per_axis(jax.jit(f).lower(x).compile(), mesh) for k, f in asked.items()}
    assert sent["replica"] == {"replica": {"all-reduce": 2 * 3 * 8}}
    assert sent["shard"] == {"shard": {"all-reduce": 3 * 8}}


def test_a_local_step_sends_nothing_to_other_replicas_and_a_round_one_shard() -> None:
    mesh, config, state, tokens = example(2, 2, np.float64)
    shard_bytes = sum(x.nbytes for x in state.params.values()) // mesh.size
    of, scalars = units(config), {"config": config, "inner": Inner()}
    with jax.set_mesh(mesh):
        local = local_step.lower(state, tokens, tokens, 0.1, **scalars).compile()
        warmup = warmup_step.lower(state, tokens, tokens, 0.1, **scalars).compile()
        anchoring = take_anchor.lower(state.params, units=of).compile()
        sync = anchoring(state.params)
        meeting = edit_round.lower(state, sync, units=of, penalty=Penalty()).compile()
        assert bytes_per_axis(local, mesh).keys() == {"shard"}
        assert bytes_per_axis(anchoring, mesh) == {}
        assert bytes_per_axis(warmup, mesh)["replica"] == {"all-reduce": shard_bytes}
        sent = bytes_per_axis(meeting, mesh)
        norms = len(of) * 2 * 8  # (U, R) float64, gathered
        assert sent["replica"] == {"all-reduce": shard_bytes, "all-gather": norms}
        assert sent["shard"] == {"all-reduce": 2 * len(state.params) * 8}
        state, _ = warmup(state, tokens, tokens, 0.1)
        assert replicas_are_equal(state.params)
        state, _ = local(state, tokens, tokens, 0.1)
        assert not replicas_are_equal(state.params)
