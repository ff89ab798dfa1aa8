"""Faults that public implementations of local SGD have had, and the test that would catch each.

norm aliased and inflated, detector blind     test_an_anomaly_does_not_blind_the_detector
NaN not flagged, mean NaN for ever;           parity_tests/test_fault_tolerance.py, here
  0 * Inf = NaN                                 test_one_bad_replica_is_as_good_as_none
local gradients divided by N * M              parity_tests/test_gradients.py
a checkpoint call that performs a step        test_taking_the_state_is_reading_it...
the whole warm-up counted as one round        test_the_warm_up_counts_for_no_round
an exchange that never reaches parameters     test_every_element_of_every_parameter_is_exchanged
a bucket that skips what does not fit         the same
a flag of the module shared by two models     test_two_engines_in_a_process_do_not_meet
epoch seconds in a float32                    test_a_clock_far_from_zero_counts_every_nanosecond
different collectives after different steps   test_round_traffic.py, test_timed_rounds.py
one outer optimizer steps other fragments     test_a_fragment_moves_no_other
master and model aliased on a CPU             test_no_store_shares_memory_with_parameters
pseudo-gradient of the wrong sign             parity_tests/test_equalities.py, independent.py
step counter not saved, warm-up repeats       test_engine.py, E9
"""

import json
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from core_torch import train as core_train
from core_torch.config import PenaltyConfig, StreamingConfig, SyncConfig
from core_torch.sync import saved as sync_state
from core_torch.sync.trigger import TimeTrigger
from core_torch.tests.engine_runs import Fault, Life, begin, bits, config_of, inner_step
from core_torch.tests.fake_ranks import make_world
from core_torch.tests.test_engine import (
    METHODS,
    SECOND,
    aedit,
    assert_same,
    each_method,
    edit,
    lives,
    parameters,
    rows,
    usual,
)

ALL_BAD = [f"{i}.weight" for i in range(4)]
VALUES = [float("nan"), float("inf"), 1e30]


def test_an_anomaly_does_not_blind_the_detector() -> None:
    penalty = PenaltyConfig(warmup_rounds=10, z_threshold=4.0, temperature=1.0)
    faults: list[Fault] = [(step, 1, "0.weight", 50.0) for step in (31, 37)]
    [life, _] = lives(edit(every=2, warmup=0, penalty=penalty), steps=40, faults=faults)
    flagged = [e.round for e in life.events if e.flagged[0][1]]
    assert flagged == [16, 19]
    state = life.sync.state
    assert state is not None and state.stats.mean_R[0, 1] < 5.0


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("sync", [edit(warmup=0), aedit(warmup=0), edit(warmup=0, wire="int8")])
def test_one_bad_replica_is_as_good_as_none(sync: SyncConfig, value: float) -> None:
    faults = [(step, 2, name, value) for step in (2, 5, 8, 11) for name in ALL_BAD]
    more = lives(sync, replicas=3, steps=12, faults=faults)
    fewer = lives(sync, replicas=2, steps=12)
    assert_same(more[:2], fewer)
    assert all(e.weight[u][2] == 0 for e in more[0].events for u in range(4))
    assert parameters(more[2]) == parameters(more[0])


@pytest.mark.parametrize("layerwise", [False, True])
def test_when_all_replicas_are_bad_the_anchor_stays_and_training_goes_on(layerwise: bool) -> None:
    faults = [(4, n, name, VALUES[n]) for n in range(3) for name in ALL_BAD]
    ranks = lives(edit(layerwise=layerwise), replicas=3, faults=faults)
    first, *others = ranks[0].events
    assert first.rollback == [True] * 4 and not any(any(e.rollback) for e in others)
    parted = lives(edit(), replicas=3, steps=3)[0].forwards[2]  # the parameters at the anchor
    assert {life.forwards[5] for life in ranks} == {parted}
    for life in ranks:
        assert all(np.isfinite(np.frombuffer(x)).all() for x in parameters(life))


@each_method
def test_taking_the_state_is_reading_it_and_a_run_goes_on_from_it(name: str) -> None:
    sync = METHODS[name]

    def looks(life: Life) -> bool:
        before, trace = bits(life), list(life.sync.axes.replica.ledger.trace or [])
        first, second = sync_state.state_dict(life.sync), sync_state.state_dict(life.sync)
        assert json.dumps(first["scalars"]) == json.dumps(second["scalars"])
        assert all(torch.equal(x, second["tensors"][k]) for k, x in first["tensors"].items())
        seen = (life.sync.axes.replica.ledger.trace or [])[len(trace) :]
        assert bool(seen) == (sync.method == "co2_star" and life.sync.state is not None)
        assert bits(life) == before
        if life.sync.step == 8:  # and a new engine goes on from it
            sync_state.load_state_dict(life.sync, json_like(first))
        return False

    assert_same(lives(sync, stop=looks), usual(name))


