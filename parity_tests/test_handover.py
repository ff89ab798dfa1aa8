"""A run that begins in one core and ends in the other: equal bits where it changes hands.

The run goes on as the *other* core's uninterrupted one does, within the tolerances of runs by
themselves.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core_torch.checkpoint.sound import find, verify
from parity_tests.cases import handover
from parity_tests.checks import cells
from parity_tests.checks.cells import SECOND, Cell
from parity_tests.checks.compare import Comparer
from parity_tests.checks.core_runs import CoreRun, arguments, launch
from parity_tests.checks.methods import check_inner, check_states, together
from parity_tests.checks.reference_runs import (
    batch,
    config_of,
    initial,
    separate_programs,
    trace,
)
from parity_tests.checks.training import free_tolerance
from parity_tests.harness.pool import RankPool
from parity_tests.harness.ulps import ErrorTable
from reference_jax.fsdp import replicate
from reference_jax.handover import Layout, read, write
from reference_jax.train import Host, Record, Run, train

_cell: dict[str, Any] = dict(replicas=2, shards=2, dtype="float64", model="tiny", steps=13)
_timed = Cell(
    method="aedit",
    sync=(("timed", (("min_total_steps", 1),)),),
    step_ns=(SECOND, 2 * SECOND),
    **_cell,
)
# (run, step or tick of the hand-over)
FROM_CORE = [
    (Cell(method="edit", **_cell), 8),  # between two rounds, statistics filled
    pytest.param(
        Cell(method="streaming_diloco", sync=(("wire", "bf16"),), **_cell),  # in flight
        8,
        marks=pytest.mark.only_full,
    ),
    pytest.param(_timed, 4, marks=pytest.mark.only_full),
    pytest.param(Cell(method="edit", **_cell | {"model": "gpt2"}), 8, marks=pytest.mark.only_full),
]
FROM_REFERENCE = [
    (Cell(method="edit", **_cell), 8),
    (Cell(method="co2_star", every=3, **_cell), 7),  # in flight, anchors cut over replicas
    pytest.param(_timed, 3, marks=pytest.mark.only_full),
    pytest.param(Cell(method="edit", **_cell | {"model": "qwen"}), 8, marks=pytest.mark.only_full),
]


def records_of(cell: Cell, run: Run, count: int | None = None) -> list[Record]:
    with separate_programs():
        steps = train(config_of(cell), lambda i: batch(cell, i, 1), run=run)
        return list(itertools.islice(steps, count))


def assert_same_bits(run: Run, ranks: CoreRun) -> None:
    """The reference's state and what the ranks hold, tensor by tensor."""
    pairs = [
        (run.host(run.state.params), ranks.whole("states", 0, "theta")),
        (run.host(run.state.exp_avg), ranks.whole("states", 0, "exp_avg")),
        (run.host(run.state.exp_avg_sq), ranks.whole("states", 0, "exp_avg_sq")),
        ({k: np.array(x) for k, x in run.state.step.items()}, ranks.adam_steps("states", 0)),
    ]
    assert run.sync is not None
    for key in ("anchor", "velocity"):
        held: Host = run.host(getattr(run.sync, key), axis=0)
        pairs.append((held, ranks.agreed("states", 0, key)))
    if run.sync.owed:
        pairs.append((run.host(run.sync.owed), ranks.whole("states", 0, "residual")))
    stats = {k: np.array(x) for k, x in run.sync.stats._asdict().items()}
    pairs.append((stats, ranks.stats("states", 0)))
    for mine, theirs in pairs:
        assert mine.keys() == theirs.keys()
        for name, x in mine.items():
            np.testing.assert_array_equal(x, theirs[name], err_msg=name, strict=True)


@pytest.mark.parametrize(("row", "at"), FROM_CORE, ids=str)
def test_the_reference_goes_on_from_a_commit_of_the_core(
    pool: RankPool, errors: ErrorTable, tmp_path: Path, row: Cell, at: int
) -> None:
    told = pool.run(handover.stop, *arguments(row), str(tmp_path), at, list(row.step_ns))
    run = read(find(tmp_path), config_of(row))
    assert_same_bits(run, CoreRun(row, told))
    records, core = records_of(row, run), launch(pool, row)
    compare = Comparer(errors, row, "free")
    for record, after in itertools.zip_longest(records, records[1:]):
        check_inner(compare, core, record)
        check_states(compare, core, record, together(record, after))
    events = [one.event for record in records for one in record.rounds]
    ends = core.events[len(core.events) - len(events) :]
    assert [e["round"] for e in events] == [e["round"] for e in ends] and len(events) >= 2
    assert [e["steps"] for e in events] == [e["steps"] for e in ends]
    assert records[-1].steps_R.tolist() == [len(lead["records"]) for lead in core.leads]


@pytest.mark.parametrize(("row", "at"), FROM_REFERENCE, ids=str)
def test_the_core_goes_on_from_a_commit_of_the_reference(
    pool: RankPool, errors: ErrorTable, tmp_path: Path, row: Cell, at: int
) -> None:
    run = Run(config_of(row), replicate(initial(row), row.replicas))
    records_of(row, run, at)
    layout = Layout(cells.ROWS // row.shards, cells.SEQUENCE, cells.DATA_SEED)
    verify(write(tmp_path, run, layout, shards=row.shards))
    told = pool.run(handover.go_on, *arguments(row), str(tmp_path), list(row.step_ns))
    core = CoreRun(row, told)
    assert_same_bits(run, core)
    whole = trace(row).records
    events = [one.event for record in whole for one in record.rounds][-len(core.events) :]
    assert [e["round"] for e in events] == [e["round"] for e in core.events] and len(events) >= 2
    assert [e["steps"] for e in events] == [e["steps"] for e in core.events]
    compare, start = Comparer(errors, row, "free"), replicate(initial(row), row.replicas)
    last = [len(lead["states"]) - 1 for lead in core.leads]
    moments = [(last, whole[-1])] if row.step_ns else [(r.step - at, r) for r in whole[at:]]
    for index, record in moments:
        allowed = free_tolerance(row, int(record.steps_R.max()))
        mine, where = core.whole("states", index, "theta"), f"step {record.step}"
        compare.tensors(
            "update", mine, record.params, allowed, where=where, since_R=start, is_update=True
        )
