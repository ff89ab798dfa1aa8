"""Errors say what, where, why and what next, travel between ranks, and set the exit code."""

import copy

import pytest

from core_torch import errors
from core_torch.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    ConfigError,
    DataError,
    NonFinite,
    PeerLost,
    Preempted,
    ReplicasDiffer,
    TwinshardError,
)

CODES = {
    ConfigError: 2,
    DataError: 3,
    CheckpointError: 4,
    CheckpointCorrupt: 4,
    CheckpointMismatch: 4,
    NonFinite: 5,
    ReplicasDiffer: 5,
    PeerLost: 6,
    Preempted: errors.EXIT_PREEMPTED,
}
KINDS = sorted(CODES, key=lambda kind: kind.__name__)


def test_four_lines_say_what_where_why_and_what_next() -> None:
    error = NonFinite("loss is nan", where="replica 1", likely="a high lr", next="--optim.lr 1e-4")
    assert str(error).splitlines() == [
        "NonFinite: loss is nan",
        "  at replica 1",
        "  likely: a high lr",
        "  next:   --optim.lr 1e-4",
    ]


def test_what_is_not_known_is_not_printed() -> None:
    assert str(DataError("no text")) == "DataError: no text"
    assert str(DataError("no text", next="give a file")).count("\n") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_the_way_to_another_process(kind: type[TwinshardError]) -> None:
    error = kind("what", where="where", likely="likely", next="next")
    # copy uses __reduce__, as whatever carries errors between processes does.
    again = copy.copy(error)
    assert type(again) is kind and again is not error
    assert str(again) == str(error) and again.args == ("what",)


def test_every_error_has_a_documented_exit_code_apart_from_success_and_signals() -> None:
    found = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, TwinshardError)
    } - {TwinshardError}
    assert found == set(CODES)
    assert {kind: kind.exit_code for kind in KINDS} == CODES
    assert all(kind.__doc__ for kind in KINDS)
    special = {errors.EXIT_OK: 0, errors.EXIT_PREEMPTED: 75, errors.EXIT_INTERRUPTED: 130}
    assert all(code == meaning for code, meaning in special.items())
    others = {code for kind, code in CODES.items() if kind is not Preempted}
    assert not special.keys() & {*others, TwinshardError.exit_code}


def test_a_corrupt_or_foreign_checkpoint_is_caught_as_a_checkpoint_error() -> None:
    for kind in (CheckpointCorrupt, CheckpointMismatch):
        with pytest.raises(CheckpointError):
            raise kind("not ours")
