"""Every rank knows from counters alone which tokens are its own, and no two ranks share any."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_torch.data.batches import Layout, batch_for, count_sequences, held_out_batches
from core_torch.errors import DataError

T = 3  # tokens of a sequence; token values below say which sequence they come from
small = st.integers(1, 4)
layouts = st.builds(
    Layout,
    num_sequences=st.integers(1, 40),
    sequence=st.just(T),
    batch=small,
    replicas=small,
    shards=small,
    seed=st.integers(0, 2**64 - 1),
)


def tokens_for(layout: Layout) -> np.ndarray:
    return np.arange(layout.num_sequences * T + 1, dtype=np.uint16)


def sequences_seen(layout: Layout, *, step: int, replica: int, shard: int) -> list[int]:
    inputs, _ = batch_for(tokens_for(layout), layout, step=step, replica=replica, shard=shard)
    return [int(first) // T for first in inputs[:, 0]]


@settings(deadline=None)
@given(layouts, st.integers(0, 3))
def test_an_epoch_shows_every_sequence_exactly_once(layout: Layout, epoch: int) -> None:
    per_step = layout.shards * layout.batch * layout.replicas
    first, last = epoch * layout.num_sequences, (epoch + 1) * layout.num_sequences
    seen = {}
    for step in range(first // per_step, last // per_step + 1):
        for replica in range(layout.replicas):
            for shard in range(layout.shards):
                rows = sequences_seen(layout, step=step, replica=replica, shard=shard)
                for b, sequence in enumerate(rows):
                    row = (step * layout.shards + shard) * layout.batch + b
                    seen[row * layout.replicas + replica] = sequence
    assert sorted(seen[q] for q in range(first, last)) == list(range(layout.num_sequences))


@settings(deadline=None)
@given(layouts, st.data())
def test_ranks_are_disjoint_within_an_epoch_even_at_different_step_counts(
    layout: Layout, data: st.DataObject
) -> None:
    steps = layout.num_sequences // (layout.replicas * layout.shards * layout.batch)
    seen: list[int] = []
    for replica in range(layout.replicas):
        own_steps = data.draw(st.integers(0, steps), label=f"steps of replica {replica}")
        for step in range(own_steps):
            for shard in range(layout.shards):
                seen += sequences_seen(layout, step=step, replica=replica, shard=shard)
    assert len(seen) == len(set(seen))


@settings(deadline=None)
@given(layouts, st.integers(0, 1000), st.data())
def test_targets_are_the_inputs_shifted_by_one(
    layout: Layout, step: int, data: st.DataObject
) -> None:
    replica = data.draw(st.integers(0, layout.replicas - 1))
    shard = data.draw(st.integers(0, layout.shards - 1))
    inputs, targets = batch_for(tokens_for(layout), layout, step=step, replica=replica, shard=shard)
    assert inputs.shape == targets.shape == (layout.batch, T)
    assert inputs.dtype == targets.dtype == np.int64
    np.testing.assert_array_equal(targets, inputs + 1)  # the tokens count upwards
    np.testing.assert_array_equal(inputs[:, 0] % T, 0)


def test_a_batch_depends_on_its_arguments_only_whatever_was_asked_before() -> None:
    layout = Layout(num_sequences=50, sequence=T, batch=4, replicas=2, shards=2, seed=7)
    tokens = tokens_for(layout)
    steps = [0, 9, 3, 200, 40, 3, 0]  # several epochs, so that cached orders come and go
    asked = [batch_for(tokens, layout, step=s, replica=1, shard=0) for s in steps]
    for s, before in zip(reversed(steps), reversed(asked), strict=True):
        again = batch_for(tokens, layout, step=s, replica=1, shard=0)
        np.testing.assert_array_equal(again, before)


def test_writing_into_a_batch_changes_neither_the_tokens_nor_other_batches() -> None:
    layout = Layout(num_sequences=8, sequence=T, batch=4, replicas=1, shards=1, seed=0)
    tokens = tokens_for(layout)
    inputs, targets = batch_for(tokens, layout, step=0, replica=0, shard=0)
    kept = targets.copy()
    inputs[:] = -1
    assert inputs.flags.owndata and targets.flags.owndata
    np.testing.assert_array_equal(targets, kept)
    np.testing.assert_array_equal(tokens, tokens_for(layout))
    assert (batch_for(tokens, layout, step=0, replica=0, shard=0)[0] >= 0).all()


def test_the_rule_of_the_module_docstring_restated_with_plain_loops_gives_the_same_rows() -> None:
    layout = Layout(num_sequences=5, sequence=T, batch=2, replicas=3, shards=2, seed=11)
    tokens = np.arange(100, 100 + 5 * T + 1, dtype=np.uint32)
    inputs, targets = batch_for(tokens, layout, step=4, replica=2, shard=1)
    for b in range(2):
        epoch, place = divmod((4 * 2 * 2 + 1 * 2 + b) * 3 + 2, 5)
        philox = np.random.Philox(key=np.array([11, epoch], dtype=np.uint64))
        raw = [int(philox.random_raw()) for _ in range(5)]
        i = sorted(range(5), key=raw.__getitem__)[place]
        assert inputs[b].tolist() == [100 + i * T + k for k in range(T)]
        assert targets[b].tolist() == [100 + i * T + k + 1 for k in range(T)]


def test_the_order_of_an_epoch_is_the_same_in_every_version_so_that_old_runs_resume() -> None:
    layout = Layout(num_sequences=8, sequence=T, batch=8, replicas=1, shards=1, seed=3)
    assert sequences_seen(layout, step=0, replica=0, shard=0) == [6, 1, 5, 2, 7, 4, 3, 0]
    assert sequences_seen(layout, step=1, replica=0, shard=0) == [7, 3, 5, 6, 4, 0, 2, 1]


def test_another_seed_gives_another_order() -> None:
    orders = {
        tuple(sequences_seen(Layout(40, T, 40, 1, 1, seed), step=0, replica=0, shard=0))
        for seed in range(4)
    }
    assert len(orders) == 4


@pytest.mark.parametrize(
    ("num_tokens", "sequences"), [(0, 0), (1, 0), (T, 0), (T + 1, 1), (2 * T, 1), (2 * T + 1, 2)]
)
def test_the_last_sequence_needs_one_token_more_for_its_target(
    num_tokens: int, sequences: int
) -> None:
    assert count_sequences(num_tokens, T) == sequences


def test_tokens_shorter_than_the_layout_are_refused_with_both_counts() -> None:
    layout = Layout(num_sequences=4, sequence=T, batch=1, replicas=1, shards=1, seed=0)
    with pytest.raises(DataError, match="12 tokens are fewer than the 13"):
        batch_for(tokens_for(layout)[:-1], layout, step=0, replica=0, shard=0)


@pytest.mark.parametrize(
    ("counters", "message"),
    [
        ({"step": -1, "replica": 0, "shard": 0}, "step must be at least 0, got -1"),
        ({"step": 0, "replica": 2, "shard": 0}, r"replica must lie in 0\.\.1, got 2"),
        ({"step": 0, "replica": 0, "shard": -1}, r"shard must lie in 0\.\.2, got -1"),
    ],
)
def test_a_rank_outside_the_mesh_gets_no_tokens(counters: dict[str, int], message: str) -> None:
    layout = Layout(num_sequences=4, sequence=T, batch=1, replicas=2, shards=3, seed=0)
    with pytest.raises(ValueError, match=message):
        batch_for(tokens_for(layout), layout, **counters)


@pytest.mark.parametrize(("name", "value"), [("batch", 0), ("seed", -1), ("seed", 2**64)])
def test_a_layout_that_cannot_be_dealt_is_refused(name: str, value: int) -> None:
    fields = {"num_sequences": 4, "sequence": 1, "batch": 1, "replicas": 1, "shards": 1, "seed": 0}
    with pytest.raises(ValueError, match=f"{name} must .* got {value}"):
        Layout(**fields | {name: value})


def test_held_out_batches_are_distinct_whole_sequences_from_all_over_the_split() -> None:
    tokens = np.arange(10 * T + 2)
    batches = held_out_batches(tokens, T, batch=2, count=5)
    assert [inputs.shape for inputs, _ in batches] == [(2, T), (2, T), (1, T)]
    first = np.concatenate([inputs[:, 0] for inputs, _ in batches])
    assert first.tolist() == [0, 2 * T, 4 * T, 6 * T, 8 * T]
    assert all((targets == inputs + 1).all() for inputs, targets in batches)


def test_held_out_batches_give_what_there_is_when_more_is_asked_for() -> None:
    batches = held_out_batches(np.arange(3 * T + 1), T, batch=8, count=64)
    assert [inputs[:, 0].tolist() for inputs, _ in batches] == [[0, T, 2 * T]]


def test_a_held_out_split_without_one_sequence_is_refused() -> None:
    with pytest.raises(DataError, match="3 tokens holds no sequence of 3"):
        held_out_batches(np.arange(T), T, batch=1, count=1)


def test_a_run_that_changes_its_layout_goes_on_with_the_next_draw() -> None:
    total, seen, taken, step = 97, [], 0, 5
    for replicas, shards, batch in ((2, 2, 2), (1, 4, 1), (4, 1, 1), (2, 1, 3)):
        layout = Layout(total, T, batch, replicas, shards, seed=3)
        first_row = taken // replicas - step * shards * batch
        for n in range(replicas):
            for m in range(shards):
                place = {"step": step, "replica": n, "shard": m, "first_row": first_row}
                inputs, _ = batch_for(tokens_for(layout), layout, **place)
                seen += [int(first) // T for first in inputs[:, 0]]
        taken, step = taken + replicas * shards * batch, step + 1
    alone = Layout(total, T, taken, replicas=1, shards=1, seed=3)
    assert sorted(seen) == sorted(sequences_seen(alone, step=0, replica=0, shard=0))
    with pytest.raises(ValueError, match="before row 0"):
        batch_for(tokens_for(layout), layout, step=0, replica=0, shard=0, first_row=-1)
