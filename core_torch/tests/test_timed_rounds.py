"""Rounds by the clock: two hundred random runs in which nobody may wait for one who has gone.

All replicas must meet in the same numbered rounds, and each inner step count in exactly one.
"""

from dataclasses import fields

import pytest
import torch

from core_torch.sync.events import RoundEvent
from core_torch.tests.engine_runs import Life
from core_torch.tests.timed_schedules import Schedule, live_all, random_schedule


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_replicas_of_any_speed_meet_in_the_same_rounds_and_end_together(first: int) -> None:
    for seed in range(first, first + 50):
        schedule = random_schedule(seed)
        lives = live_all(schedule)
        check_rounds(schedule, lives)
        check_ends(schedule, lives)


def test_the_schedules_hold_what_they_are_meant_to_hold() -> None:
    schedules = [random_schedule(seed) for seed in range(200)]
    syncs = [s.config.sync for s in schedules]
    assert {s.config.mesh.replicas for s in schedules} == {2, 3, 4}
    assert {sync.layerwise for sync in syncs} == {False, True}
    assert {sync.timed.min_total_steps for sync in syncs} == {1, 2, 10, 40}
    assert sum(s.leaves_after.count(None) < len(s.leaves_after) for s in schedules) > 40
    assert any(not any(x is None for x in s.leaves_after) for s in schedules)
    assert any(s.config.sync.warmup > s.config.train.steps for s in schedules)


def check_rounds(schedule: Schedule, lives: list[Life]) -> None:
    """The same rounds everywhere, numbered one after the other; no step in two or in none."""
    shards, warmup = schedule.config.mesh.shards, schedule.config.sync.warmup
    events = lives[0].events
    for life in lives:
        assert [told(e) for e in life.events] == [told(e) for e in events], schedule
    assert [e.round for e in events] == list(range(1, len(events) + 1)), schedule
    made = [life.sync.step for life in lives[::shards]]
    counted = [sum(e.steps[n] for e in events if not e.empty) for n in range(len(made))]
    assert counted == [max(0, steps - warmup) for steps in made], schedule
    for rank, life in enumerate(lives):  # who is in the same row meets in the same order
        for axis, peer in (("replica", rank % shards), ("shard", rank // shards * shards)):
            traces = (x.sync.axes.replica.ledger.trace or [] for x in (life, lives[peer]))
            mine, theirs = ([d for d in trace if d.axis == axis] for trace in traces)
            assert mine == theirs, schedule


def check_ends(schedule: Schedule, lives: list[Life]) -> None:
    """Equal tokens, commits and parameters; and not before the run has its tokens."""
    config, shards = schedule.config, schedule.config.mesh.shards
    made = [life.sync.step for life in lives[::shards]]
    if config.sync.warmup <= config.train.steps:
        tokens = sum(made) * config.tokens_per_step // len(made)
        assert {life.sync.votes.agreed_tokens for life in lives} == {tokens}, schedule
    for rank, life in enumerate(lives):
        assert life.state is not None and life.commits == lives[0].commits, schedule
        assert life.state.is_done or None not in schedule.leaves_after, schedule
        like = lives[rank % shards].state
        assert like is not None
        for p, q in zip(life.state.model.parameters(), like.model.parameters(), strict=True):
            assert torch.equal(p, q), schedule


def told(event: RoundEvent) -> str:
    """All but the inner step, of which each replica has its own."""
    return repr([getattr(event, f.name) for f in fields(event) if f.name != "step"])
