"""What a trace says of a run, and that a run that stops and goes on writes the same lines.

A round is checked by sums of sketches: they are linear, as it is.
"""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
import pytest

from reference_jax.aedit import Timed
from reference_jax.edit import Penalty
from reference_jax.fsdp import replicate
from reference_jax.handover import Layout, read, write
from reference_jax.model import init_params, units
from reference_jax.sketch import sketch
from reference_jax.streaming import Streaming
from reference_jax.tests.cases import MODEL, Host, batches_of
from reference_jax.trace import parts, put_down, tapped
from reference_jax.trace import write as write_trace
from reference_jax.train import Run, TrainConfig, batch_of_step, train

EDIT = TrainConfig(
    model=MODEL,
    method="edit",
    replicas=2,
    shards=1,
    steps=6,
    every=2,
    warmup=2,
    accumulate=2,
    lr=0.05,
    penalty=Penalty(max_norm=0.2),
)
STREAMING = dataclasses.replace(
    EDIT,
    method="streaming_diloco",
    steps=7,
    every=4,
    warmup=0,
    wire="bf16",
    streaming=Streaming(fragments=2, delay=1, mix=0.25),
)
CO2 = dataclasses.replace(EDIT, method="co2")
AEDIT = dataclasses.replace(
    EDIT,
    method="aedit",
    steps=6,
    timed=Timed(interval_ns=4, step_ns=(1, 2), min_total_steps=5, step_weight=0.5),
)
RUNS = {"edit": EDIT, "streaming_diloco": STREAMING, "co2": CO2, "aedit": AEDIT}
BATCHES = batches_of(2, 1)
Line = dict[str, Any]


def begun() -> Host:
    return {k: np.array(x) for k, x in init_params(MODEL, seed=0, dtype="float64").items()}


def lines_of(folder: Path) -> list[Line]:
    """Without their numbers, which begin anew where a run goes on."""
    lines = [json.loads(line) for line in (folder / "events.0.jsonl").read_text().splitlines()]
    assert [line.pop("seq") for line in lines] == list(range(len(lines)))
    return lines


@functools.cache
def whole(method: str) -> list[Line]:
    """The trace of a whole run."""
    with TemporaryDirectory() as folder:
        write_trace(folder, RUNS[method], BATCHES, params=begun())
        return lines_of(Path(folder))


def sk(line: Line) -> np.ndarray:
    return np.array(line["sk"])


def rounds_of(lines: list[Line]) -> Iterator[tuple[Line, dict[tuple[Any, ...], Line]]]:
    """(the line that ends a round, its lines by phase, unit, name and replica)."""
    ends = [x for x in lines if x["phase"] == "sync.end" and x["name"] == "round"]
    for end in ends:
        mine = [x for x in lines if x["round"] == end["round"]]
        yield end, {(x["phase"], x["unit"], x["name"], x["replica"]): x for x in mine}


def test_every_phase_is_written_in_the_order_of_a_step() -> None:
    lines = whole("edit")
    order = [x for x, _ in itertools.groupby(x["phase"] for x in lines if x["step"] <= 4)]
    step = ["data", "forward", "backward", "grad", "clip", "optim"]
    assert order[:19] == ["init", *3 * step] and order[19:25] == step
    told = [name.removeprefix("sync.") for name in order[25:]]
    assert told == [
        "delta",
        "vote",
        *len(units(MODEL)) * ["merge", "clip", "outer", "params"],
        "end",
    ]
    shapes = {tuple(x["shape"]) for x in lines if x["name"] == "output.1"}
    assert shapes == {(2, 6, 8), (2, 6, 29)}
    assert [x["value"] for x, _ in rounds_of(lines)] == 2 * [{"forced": False, "empty": False}]


@pytest.mark.parametrize("method", RUNS)
def test_a_round_adds_up_from_its_lines(method: str) -> None:
    count = 0
    for end, found in rounds_of(whole(method)):
        if end["value"]["empty"]:
            assert {phase for phase, *_ in found} == {"sync.vote", "sync.end"}
            continue
        for _, unit, name, _ in [key for key in found if key[0] == "sync.merge"]:
            count += 1
            d = [found["sync.delta", unit, name, n] for n in range(2)]
            votes = [found["sync.vote", unit, "vote", n]["value"] for n in range(2)]
            total = found["sync.merge", unit, name, None]
            mean = sum(v["weight"] * sk(x) for v, x in zip(votes, d, strict=True))
            rtol = 0.1 if RUNS[method].wire == "bf16" else 1e-9
            scale = math.sqrt(total["sum2"])
            np.testing.assert_allclose(sk(total), mean, atol=rtol * scale)
            if method in ("edit", "aedit"):  # used at once: theta becomes the new anchor
                moved = sk(found["sync.outer", unit, f"{name}/anchor", None])
                for n in range(2):
                    to_anchor = sk(found["sync.params", unit, name, n])
                    np.testing.assert_allclose(to_anchor, moved + sk(d[n]), atol=1e-12)
        for (phase, unit, _, n), vote in found.items():
            if phase == "sync.vote":
                mine = [k for k in found if (k[0], k[1], k[3]) == ("sync.delta", unit, n)]
                norm = math.sqrt(sum(found[k]["sum2"] for k in mine))
                assert vote["value"]["norm"] == pytest.approx(norm, rel=1e-12)
    assert count >= 2 * len(begun())


def test_tokens_are_those_of_each_replicas_own_step() -> None:
    told = [x for x in whole("edit") if x["phase"] == "data"]
    assert len(told) == 6 * 2 * 2 * 2
    for x in told:
        side, k = x["name"].split(".")
        both = BATCHES(2 * (x["step"] - 1) + int(k))
        dealt = both[side == "targets"][x["replica"]]
        assert x["sk"] == sketch(dealt, 0).sk and x["dtype"] == "int64"


