"""An event tells a round in plain numbers."""

import json
import math
from dataclasses import asdict

import torch

from core_torch.sync.events import RoundEvent, describe
from core_torch.sync.meeting import Meeting, Told
from core_torch.sync.penalty import Verdict
from core_torch.sync.sync_round import Measured
from core_torch.sync.units import SyncUnit


def event(steps: list[int] | None = None, *, is_empty: bool = False) -> RoundEvent:
    """Two units on three replicas: one has a NaN and two re-armed flags, the other rolls back."""
    yes, no = True, False
    verdict = Verdict(
        is_finite_R=torch.tensor([[yes, yes, no], [yes, yes, yes]]),
        is_flagged_R=torch.tensor([[yes, yes, no], [yes, yes, yes]]),
        is_rearmed_R=torch.tensor([[yes, yes, no], [no, no, no]]),
        is_anomaly_R=torch.tensor([[no, no, yes], [yes, yes, yes]]),
    )
    measured = Measured(
        norm_UR=torch.tensor([[1.0, 8.0, float("nan")], [4.0, 5.0, 6.0]]),
        verdict=verdict,
        weight_UR=torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]),
        accept_U=torch.tensor([yes, no]),
    )
    told = {
        0: Told(torch.tensor(2.0), torch.tensor(0.25), torch.tensor(1.5)),
        1: Told(torch.tensor(0.0), torch.tensor(1.0), torch.tensor(1.0)),
    }
    meeting = Meeting(
        number=7,
        step=42,
        forced=False,
        members=[0, 2],
        steps=steps or [5, 5, 5],
        measured=measured,
        is_empty=is_empty,
        finished={} if is_empty else told,
    )
    return describe(meeting, [SyncUnit(n, (), (), ()) for n in ("embedding", "layer", "head")])


def test_every_field_of_a_line_has_a_place_for_each_unit_and_replica() -> None:
    line = asdict(event())
    assert str(line["norm"].pop(0)) == "[1.0, 8.0, nan]"
    assert line == {
        "round": 7,
        "step": 42,
        "forced": False,
        "empty": False,
        "steps": [5, 5, 5],
        "units": ["embedding", "head"],
        "norm": [[4.0, 5.0, 6.0]],
        "finite": [[True, True, False], [True, True, True]],
        "flagged": [[True, True, False], [True, True, True]],
        "rearmed": [[True, True, False], [False, False, False]],
        "anomalous": [[False, False, True], [True, True, True]],
        "weight": [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]],
        "effective_replicas": [2.0, 0.0],
        "combined_norm": [2.0, 0.0],
        "clip": [0.25, 1.0],
        "gap": [1.5, 1.0],
        "rollback": [False, True],
    }


def test_an_event_holds_no_tensor() -> None:
    assert json.loads(json.dumps(asdict(event()), allow_nan=True))["weight"][0] == [0.5, 0.5, 0.0]


def test_anomalies_count_pairs_of_unit_and_replica() -> None:
    assert event().anomalies == 4
    assert event([0, 3, 3]).anomalies == 3, "who made no step is absent, not anomalous"
    assert event(is_empty=True).anomalies == 0


def test_an_empty_round_tells_norms_and_no_exchange() -> None:
    told = event(is_empty=True)
    assert told.empty and told.norm[1] == [4.0, 5.0, 6.0] and told.clip == [1.0, 1.0]
    assert all(math.isnan(x) for x in told.combined_norm)


def test_the_first_non_finite_norm_is_named_by_unit_and_replica() -> None:
    assert event().first_non_finite() == ("embedding", 2)
    sound = RoundEvent(**{**asdict(event()), "finite": [[True] * 3] * 2})
    assert sound.first_non_finite() is None
