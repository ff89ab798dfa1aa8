"""A committed step comes back bit for bit, with any number of shards, and old ones go in order."""

import math
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core_torch.checkpoint.commit import COMMIT, commits, inspect, latest, prune
from core_torch.checkpoint.files import decode, encode
from core_torch.checkpoint.load import read
from core_torch.checkpoint.save import Gather
from core_torch.checkpoint.sound import newest_sound, verify
from core_torch.checkpoint.state import Layout, SavedState, Shard, canonical, restore_into
from core_torch.errors import CheckpointError, CheckpointMismatch
from core_torch.tests.checkpoint_cases import (
    commit_step,
    cut,
    full_tensors,
    run_ranks,
    save_as,
    state_of,
)

ONE = Layout(0, 0, 1, 1)


def bits(x: torch.Tensor) -> bytes:
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(got: dict[str, Shard], want: dict[str, Shard]) -> None:
    """Names, places, dtypes and bits."""
    assert got.keys() == want.keys()
    for name, shard in want.items():
        assert (got[name].shape, got[name].start) == (shard.shape, shard.start), name
        assert got[name].local.dtype == shard.local.dtype, name
        assert got[name].local.shape == shard.local.shape, name
        assert bits(got[name].local) == bits(shard.local), name


def save_one(run: Path, state: SavedState, tokenizer: Path | None = None) -> Path:
    return save_as(ONE, lambda: None, lambda value: [value], run, state, tokenizer=tokenizer)


def whole(x: torch.Tensor) -> Shard:
    return Shard(x, tuple(x.shape), 0)


@pytest.mark.parametrize(("replicas", "shards"), [(1, 1), (2, 2), (1, 4), (3, 1)])
def test_the_same_layout_gets_its_bits_back(tmp_path: Path, replicas: int, shards: int) -> None:
    folder = commit_step(tmp_path, 5, replicas=replicas, shards=shards)
    verify(folder)
    for rank in range(replicas * shards):
        layout = Layout(*divmod(rank, shards), replicas, shards)
        got, want = read(tmp_path, layout=layout), state_of(layout)
        assert_same(got.shared, want.shared)
        assert_same(got.own, want.own)
        assert got.scalars == want.scalars


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_special_values_and_every_dtype_survive(tmp_path: Path, dtype: torch.dtype) -> None:
    odd = torch.tensor([math.nan, -0.0, math.inf, 5e-324, -1.5])
    tensors = {"a/x": whole(odd.nan_to_num().to(dtype)), "a/y": whole(odd), "a/z": whole(odd[3])}
    save_one(tmp_path, SavedState({}, tensors, {}))
    assert_same(read(tmp_path, layout=ONE).own, tensors)


def test_views_and_transposed_tensors_are_saved_as_they_look(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {"a/t": whole(base.t()), "a/u": whole(base[1:3]), "a/v": whole(base)}
    before = bits(base)
    save_one(tmp_path, SavedState({}, tensors, {}))
    assert_same(read(tmp_path, layout=ONE).own, tensors)
    assert bits(base) == before


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 13),
    saved=st.integers(1, 5),
    now=st.integers(1, 5),
    replica=st.integers(0, 1),
)
def test_any_number_of_shards_reads_what_any_other_saved(
    rows: int, saved: int, now: int, replica: int
) -> None:
    def work(layout: Layout, barrier: Callable[[], None], gather: Gather) -> Path:
        return save_as(layout, barrier, gather, Path(run), state_of(layout, rows))

    with tempfile.TemporaryDirectory() as run:
        run_ranks(2, saved, work)
        for shard in range(now):
            layout = Layout(replica, shard, 2, now)
            got, want = read(Path(run), layout=layout), state_of(layout, rows)
            assert_same(got.own, want.own)
            assert_same(got.shared, want.shared)


def test_rows_cut_in_another_way_come_back_to_the_ranks_that_saved_them(tmp_path: Path) -> None:
    full = torch.arange(10.0).reshape(5, 2)
    cuts = [(3, 5), (0, 0), (0, 3)]  # neither even nor in order, and one empty

    def work(layout: Layout, barrier: Callable[[], None], gather: Gather) -> Path:
        start, stop = cuts[layout.shard]
        state = SavedState({}, {"a/x": Shard(full[start:stop], (5, 2), start)}, {})
        return save_as(layout, barrier, gather, tmp_path, state)

    run_ranks(1, 3, work)
    for shard, (start, stop) in enumerate(cuts):
        got = read(tmp_path, layout=Layout(0, shard, 1, 3)).own["a/x"]
        assert got.start == start and bits(got.local) == bits(full[start:stop])
    assert bits(read(tmp_path, layout=ONE).own["a/x"].local) == bits(full)


