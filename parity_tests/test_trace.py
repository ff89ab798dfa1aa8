"""The trace of a run: complete, additive over shards, the same when resumed, and without effect."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parity_tests.cases import tracing
from parity_tests.checks.cells import SECOND, Cell
from parity_tests.checks.core_runs import arguments
from parity_tests.checks.trajectories import same
from parity_tests.harness.pool import RankPool
from parity_tests.instrument.files import Event, Key, Trace, read_trace
from reference_jax.sketch import sketch as sketch_in_numpy

OFFLOAD = ("offload", True)
_two = partial(Cell, replicas=2, shards=2, dtype="float64", model="tiny", every=3, warmup=1)
_late = (("streaming", (("fragments", 2), ("delay", 2), ("mix", 0.25))),)
CASES: dict[str, Cell] = {
    "synchronous": Cell(
        method="synchronous", replicas=1, shards=4, dtype="float64", model="odd", steps=3
    ),
    "accumulating": _two(method="synchronous", steps=2, model="gqa", sharding="simple_fsdp"),
    "compiled": _two(method="post_local_sgd", replicas=1, steps=4, sharding="simple_fsdp_aot"),
    "diloco": _two(method="diloco", steps=5, sync=(("wire", "int8"),), sharding="simple_fsdp"),
    "streaming_diloco": _two(method="streaming_diloco", every=4, steps=7, sync=_late),
    "co2": _two(method="co2", steps=8),
    "co2_star": _two(method="co2_star", steps=8, sync=(("wire", "bf16"),)),
    "edit": _two(method="edit", steps=6, model="tied", sync=(("layerwise", True), OFFLOAD)),
    "aedit": _two(
        method="aedit",
        steps=7,
        step_ns=(SECOND, 2 * SECOND),
        sync=(("timed", (("min_total_steps", 5),)),),
    ),
}
WITH_STATISTICS = ("edit", "aedit")
TENSORS = ("merge", "outer", "params")  # of a round that has exchanged something


class Recorded:
    """A case with taps, and without."""

    def __init__(self, pool: RankPool, cell: Cell, folder: Path) -> None:
        self.cell, self.folder = cell, folder
        self.plain = self._run(pool, "")
        self.tapped = self._run(pool, str(folder))
        self.trace: Trace = read_trace(folder)
        first = self.tapped[0]
        self.events: list[dict[str, Any]] = first["events"]
        self.steps = [rank["steps"] for rank in self.tapped[:: cell.shards]]
        self.params = list(first["state"]["theta"])

    def _run(self, pool: RankPool, folder: str) -> list[Any]:
        ranks = pool.run(tracing.record, *arguments(self.cell), folder, list(self.cell.step_ns))
        return [rank for rank in ranks if rank is not None]

    def of(self, phase: str, name: str, replica: int | None) -> list[Event]:
        """What the trace tells of something, in order."""
        found = [event for event in self.trace.events if event.key.phase == phase]
        return [x for x in found if (x.key.name, x.key.replica) == (name, replica)]


@pytest.fixture(scope="module")
def recorded(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorded]:
    """Every case, run on the first use."""

    class Cases(dict[str, Recorded]):
        def __missing__(self, name: str) -> Recorded:
            folder = tmp_path_factory.mktemp("traces") / name
            self[name] = Recorded(pool, CASES[name], folder)
            return self[name]

    return Cases()


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.only_full) if name == "compiled" else name
        for name in CASES
    ]
)
def run(request: pytest.FixtureRequest, recorded: dict[str, Recorded]) -> Recorded:
    """One case after the other."""
    return recorded[request.param]


def test_taps_leave_every_bit_and_every_byte_sent(run: Recorded) -> None:
    for plain, tapped in zip(run.plain, run.tapped, strict=True):
        assert plain["error"] is None and tapped["error"] is None
        del plain["state"]["storage"], tapped["state"]["storage"]
        assert same(plain, tapped)


def test_every_key_is_written_once_and_no_other(run: Recorded) -> None:
    found = Counter(event.key for event in run.trace.events)
    expected = Counter([*inner_keys(run), *round_keys(run)])
    assert found == expected, (list(found - expected)[:5], list(expected - found)[:5])


def test_what_was_added_is_what_parameters_moved_by(run: Recorded) -> None:
    # Sketches are linear. CO2 returns to its anchor once, which is written nowhere.
    returns = run.cell.method in ("co2", "co2_star")
    for name in run.params:
        for n, replica in enumerate(run.tapped[:: run.cell.shards]):
            added = [*run.of("optim", f"{name}/update", n), *run.of("sync.params", name, n)]
            begun, unit = run.of("init", name, n)[0], run.cell.shards
            assert len(added) >= run.steps[n]
            parts = [r["state"]["theta"][name] for r in run.tapped[n * unit : (n + 1) * unit]]
            ended = sketch_of(np.concatenate([part["rows"] for part in parts]))
            total = np.sum([sketch(event) for event in (begun, *added)], axis=0)
            assert parts[0]["shape"] == begun.shape and replica["error"] is None
            assert returns or total == pytest.approx(ended, abs=1e-12)


def test_votes_and_ends_are_the_events_of_the_run(run: Recorded) -> None:
    for event in run.events:
        number = event["round"]
        for i, unit in enumerate(event["units"]):
            for n, steps in enumerate(event["steps"]):
                vote = run.trace.by_key[Key("round", number, "sync.vote", unit, "vote", n)].value
                told = {x: event[x][i][n] for x in ("norm", "weight", "finite", "anomalous")}
                assert vote is not None and vote["steps"] == steps
                assert {name: vote[name] for name in told} == told
            if not event["empty"]:
                key = Key("round", number, "sync.clip", unit, "outer", None)
                fields = {"norm": "combined_norm", "clip": "clip", "gap": "gap"}
                outer = run.trace.by_key[key].value
                assert outer is not None and outer["rollback"] == event["rollback"][i]
                assert {x: outer[x] for x in fields} == {x: event[y][i] for x, y in fields.items()}


def test_collectives_are_told_as_the_ledger_counts_them(run: Recorded) -> None:
    for rank, told in enumerate(run.tapped):
        found = [x for x in run.trace.collectives if x.rank == rank]
        # What the engine sends before its first step comes before the taps.
        ledger = told["trace"][len(told["trace"]) - len(found) :]
        assert len(told["trace"]) - len(found) <= 2 and found
        assert [(x.axis, x.op, x.unit) for x in found] == [(d[0], d[1], d[4]) for d in ledger]
        sizes = {"uint8": 1, "int64": 8, "float64": 8}
        assert [x.bytes for x in found] == [d[3] * sizes[d[2]] for d in ledger]


def test_shards_of_any_size_add_up_to_the_tensor(
    recorded: dict[str, Recorded], pool: RankPool, tmp_path: Path
) -> None:
    cut = recorded["synchronous"]  # on four shards: uneven rows, and empty ones
    cell = cut.cell.on_one_shard
    pool.run(tracing.record, *arguments(cell), str(tmp_path / "whole"))
    whole = read_trace(tmp_path / "whole")
    assert any(len(event.parts) == 3 for event in cut.trace.events)  # a shard without rows
    assert {e.key for e in cut.trace.events} == set(whole.by_key)
    for event in cut.trace.events:
        other = whole.by_key[event.key]
        if event.value is not None:
            assert other.value == pytest.approx(event.value, rel=1e-12)
            continue
        assert (event.shape, event.dtype, event.bad) == (other.shape, other.dtype, other.bad)
        assert event.norm == pytest.approx(other.norm, rel=1e-12)
        assert event.amax == pytest.approx(other.amax, rel=1e-12)
        assert sketch(event) == pytest.approx(sketch(other), abs=1e-12 * max(other.norm, 1e-3))


@pytest.mark.parametrize(
    ("name", "stop"),
    [
        ("edit", 4),  # a round that the next forward will carry
        ("streaming_diloco", 4),  # a fragment in flight
        ("co2_star", 5),  # the model in flight, anchors cut over the replicas
        ("aedit", 3),
    ],
)
def test_a_resumed_run_writes_the_trace_of_the_run_that_never_stopped(
    recorded: dict[str, Recorded], pool: RankPool, tmp_path: Path, name: str, stop: int
) -> None:
    run, folder = recorded[name], tmp_path / "trace"
    more = (str(folder), str(tmp_path / "run"), stop, 1, list(run.cell.step_ns))
    pool.run(tracing.record_in_two_parts, *arguments(run.cell), *more)
    for path in run.folder.iterdir():
        assert (folder / path.name).read_text() == path.read_text(), path.name
    assert len(list(run.folder.glob("events.*"))) == 4


def inner_keys(run: Recorded) -> list[Key]:
    """Of all inner steps of all replicas."""
    keys, outputs = [], ["embedding", *(f"layers.{i}" for i in range(run.cell.layers)), "head"]
    outputs = ["head"] if run.cell.sharding == "simple_fsdp_aot" else outputs
    units = {name: unit_of(name, run.cell) for name in run.params}
    for n, steps in enumerate(run.steps):
        keys += [Key("step", 0, "init", units[name], name, n) for name in units]
        for t in range(1, steps + 1):
            step = partial(Key, "step", t, replica=n)
            for k in range(run.cell.accumulate):
                keys += [step("data", None, f"{x}.{k}") for x in ("inputs", "targets")]
                for unit in outputs:
                    keys.append(step("forward", unit, f"output.{k}"))
                    keys.append(step("backward", unit, f"gradient.{k}"))
            keys += [step("grad", units[name], name) for name in units]
            for moment in ("update", "exp_avg", "exp_avg_sq"):
                keys += [step("optim", units[name], f"{name}/{moment}") for name in units]
            values = (("forward", "loss"), ("clip", "gradient"), ("optim", "rate"))
            keys += [step(phase, None, name) for phase, name in values]
    return keys


def round_keys(run: Recorded) -> list[Key]:
    """Of all rounds that the run has told of."""
    keys, method = [], run.cell.method
    replicas = range(run.cell.replicas)
    for event in run.events:
        at = partial(Key, "round", event["round"])
        keys.append(at("sync.end", None, "round", None))
        for unit in event["units"]:
            keys += [at("sync.vote", unit, "vote", n) for n in replicas]
            if method in WITH_STATISTICS:
                keys += [at("sync.end", unit, "statistics", n) for n in replicas]
            if event["empty"]:
                continue
            keys.append(at("sync.clip", unit, "outer", None))
            for name in members(run, unit):
                keys += [at("sync.delta", unit, name, n) for n in replicas]
                keys += [at("sync.params", unit, name, n) for n in replicas]
                keys.append(at("sync.merge", unit, name, None))
                keys += [
                    at("sync.outer", unit, f"{name}/{x}", None) for x in ("anchor", "velocity")
                ]
    return keys


def members(run: Recorded, unit: str) -> list[str]:
    """Parameters of a sync unit."""
    if unit == "model":
        return run.params
    if unit.startswith("fragment."):
        order = ["embedding", *(f"layers.{i}" for i in range(run.cell.layers)), "head"]
        held = order[int(unit.removeprefix("fragment.")) :: 2]
        return [name for name in run.params if unit_of(name, run.cell) in held]
    return [name for name in run.params if unit_of(name, run.cell) == unit]


def unit_of(name: str, cell: Cell) -> str:
    """The model's unit of a parameter."""
    if name.startswith("layers."):
        return ".".join(name.split(".")[:2])
    return "embedding" if name.startswith("tok_") or cell.model == "tied" else "head"


def sketch(event: Event) -> np.ndarray:
    """Of a tensor's event."""
    assert event.sketch is not None, event.key
    return event.sketch


def sketch_of(whole: np.ndarray) -> np.ndarray:
    """As the reference makes it."""
    return np.array(sketch_in_numpy(whole, 0).sk)
