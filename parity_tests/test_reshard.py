"""A commit goes on with other shards, other replicas, another way of sharding, by stated rules."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from core_torch.checkpoint.sound import find
from core_torch.data import batches as core_data
from parity_tests.cases import reshard
from parity_tests.checks.trajectories import PENALTY, Trajectory, Whole, same
from parity_tests.harness.pool import RankPool, RanksFailed
from parity_tests.test_resume import (
    AEDIT,
    CO2,
    CO2_STAR,
    DILOCO,
    EDIT,
    INSIDE,
    POST,
    STREAMING,
    SYNCHRONOUS,
    TENSORS,
    changes_of,
)
from reference_jax import data as reference_data

INNER = ("theta", "exp_avg", "exp_avg_sq")
OTHERS = [(1, 4), (4, 1), (1, 1), (2, 1)]


def title(value: Any) -> str:
    """Of a parameter of a test: a method, or a way of sharding."""
    if not isinstance(value, dict):
        return str(value)
    shard = value.get("shard", {"method": "fsdp2"})
    return str(value.get("method") or shard.get("compile") or shard["method"])


def full(*case: Any) -> Any:
    """A case that others see most of."""
    return pytest.param(*case, marks=pytest.mark.only_full)


def tensors_of(folder: Path) -> dict[str, Whole]:
    """Whole tensors of each folder of a commit, put together by its table and nothing else."""
    step = find(folder)
    told = json.loads((step / "state.json").read_text())
    found: dict[str, Whole] = {}
    for file, pieces in sorted(told["tensors"].items()):
        rows = load_file(step / file)
        for name, piece in pieces.items():
            whole = found.setdefault(file.partition("/")[0], {})
            empty = np.zeros(piece["shape"], rows[name].dtype)
            held = whole.setdefault(name, empty)
            if piece["shape"]:
                held[piece["start"] : piece["start"] + piece["rows"]] = rows[name]
            else:
                whole[name] = rows[name]
    return found


def close(x: Whole, y: Whole) -> None:
    """Equal but for the order of sums in float64."""
    assert x.keys() == y.keys()
    for name in x:
        np.testing.assert_allclose(x[name], y[name], rtol=1e-11, atol=1e-13, err_msg=name)


@pytest.mark.parametrize(
    ("replicas", "shards"), [(1, 4), full(4, 1), full(1, 1), full(1, 2)], ids=str
)
def test_replicas_that_become_others_merge_as_the_formulas_say(
    pool: RankPool, tmp_path: Path, replicas: int, shards: int
) -> None:
    before = changes_of(EDIT)
    pool.run(reshard.saved, before, str(tmp_path), 4)
    after = changes_of(EDIT, replicas=replicas, shards=shards)
    loaded = Trajectory(pool.run(reshard.taken_up, before, after, str(tmp_path)), replicas)
    files = tensors_of(tmp_path)
    shared, own = files["tensors"], [files[f"replica-000{n}"] for n in (0, 1)]
    told = json.loads((find(tmp_path) / "state.json").read_text())["scalars"]["sync"]
    anchor, velocity = merged(shared, own, told["units"])
    close(loaded.whole("anchor", 0), anchor)
    close(loaded.whole("velocity", 0), velocity)
    for n in range(replicas):
        assert same(loaded.whole("theta", 0, n), loaded.whole("anchor", 0, n))
        for key in ("exp_avg", "exp_avg_sq"):
            kept = {k: own[n % 2][f"{key}/{k}"] for k in anchor}
            assert same(loaded.whole(key, 0, n), {k: kept[k] for k in loaded.whole(key, 0, n)})
    for key, x_UN in loaded.stats(0).items():
        np.testing.assert_array_equal(
            x_UN, np.array(told["stats"][key])[:, np.arange(replicas) % 2]
        )
    assert loaded.steps == 5 and np.isfinite(loaded.rank(0)["records"][-1]["loss"])


def merged(shared: Whole, own: list[Whole], units: list[str]) -> tuple[Whole, Whole]:
    """Anchor and velocity after the forced round of two replicas that nobody has flagged yet."""
    anchor, velocity = dict[str, Any](), dict[str, Any]()
    of_all = [name.removeprefix("anchor/") for name in shared if name.startswith("anchor/")]
    for unit in units:
        names = [name for name in of_all if unit_of(name) == unit]
        steps = [{k: shared[f"anchor/{k}"] - one[f"param/{k}"] for k in names} for one in own]
        norms = np.array([np.sqrt(sum(np.sum(x * x) for x in d.values())) for d in steps])
        weights = np.exp(-(norms - norms.min()) / PENALTY["temperature"])
        weights /= weights.sum()
        step = {k: weights[0] * steps[0][k] + weights[1] * steps[1][k] for k in names}
        norm = np.sqrt(sum(np.sum(x * x) for x in step.values()))
        clip = min(1.0, PENALTY["max_norm"] / (norm + 1e-6))
        for k in names:
            b = 0.85 * shared[f"velocity/{k}"] + clip * step[k]
            anchor[k] = shared[f"anchor/{k}"] - 0.8 * (clip * step[k] + 0.85 * b)
            velocity[k] = b
    return anchor, velocity


def unit_of(name: str) -> str:
    """The unit of a parameter of the untied model."""
    if name.startswith("layers."):
        return ".".join(name.split(".")[:2])
    return "embedding" if name.startswith("tok_") else "head"


MERGES = [
    (INSIDE, 5, (4, 1)),  # a round that the next forward would have carried
    (CO2_STAR, 6, (1, 4)),  # in flight, anchors cut over the replicas
    (STREAMING | {"streaming": {"mix": 0.25}}, 4, (1, 2)),  # a fragment in flight
    full(CO2, 7, (1, 4)),
    full(CO2_STAR, 7, (4, 1)),
    full(DILOCO, 6, (4, 1)),
    full(POST, 4, (1, 1)),
    full(EDIT, 7, (4, 1)),
    full(EDIT, 8, (4, 1)),  # right after a round: nothing to merge
    full(STREAMING, 4, (4, 1)),
    full(AEDIT, 4, (1, 4)),
]


@pytest.mark.parametrize(("sync", "stop", "mesh"), MERGES, ids=title)
def test_the_merge_is_the_end_of_the_run_that_was_saved(
    pool: RankPool, tmp_path: Path, sync: dict[str, Any], stop: int, mesh: tuple[int, int]
) -> None:
    sync = sync | {"wire": "fp32"}  # a merge codes nothing
    step_ns = [10**9, 2 * 10**9] if sync["method"] == "aedit" else []
    before, (replicas, shards) = changes_of(sync), mesh
    stopped = pool.run(reshard.saved, before, str(tmp_path), stop, step_ns)
    ended = Trajectory([one | {"events": []} for one in stopped], 2)
    after = changes_of(sync, replicas=replicas, shards=shards)
    slow = [step_ns[n % 2] for n in range(replicas)] if step_ns else []
    loaded = Trajectory(pool.run(reshard.taken_up, before, after, str(tmp_path), slow), replicas)
    counted = [rank["counted"] for rank in loaded.ranks]
    for key in ("theta", "anchor", "velocity"):
        for n in range(replicas):
            close(loaded.whole(key, 0, n), ended.whole(key, -1, n % 2))
    for key in ("exp_avg", "exp_avg_sq"):
        for n in range(replicas):
            assert same(loaded.whole(key, 0, n), ended.whole(key, 0, n % 2)), key
    assert not any(any(one["since"]) for one in counted)
    rows = max(one["counted"]["rows"] for one in stopped)
    assert all(one["rows"] == -(-rows * 2 // replicas) for one in counted)
    assert all(one["tokens"] == stopped[0]["counted"]["tokens"] for one in counted) or step_ns
    statistics = ended.ranks[0]["finished"]["stats"]
    for key, x_UN in loaded.stats(0).items():
        np.testing.assert_allclose(x_UN, statistics[key][:, np.arange(replicas) % 2], rtol=1e-12)
    assert np.isfinite(loaded.rank(0)["records"][-1]["loss"])


def with_batch(changes: dict[str, Any], batch: int, accumulate: int = 1) -> dict[str, Any]:
    """The same run with other micro-batches."""
    train = changes["train"] | {"accumulate": accumulate}
    return changes | {"data": {"batch": batch}, "train": train}


# A run of 2 x 2 ranks with a batch of 2, and layouts whose steps see the same sequences.
ALIKE = [
    (EDIT, 4, (2, 1), 4, 1),
    (SYNCHRONOUS, 5, (1, 4), 2, 1),
    full(EDIT, 4, (2, 1), 2, 2),
    full(SYNCHRONOUS, 5, (4, 1), 2, 1),
    full(SYNCHRONOUS, 5, (1, 1), 4, 2),
    full(EDIT, 1, (1, 4), 2, 1),  # in the warm-up
    full(CO2_STAR, 6, (2, 1), 4, 1),
    full(STREAMING | {"wire": "fp32"}, 5, (2, 1), 1, 4),
    full(INSIDE | {"wire": "fp32"}, 5, (2, 1), 4, 1),
]


@pytest.mark.parametrize(("sync", "stop", "mesh", "batch", "accumulate"), ALIKE, ids=title)
def test_where_a_step_sees_the_same_sequences_the_run_goes_on_as_if_nothing_had_changed(
    pool: RankPool,
    tmp_path: Path,
    sync: dict[str, Any],
    stop: int,
    mesh: tuple[int, int],
    batch: int,
    accumulate: int,
) -> None:
    before, (replicas, shards) = changes_of(sync), mesh
    kept = pool.run(reshard.whole, before, before)
    pool.run(reshard.saved, before, str(tmp_path), stop)
    after = with_batch(changes_of(sync, replicas=replicas, shards=shards), batch, accumulate)
    again = Trajectory(pool.run(reshard.taken_up, before, after, str(tmp_path)), replicas)
    whole = Trajectory(kept, 2)
    for n in range(replicas):
        for key in ("theta", "exp_avg", "exp_avg_sq"):
            assert same(again.whole(key, 0, n), whole.whole(key, stop, n % 2)), key
    parts_later = sync is EDIT and stop == 1  # from then on the numbers of replicas tell
    last = 1 if parts_later else again.steps
    for step in range(last + 1):
        close(again.whole("theta", step, 0), whole.whole("theta", stop + step, 0))
    for old, new in zip(
        whole.rank(0)["records"][stop:][:last], again.rank(0)["records"], strict=False
    ):
        assert (old["step"], old["tokens"], old["lr"]) == (new["step"], new["tokens"], new["lr"])


EAGER = {"shard": {"method": "simple_fsdp"}}
COMPILED = {"shard": {"method": "simple_fsdp", "compile": "aot_eager"}}
SWITCHES = [
    (EDIT, 4, {}, COMPILED),
    full(EDIT, 4, COMPILED, EAGER),
    full(EDIT, 4, EAGER, {}),
    full(INSIDE, 5, {}, COMPILED),
    full(INSIDE, 5, COMPILED, {}),
    full(CO2_STAR, 6, {}, EAGER),
]


@pytest.mark.parametrize(("sync", "stop", "first", "second"), SWITCHES, ids=title)
def test_a_run_goes_on_bit_for_bit_with_its_parameters_sharded_by_other_means(
    pool: RankPool,
    tmp_path: Path,
    sync: dict[str, Any],
    stop: int,
    first: dict[str, Any],
    second: dict[str, Any],
) -> None:
    before, after = changes_of(sync) | first, changes_of(sync) | second
    kept = pool.run(reshard.whole, before, before)
    pool.run(reshard.saved, before, str(tmp_path), stop)
    again = pool.run(reshard.taken_up, before, after, str(tmp_path))
    for old, new in zip(kept, again, strict=True):
        assert len(new["history"]) == len(old["history"]) - stop
        for x, y in zip(old["history"][stop:], new["history"], strict=True):
            assert all(same(x.get(key), y.get(key)) for key in (*TENSORS, "adam_step", "stats"))


def test_where_steps_are_counted_in_tokens_their_number_must_stay(
    pool: RankPool, tmp_path: Path
) -> None:
    before, after = changes_of(AEDIT), changes_of(AEDIT, shards=1)
    pool.run(reshard.saved, before, str(tmp_path), 4, [10**9, 2 * 10**9])
    with pytest.raises(RanksFailed, match="tokens of a step over all replicas: saved 64, now 32"):
        pool.run(reshard.taken_up, before, after, str(tmp_path))


def test_both_cores_go_on_with_the_same_row() -> None:
    tokens = np.arange(41 * 8 + 1)
    dealt: dict[str, Any] = {"sequence": 8, "batch": 2, "replicas": 3, "shards": 2, "seed": 5}
    for step, replica, shard, first_row in ((3, 1, 0, -5), (0, 2, 1, 17)):
        place: dict[str, Any] = {
            "step": step,
            "replica": replica,
            "shard": shard,
            "first_row": first_row,
        }
        mine = core_data.batch_for(tokens, core_data.Layout(num_sequences=41, **dealt), **place)
        theirs = reference_data.batch_for(tokens, **dealt, **place)
        assert all(map(same, mine, theirs))