def json_like(state: dict[str, Any]) -> dict[str, Any]:
    """As a file would give it back."""
    leaves = json.loads(json.dumps({k: state[k] for k in ("scalars", "counters")}))
    return leaves | {"tensors": {k: x.clone() for k, x in state["tensors"].items()}}


@pytest.mark.parametrize("name", ["edit", "diloco", "streaming", "co2", "aedit", "aedit whole"])
def test_the_warm_up_counts_for_no_round(name: str) -> None:
    [life, _] = lives(replace(METHODS[name], warmup=7), steps=16)
    first = life.events[0]
    expected = {"edit": 3, "aedit": 3, "aedit whole": 3, "diloco": 4, "co2": 4, "streaming": 2}
    assert (first.round, first.step, first.steps) == (1, 7 + expected[name], [expected[name]] * 2)


@each_method
def test_every_element_of_every_parameter_is_exchanged(name: str) -> None:
    ranks = lives(METHODS[name], replicas=3)
    ended = [parameters(life) for life in ranks]
    assert ended[0] == ended[1] == ended[2]
    one = begin(config_of(METHODS[name]), make_world(1).meshes[0], Life(0, 0, SECOND))
    started, state = one.state, ranks[0].state
    assert started is not None and state is not None
    for p, q in zip(started.model.parameters(), state.model.parameters(), strict=True):
        assert not (p == q).any()


def test_two_engines_in_a_process_do_not_meet() -> None:
    for one, two in ((edit(), edit(every=2)), (edit(), aedit(every="2s"))):
        alone = [lives(sync, replicas=1)[0] for sync in (one, two)]
        worlds = [make_world(1) for _ in range(2)]
        together = [
            begin(config_of(sync, replicas=1), world.meshes[0], Life(0, 0, SECOND))
            for sync, world in zip((one, two), worlds, strict=True)
        ]
        take_turns(together)
        for x, y in zip(together, alone, strict=True):
            assert x.forwards == y.forwards and parameters(x) == parameters(y)


def take_turns(pair: list[Life]) -> None:
    """A step of one, then a step of the other."""
    with mock.patch.object(core_train, "inner_step", inner_step):
        steps = [core_train.train(life.state) for life in pair if life.state is not None]
        for _ in range(13):
            for generator in steps:
                next(generator, None)
        for life in pair:
            assert life.state is not None
            core_train.finish(life.state)


def test_a_clock_far_from_zero_counts_every_nanosecond() -> None:
    now = [1_796_000_000 * SECOND + 1]
    trigger = TimeTrigger(0, 3, lambda: now[0])
    trigger.restart()
    seen = []
    for _ in range(5):
        seen.append((trigger.elapsed_ns, trigger.is_over()))
        now[0] += 1
    assert seen == [(0, False), (1, False), (2, False), (3, True), (4, True)]
    assert all(type(elapsed) is int for elapsed, _ in seen)
    trigger.restart(2)
    assert trigger.elapsed_ns == 2


def test_a_fragment_moves_no_other() -> None:
    streaming = StreamingConfig(fragments=4, delay=0, mix=0.5)
    before: list[list[bytes]] = []

    def looks(life: Life) -> bool:
        state = life.sync.state
        if state is None or life.identity != 0:
            return False
        now = [
            b"".join(x.numpy().tobytes() for part in state.store.get(u) for x in part)
            for u in range(4)
        ]
        if before:
            moved = [u for u in range(4) if now[u] != before[-1][u]]
            told = [e for e in life.events if e.step == life.sync.step]
            assert [f"fragment.{u}" for u in moved] == [name for e in told for name in e.units]
        before.append(now)
        return False

    lives(rows("streaming_diloco", streaming=streaming), stop=looks)
    assert len(before) == 12


@pytest.mark.parametrize("name", ["edit", "edit int8 offload", "co2_star", "streaming"])
def test_no_store_shares_memory_with_parameters(name: str) -> None:
    def looks(life: Life) -> bool:
        state = life.sync.state
        if state is None or life.state is None:
            return False
        places = {p.data_ptr() for p in life.state.model.parameters()}
        for u in range(len(life.sync.units)):
            held = [x for part in state.store.get(u) for x in part]
            state.store.release(u)
            assert not places & {x.untyped_storage().data_ptr() for x in held}
            assert len({x.data_ptr() for x in held}) == len(held)
        return False

    lives(METHODS[name], stop=looks)


def test_a_store_on_the_host_gives_copies_and_takes_copies() -> None:
    [life] = lives(edit(offload=True), replicas=1)
    assert life.sync.state is not None
    store = life.sync.state.store
    first = store.get(0)
    first.anchor[0].add_(1.0)  # what nobody may do; it must not reach the host
    store.release(0)
    again = store.get(0)
    assert not torch.equal(first.anchor[0], again.anchor[0])
    store.put(0, again)
    again.anchor[0].add_(1.0)
    assert not torch.equal(store.get(0).anchor[0], again.anchor[0])
