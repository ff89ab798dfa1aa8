"""Costs: exact where they are defined, recovered where they are fitted, honest where cached."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_torch.shard.cost import (
    ComputeSample,
    Costs,
    LinkSample,
    fit,
    hardware_key,
    load,
    profile_key,
    save,
    wire_bytes,
)
from core_torch.shard.program import Instruction

quick = settings(deadline=None, max_examples=40, derandomize=True)


def costs(**changed: object) -> Costs:
    numbers: dict[str, object] = dict(
        flops_per_second=4e9,
        bytes_per_second=2e9,
        seconds_per_operator=1e-6,
        latency_seconds=1e-3,
        link_bytes_per_second=125e6,
    )
    return Costs(**numbers | changed)  # type: ignore[arg-type]


def instruction(**fields: object) -> Instruction:
    common: dict[str, object] = dict(
        kind="compute", name="compute 3", run=tuple, inputs=(), outputs=()
    )
    return Instruction(**common | fields)  # type: ignore[arg-type]


def test_arithmetic_memory_and_overhead_of_a_segment_add_up() -> None:
    work = instruction(flops=8e9, touched_bytes=1e9, operators=500)
    assert costs().seconds_of(work) == 2 + 0.5 + 0.0005
    assert costs(flops_per_second=math.inf).seconds_of(work) == 0.5 + 0.0005


def test_a_measured_instruction_costs_what_was_measured_in_its_program_only() -> None:
    work = instruction(flops=8e9)
    measured = costs(profile={"backward compute compute 3": 0.25})
    assert measured.seconds_of(work, "backward") == 0.25
    assert measured.seconds_of(work, "forward") == 2
    wait = instruction(kind="wait", op="reduce_scatter", name="layers.0")
    assert profile_key("backward", wait) == "backward wait reduce_scatter layers.0"


@pytest.mark.parametrize(
    ("op", "ranks", "wire"),
    [
        ("all_gather", 2, 500),
        ("reduce_scatter", 4, 750),
        ("all_reduce", 4, 1500),
        ("all_reduce", 1, 0),
    ],
)
def test_wire_bytes_of_a_payload_of_1000(op: str, ranks: int, wire: float) -> None:
    assert wire_bytes(op, 1000, ranks) == wire  # type: ignore[arg-type]


def test_a_collective_takes_latency_and_its_bytes_and_nothing_among_one_rank() -> None:
    assert costs().link_seconds("all_gather", 250e6, 2) == 1e-3 + 1
    assert costs().link_seconds("all_gather", 250e6, 1) == 0


@pytest.mark.parametrize(
    "field",
    [
        {"flops_per_second": 0.0},
        {"link_bytes_per_second": math.nan},
        {"latency_seconds": -1.0},
        {"compute_slowdown": 0.9},
        {"profile": {"forward compute 1": math.inf}},
    ],
)
def test_costs_that_cannot_be_are_named(field: dict[str, object]) -> None:
    [name] = field if "profile" not in field else ["forward compute 1"]
    with pytest.raises(ValueError, match=name):
        costs(**field)


def samples(true: Costs, *, noise: float = 0.0) -> tuple[list[ComputeSample], list[LinkSample]]:
    """Twenty segments of random mixtures and five sizes of collective under ``true`` costs."""
    random = np.random.default_rng(7)
    compute = []
    for flops, touched, operators in 10 ** random.uniform([6, 5, 0], [10, 8, 2], (20, 3)):
        work = instruction(flops=flops, touched_bytes=touched, operators=operators)
        seconds = true.seconds_of(work) * (1 + noise * random.uniform(-1, 1))
        compute.append(ComputeSample(flops, touched, operators, seconds))
    sizes = [1e4, 1e5, 1e6, 1e7, 1e8]
    factors = 1 + noise * random.uniform(-1, 1, 5)
    link = [
        LinkSample(wire, (true.latency_seconds + wire / true.link_bytes_per_second) * f)
        for wire, f in zip(sizes, factors, strict=True)
    ]
    return compute, link


rates = ("flops_per_second", "bytes_per_second", "link_bytes_per_second")
durations = ("seconds_per_operator", "latency_seconds")


def test_exact_samples_give_the_costs_that_made_them() -> None:
    found = fit(*samples(costs()), compute_slowdown=1.25)
    for name in (*rates, *durations):
        assert getattr(found, name) == pytest.approx(getattr(costs(), name), rel=1e-9)
    assert found.compute_slowdown == 1.25


def test_samples_that_are_five_percent_off_predict_within_five() -> None:
    found = fit(*samples(costs(), noise=0.05))
    compute, link = samples(costs())
    for flops, touched, operators, seconds in compute:
        work = instruction(flops=flops, touched_bytes=touched, operators=operators)
        assert found.seconds_of(work) == pytest.approx(seconds, rel=0.05)
    for wire, seconds in link:
        assert found.link_seconds("all_gather", 2 * wire, 2) == pytest.approx(seconds, rel=0.05)


def test_what_the_samples_do_not_need_is_free_and_nothing_is_negative() -> None:
    compute = [ComputeSample(f, 9.0 - f, 0, f - 0.1) for f in (1.0, 2.0, 4.0, 8.0)]
    found = fit(compute, [LinkSample(1e6, 0.01), LinkSample(2e6, 0.02)])
    assert found.bytes_per_second == math.inf, "more bytes, less time: no coefficient below 0"
    assert found.seconds_per_operator == 0
    assert found.latency_seconds == pytest.approx(0, abs=1e-12)


def test_no_samples_or_samples_without_time_are_refused() -> None:
    link = [LinkSample(1.0, 1.0)]
    with pytest.raises(ValueError, match="calibration needs samples"):
        fit([], link)
    with pytest.raises(ValueError, match="calibration needs samples"):
        fit([ComputeSample(1, 1, 1, 0.0)], link)


positive = st.floats(1e-3, 1e3)


@quick
@given(st.lists(st.tuples(positive, positive, positive, positive), min_size=1, max_size=12))
def test_a_fit_is_never_worse_than_one_coefficient_alone(
    rows: list[tuple[float, float, float, float]],
) -> None:
    found = fit([ComputeSample(*row) for row in rows], [LinkSample(1.0, 1.0)])

    def error(a: float, b: float, c: float) -> float:
        return sum(((a * f + b * m + c * o) / s - 1) ** 2 for f, m, o, s in rows)

    of_fit = error(
        1 / found.flops_per_second, 1 / found.bytes_per_second, found.seconds_per_operator
    )
    for i in range(3):
        ratios = [row[i] / row[3] for row in rows]
        alone = [0.0, 0.0, 0.0]
        alone[i] = sum(ratios) / sum(r * r for r in ratios)
        assert of_fit <= error(*alone) * (1 + 1e-6) + 1e-9


def test_the_cache_keeps_costs_by_key_and_infinity_survives(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    one = costs(bytes_per_second=math.inf, profile={"forward compute compute 0": 0.5})
    save(path, "one", one)
    save(path, "two", costs())
    assert load(path, "one") == one and load(path, "two") == costs()
    assert load(path, "three") is None
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.mark.parametrize("text", ["", "[]", '{"one": 3}', '{"one": {"profile": {}}}', "\xff"])
def test_a_damaged_cache_means_measuring_again(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(text.encode("latin-1"))
    assert load(path, "one") is None
    save(path, "one", costs())
    assert load(path, "one") == costs()


def test_impossible_numbers_in_a_cache_mean_measuring_again(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    save(path, "one", costs())
    path.write_text(path.read_text().replace("0.001", "-1"))
    assert load(path, "one") is None


def test_a_calibration_is_for_one_machine_thread_count_network_and_set_of_versions() -> None:
    versions = {"torch": "2.13.0", "python": "3.11"}
    key = hardware_key(threads=1, versions=versions, network="loopback")
    assert key == hardware_key(
        threads=1, versions=dict(reversed(versions.items())), network="loopback"
    )
    assert "torch 2.13.0" in key and key.endswith("loopback")
    others = {
        hardware_key(threads=2, versions=versions, network="loopback"),
        hardware_key(threads=1, versions={"torch": "2.14.0"}, network="loopback"),
        hardware_key(threads=1, versions=versions, network="1gbit,1ms"),
    }
    assert len(others - {key}) == 3
