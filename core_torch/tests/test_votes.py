"""Counters and votes: what replicas that count differently agree on."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core_torch.sync.votes import Votes

CPU = torch.device("cpu")


def meet(replicas: list[Votes], steps: list[int]) -> None:
    """One numbered round of all."""
    ballots = [v.ballot(s, device=CPU).tolist() for v, s in zip(replicas, steps, strict=True)]
    for votes in replicas:
        votes.count(ballots)


def make(count: int) -> list[Votes]:
    return [Votes(replicas=count) for _ in range(count)]


@settings(deadline=None, max_examples=50, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 2**53 + 1), min_size=3, max_size=3), max_size=5))
def test_agreed_tokens_are_the_exact_sum_whatever_each_has_estimated(
    rounds: list[list[int]],
) -> None:
    replicas = make(3)
    for tokens in rounds:
        for votes, seen in zip(replicas, tokens, strict=True):
            before = votes.agreed_tokens
            votes.local_tokens += seen
            assert votes.tokens == before + 3 * seen
        meet(replicas, [1, 1, 1])
    assert {v.agreed_tokens for v in replicas} == {sum(map(sum, rounds))}
    assert {v.local_tokens for v in replicas} == {0}


def test_equal_replicas_estimate_the_truth_so_counting_at_the_anchor_is_exact() -> None:
    replicas = make(4)
    for votes in replicas:
        votes.local_tokens = 10
        votes.agree()
    assert [(v.agreed_tokens, v.local_tokens) for v in replicas] == [(40, 0)] * 4


def test_a_run_ends_by_tokens_only_if_it_was_told_how_many() -> None:
    one, two = Votes(replicas=2, local_tokens=5), Votes(replicas=2, local_tokens=5)
    two.enough_tokens = 10
    assert not one.has_enough and two.has_enough
    two.local_tokens = 4
    assert not two.has_enough


def test_all_stop_only_when_the_last_one_has_stopped() -> None:
    replicas = make(2)
    replicas[0].is_stopping = True
    ballots = [v.ballot(3, device=CPU).tolist() for v in replicas]
    assert replicas[0].count(ballots) == ([3, 3], False)
    replicas[1].is_stopping = True
    ballots = [v.ballot(0, device=CPU).tolist() for v in replicas]
    assert replicas[0].count(ballots) == ([0, 0], True)


def test_one_wish_for_a_checkpoint_is_enough_if_everybody_can_make_it() -> None:
    replicas = make(3)
    replicas[2].wants_checkpoint = True
    replicas[0].is_stepping = False
    meet(replicas, [1, 1, 1])
    assert [v.checkpoint_agreed for v in replicas] == [False] * 3 and replicas[2].wants_checkpoint
    replicas[0].is_stepping = True
    meet(replicas, [1, 1, 1])
    assert [v.checkpoint_agreed for v in replicas] == [True] * 3
    assert not any(v.wants_checkpoint for v in replicas)
