"""Both cores send the same bytes over the replica axis, step for step."""

import jax
import numpy as np
import pytest

from parity_tests.checks.cells import OPTIM, Cell
from parity_tests.checks.ledger import (
    UNEVEN,
    UNEVEN_COMPILED,
    UNEVEN_SIMPLE,
    WHOLE,
    WHOLE_SIMPLE,
    check_ledger,
    shipped,
)
from parity_tests.checks.reference_runs import Locked, separate_programs
from parity_tests.harness.pool import RankPool
from reference_jax import train as reference_train


@pytest.mark.parametrize(
    "cell", [UNEVEN, WHOLE, UNEVEN_SIMPLE, UNEVEN_COMPILED, WHOLE_SIMPLE], ids=str
)
def test_a_step_and_a_round_send_as_many_bytes_over_replicas_as_compiled_hlo_says(
    pool: RankPool, cell: Cell
) -> None:
    check_ledger(pool, cell)


def test_the_uneven_cell_has_padding_and_both_kinds_of_message() -> None:
    sent = shipped(UNEVEN).replica_bytes
    rows = sum(-(-len(x) // 2) * x[0].size for x in Locked(UNEVEN, 2).start.values())
    assert sent["synchronous"] == {"all-reduce": 8 * rows}
    assert sent["round"] == {"all-reduce": 8 * rows, "all-gather": 3 * 2 * 8}


@pytest.mark.parametrize("kind", ["local", "synchronous"])
def test_the_reference_in_separate_programs_takes_the_shipped_step(kind: str) -> None:
    programs, reference = shipped(UNEVEN), Locked(UNEVEN, UNEVEN.shards)
    numbers = {"config": reference.config.model, "inner": reference.config.inner}
    name = {"local": "local_step", "synchronous": "warmup_step"}[kind]
    with jax.set_mesh(reference.mesh):
        one, seen = programs.steps[kind](programs.state, *programs.tokens, OPTIM["lr"])
        with separate_programs():
            step = getattr(reference_train, name)
            two, also = step(programs.state, *programs.tokens, OPTIM["lr"], **numbers)
    np.testing.assert_allclose(seen.loss_R, also.loss_R, rtol=1e-15)
    np.testing.assert_allclose(seen.grad_norm_R, also.grad_norm_R, rtol=1e-14)
    for key in ("params", "exp_avg", "exp_avg_sq"):
        for tensor, x in getattr(one, key).items():
            y = getattr(two, key)[tensor]
            scale = float(np.abs(x).max())
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-14 * scale, err_msg=tensor)
