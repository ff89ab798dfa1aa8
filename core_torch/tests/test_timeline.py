"""The timeline: exact on programs small enough for paper, lawful on any, true to ``execute``."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_torch.shard.program import Instruction, Program, execute
from core_torch.shard.timeline import Timeline, simulate, simulate_step
from core_torch.tests.program_cases import Writer, costs

quick = settings(deadline=None, max_examples=60, derandomize=True)


def two_buckets() -> Program:
    """Gathers of 3 seconds each, both issued at once, before 5 and 2 seconds of compute."""
    w = Writer()
    a = w.start("a", op="all_gather", payload_bytes=40, ranks=2)
    b = w.start("b", op="all_gather", payload_bytes=40, ranks=2)
    x = w.compute("A", [w.wait("a", a, op="all_gather")], flops=5)
    return w.program("forward", [w.compute("B", [x, w.wait("b", b, op="all_gather")], flops=2)])


def times(timeline: Timeline) -> dict[str, tuple[float, float, float]]:
    """Begin, end and blocked seconds by kind and name."""
    return {f"{s.kind} {s.name}": (s.begin, s.end, s.blocked) for s in timeline.spans}


def test_a_wait_blocks_until_the_link_has_served_all_that_was_issued_before() -> None:
    found = simulate(two_buckets(), costs())
    assert [(t.name, t.wire_bytes, t.issued, t.begin, t.end) for t in found.transfers] == [
        ("a", 20, 0, 0, 3),
        ("b", 20, 0, 3, 6),
    ]
    assert times(found) == {
        "start a": (0, 0, 0),
        "start b": (0, 0, 0),
        "wait a": (0, 3, 3),
        "compute A": (3, 8, 0),
        "wait b": (8, 8, 0),
        "compute B": (8, 10, 0),
    }
    assert [(t.awaited, t.exposed) for t in found.transfers] == [(0, 3), (8, 0)]
    totals = (found.seconds, found.compute_seconds, found.link_seconds, found.exposed_seconds)
    assert totals == (10, 7, 6, 3)


def test_compute_is_slower_only_while_the_link_is_busy() -> None:
    found = simulate(two_buckets(), costs(compute_slowdown=2.0))
    # From 3 to 6 half speed: 1.5 of 5 seconds are done; the other 3.5 at full speed.
    assert times(found)["compute A"] == (3, 9.5, 0)
    assert times(found)["compute B"] == (9.5, 11.5, 0)


def test_packing_delays_the_start_and_unpacking_follows_the_wait() -> None:
    w = Writer()
    flight = w.start("a", op="all_reduce", payload_bytes=10, ranks=2, touched_bytes=4)
    found = simulate(
        w.program("p", [w.wait("a", flight, op="all_reduce", touched_bytes=6)]), costs()
    )
    assert found.transfers[0][5:10] == (4, 4, 6, 4, 2)  # an all-reduce sends its payload twice over
    assert times(found) == {"start a": (0, 4, 0), "wait a": (4, 12, 2)}
    assert (found.compute_seconds, found.exposed_seconds, found.seconds) == (10, 2, 12)


def test_a_collective_among_one_rank_takes_no_time() -> None:
    w = Writer()
    flight = w.start("a", op="all_gather", payload_bytes=10, ranks=1)
    found = simulate(w.program("p", [w.wait("a", flight, op="all_gather")]), costs())
    assert (found.seconds, found.transfers[0].wire_bytes) == (0, 0)


def test_memory_lives_as_long_as_a_view_of_it_and_what_is_held_is_not_counted() -> None:
    w = Writer()
    held, given_away = w.input(1000), w.input(7)
    seen = w.view(held)
    made = w.compute("make", [seen, given_away], 100, scratch_bytes=30)  # 7 + 100 + 30
    half = w.view(made)
    small = w.compute("first", [made], 5)  # made is let go of, but half is a view of it
    last = w.compute("second", [half, small], 11)
    found = simulate(w.program("p", [last], held=[held]), costs())
    assert found.start_bytes == 7
    assert [s.live_bytes for s in found.spans] == [7, 100, 100, 105, 11]
    assert [s.peak_bytes for s in found.spans] == [7, 137, 100, 105, 116]
    assert (found.peak_bytes, found.peak_at) == (137, 1)


def test_scratch_below_zero_tells_of_inputs_freed_before_outputs_exist() -> None:
    w = Writer()
    out = w.compute("shrink", [w.input(100)], 90, scratch_bytes=-80)
    found = simulate(w.program("p", [out]), costs())
    assert found.spans[0].peak_bytes == 110
    w.instructions[0] = replace(w.instructions[0], scratch_bytes=-500)
    found = simulate(w.program("p", [out]), costs())
    assert found.spans[0].peak_bytes == 100, "never below what lives before and after"


def step() -> tuple[Program, Program, dict[int, int]]:
    """Forward: 50 saved twice through a view, 3 returned. Backward: gradients of 20 and 8."""
    f = Writer()
    shard = f.input(1000)
    saved = f.compute("act", [shard], 50, flops=1)
    alias = f.view(saved)
    loss = f.compute("loss", [alias], 3, flops=1)
    forward = f.program("forward", [loss, saved, alias, shard], held=[shard])
    b = Writer()
    again, act, act_view, tangent = b.input(1000), b.input(50), b.input(50), b.input(3)
    first = b.compute("g1", [again, act, tangent], 20, flops=1)
    second = b.compute("g2", [act_view], 8, flops=1)
    backward = b.program("backward", [first, second], held=[again])
    return forward, backward, {again: shard, act: saved, act_view: alias}


def test_activations_pass_to_the_backward_once_and_gradients_live_to_the_end() -> None:
    forward, backward, carried = step()
    found = simulate_step(forward, backward, costs(), carried=carried, resident_bytes=2)
    # Outside 2; loss 3 to the end; its tangent 3 until g1; the activation until g2.
    assert [s.live_bytes for s in found.spans] == [52, 52, 55, 2 + 3 + 50 + 20, 2 + 3 + 20 + 8]
    assert found.spans[3].peak_bytes == 2 + 3 + 3 + 50 + 20
    assert [s.program for s in found.spans] == ["forward"] * 3 + ["backward"] * 2
    assert (found.seconds, found.start_bytes) == (4, 2)


def test_a_result_that_is_also_saved_stays_with_the_caller() -> None:
    forward, backward, carried = step()
    twice = replace(forward, outputs=(*forward.outputs, forward.outputs[1]))
    found = simulate_step(twice, backward, costs(), carried=carried)
    assert found.spans[-1].live_bytes == 3 + 20 + 8 + 50


def test_an_activation_that_the_caller_holds_lives_to_the_end() -> None:
    forward, backward, carried = step()
    holding = replace(backward, held=backward.held | {backward.inputs[1]})
    found = simulate_step(forward, holding, costs(), carried=carried)
    assert found.spans[-1].live_bytes == 3 + 20 + 8 + 50


def test_what_the_forward_leaves_over_dies_between_the_programs() -> None:
    w = Writer()
    unused, out = w.compute("unused", [], 64), w.compute("out", [], 1)
    forward = w.program("forward", [out])
    backward = Writer().program("backward", [])
    assert simulate(forward, costs()).spans[-1].live_bytes == 65
    later = Writer()
    later.compute("c", [])
    backward = later.program("backward", [])
    found = simulate_step(forward, backward, costs(), carried={})
    assert found.spans[-1].live_bytes == 1 and unused == 0


def test_a_start_without_a_wait_a_wait_without_a_start_and_strangers_are_refused() -> None:
    w = Writer()
    flight = w.start("a", op="all_gather", payload_bytes=10, ranks=2)
    with pytest.raises(ValueError, match=r"p never waits for \['a'\]"):
        simulate(w.program("p", [flight]), costs())
    w = Writer()
    out = w.wait("a", w.input(), op="all_gather")
    with pytest.raises(ValueError, match="p has a wait a for no start"):
        simulate(w.program("p", [out]), costs())
    forward, backward, _ = step()
    with pytest.raises(ValueError, match=r"\[77, 88\]"):
        simulate_step(forward, backward, costs(), carried={77: 88})


class Storage:
    """Memory of a value, in a run of a program without tensors."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


