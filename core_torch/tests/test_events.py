"""An event tells a round in plain numbers."""

import json
from dataclasses import asdict

import torch

from core_torch.sync.events import RoundEvent, describe
from core_torch.sync.penalty import Verdict
from core_torch.sync.state import UnitState
from core_torch.sync.sync_round import Finished, Measured


def event() -> RoundEvent:
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
    state = UnitState([torch.zeros(1)], [torch.zeros(1)])
    finished = [
        Finished(state, torch.tensor(2.0), torch.tensor(0.25)),
        Finished(state, torch.tensor(0.0), torch.tensor(1.0)),
    ]
    counts = dict(round=7, step=42, forced=False)
    return describe(measured, finished, units=["embedding", "head"], **counts)


def test_every_field_of_a_line_has_a_place_for_each_unit_and_replica() -> None:
    line = asdict(event())
    assert str(line["norm"].pop(0)) == "[1.0, 8.0, nan]"
    assert line == {
        "round": 7,
        "step": 42,
        "forced": False,
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
        "rollback": [False, True],
    }


def test_an_event_holds_no_tensor() -> None:
    assert json.loads(json.dumps(asdict(event()), allow_nan=True))["weight"][0] == [0.5, 0.5, 0.0]


def test_anomalies_count_pairs_of_unit_and_replica() -> None:
    assert event().anomalies == 4


def test_the_first_non_finite_norm_is_named_by_unit_and_replica() -> None:
    assert event().first_non_finite() == ("embedding", 2)
    sound = RoundEvent(**{**asdict(event()), "finite": [[True] * 3] * 2})
    assert sound.first_non_finite() is None
