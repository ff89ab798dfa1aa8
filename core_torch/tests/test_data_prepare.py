"""A prepared folder is what its sources say, however it was made, or it is not there."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from core_torch.config import DataConfig
from core_torch.data import preparing
from core_torch.data.atomic import new_folder
from core_torch.data.corpus import prepare
from core_torch.data.prepared import open_prepared
from core_torch.data.preparing import Job, encode, prepare_folder
from core_torch.data.sources import Piece
from core_torch.data.tokenizer import ByteTokenizer, train_bpe
from core_torch.errors import DataError

WORDS = "To be, or not to be: that is the question.\n"
CONTENT = ("train.tokens", "held_out.tokens", "tokenizer.json")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Two texts, and lines of JSON of many lengths."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "a.txt").write_text(WORDS * 40)
    (folder / "b.txt").write_text("Grüße aus Köln.\n" * 30)
    lines = [json.dumps({"text": WORDS * (1 + n % 5)}) for n in range(40)]
    (folder / "c.jsonl").write_text("\n".join(lines))
    return folder


def bytes_of(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in CONTENT]


def test_a_prepared_folder_holds_the_tokens_that_a_run_would_have_made(
    sources: Path, tmp_path: Path
) -> None:
    for share in (0.05, 0.3):
        own = prepare(DataConfig(path=str(sources), held_out=share), tmp_path / f"run{share}")
        out = tmp_path / f"out{share}"
        told = prepare_folder([str(sources)], out, DataConfig(held_out=share))
        prepared = open_prepared(out)
        for name in ("train", "held_out"):
            ids = getattr(prepared, name).ids
            np.testing.assert_array_equal(ids, getattr(own, name).ids)
            assert told[name]["tokens"] == len(ids)
            assert told[name]["documents"] == (ids == 256).sum()
        prepared.check_content()


@pytest.mark.parametrize("share", [0.25, 0.375, 0.4])
def test_a_long_document_may_be_cut_on_a_seam_of_its_pieces_or_within_one(
    tmp_path: Path, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core_torch.data.sources.LONGEST", 8)
    (tmp_path / "a.txt").write_text("0123456789abcdef" * 2)
    own = prepare(DataConfig(path=str(tmp_path / "a.txt"), held_out=share), tmp_path / "run")
    prepare_folder([str(tmp_path / "a.txt")], tmp_path / "out", DataConfig(held_out=share))
    prepared = open_prepared(tmp_path / "out")
    assert prepared.train.ids.tolist() == own.train.ids.tolist()
    assert prepared.held_out.ids.tolist() == own.held_out.ids.tolist()


def test_the_number_of_processes_changes_no_byte(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "_JOB", 500)  # many jobs
    config = DataConfig(tokenizer="bpe", bpe_vocabulary=300)
    for processes in (1, 2):
        out = tmp_path / f"out{processes}"
        prepare_folder([str(sources)], out, config, processes=processes)
    one, two = tmp_path / "out1", tmp_path / "out2"
    assert bytes_of(one) == bytes_of(two)
    assert (one / "data.json").read_bytes() == (two / "data.json").read_bytes()


def test_sources_are_read_in_the_order_given(sources: Path, tmp_path: Path) -> None:
    files = [str(sources / name) for name in ("b.txt", "a.txt")]
    told = prepare_folder(files, tmp_path / "out", DataConfig())
    assert [source["path"] for source in told["sources"]] == files
    ids = open_prepared(tmp_path / "out").train.ids
    assert ByteTokenizer().decode(ids[:16]) == "Grüße aus Köl"


def test_a_bpe_is_trained_on_training_text_only(tmp_path: Path) -> None:
    for end in "xy":
        (tmp_path / f"{end}.txt").write_text(WORDS * 100 + end * 200)  # less than 5 %
        config = DataConfig(tokenizer="bpe", bpe_vocabulary=280)
        prepare_folder([str(tmp_path / f"{end}.txt")], tmp_path / end, config)
    found = [open_prepared(tmp_path / end).tokenizer.fingerprint() for end in "xy"]
    assert found[0] == found[1]


def test_a_bpe_is_trained_on_a_sample_from_all_over_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [json.dumps({"text": f"{n:04} text"}) for n in range(1000)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(preparing, "SAMPLE", 900)
    seen: list[str] = []

    def watched(texts: Iterable[str], vocabulary: int) -> ByteTokenizer:
        seen.extend(texts)
        return ByteTokenizer()

    monkeypatch.setattr("core_torch.data.tokenizer.train_bpe", watched)
    prepare_folder([str(tmp_path / "a.jsonl")], tmp_path / "out", DataConfig(tokenizer="bpe"))
    assert seen == [f"{n:04} text" for n in range(0, 950, 10)][: 900 // 9]


def test_a_tokenizer_file_is_kept_beside_the_tokens(sources: Path, tmp_path: Path) -> None:
    train_bpe(WORDS, 270).save(tmp_path / "own.json")
    config = DataConfig(tokenizer=str(tmp_path / "own.json"))
    prepare_folder([str(sources / "a.txt")], tmp_path / "out", config)
    prepared = open_prepared(tmp_path / "out")
    assert prepared.tokenizer.fingerprint() == train_bpe(WORDS, 270).fingerprint()
    assert prepared.tokenizer.decode(prepared.train.ids[:20]).startswith("To be, or not")


def test_a_preparation_that_fails_leaves_nothing_and_can_be_begun_again(
    sources: Path, tmp_path: Path
) -> None:
    def fail(doing: str, done: int, of: int) -> None:
        if doing == "encoding":
            raise KeyboardInterrupt

    place = tmp_path / "place"
    with pytest.raises(KeyboardInterrupt):
        prepare_folder([str(sources)], place / "out", DataConfig(), tell=fail)
    assert list(place.iterdir()) == []
    prepare_folder([str(sources)], place / "out", DataConfig())
    assert [path.name for path in place.iterdir()] == ["out"]


KILLED = """
import sys, time
from pathlib import Path
from core_torch.config import DataConfig
from core_torch.data import preparing
preparing._JOB = 500