def test_another_number_of_replicas_is_refused_with_both_numbers(tmp_path: Path) -> None:
    commit_step(tmp_path, 5, replicas=2)
    with pytest.raises(CheckpointMismatch, match="replicas: saved 2, now 3"):
        read(tmp_path, layout=Layout(0, 0, 3, 1))


@given(st.lists(st.floats() | st.floats(width=32)))
def test_floats_come_back_exactly(floats: list[float]) -> None:
    scalars = {"statistics": [floats, {"count": 3, "flag": True, "none": None, "text": "edit"}]}
    got = decode(encode(scalars))["statistics"]
    assert [x.hex() for x in got[0]] == [x.hex() for x in floats]
    assert got[1] == scalars["statistics"][1]


@pytest.mark.parametrize("bad", [torch.ones(1), {1: 2}, {"x": {3}}, b"x"])
def test_scalars_that_json_cannot_hold_are_refused_by_name(tmp_path: Path, bad: Any) -> None:
    with pytest.raises(CheckpointError, match="TypeError: a checkpoint's scalars cannot hold"):
        save_one(tmp_path, SavedState({}, {}, {"bad": bad}))
    assert commits(tmp_path) == [] and list((tmp_path / "ckpt").iterdir()) == []


def test_a_text_that_would_come_back_as_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="'-inf' would come back as a number"):
        encode(["-inf"])


def test_wrappers_leave_no_trace_in_files(tmp_path: Path) -> None:
    wrapped = {"param/_orig_mod.layers.0.parametrizations.weight.original": whole(torch.ones(2))}
    save_one(tmp_path, SavedState({}, wrapped, {}))
    saved = read(tmp_path, layout=ONE).own
    assert list(saved) == ["param/layers.0.weight"]
    target = torch.zeros(2)
    restore_into({"param/module.layers.0._orig_mod.weight": whole(target)}, saved)
    assert target.tolist() == [1, 1]


def test_canonical_names_stay_as_they_are() -> None:
    for name in ("layers.0.attention.wq.weight", "anchor/norm.weight", "module", "step/module"):
        assert canonical(name) == name


def test_two_names_of_one_tensor_are_refused(tmp_path: Path) -> None:
    twice = {"param/x": whole(torch.ones(1)), "param/_orig_mod.x": whole(torch.ones(1))}
    with pytest.raises(CheckpointError, match="is a second tensor called 'param/x'"):
        save_one(tmp_path, SavedState({}, twice, {}))


