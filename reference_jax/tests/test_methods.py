"""Delayed and timed methods do what loops over the recorded inner steps do, in plain NumPy."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from reference_jax.aedit import Pace, Timed
from reference_jax.co2 import Co2, co2_drain
from reference_jax.edit import Penalty, edit_round
from reference_jax.local_sgd import NonFinite, admit_all
from reference_jax.mesh import EVERYWHERE, make_mesh, put
from reference_jax.model import units
from reference_jax.streaming import Flight, Streaming, fragment_due, fragments
from reference_jax.tests.cases import MODEL, TOY_MODEL, TOY_UNITS, Host, batches_of, cut, draw, toy
from reference_jax.train import Record, TrainConfig, batch_of_step, train

CONFIG = TrainConfig(
    model=MODEL, method="diloco", replicas=2, shards=1, steps=9, every=4, lr=0.05, shape="linear"
)
STREAMING = dataclasses.replace(
    CONFIG, method="streaming_diloco", streaming=Streaming(fragments=2, delay=1, mix=0.25)
)
CO2 = dataclasses.replace(CONFIG, method="co2", steps=7, every=2, co2=Co2(clip=0.05))
AEDIT = dataclasses.replace(
    CONFIG,
    method="aedit",
    steps=6,
    penalty=Penalty(max_norm=0.2),
    timed=Timed(interval_ns=4, step_ns=(1, 2), min_total_steps=5, step_weight=0.5),
)
BATCHES = batches_of(2, 1)
IN_A_STEP = 2 * 2 * 6  # tokens of all replicas


def run_of(config: TrainConfig, **changes: Any) -> list[Record]:
    return list(train(dataclasses.replace(config, **changes), BATCHES, dtype="float64"))


def events_of(records: list[Record], *keys: str) -> list[tuple[Any, ...]]:
    """(step at which it was completed, fields of the event) of all rounds."""
    return [(r.step, *(told.event[k] for k in keys)) for r in records for told in r.rounds]


def start_of(records: list[Record]) -> Host:
    """The anchor that was taken before step 1; no method here moves it in step 1."""
    assert records[0].anchor is not None and not records[0].rounds
    return records[0].anchor


def zeros_like(anchor: Host) -> Host:
    return {k: np.zeros_like(a) for k, a in anchor.items()}


def norm(arrays: Host) -> float:
    return float(np.sqrt(sum((x**2).sum() for x in arrays.values())))


def assert_moved_alike(record: Record, anchor: Host, velocity: Host, start: Host) -> None:
    assert record.anchor is not None and record.velocity is not None
    for k, a in anchor.items():
        moved = record.anchor[k] - start[k]
        np.testing.assert_allclose(moved, a - start[k], rtol=1e-11, atol=1e-14, err_msg=k)
        np.testing.assert_allclose(record.velocity[k], velocity[k], rtol=1e-11, atol=1e-14)


def assert_same_bits(one: list[Record], two: list[Record], *fields: str) -> None:
    for x, y in zip(one, two, strict=True):
        for field in fields:
            sides = (jax.tree.leaves(getattr(record, field)) for record in (x, y))
            for a, b in zip(*sides, strict=True):
                np.testing.assert_array_equal(a, b, err_msg=f"{field}, step {x.step}")


STATE = ("lr", "loss_R", "params", "anchor", "velocity", "exp_avg", "exp_avg_sq", "counts")


def test_streaming_in_one_fragment_without_delay_and_mixing_is_diloco_bit_for_bit() -> None:
    whole = run_of(CONFIG)
    streamed = run_of(STREAMING, streaming=Streaming(fragments=1, delay=0, mix=0.0))
    assert_same_bits(whole, streamed, *STATE)
    keys = ("round", "step", "forced", "norm", "combined_norm", "steps")
    assert events_of(whole, *keys) == events_of(streamed, *keys)
    assert events_of(whole, "steps") == [(4, [4, 4]), (8, [4, 4]), (9, [1, 1])]


def streaming_by_hand(records: list[Record]) -> Iterator[tuple[Host, Host, Host]]:
    """theta, anchor and velocity after each step: H = 4, P = 2, delay 1, mix 1/4."""
    names = [parts for _, parts in units(MODEL)]
    parts = {0: [*names[0], *names[2]], 1: [*names[1]]}
    a, flying = dict(start_of(records)), dict[int, Host]()
    b = zeros_like(a)

    def land(progress: Host, mix: float) -> None:
        for k, d in progress.items():
            b[k] = 0.9 * b[k] + d
            a[k] = a[k] - 0.7 * (d + 0.9 * b[k])
            theta[k] = mix * theta[k] + (1 - mix) * a[k]

    for t, record in enumerate(records, start=1):
        theta = dict(record.inner_params)
        if t in (3, 5, 7, 9):
            land(flying.pop(t), 0.25)
        if t in (2, 4, 6, 8):
            mine = parts[1 if t in (2, 6) else 0]
            flying[t + 1] = {k: (a[k] - theta[k]).mean(axis=0) for k in mine}
        if t == 9:
            land({k: (a[k] - theta[k]).mean(axis=0) for k in a}, 0.0)
        yield theta, dict(a), dict(b)


def test_streaming_is_the_loop_by_hand_and_says_when_it_measured_and_when_it_used() -> None:
    records = run_of(STREAMING)
    start = start_of(records)
    for record, (theta, a, b) in zip(records, streaming_by_hand(records), strict=True):
        assert_moved_alike(record, a, b, start)
        for k, x in theta.items():
            np.testing.assert_allclose(record.params[k] - start[k], x - start[k], atol=1e-14)
    assert events_of(records, "step", "round", "units", "forced", "steps") == [
        (3, 2, 1, ["fragment.1"], False, [2, 2]),
        (5, 4, 2, ["fragment.0"], False, [4, 4]),
        (7, 6, 3, ["fragment.1"], False, [4, 4]),
        (9, 8, 4, ["fragment.0"], False, [4, 4]),
        (9, 9, 5, ["fragment.0", "fragment.1"], True, [1, 1]),
    ]


def test_mixing_that_keeps_all_leaves_parameters_alone_until_the_last_round() -> None:
    records = run_of(STREAMING, streaming=Streaming(fragments=2, delay=1, mix=1.0))
    for record in records[:-1]:
        for k, x in record.params.items():
            np.testing.assert_array_equal(x, record.inner_params[k])
    assert records[-1].anchor is not None
    for k, x_R in records[-1].params.items():
        np.testing.assert_array_equal(x_R, np.stack([records[-1].anchor[k]] * 2))


def test_fragments_are_dealt_in_turn_and_due_evenly() -> None:
    named = tuple((f"u{i}", (f"p{i}", f"q{i}")) for i in range(5))
    assert fragments(named, 2) == (
        ("fragment.0", ("p0", "q0", "p2", "q2", "p4", "q4")),
        ("fragment.1", ("p1", "q1", "p3", "q3")),
    )
    due = [fragment_due(t, warmup=1, every=6, count=3) for t in range(1, 14)]
    assert due == [None, None, 1, None, 2, None, 0, None, 1, None, 2, None, 0]
    with pytest.raises(ValueError, match="do not fill 6"):
        fragments(named, 6)
    with pytest.raises(ValueError, match="3 fragments need"):
        fragment_due(1, warmup=0, every=4, count=3)


def test_co2_is_the_loop_by_hand_and_uses_each_progress_once_one_meeting_late() -> None:
    records = run_of(CO2)
    start = start_of(records)
    a, m, waiting, gaps, largest = dict(start), zeros_like(start), None, [], 0.0
    for t, record in enumerate(records, start=1):
        if t in (2, 4, 6, 7):
            d = {k: a[k] - x_R for k, x_R in record.inner_params.items()}
            moved = np.mean([norm({k: x_R[n] for k, x_R in d.items()}) for n in range(2)])
            now = {k: x_R.mean(axis=0) for k, x_R in d.items()}
            for progress in [waiting, now] if t == 7 else [waiting]:
                if progress is not None:
                    gaps.append(1 + norm(m) / (moved + 1e-6))
                    free = {k: 0.5 * m[k] + progress[k] / gaps[-1] for k in m}
                    largest = max(largest, *(np.abs(x).max() for x in free.values()))
                    m = {k: np.clip(x, -0.05, 0.05) for k, x in free.items()}
                    a = {k: a[k] - m[k] for k in a}
            waiting = now
            for k, x_R in record.params.items():
                assert record.anchor is not None
                np.testing.assert_array_equal(x_R, np.stack([record.anchor[k]] * 2))
        assert_moved_alike(record, a, m, start)
    told = events_of(records, "step", "forced", "steps")
    assert told == [(4, 2, False, [2, 2]), (6, 4, False, [2, 2])] + [
        (7, 6, False, [2, 2]),
        (7, 7, True, [1, 1]),
    ]
    np.testing.assert_allclose([g for _, [g] in events_of(records, "gap")], gaps, rtol=1e-12)
    assert largest > 0.06 and max(gaps) > 1.5, "neither clip nor gap did anything"


def test_co2_star_gives_the_numbers_of_co2() -> None:
    one, two = run_of(CO2, steps=4), run_of(CO2, steps=4, method="co2_star")
    assert_same_bits(one, two, *STATE)


def test_without_staleness_the_gap_is_one() -> None:
    anchor, mesh = draw(0), make_mesh(2, 1)
    state, sync = toy(anchor, draw(1, replicas=2), mesh, units=1, velocity=draw(2))
    with jax.set_mesh(mesh):
        measured = admit_all(put(np.ones((1, 2)), mesh, EVERYWHERE))
        flight = Flight(measured, sync.anchor)
        rule = Co2(clip=1e9, staleness=False)
        _, after, done = co2_drain(state, sync, flight, units=TOY_MODEL, rule=rule)
    assert done.gap_U.tolist() == [1.0]
    for k, m in cut(after.velocity, axis=0).items():
        np.testing.assert_allclose(m, 0.5 * draw(2)[k] + anchor[k], rtol=1e-15)


@pytest.mark.parametrize(("config", "sent", "used"), [(STREAMING, 2, 3), (CO2, 2, 4)])
def test_a_replica_that_is_nan_ends_a_run_when_its_exchange_is_used(
    config: TrainConfig, sent: int, used: int
) -> None:
    def sicken(step: int, params_R: Host) -> Host:
        if step == sent:
            for x_R in params_R.values():
                x_R[1] = np.nan
        return params_R

    records = []
    with pytest.raises(NonFinite, match="replica 1 is not finite in unit"):
        for record in train(config, BATCHES, dtype="float64", perturb=sicken):
            records.append(record)
    assert len(records) == used - 1
    assert records[0].anchor is not None and records[-1].anchor is not None
    for k, a in records[-1].anchor.items():
        np.testing.assert_array_equal(a, records[0].anchor[k])


def test_at_equal_speeds_a_run_by_the_clock_is_edit_bit_for_bit() -> None:
    by_steps = run_of(AEDIT, method="edit", steps=9, every=4, warmup=1)
    timed = Timed(interval_ns=11, step_ns=(3, 3), min_total_steps=8)  # 4 steps: ceil(11 / 3)
    by_time = run_of(AEDIT, steps=9, warmup=1, timed=timed)
    assert_same_bits(by_steps, by_time, *STATE, "stats", "tokens", "steps_R")
    assert events_of(by_steps) == [(5,), (9,)]
    for one, two in zip(by_steps, by_time, strict=True):
        assert [told.event for told in one.rounds] == [told.event for told in two.rounds]


def test_at_speeds_1_to_2_steps_are_2_to_1_until_the_tokens_suffice() -> None:
    records = run_of(AEDIT)
    active = [r.is_active_R.tolist() for r in records]
    both, fast = [True, True], [True, False]
    assert active == [both, both, fast, fast] + [both, both, fast] + [both]
    assert records[-1].steps_R.tolist() == [8, 5]
    assert [r.tokens / IN_A_STEP for r in records] == [1, 2, 3, 4, 4, 5, 6, 6.5]
    assert [r.lr for r in records] == [
        pytest.approx(0.05 * max(0.1, 1 - 0.9 * r.tokens / (6 * IN_A_STEP))) for r in records
    ]
    assert events_of(records, "round", "steps", "empty", "forced") == [
        (4, 1, [4, 2], False, False),
        (7, 2, [3, 2], False, False),
        (8, 3, [1, 1], True, False),
        (8, 4, [1, 1], False, True),
    ]


def test_who_waits_keeps_every_bit_and_reads_its_own_next_batch_afterwards() -> None:
    records = run_of(AEDIT)
    for waiting in (2, 3):
        before, after = records[1], records[waiting]
        for k, x_R in after.inner_params.items():
            np.testing.assert_array_equal(x_R[1], before.inner_params[k][1])
            assert after.counts[k].tolist() == [waiting + 1, 2]
        assert np.isnan([after.loss_R[1], after.grad_norm_R[1]]).all()
    inputs, targets = batch_of_step(
        dataclasses.replace(AEDIT, accumulate=2), BATCHES, np.array([3, 1])
    )
    micro = [BATCHES(i) for i in (6, 7, 2, 3)]
    for side, dealt in ((0, inputs), (1, targets)):
        np.testing.assert_array_equal(dealt[0], np.concatenate([m[side][0] for m in micro[:2]], 1))
        np.testing.assert_array_equal(dealt[1], np.concatenate([m[side][1] for m in micro[2:]], 1))


def test_weights_go_by_norms_and_by_steps_and_an_empty_round_moves_nothing() -> None:
    records = run_of(AEDIT)
    for _, norms, weights, steps in events_of(records, "norm", "weight", "steps")[:2]:
        by_norm = np.exp(-np.array(norms))
        by_norm /= by_norm.sum(axis=1, keepdims=True)
        mixed = 0.5 * by_norm + 0.5 * np.array(steps) / sum(steps)
        np.testing.assert_allclose(weights, mixed, rtol=1e-13)
    empty, forced = records[-1].rounds
    assert not empty.combined and np.isnan(empty.event["combined_norm"]).all()
    assert empty.event["norm"] == forced.event["norm"]
    assert records[-1].stats is not None
    assert records[-1].stats["count_R"].tolist() == [[2, 2]] * 3  # neither empty nor forced


def test_steps_count_on_over_empty_rounds_and_tokens_do_not() -> None:
    timed = Timed(interval_ns=4, step_ns=(1, 2), min_total_steps=7)
    pace = Pace(timed, tokens=10, agreed=100, total=1000)
    told = []
    for _ in range(3):
        while any(active := pace.is_active()):
            for n in range(2):
                if active[n]:
                    pace.stepped(n)
        told.append((pace.estimate(0), pace.estimate(1), *pace.meet(), pace.agreed))
    assert told == [
        (180, 140, [4, 2], True, 160),
        (240, 200, [8, 4], False, 220),
        (300, 260, [4, 2], True, 280),
    ]
    with pytest.raises(ValueError, match="must take time"):
        Pace(timed._replace(step_ns=(1, 0)), tokens=1, agreed=0, total=1)


def test_a_replica_without_steps_is_as_good_as_absent() -> None:
    anchor, mesh = draw(0), make_mesh(3, 1)
    params_R = draw(1, replicas=3)
    for k, x_R in params_R.items():
        x_R[1] = anchor[k]
    state, sync = toy(anchor, params_R, mesh, units=2)
    given: dict[str, Any] = {"units": TOY_UNITS, "penalty": Penalty(), "share": 0.25}
    with jax.set_mesh(mesh):
        steps_R = put(np.array([3, 0, 2]), mesh, EVERYWHERE)
        state, among, done = edit_round(state, sync, steps_R=steps_R, **given)
    two_R = {k: x_R[[0, 2]] for k, x_R in params_R.items()}
    mesh = make_mesh(2, 1)
    other, sync = toy(anchor, two_R, mesh, units=2)
    with jax.set_mesh(mesh):
        steps_R = put(np.array([3, 2]), mesh, EVERYWHERE)
        _, without, _ = edit_round(other, sync, steps_R=steps_R, **given)
    for k, a in cut(without.anchor, axis=0).items():
        np.testing.assert_array_equal(cut(among.anchor, axis=0)[k], a)
        np.testing.assert_array_equal(cut(state.params, axis=1)[k][1], a)
        assert state.step[k].tolist() == [5, 5, 5]  # it is well, so nothing is healed
    verdict = done.measured.verdict
    assert verdict.is_anomaly_R.tolist() == [[False, True, False]] * 2
    assert not verdict.is_flagged_R.any() and among.stats.count_R.tolist() == [[1, 0, 1]] * 2


def test_coded_rounds_of_a_run_send_all_but_what_is_owed() -> None:
    records = run_of(CONFIG, steps=6, every=3, wire="int8")
    anchor = start_of(records)
    meant, sent = zeros_like(anchor), zeros_like(anchor)
    for record in records:
        if record.combined is not None and record.anchor is not None:
            for k, x_R in record.inner_params.items():
                meant[k] += (anchor[k] - x_R).mean(axis=0)
                sent[k] += record.combined[k]
            anchor = record.anchor
    assert records[-1].owed is not None
    for k, e_R in records[-1].owed.items():
        np.testing.assert_allclose(sent[k] + e_R.mean(axis=0), meant[k], atol=1e-15)
    assert norm(records[-1].owed) > 1e-4


def test_a_method_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="'sgd' is not one of synchronous, post_local_sgd"):
        run_of(CONFIG, method="sgd")
