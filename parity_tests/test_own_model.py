"""A module of somebody else trains under EDiT on four ranks, and resumes to the last bit."""

from pathlib import Path
from typing import Any

import pytest

from parity_tests.checks.trajectories import launch
from parity_tests.harness.pool import RankPool
from parity_tests.test_resume import EDIT, changes_of, check_resumed

BUILD = "parity_tests.cases.own_model:build"
COMPILED = {"method": "simple_fsdp", "compile": "aot_eager"}


@pytest.mark.parametrize(
    "shard", [{}, pytest.param(COMPILED, marks=pytest.mark.only_full)], ids=("fsdp2", "compiled")
)
def test_a_module_of_ones_own_trains_under_edit_and_resumes(
    pool: RankPool, tmp_path: Path, shard: dict[str, Any]
) -> None:
    changes = changes_of(EDIT) | {"model": {"build": BUILD}, "shard": shard}
    whole = launch(pool, 2, 2, changes)
    losses = [record["loss"] for record in whole.rank(0)["records"]]
    assert losses[-1] < losses[0]
    assert whole.events[0]["units"] == ["words", "mixer 0", "mixer 1"]
    names = whole.rank(0)["history"][0]["theta"].keys()
    assert {"own.table.weight", "own.mixers.1.scale"} <= set(names)
    check_resumed(pool, whole, tmp_path, changes, 4)
