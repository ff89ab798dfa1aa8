"""Faults put into the engine of local SGD: tests that were not written for them must see them.

Those on threads run in this process; ``--full`` runs all, otherwise one of each kind.
"""

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from core_torch.config import Co2Config
from core_torch.tests import test_engine as engine
from core_torch.tests import test_known_faults as known
from core_torch.tests import test_round_traffic as traffic
from core_torch.tests import test_timed_rounds as timed
from core_torch.tests.timed_schedules import live_all, random_schedule
from parity_tests.cases import layerwise
from parity_tests.checks.cells import ROWS_OF_METHODS
from parity_tests.checks.methods import check_method
from parity_tests.harness.engine_mutants import ENGINE_MUTANTS
from parity_tests.harness.mutants import MUTANTS, applied
from parity_tests.harness.pool import RankPool
from parity_tests.harness.ulps import ErrorTable
from parity_tests.test_layerwise import INSIDE, TWICE, WHOLE, assert_same_run

Check = Callable[[], object]
OnRanks = Callable[[RankPool], object]


def owed(method: str) -> None:
    """E13."""
    with pytest.MonkeyPatch.context() as patch:
        engine.test_what_was_sent_and_what_is_owed_are_what_was_meant(method, "int8", patch)


def schedules() -> None:
    """Some of the two hundred."""
    for seed in range(16):
        schedule = random_schedule(seed)
        lives = live_all(schedule)
        timed.check_rounds(schedule, lives)
        timed.check_ends(schedule, lives)


def goes_on(name: str) -> None:
    """E9."""
    engine.test_a_run_that_goes_on_from_any_step_is_the_run_that_never_stopped(name)


def healed() -> None:
    """One bad replica, which is good again later."""
    traffic.test_ranks_that_meet_dispatch_the_same_and_nothing_between_rounds("edit int8 offload")
    known.test_one_bad_replica_is_as_good_as_none(engine.edit(warmup=0, wire="int8"), 1e30)


def row(method: str, number: int) -> OnRanks:
    """A comparison with the reference."""
    cells = [cell for cell in ROWS_OF_METHODS if cell.method == method]
    return lambda pool: check_method(pool, ErrorTable(), cells[number])


def prefetched(pool: RankPool) -> None:
    """E5 on FSDP2 that gathers a unit ahead."""
    changes = TWICE | {"shard": {"forward_prefetch": 1}}
    whole, inside = (pool.run(layerwise.run, changes | {"sync": s}) for s in (WHOLE, INSIDE))
    assert_same_run(inside, whole)


ON_THREADS: dict[str, Check] = {
    "the residual is never sent": partial(owed, "diloco"),
    "what nobody used counts as sent": partial(owed, "edit"),
    "codes are added without weights": healed,
    "no staleness gap": partial(
        engine.test_co2_star_gives_the_numbers_of_co2, 2, "fp32", Co2Config()
    ),
    "the fragment after the one that is due": traffic.test_a_fragment_sends_its_own_elements_only,
    "the closing round mixes": partial(
        known.test_every_element_of_every_parameter_is_exchanged, "streaming"
    ),
    "replicas without a step count": traffic.test_a_replica_that_ends_early_serves_the_others,
    "norms of the absent enter the median": (
        engine.test_replicas_without_a_step_do_not_make_those_with_steps_look_too_large
    ),
    "time is not restarted": (
        engine.test_between_two_rounds_a_replica_makes_as_many_steps_as_its_clock_allows
    ),
    "every shard asks its own clock": partial(
        traffic.test_three_speeds_an_empty_round_and_an_early_end, False, "fp32"
    ),
    "tokens of one replica times all": schedules,
    "who waits would have to commit": schedules,
    "the first to stop stops all": traffic.test_a_replica_that_ends_early_serves_the_others,
    "no round is empty": partial(
        traffic.test_three_speeds_an_empty_round_and_an_early_end, True, "fp32"
    ),
    "an evaluation carries the round": partial(
        engine.test_an_evaluation_carries_no_round_and_changes_nothing, engine.edit()
    ),
    "a round that is due is forgotten at the end": partial(
        engine.test_by_the_clock_at_equal_speeds_is_edit, {}, True
    ),
    "the host's memory is given away": (
        known.test_a_store_on_the_host_gives_copies_and_takes_copies
    ),
    "what is in flight is not saved": partial(goes_on, "co2"),
    "what is owed is not saved": partial(goes_on, "edit bf16"),
    "elapsed time is not saved": partial(goes_on, "aedit whole"),
    "a round that is due is not saved": partial(goes_on, "edit"),
}
ON_RANKS: dict[str, OnRanks] = {
    "the gap of the meeting before": row("co2", 0),
    "the first progress of CO2 enters twice": row("co2", 0),
    "a delay one step longer": row("streaming_diloco", 0),
    "mixed the other way round": row("streaming_diloco", 1),
    "weights without steps": row("aedit", 1),
    "gathered ahead before the round": prefetched,
}
CHOSEN = {
    "the residual is never sent",
    "no staleness gap",
    "the fragment after the one that is due",
    "replicas without a step count",
    "an evaluation carries the round",
    "gathered ahead before the round",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All mutants with ``--full``, else the chosen ones."""
    for fixture, table in (("on_threads", ON_THREADS), ("on_ranks", ON_RANKS)):
        if fixture in metafunc.fixturenames:
            is_full = metafunc.config.getoption("full")
            metafunc.parametrize(fixture, [m for m in table if is_full or m in CHOSEN])


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    """Runs that tests keep for each other were made without this fault, or with another."""
    engine.usual.cache_clear()
    yield
    engine.usual.cache_clear()


def test_every_fault_of_the_engine_is_met_by_a_check() -> None:
    assert ON_THREADS.keys() | ON_RANKS.keys() == ENGINE_MUTANTS.keys()
    assert not ENGINE_MUTANTS.keys() & MUTANTS.keys()


def test_a_fault_of_the_engine_is_noticed_on_threads(on_threads: str) -> None:
    with applied(on_threads), pytest.raises(AssertionError):
        ON_THREADS[on_threads]()


def test_a_fault_of_the_engine_is_noticed_on_ranks(pool: RankPool, on_ranks: str) -> None:
    with pool.mutated(on_ranks), pytest.raises(AssertionError):
        ON_RANKS[on_ranks](pool)
