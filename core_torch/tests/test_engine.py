"""Equalities of whole runs on ranks that are threads: every method, bit for bit where it can be.

parity_tests runs the same equalities on processes with a real model where that may differ.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from core_torch.config import (
    Co2Config,
    OuterConfig,
    PenaltyConfig,
    StreamingConfig,
    SyncConfig,
    TimedConfig,
)
from core_torch.sync import sync_round
from core_torch.sync.coded import PendingCoded, decode, start_coded
from core_torch.tests.engine_runs import Fault, Life, config_of, resumed, run

SECOND = 10**9
# Thresholds so low that all parts of the penalty act.
PENALTY = PenaltyConfig(warmup_rounds=10, temperature=0.05, max_norm=0.2, ema_alpha=0.5)
AVERAGE = OuterConfig(lr=1.0, momentum=0.0)


def edit(**changes: Any) -> SyncConfig:
    usual: dict[str, Any] = {"method": "edit", "every": 3, "warmup": 2, "penalty": PENALTY}
    return SyncConfig(**usual | changes)


def aedit(**changes: Any) -> SyncConfig:
    usual: dict[str, Any] = {"every": "3s", "timed": TimedConfig(min_total_steps=1)}
    return edit(**{"method": "aedit"} | usual | changes)


def rows(method: str, **changes: Any) -> SyncConfig:
    usual: dict[str, Any] = {"method": method, "every": 4, "warmup": 2}
    return SyncConfig(**usual | changes)


METHODS: dict[str, SyncConfig] = {
    "post_local_sgd": rows("post_local_sgd"),
    "diloco": rows("diloco"),
    "streaming": rows("streaming_diloco"),
    "streaming long": rows(
        "streaming_diloco", streaming=StreamingConfig(fragments=4, delay=3, mix=0.25)
    ),
    "co2": rows("co2"),
    "co2_star": rows("co2_star"),
    "edit whole": edit(layerwise=False),
    "edit": edit(),
    "aedit whole": aedit(layerwise=False),
    "aedit": aedit(),
    "edit bf16": edit(wire="bf16"),
    "edit int8 offload": edit(wire="int8", offload=True),
    "streaming int8": rows("streaming_diloco", wire="int8"),
    "co2 bf16 offload": rows("co2", wire="bf16", offload=True),
    "co2_star int8": rows("co2_star", wire="int8"),
    "aedit int8": aedit(wire="int8"),
}
each_method = pytest.mark.parametrize("name", METHODS)


def lives(sync: SyncConfig, **how: Any) -> list[Life]:
    """A run of two replicas, or as told; a step of all takes a second."""
    mesh = {key: how.pop(key) for key in ("replicas", "shards", "steps") if key in how}
    replicas = mesh.get("replicas", 2)
    return run(config_of(sync, **mesh), step_ns=how.pop("step_ns", [SECOND] * replicas), **how)


@cache
def usual(name: str) -> list[Life]:
    """A run of ``METHODS`` that nobody disturbs."""
    return lives(METHODS[name], watched=True)


def assert_same(x: list[Life], y: list[Life], pairs: dict[int, int] | None = None) -> None:
    """The same parameters in each forward and at the end, to the last bit."""
    for i, k in (pairs or {i: i for i in range(len(x))}).items():
        assert x[i].error is None and x[i].forwards == y[k].forwards
        assert parameters(x[i]) == parameters(y[k])


def parameters(life: Life) -> list[bytes]:
    """At the end."""
    assert life.state is not None
    return [p.detach().numpy().tobytes() for p in life.state.model.parameters()]


# --- E1, E3: one replica, equal replicas ---


@pytest.mark.parametrize(
    "sync",
    [
        rows("post_local_sgd"),
        rows("streaming_diloco", outer=AVERAGE, streaming=StreamingConfig(delay=0, mix=0.0)),
        edit(outer=AVERAGE, penalty=PenaltyConfig(clip=False)),
        aedit(outer=AVERAGE, penalty=PenaltyConfig(clip=False)),
    ],
    ids=lambda sync: sync.method,
)
def test_one_replica_with_plain_averaging_is_plain_training(sync: SyncConfig) -> None:
    never = rows("post_local_sgd", every=1000)
    [one], [plain] = (lives(s, replicas=1) for s in (sync, never))
    assert len(one.events) >= 3
    for x, y in zip(one.theta[-1], plain.theta[-1], strict=True):
        assert close(x, y)


def close(x: bytes, y: bytes, allowed: float = 1e-13) -> bool:
    a, b = (np.frombuffer(z) for z in (x, y))
    return bool(np.abs(a - b).max() <= allowed * np.abs(b).max())


@each_method
def test_replicas_with_equal_data_are_one_replica(name: str) -> None:
    replicas = 4 if name in ("streaming", "co2", "aedit") else 2
    many = lives(METHODS[name], replicas=replicas, identities=[0] * replicas)
    one = lives(METHODS[name], replicas=1)
    if METHODS[name].wire == "fp32":
        assert_same(many, one, dict.fromkeys(range(replicas), 0))
    assert all(parameters(life) == parameters(many[0]) for life in many)


# --- E5, E8: where and when a round is performed does not matter ---

TWO: list[Fault] = [
    (4, 1, "1.weight", 20.0),
    (7, 0, "2.weight", float("nan")),
    (10, 0, "0.weight", 1e30),
    (10, 1, "0.weight", 1e30),
]


@pytest.mark.parametrize(
    ("limit", "changes"), [(1, {}), (2, {}), (9, {"wire": "int8", "offload": True})], ids=str
)
@pytest.mark.parametrize("make", [edit, aedit])
def test_a_round_inside_the_forward_is_the_whole_round(
    make: Callable[..., SyncConfig], limit: int, changes: dict[str, Any]
) -> None:
    whole = lives(make(layerwise=False, **changes), faults=TWO, shards=2)
    inside = lives(make(prefetch_units=limit, **changes), faults=TWO, shards=2)
    assert_same(inside, whole)
    assert repr(inside[0].events) == repr(whole[0].events) and len(whole[0].events) == 4
    anomalous = [e.anomalous for e in whole[0].events]
    assert any(row == [True, False] for units in anomalous for row in units)
    assert any(e.rollback[0] for e in whole[0].events)


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("changes", [{}, {"wire": "bf16"}], ids=str)
def test_by_the_clock_at_equal_speeds_is_edit(changes: dict[str, Any], layerwise: bool) -> None:
    one = lives(edit(layerwise=layerwise, **changes), faults=TWO, steps=14)
    two = lives(aedit(layerwise=layerwise, **changes), faults=TWO, steps=14)
    assert_same(two, one)
    assert repr(two[0].events) == repr(one[0].events) and len(one[0].events) == 4
    states = [run[0].sync.state for run in (one, two)]
    assert states[0] and states[1] and repr(states[0].stats) == repr(states[1].stats)


@pytest.mark.parametrize("sync", [edit(), aedit(), edit(wire="int8", offload=True)], ids=str)
def test_an_evaluation_carries_no_round_and_changes_nothing(sync: SyncConfig) -> None:
    assert_same(lives(sync, looks=True), lives(sync))


def test_between_two_rounds_a_replica_makes_as_many_steps_as_its_clock_allows() -> None:
    first = lives(aedit(every="6s"), step_ns=[SECOND, 2 * SECOND, 4 * SECOND], replicas=3, steps=30)
    counts = [e.steps for e in first[0].events]
    assert counts[:3] == [[6, 3, 2]] * 3
    ran = [life.sync.step for life in first]
    assert [sum(c) + 2 for c in zip(*counts, strict=True)] == ran
    assert len({life.sync.votes.agreed_tokens for life in first}) == 1
    assert all(life.state.is_done for life in first if life.state)


def test_replicas_without_a_step_do_not_make_those_with_steps_look_too_large() -> None:
    sync = aedit(penalty=PenaltyConfig(spike_ratio=2.0))
    ranks = lives(sync, replicas=4, leaves={1: 4, 2: 4, 3: 4}, steps=9)
    alone = [e for e in ranks[0].events if e.steps[0] and not any(e.steps[1:])]
    assert len(alone) >= 2
    for event in alone:
        assert event.weight == [[1.0, 0.0, 0.0, 0.0]] * 4 and not any(event.rollback)


# --- E13: nothing is lost in fewer bits ---


@pytest.mark.parametrize("wire", ["bf16", "int8"])
@pytest.mark.parametrize("method", ["diloco", "edit", "streaming_diloco", "co2"])
def test_what_was_sent_and_what_is_owed_are_what_was_meant(
    method: str, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meant: dict[tuple[int, str], torch.Tensor] = {}
    sent: dict[tuple[int, str], torch.Tensor] = {}

    def tapped(
        flat: torch.Tensor, old: torch.Tensor, weight_R: torch.Tensor, axis: Any, **how: Any
    ) -> Any:
        pending, left = start_coded(flat, old, weight_R, axis, **how)
        key = (axis.index, how["scope"])
        assert isinstance(pending, PendingCoded)
        if weight_R[axis.index] > 0:  # else nobody uses what was sent
            data = pending.gathered.wait()[axis.index]
            decoded = decode(data, flat.numel(), flat.dtype, wire)
            meant[key] = meant.get(key, 0) + flat
            sent[key] = sent.get(key, 0) + decoded
        return pending, left

    monkeypatch.setattr(sync_round, "start_coded", tapped)
    sync = edit(wire=wire) if method == "edit" else rows(method, wire=wire)
    faults: list[Fault] = [(4, 1, "1.weight", float("nan"))] if method == "edit" else []
    ranks = lives(sync, faults=faults, steps=14)
    for life in ranks:
        assert life.sync.state is not None and len(life.events) >= 3
        for unit, left in zip(life.sync.units, life.sync.state.residuals, strict=True):
            key = (life.identity, unit.name)
            assert left is not None and left.abs().max() > 0
            torch.testing.assert_close(sent[key] + left, meant[key], rtol=1e-13, atol=1e-14)


# --- E9: stop anywhere ---


@each_method
def test_a_run_that_goes_on_from_any_step_is_the_run_that_never_stopped(name: str) -> None:
    whole = usual(name)
    assert len(whole[0].events) >= 3
    for stop in (5, 6, 8):  # due or just started, in flight, due again
        again = lives(
            METHODS[name],
            stop=lambda life, stop=stop: life.sync.step == stop,
            after=resumed,
        )
        for x, y in zip(again, whole, strict=True):
            assert x.history == y.history[stop:], stop
            assert x.forwards == y.forwards[stop:], stop
            assert repr(x.events) == repr(y.events[len(y.events) - len(x.events) :])


@pytest.mark.parametrize("layerwise", [False, True])
def test_replicas_of_unequal_speed_go_on_from_a_commit_they_agreed_on(layerwise: bool) -> None:
    how: dict[str, Any] = {"step_ns": [SECOND, 2 * SECOND, 3 * SECOND], "replicas": 3, "steps": 20}
    sync = aedit(every="5s", layerwise=layerwise, wire="int8")

    def asks(life: Life) -> bool:
        life.sync.votes.wants_checkpoint |= life.identity == 1 and life.sync.step == 7
        return False

    def agreed(life: Life) -> bool:
        return asks(life) or life.sync.votes.checkpoint_agreed

    whole = lives(sync, stop=asks, watched=True, **how)
    again = lives(sync, stop=agreed, after=resumed, **how)
    assert [len(x.history) < len(y.history) for x, y in zip(again, whole, strict=True)] == [
        True
    ] * 3
    for x, y in zip(again, whole, strict=True):
        assert len(x.history) > 3 and x.history[-1].split("{")[0] == y.history[-1].split("{")[0]
        assert x.forwards == y.forwards[-len(x.forwards) :]


# --- E12: special cases ---


def test_streaming_of_one_fragment_without_delay_and_mixing_is_diloco() -> None:
    plain = StreamingConfig(fragments=1, delay=0, mix=0.0)
    one = lives(rows("streaming_diloco", streaming=plain), shards=2)
    assert_same(one, lives(rows("diloco"), shards=2))


def test_streaming_that_keeps_its_own_values_is_training_alone() -> None:
    deaf = StreamingConfig(fragments=2, delay=1, mix=1.0)
    one = lives(rows("streaming_diloco", streaming=deaf))
    alone = lives(rows("post_local_sgd", every=1000))
    for x, y in zip(one, alone, strict=True):
        assert x.forwards == y.forwards and x.theta == y.theta
    assert parameters(one[0]) == parameters(one[1]) != list(one[0].theta[-1])


@pytest.mark.parametrize(
    ("replicas", "wire", "co2"),
    [
        (2, "fp32", Co2Config()),
        (3, "fp32", Co2Config(clip=1e-3)),
        (4, "int8", Co2Config(staleness=False)),
    ],
    ids=str,
)
def test_co2_star_gives_the_numbers_of_co2(replicas: int, wire: str, co2: Co2Config) -> None:
    one, two = (
        lives(rows(name, wire=wire, co2=co2), replicas=replicas, shards=2)
        for name in ("co2", "co2_star")
    )
    assert_same(two, one)
    assert repr(one[0].events) == repr(two[0].events)
    assert (max(e.gap[0] for e in one[0].events) > 1) == co2.staleness


@pytest.mark.parametrize("name", [n for n in METHODS if "star" not in n and "offload" not in n])
def test_offload_changes_no_bit(name: str) -> None:
    assert_same(lives(replace(METHODS[name], offload=True)), usual(name))


# --- E14: who is who ---


@each_method
def test_two_replicas_that_change_places_change_no_bit(name: str) -> None:
    assert_same(lives(METHODS[name], identities=[1, 0]), usual(name), {0: 1, 1: 0})
