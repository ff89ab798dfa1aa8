"""Methods are rows of a table; settings fill a row in."""

from typing import get_args, get_type_hints

import pytest

from core_torch import config
from core_torch.config import OuterConfig, PenaltyConfig, SyncConfig
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
    assert rules("edit") == (0.8, 0.85, PenaltyConfig())


def test_only_edit_works_unit_by_unit_and_synchronous_training_has_no_unit() -> None:
    assert {name: row.unit for name, row in METHODS.items()} == {
        "synchronous": "none",
        "post_local_sgd": "model",
        "diloco": "model",
        "edit": "units",
    }


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
