"""Local SGD in somebody's own loop: the calls written out, the context manager, state."""

from typing import Any

import pytest

from parity_tests.cases import library
from parity_tests.checks.trajectories import same
from parity_tests.harness.pool import RankPool

HOW = (
    "fsdp2",
    pytest.param("fsdp2 root", marks=pytest.mark.only_full),
    pytest.param("simple_fsdp", marks=pytest.mark.only_full),
    "compiled",
    "plain",
)


def agreed(ranks: list[Any]) -> Any:
    """Ranks 0 and 2 hold the same rows of two replicas; both must be the anchor at the end."""
    for shard in (0, 1):
        assert same(ranks[shard]["params"], ranks[2 + shard]["params"]), "replicas differ"
    return ranks[0]


@pytest.mark.parametrize("how", HOW)
def test_layer_by_layer_in_the_forward_a_loop_gets_the_numbers_of_whole_rounds(
    pool: RankPool, how: str
) -> None:
    inside = pool.run(library.run, how, {})
    behind = pool.run(library.run, how, {"layerwise": False})
    for a, b in zip(inside, behind, strict=True):
        assert a["losses"] == b["losses"] and same(a["params"], b["params"])
        assert same(a["events"], b["events"]) and len(a["events"]) == 3
    agreed(inside)
    assert inside[0]["losses"] != inside[2]["losses"], "replicas saw the same data"


@pytest.mark.parametrize(
    "method",
    [
        *(
            pytest.param(method, marks=pytest.mark.only_full)
            for method in ("post_local_sgd", "diloco", "co2")
        ),
        "streaming_diloco",
        "aedit",
    ],
)
def test_the_context_manager_makes_the_same_calls(pool: RankPool, method: str) -> None:
    changes: dict[str, Any] = {"method": method, "every": 4}
    if method == "aedit":
        changes |= {"every": "600s"}  # never due by itself: the forced round at the end is all
    written = pool.run(library.run, "fsdp2", changes)
    hooked = pool.run(library.run, "fsdp2", changes, "with")
    for a, b in zip(written, hooked, strict=True):
        assert a["losses"] == b["losses"] and same(a["params"], b["params"])
    assert agreed(written)["events"][-1]["forced"]


@pytest.mark.parametrize(
    ("changes", "stop"),
    [
        pytest.param({}, 1, marks=pytest.mark.only_full),  # in the warm-up
        ({}, 5),  # a round waits for the next forward
        ({"method": "streaming_diloco", "every": 4, "wire": "int8"}, 6),  # one is in flight
        ({"method": "co2_star", "every": 3}, 7),
        pytest.param({"method": "diloco", "offload": True}, 6, marks=pytest.mark.only_full),
    ],
    ids=["warm-up", "due", "in flight", "co2_star", "offload"],
)
def test_state_taken_anywhere_continues_bit_for_bit(
    pool: RankPool, changes: dict[str, Any], stop: int
) -> None:
    through = pool.run(library.run, "fsdp2", changes)
    for a, b in zip(through, pool.run(library.resumed, "fsdp2", changes, stop), strict=True):
        assert a["losses"] == b["losses"] and same(a["params"], b["params"])
        assert same(a["events"], b["events"])


def test_two_models_in_one_process_know_nothing_of_each_other(pool: RankPool) -> None:
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"method": "streaming_diloco", "every": 4, "warmup": 0},
    )
    together = pool.run(library.two_models, changes, True)
    apart = pool.run(library.two_models, changes, False)
    assert same(together, apart)


def test_what_cannot_work_is_refused_on_all_ranks(pool: RankPool) -> None:
    told = pool.run(library.refusals)
    assert all(same(rank, told[0]) for rank in told)
    wanted = {
        "foreign optimizer": "parameters that the module does not have",
        "replicated by FSDP2": "lies on the mesh dimensions ('replica', 'shard')",
        "stored in half precision": "stored in torch.bfloat16",
        "no replicas": "sync rounds need 'replica'",
        "unused setting": "penalty: diloco has no penalty",
        "no rounds": "has no rounds",
        "too many fragments": "9 for 5 units",
        "different replicas": "hold other parameters than replica 0",
    }
    assert told[0].keys() == wanted.keys()
    for name, words in wanted.items():
        assert words in told[0][name], (name, told[0][name])


def test_a_round_that_no_forward_carries_is_an_error_not_a_silence(pool: RankPool) -> None:
    said = pool.run(library.round_past_the_hooks)
    assert set(said) == {"1 the round that was due after inner step 1 was not in the next forward"}