def test_a_pseudo_gradient_is_what_the_optimizer_did_since_the_anchor() -> None:
    lines = whole("edit")
    _, found = next(rounds_of(lines))
    for (phase, _, name, n), d in found.items():
        if phase == "sync.delta":
            mine = [x for x in lines if (x["name"], x["replica"]) == (f"{name}/update", n)]
            did = sum(sk(x) for x in mine if x["step"] in (3, 4))
            np.testing.assert_allclose(sk(d), -did, atol=1e-12)


def test_a_late_exchange_is_measured_in_one_step_and_used_in_another() -> None:
    lines = whole("streaming_diloco")
    places = {
        phase: [i for i, x in enumerate(lines) if x["round"] == 1 and x["phase"] == f"sync.{phase}"]
        for phase in ("vote", "merge")
    }
    between = lines[places["vote"][-1] : places["merge"][0]]
    assert {x["step"] for x in between if x["phase"] == "optim"} == {3}
    assert {lines[i]["step"] for i in places["merge"]} == {2}
    assert lines[places["merge"][0]]["unit"] == "fragment.1"


def test_by_the_clock_each_replica_counts_its_own_steps() -> None:
    lines = whole("aedit")
    losses = [x for x in lines if x["name"] == "loss"]
    counted = [[x["step"] for x in losses if x["replica"] == n] for n in (0, 1)]
    assert [steps == list(range(1, len(steps) + 1)) for steps in counted] == [True, True]
    assert len(counted[0]) > len(counted[1]) > 2
    votes = [x["value"]["steps"] for x in lines if x["phase"] == "sync.vote" and x["replica"] == 1]
    assert votes == 3 * [2] + 6 * [1]
    assert [tuple(end["value"].values()) for end, _ in rounds_of(lines)] == [
        (False, False),
        (False, True),  # too few steps
        (True, False),
    ]


def test_derivatives_inside_the_model_are_those_of_the_chain_rule() -> None:
    start = replicate(begun(), 2)
    run = Run(dataclasses.replace(EDIT, warmup=0), start)
    batch = batch_of_step(EDIT, BATCHES, run.steps_R)
    inputs, targets = (x[:, 0] for x in batch)
    outputs, gradients = tapped(start, inputs, targets, config=MODEL, compute=None)
    assert set(outputs) == set(parts(MODEL))
    share = jax.nn.softmax(outputs["head"], axis=-1)
    expected = (share - jax.nn.one_hot(targets, MODEL.vocabulary)) / targets[0].size
    np.testing.assert_allclose(gradients["head"], expected, rtol=1e-9, atol=1e-15)
    grads = run.host(run.inner_step(*batch, lr=0.1).grads)["tok_embeddings.weight"]
    for n in range(2):
        rows = np.zeros_like(grads[n])
        np.add.at(rows, inputs[n], np.asarray(gradients["embedding"][n]))
        np.testing.assert_allclose(rows, grads[n], rtol=1e-9, atol=1e-14)


def test_what_is_not_finite_is_counted_and_written_as_text(tmp_path: Path) -> None:
    def sicken(step: int, params_R: Host) -> Host:
        params_R["norm.weight"][1, 0] = np.nan
        return params_R

    config = dataclasses.replace(EDIT, steps=4)
    write_trace(tmp_path, config, BATCHES, params=begun(), perturb=sicken)
    (_, found), *_ = rounds_of(lines_of(tmp_path))
    assert found["sync.delta", "head", "norm.weight", 1]["bad"] == 1
    vote = found["sync.vote", "head", "vote", 1]["value"]
    assert (vote["norm"], vote["finite"], vote["weight"]) == ("nan", False, 0.0)
    assert found["sync.merge", "head", "norm.weight", None]["bad"] == 0


@pytest.mark.parametrize(("method", "stop"), [("edit", 3), ("streaming_diloco", 4), ("co2", 5)])
def test_a_run_that_stops_and_goes_on_writes_the_lines_of_one_that_does_not(
    tmp_path: Path, method: str, stop: int
) -> None:
    config = RUNS[method]
    assert stop_and_go_on(config, tmp_path, stop) == whole(method)


def test_by_the_clock_a_run_stops_only_where_nobody_waits(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="waits for its round"):
        stop_and_go_on(AEDIT, tmp_path, 5)
    assert stop_and_go_on(AEDIT, tmp_path, 3) == whole("aedit")


def stop_and_go_on(config: TrainConfig, folder: Path, stop: int) -> list[Line]:
    """The lines before and after a stop at step or tick ``stop``."""
    run, start = Run(config, replicate(begun(), 2)), replicate(begun(), 2)
    first = itertools.islice(train(config, BATCHES, run=run), stop)
    put_down(folder / "first", config, BATCHES, first, start)
    path = write(folder, run, Layout(batch=2, sequence=6, seed=3))
    del run
    again = read(path, config)
    rest = train(config, BATCHES, run=again)
    put_down(folder / "rest", config, BATCHES, rest, again.host(again.state.params))
    return lines_of(folder / "first") + lines_of(folder / "rest")


@pytest.mark.parametrize("file", ["state.json", "replica-0001/shard-0000.safetensors"])
def test_a_damaged_or_foreign_commit_is_refused(tmp_path: Path, file: str) -> None:
    path = write(tmp_path, Run(EDIT, replicate(begun(), 2)), Layout(batch=2, sequence=6, seed=3))
    assert read(path, EDIT).step == 0
    with pytest.raises(ValueError, match="another method"):
        read(path, CO2)
    data = bytearray((path / file).read_bytes())
    data[-3] ^= 1
    (path / file).write_bytes(data)
    with pytest.raises(ValueError, match="not what COMMIT"):
        read(path, EDIT)