def test_restoring_writes_into_the_same_storage() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    place = weight.data_ptr()
    restore_into({"param/w": whole(weight)}, {"param/w": whole(torch.ones(3))})
    assert weight.data_ptr() == place and weight.tolist() == [1, 1, 1] and weight.requires_grad


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({}, "param/w: saved absent, now float32"),
        ({"param/w": whole(torch.ones(3)), "param/z": whole(torch.ones(1))}, "now absent"),
        ({"param/w": whole(torch.ones(4))}, r"param/w: saved float32 \[4\].*now float32 \[3\]"),
        ({"param/w": whole(torch.ones(3).double())}, "saved float64.*now float32"),
        ({"param/w": Shard(torch.ones(3), (6,), 3)}, r"saved float32 \[6\]"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_copied(
    saved: dict[str, Shard], message: str
) -> None:
    first, second = torch.zeros(2), torch.zeros(3)
    everything = {"param/a": whole(torch.ones(2)), **saved}
    with pytest.raises(CheckpointMismatch, match=message):
        restore_into({"param/a": whole(first), "param/w": whole(second)}, everything)
    assert not first.any() and not second.any()


def test_the_newest_commits_stay_and_broken_folders_neither_count_nor_go(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        commit_step(tmp_path, step, keep=3)
    (tmp_path / "ckpt/step-00000003" / COMMIT).write_text("{")
    commit_step(tmp_path, 4, keep=2)
    assert [p.name for p in commits(tmp_path)] == ["step-00000002", "step-00000004"]
    assert (tmp_path / "ckpt/step-00000003").is_dir()


def test_keeping_fewer_than_two_commits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="keep must be at least 2, got 1"):
        commit_step(tmp_path, 1, keep=1)
    with pytest.raises(ValueError, match="keep must be at least 2, got 1"):
        prune(tmp_path, 1)


def test_a_run_that_went_back_keeps_the_step_it_just_saved(tmp_path: Path) -> None:
    for step in (1, 7, 8, 3):
        commit_step(tmp_path, step)
    assert [p.name for p in commits(tmp_path)] == [f"step-0000000{k}" for k in (3, 7, 8)]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    for mark in (1.0, 2.0):
        commit_step(tmp_path, 5, mark=mark)
    assert read(tmp_path, layout=ONE).scalars["mark"] == 2.0
    assert [p.name for p in (tmp_path / "ckpt").iterdir()] == ["step-00000005"]


@pytest.mark.parametrize(
    "name", ["step-5", "step-000000005", "step-00000005x", "step-0000000٥", ".tmp-00000005-0"]
)
def test_folders_with_other_names_do_not_count(tmp_path: Path, name: str) -> None:
    folder = commit_step(tmp_path, 5)
    folder.rename(folder.parent / name)
    assert commits(tmp_path) == [] and latest(tmp_path) is None and inspect(tmp_path) == []


def test_a_commit_under_the_number_of_another_step_does_not_count(tmp_path: Path) -> None:
    folder = commit_step(tmp_path, 5)
    folder.rename(folder.parent / "step-00000006")
    [(_, problem)] = inspect(tmp_path)
    assert "want step 6, got step 5" in str(problem)


def test_the_commit_is_written_last_and_nothing_counts_before_the_rename(tmp_path: Path) -> None:
    seen: list[tuple[str, bool, int, int]] = []

    def look(point: str) -> None:
        files = [p.name for p in (tmp_path / "ckpt").rglob("*") if p.is_file()]
        seen.append((point, COMMIT in files, len(files), len(commits(tmp_path))))

    commit_step(tmp_path, 5, at_point=look)
    assert seen == [
        ("ckpt_after_shards", False, 2, 0),
        ("ckpt_before_commit", False, 3, 0),
        ("ckpt_before_rename", True, 4, 0),
        ("ckpt_after_rename", True, 4, 1),
    ]


def test_saving_clears_temporaries_that_a_crash_left(tmp_path: Path) -> None:
    stale = tmp_path / "ckpt/.tmp-00000004-0123456789abcdef/tensors"
    stale.mkdir(parents=True)
    (stale / "shard-0000.safetensors").write_bytes(b"half")
    commit_step(tmp_path, 5)
    assert [p.name for p in (tmp_path / "ckpt").iterdir()] == ["step-00000005"]


def test_the_tokenizer_lies_beside_the_tensors_and_folders_are_private(tmp_path: Path) -> None:
    run, tokenizer = tmp_path / "a run ü", tmp_path / "tokenizer.json"
    tokenizer.write_text('{"bytes": true}')
    folder = save_one(run, SavedState({}, {}, {}), tokenizer=tokenizer)
    assert (folder / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    verify(folder)
    for path in (run, *run.rglob("*")):
        if path.is_dir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o700, path


def test_a_named_step_and_a_step_folder_are_read_like_the_newest(tmp_path: Path) -> None:
    for step in (1, 2):
        commit_step(tmp_path, step, mark=float(step))
    assert read(tmp_path, layout=ONE).scalars["mark"] == 2.0
    assert read(tmp_path, layout=ONE, step=1).scalars["mark"] == 1.0
    assert read(tmp_path / "ckpt/step-00000001", layout=ONE).scalars["mark"] == 1.0
    with pytest.raises(CheckpointError, match="no commit of step 9 .*step-00000001, step-00000002"):
        read(tmp_path, layout=ONE, step=9)


def test_a_run_without_commits_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no committed step .*commits there: none"):
        read(tmp_path, layout=ONE)
    assert newest_sound(tmp_path) == (None, [])


def test_shards_of_different_replicas_are_kept_apart(tmp_path: Path) -> None:
    commit_step(tmp_path, 5, replicas=2, shards=2)
    for replica in range(2):
        got = read(tmp_path, layout=Layout(replica, 0, 2, 1)).own
        want = {k: cut(v, ONE) for k, v in full_tensors(replica).items()}
        assert_same(got, want)
    assert len(os.listdir(tmp_path / "ckpt/step-00000005")) == 5
