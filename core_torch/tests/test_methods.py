"""Methods are rows of a table; settings fill a row in."""

from typing import get_args, get_type_hints

import pytest

from core_torch import config
from core_torch.config import (
    OuterConfig,
    PenaltyConfig,
    StreamingConfig,
    SyncConfig,
    TimedConfig,
)
from core_torch.sync.methods import METHODS, rules_of


def rules(method: str, **settings: object) -> tuple[float, float, PenaltyConfig | None]:
    made = rules_of(SyncConfig(method=method, **settings))  # type: ignore[arg-type]
    return made.outer_lr, made.outer_momentum, made.penalty


def test_the_configuration_offers_exactly_the_rows_of_the_table() -> None:
    offered = get_args(get_type_hints(SyncConfig)["method"])
    assert tuple(METHODS) == offered == config.METHODS


def test_each_method_has_the_outer_optimizer_of_its_paper() -> None:
    assert rules("post_local_sgd") == (1.0, 0.0, None)
    assert rules("diloco") == (0.7, 0.9, None)
    assert rules("streaming_diloco") == (0.7, 0.9, None)
    assert rules("co2") == rules("co2_star") == (1.0, 0.5, None)
    assert rules("edit") == rules("aedit") == (0.8, 0.85, PenaltyConfig())


def test_the_rows_are_those_of_the_architecture() -> None:
    told = {name: (row.unit, row.trigger, row.finish, row.outer) for name, row in METHODS.items()}
    assert told == {
        "synchronous": ("none", "steps", "at once", "nesterov"),
        "post_local_sgd": ("model", "steps", "at once", "nesterov"),
        "diloco": ("model", "steps", "at once", "nesterov"),
        "streaming_diloco": ("fragments", "steps", "steps later", "nesterov"),
        "co2": ("model", "steps", "next round", "momentum"),
        "co2_star": ("model", "steps", "next round", "momentum"),
        "edit": ("units", "steps", "at once", "nesterov"),
        "aedit": ("units", "seconds", "at once", "nesterov"),
    }
    penalised = {name for name, row in METHODS.items() if row.combine == "penalty"}
    assert penalised == {"edit", "aedit"}


def test_settings_of_one_method_reach_no_other() -> None:
    streaming = StreamingConfig(fragments=4, delay=3, mix=0.25)
    timed = TimedConfig(min_total_steps=7, step_weight=0.5)
    common = dict(streaming=streaming, timed=timed, offload=True)

    def made(method: str) -> tuple[object, ...]:
        rules = rules_of(SyncConfig(method=method, **common))  # type: ignore[arg-type]
        told = (rules.fragments, rules.delay_steps, rules.mix)
        return *told, rules.min_total_steps, rules.step_weight, rules.store

    assert made("streaming_diloco") == (4, 3, 0.25, 0, 0.0, "host")
    assert made("aedit") == (1, 0, 0.0, 7, 0.5, "host")
    assert made("edit") == made("diloco") == (1, 0, 0.0, 0, 0.0, "host")
    assert made("co2_star") == (1, 0, 0.0, 0, 0.0, "replicas")


def test_rounds_run_inside_the_forward_unless_told_otherwise() -> None:
    def inside(method: str, **settings: object) -> bool:
        return rules_of(SyncConfig(method=method, **settings)).layerwise  # type: ignore[arg-type]

    assert inside("edit") and inside("aedit") and not inside("edit", layerwise=False)
    assert not any(inside(name) for name in METHODS if name not in ("edit", "aedit"))


@pytest.mark.parametrize("method", ["diloco", "edit"])
def test_an_outer_setting_replaces_the_default_and_zero_momentum_is_a_setting(method: str) -> None:
    assert rules(method, outer=OuterConfig(lr=0.5))[:2] == (0.5, METHODS[method].outer_momentum)
    momentum = OuterConfig(momentum=0.0)
    assert rules(method, outer=momentum)[:2] == (METHODS[method].outer_lr, 0.0)


def test_only_a_penalty_that_excludes_may_leave_a_bad_replica_out() -> None:
    def excludes(**settings: object) -> bool:
        return rules_of(SyncConfig(**settings)).excludes  # type: ignore[arg-type]

    assert excludes(method="edit")
    assert not excludes(method="edit", penalty=PenaltyConfig(exclude=False))
    assert not excludes(method="diloco") and not excludes(method="post_local_sgd")


def test_the_penalty_and_the_bound_on_exchanges_in_flight_are_passed_on() -> None:
    penalty = PenaltyConfig(z_threshold=2.0, weigh=False)
    made = rules_of(SyncConfig(penalty=penalty, prefetch_units=5))
    assert made.penalty == penalty and made.prefetch_units == 5