def live(program: Program) -> list[int]:
    """Bytes alive before each instruction as ``execute`` really lets go of them."""
    known: weakref.WeakSet[Storage] = weakref.WeakSet()
    seen: list[int] = []

    def make(number: int, given: dict[int, list[Storage]]) -> list[Storage]:
        """A value is a list that holds its storage."""
        owner = program.values[number].storage
        if owner != number:
            return [next(v[0] for i, v in given.items() if program.values[i].storage == owner)]
        storage = Storage(program.values[number].nbytes)
        known.add(storage)
        return [storage]

    def observed(instruction: Instruction) -> Instruction:
        def run(given: list[Any]) -> tuple[Any, ...]:
            seen.append(sum(storage.nbytes for storage in known))
            named = dict(zip(instruction.inputs, given, strict=True))
            return tuple(make(number, named) for number in instruction.outputs)

        return replace(instruction, run=run)

    args = [make(number, {}) for number in program.inputs]
    execute(replace(program, instructions=tuple(map(observed, program.instructions))), args)
    return seen


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Buckets gathered up to three ahead, compute that reads any earlier values, views."""
    w = Writer()
    sizes = draw(st.lists(st.integers(0, 60), min_size=1, max_size=6))
    ahead = draw(st.integers(1, 3))
    values = [w.input(draw(st.integers(1, 50))) for _ in range(draw(st.integers(1, 3)))]
    flights: list[int] = []

    def start() -> None:
        size = sizes[len(flights)]
        payload = dict(payload_bytes=size, ranks=2, touched_bytes=draw(st.integers(0, 3)))
        flights.append(w.start(f"{len(flights)}", [], size, op="all_gather", **payload))

    for i in range(len(sizes)):
        while len(flights) < min(i + ahead, len(sizes)):
            start()
        values.append(w.wait(f"{i}", flights[i], sizes[i], op="all_gather"))
        if draw(st.booleans()):
            values.append(w.view(draw(st.sampled_from(values))))
        reads = draw(st.lists(st.sampled_from(values), max_size=4, unique=True))
        work = dict(flops=draw(st.integers(0, 9)), scratch_bytes=draw(st.integers(0, 9)))
        values.append(w.compute(f"{i}", reads, draw(st.integers(0, 50)), **work))
    outputs = draw(st.lists(st.sampled_from(values), max_size=3, unique=True))
    return w.program("forward", outputs)


@quick
@given(programs(), st.sampled_from([1.0, 1.5]))
def test_the_laws_of_two_machines_hold(program: Program, slowdown: float) -> None:
    found = simulate(program, costs(compute_slowdown=slowdown))
    ends = [0.0, *(t.end for t in found.transfers)]
    for before, transfer in zip(ends, found.transfers, strict=False):
        assert transfer.begin >= max(before, transfer.issued), "the link serves one at a time"
        assert transfer.end == pytest.approx(transfer.begin + 1 + transfer.payload_bytes / 20)
    at = 0.0
    waits = {s.name: s for s in found.spans if s.kind == "wait"}
    for span in found.spans:
        assert span.begin == at and span.end >= span.begin + span.blocked >= at
        at = span.end
    for transfer in found.transfers:
        wait = waits[transfer.name]
        assert wait.begin + wait.blocked >= transfer.end
        assert (wait.begin, wait.blocked) == (transfer.awaited, transfer.exposed)
    total, compute = found.seconds, found.compute_seconds
    assert total >= max(compute, found.link_seconds) - 1e-9
    assert found.exposed_seconds == pytest.approx(total - compute, abs=1e-9)


@quick
@given(programs())
def test_memory_is_what_execute_keeps_alive(program: Program) -> None:
    found = simulate(program, costs())
    before = [found.start_bytes, *(span.live_bytes for span in found.spans[:-1])]
    assert before == live(program)
    assert found.peak_bytes >= max(before)
    for b, span in zip(before, found.spans, strict=True):
        assert span.peak_bytes >= max(b, span.live_bytes)
    assert found.peak_bytes == max(found.start_bytes, *(s.peak_bytes for s in found.spans))