def tell(doing, done, of):
    if doing == "encoding":
        print("there", flush=True)
        time.sleep(60)

if __name__ == "__main__":
    preparing.prepare_folder([sys.argv[1]], Path(sys.argv[2]), DataConfig(), processes=2, tell=tell)
"""


def test_a_killed_preparation_takes_its_processes_along_and_what_it_left_is_swept(
    sources: Path, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(KILLED)
    place = tmp_path / "place"
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py"), str(sources), str(place / "out")],
        env=os.environ | {"PYTHONPATH": root},
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"there\n"
        with pytest.raises(DataError, match="another process is writing"):
            prepare_folder([str(sources)], place / "out", DataConfig())
        os.kill(program.pid, signal.SIGKILL)
        program.wait(30)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                os.killpg(program.pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.05)
        else:
            os.killpg(program.pid, signal.SIGKILL)
            pytest.fail("a process that encodes outlives the one that reads")
    assert [path.name for path in place.iterdir()] == [".out.partial"]
    prepare_folder([str(sources)], place / "out", DataConfig())
    assert [path.name for path in place.iterdir()] == ["out"]


def test_a_folder_that_is_there_is_not_touched(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("")
    with pytest.raises(DataError, match="exists already"):
        prepare_folder([str(sources)], tmp_path / "out", DataConfig())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    assert not (tmp_path / ".out.partial").exists()


def test_a_place_that_cannot_be_written_is_named(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write .*Not a directory"):
        prepare_folder([str(sources)], tmp_path / "file/out", DataConfig())


def test_a_file_that_changes_between_the_passes_is_refused(sources: Path, tmp_path: Path) -> None:
    def tell(doing: str, done: int, of: int) -> None:
        if doing == "reading b.txt":
            (sources / "a.txt").write_text(WORDS * 41)

    with pytest.raises(DataError, match=r"a.txt had 1720 characters and now has 1763"):
        prepare_folder([str(sources)], tmp_path / "out", DataConfig(), tell=tell)
    assert not (tmp_path / "out").exists()


def test_a_named_source_must_be_readable_one_of_a_folder_need_not(
    sources: Path, tmp_path: Path
) -> None:
    (sources / "z.txt").write_bytes(b"\xff")
    told = prepare_folder([str(sources)], tmp_path / "out", DataConfig())
    assert told["skipped"] == [f"{sources}/z.txt is not UTF-8: byte 0xff at offset 0"]
    with pytest.raises(DataError, match="z.txt is not UTF-8"):
        prepare_folder([str(sources / "z.txt")], tmp_path / "other", DataConfig())


def test_text_that_is_encoded_as_an_end_is_refused() -> None:
    class Ends(ByteTokenizer):
        end_of_text = ord("x")

    ids, ended = encode(Job(0, (Piece("a", True), Piece("b", False), Piece("c", True))), Ends())
    assert ids.tolist() == [97, 120, 98, 99, 120] and ended == 2
    with pytest.raises(DataError, match="encoded as token 120"):
        encode(Job(0, (Piece("axb", True),)), Ends())


@pytest.fixture
def out(sources: Path, tmp_path: Path) -> Path:
    prepare_folder([str(sources)], tmp_path / "out", DataConfig())
    return tmp_path / "out"


def test_a_changed_id_is_found_when_the_content_is_checked(out: Path) -> None:
    raw = bytearray((out / "train.tokens").read_bytes())
    raw[100] ^= 1
    (out / "train.tokens").write_bytes(raw)
    prepared = open_prepared(out)  # reads headers only
    with pytest.raises(DataError, match="train.tokens is not what was written"):
        prepared.check_content()


def test_files_that_do_not_belong_together_are_refused(out: Path, tmp_path: Path) -> None:
    shutil.copytree(out, tmp_path / "swapped")
    shutil.copy(out / "held_out.tokens", tmp_path / "swapped/train.tokens")
    with pytest.raises(DataError, match=r"train.tokens has \d+ tokens; data.json says other"):
        open_prepared(tmp_path / "swapped")
    train_bpe(WORDS, 257).save(out / "tokenizer.json")
    with pytest.raises(DataError, match="tokenizer.json or data.json is not what was written"):
        open_prepared(out)


@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_a_folder_without_a_manifest_is_none_of_prepared_tokens(
    out: Path, content: str | None
) -> None:
    (out / "data.json").unlink()
    if content is not None:
        (out / "data.json").write_text(content)
    with pytest.raises(DataError, match="is no folder of prepared tokens"):
        open_prepared(out)


def test_a_folder_of_another_version_is_refused(out: Path) -> None:
    manifest = json.loads((out / "data.json").read_text())
    (out / "data.json").write_text(json.dumps(manifest | {"version": 2}))
    with pytest.raises(DataError, match="has version 2; this version reads 1"):
        open_prepared(out)


def test_a_new_folder_is_hidden_until_it_is_whole(tmp_path: Path) -> None:
    with new_folder(tmp_path / "a") as folder:
        (folder / "x").write_text("1")
        assert not (tmp_path / "a").exists() and folder.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "a/x").read_text() == "1"
