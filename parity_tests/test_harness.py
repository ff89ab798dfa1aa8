"""The harness itself: messages arrive unchanged, ranks come and go, differences are measured."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from core_torch.sync import outer
from parity_tests.cases import probes
from parity_tests.harness import codec, mutants
from parity_tests.harness.mutant import Mutant
from parity_tests.harness.pool import RankPool, RanksFailed

VALUES: list[Any] = [
    None,
    True,
    -(2**70),
    1e-320,
    "umlaut \u00e4 and newline\n",
    [],
    (),
    {},
    [1, (2.5, [None]), {"a": {1: "integer key"}}],
    float("-inf"),
    np.zeros((0, 3), np.float32),
    np.array(7, np.int64),
    {"x": np.arange(6.0).reshape(2, 3).T, "y": [np.array([True, False])]},
    np.array([1.5, float("nan")], ml_dtypes.bfloat16),
]


def same(x: Any, y: Any) -> bool:
    """Equality of type and value that also knows arrays and NaN."""
    if isinstance(x, np.ndarray):
        return bool(x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes())
    if isinstance(x, list | tuple):
        return type(x) is type(y) and len(x) == len(y) and all(map(same, x, y))
    if isinstance(x, dict):
        return list(x) == list(y) and all(same(x[k], y[k]) for k in x)
    return type(x) is type(y) and bool(x == y)


# --- codec ---


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_plain_data_survives_a_message_bit_for_bit(value: Any) -> None:
    assert same(codec.decode(codec.encode(value)), value)


@pytest.mark.parametrize("value", [np.float64(1.0), torch.ones(1), {1}, lambda: 0])
def test_anything_but_plain_data_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(TypeError, match=r"value\['k'\]\[1\] is a "):
        codec.encode({"k": [0, value]})


def test_a_decoded_array_can_be_written_without_touching_the_message() -> None:
    message = codec.encode(np.zeros(2))
    codec.decode(message)[0] = 1.0
    assert codec.decode(message).tolist() == [0.0, 0.0]


# --- pool ---


def test_ranks_answer_in_rank_order_with_one_thread_each_and_without_jax(pool: RankPool) -> None:
    answers = pool.run(probes.who_am_i)
    assert [a["rank"] for a in answers] == [0, 1, 2, 3]
    assert {(a["world"], a["threads"], a["jax"]) for a in answers} == {(4, 1, False)}


def test_ranks_stay_up_between_requests_and_worlds_of_other_sizes_are_apart(pool: RankPool) -> None:
    first, again = pool.run(probes.who_am_i), pool.run(probes.who_am_i)
    alone = pool.run(probes.who_am_i, ranks=1)
    assert [a["pid"] for a in first] == [a["pid"] for a in again]
    assert [a["world"] for a in alone] == [1]


def test_arguments_and_results_of_megabytes_pass(pool: RankPool) -> None:
    large = np.random.default_rng(0).normal(size=500_000)
    assert all(same(answer, large) for answer in pool.run(probes.echo, large))


def test_every_request_starts_from_the_same_seed_and_dtype(pool: RankPool) -> None:
    first, again = pool.run(probes.random_numbers), pool.run(probes.random_numbers)
    assert all(same(x, first[0]) for x in first + again)


@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (4, 1)])
def test_meshes_are_replica_major_cached_and_count_one_request_only(
    pool: RankPool, shape: tuple[int, int]
) -> None:
    replicas, shards = shape
    grid = np.arange(4.0).reshape(shape)
    for _ in range(2):
        for rank, (down, across, sent) in enumerate(pool.run(probes.sums_over_axes, *shape)):
            assert down == grid[:, rank % shards].sum()
            assert across == grid[rank // shards].sum()
            assert sent == 8 * ((replicas > 1) + (shards > 1))
    assert pool.run(probes.mesh_identity, *shape) == pool.run(probes.mesh_identity, *shape)


def test_a_rank_that_imports_jax_is_stopped() -> None:
    with pytest.raises(RanksFailed, match="must not need JAX"):
        own_pool_run(probes.import_jax, ranks=1)


def own_pool_run(*args: Any, **keywords: Any) -> None:
    """Runs something that kills the ranks on a pool of its own."""
    own = RankPool()
    try:
        own.run(*args, **keywords)
    finally:
        own.close()


def test_the_rank_that_raised_is_named_and_the_pool_works_again() -> None:
    own = RankPool()
    begin = own.run(probes.who_am_i, ranks=2)
    started = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        own.run(probes.fail_on, 1, ranks=2)
    assert time.monotonic() - started < 10
    message = str(caught.value)
    assert "rank 1: Traceback" in message and "rank 1 was told to fail" in message
    assert "rank 0" in message  # silent, or its collective failed once rank 1 was killed
    after = own.run(probes.who_am_i, ranks=2)
    own.close()
    assert {a["pid"] for a in begin}.isdisjoint(a["pid"] for a in after)


def test_a_rank_that_ends_is_reported_with_its_exit_code() -> None:
    with pytest.raises(RanksFailed, match="rank 0: ended with code 7"):
        own_pool_run(probes.end_on, 0, ranks=1)


def test_a_rank_that_hangs_is_killed_at_the_deadline_and_says_where_it_hung() -> None:
    own = RankPool()
    own.run(probes.echo, 0, ranks=1)  # imports what the deadline should not count
    with pytest.raises(RanksFailed, match=r"rank 0: no answer(.|\n)*probes.py.* in hang"):
        own.run(probes.hang, ranks=1, deadline=1.0)
    own.close()


def test_a_function_that_ranks_cannot_import_is_refused(pool: RankPool) -> None:
    with pytest.raises(TypeError, match="not at the top of a module"):
        pool.run(lambda: None)


def test_ranks_die_with_the_process_that_started_them() -> None:
    script = (
        "import os\n"
        "from parity_tests.cases import probes\n"
        "from parity_tests.harness.pool import RankPool\n"
        "pool = RankPool()\n"
        "pid = pool.run(probes.who_am_i, ranks=1)[0]['pid']\n"
        "os.write(1, str(pid).encode())\n"
        "os._exit(0)\n"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    deadline = time.monotonic() + 10
    while is_alive(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_alive(int(done.stdout))


def is_alive(pid: int) -> bool:
    """True while a process of this id runs; one that only waits to be reaped has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:  # it has ended just now, or this system has no /proc
        return not Path("/proc").exists()


# --- mutants ---


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_a_mutant_still_finds_the_text_that_it_edits(name: str) -> None:
    mutant = mutants.MUTANTS[name]
    function = mutants.find(mutant.target)
    assert mutants.edited_code(function, mutant).co_code != b""


def test_a_mutant_reaches_names_imported_elsewhere_and_is_taken_back() -> None:
    bound_before = outer.nesterov_step
    healthy = probes.outer_step(0.7, 0.9)
    with mutants.applied("outer momentum dropped"):
        faulty = probes.outer_step(0.7, 0.9)
    np.testing.assert_allclose(healthy, 1 - 0.7 * (1 + 0.9 * 1.9))
    np.testing.assert_allclose(faulty, 1 - 0.7 * (1 + 0.9))
    assert outer.nesterov_step is bound_before and same(probes.outer_step(0.7, 0.9), healthy)


def test_a_mutant_runs_inside_the_ranks_for_one_request_or_one_block(pool: RankPool) -> None:
    healthy = pool.run(probes.outer_step, 0.7, 0.9)
    faulty = pool.run(probes.outer_step, 0.7, 0.9, mutant="the outer step climbs")
    with pool.mutated("the outer step climbs"):
        in_block = pool.run(probes.outer_step, 0.7, 0.9)
    after = pool.run(probes.outer_step, 0.7, 0.9)
    assert all(map(same, healthy, after)) and all(map(same, faulty, in_block))
    assert not any(map(same, healthy, faulty))


def test_a_mutant_whose_text_is_gone_is_an_error() -> None:
    stale = Mutant("core_torch.sync.outer:heal", "no such text", "")
    with pytest.raises(ValueError, match="occurs 0 times"):
        mutants.edited_code(mutants.find(stale.target), stale)
