"""Text is read whole or refused by name; a run folder is prepared once and never mixed up."""

import hashlib
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_torch.config import DataConfig
from core_torch.data import corpus as corpus_module
from core_torch.data.corpus import load_text, open_corpus, prepare
from core_torch.data.token_file import open_tokens, write_tokens
from core_torch.data.tokenizer import train_bpe
from core_torch.errors import DataError

TEXT = "To be, or not to be: that is the question.\n" * 100


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "hamlet.txt"
    path.write_text(TEXT)
    return path


def config_for(source: Path, **changes: object) -> DataConfig:
    return DataConfig(path=str(source), **changes)  # type: ignore[arg-type]


def test_an_empty_path_is_the_shipped_corpus_that_provenance_describes() -> None:
    text = load_text("")
    provenance = (Path(corpus_module.__file__).parent / "PROVENANCE.md").read_text()
    assert hashlib.sha256(text.encode()).hexdigest() in provenance
    assert text.startswith("THE SONNETS") and len(text) > 1_000_000
    assert (Path(corpus_module.__file__).parent / corpus_module.SHIPPED).stat().st_size < 500_000


def test_the_data_package_needs_no_torch() -> None:
    program = (
        "import sys, core_torch.data.corpus, core_torch.data.batches\n"
        "sys.exit('torch' in sys.modules or 'jax' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, timeout=120).returncode == 0


def test_a_byte_order_mark_is_dropped_and_line_ends_become_newlines(tmp_path: Path) -> None:
    path = tmp_path / "dos.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n\xc3\xa9")
    assert load_text(str(path)) == "one\ntwo\nthree\né"


def test_a_folder_is_its_visible_text_files_in_order_of_their_paths(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "c.TXT", "pic.png", ".git/x.txt", ".hidden.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert load_text(str(tmp_path)) == "a/z.md\nb.txt\nc.TXT"


def refused(path: Path, message: str) -> DataError:
    with pytest.raises(DataError, match=message) as caught:
        load_text(str(path))
    assert str(path.name) in caught.value.where and caught.value.likely and caught.value.next
    return caught.value


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "gone", "gone is missing")


@pytest.mark.parametrize("content", [b"", b" \r\n\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused_if_it_is_named_and_left_out_of_a_folder(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "full.txt").write_text("words")
    (tmp_path / "hollow.txt").write_bytes(content)
    refused(tmp_path / "hollow.txt", "hollow.txt is empty")
    assert load_text(str(tmp_path)) == "words"


def test_a_byte_that_is_not_utf_8_is_named_with_its_offset_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"\xef\xbb\xbfcaf\xe9 noir")
    refused(tmp_path / "latin.txt", "latin.txt is not UTF-8: byte 0xe9 at offset 6")


def test_a_binary_file_is_refused_with_the_offset_of_its_first_zero(tmp_path: Path) -> None:
    (tmp_path / "tool.txt").write_bytes(b"ELF\0\0")
    refused(tmp_path / "tool.txt", "tool.txt is not text: zero byte at offset 3")


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"x")
    refused(tmp_path, "holds no text files")


def test_a_pipe_is_neither_a_file_nor_a_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "neither a file nor a folder")


def test_a_path_that_the_system_refuses_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read .*File name too long"):
        load_text(str(tmp_path / ("x" * 300)))


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_both_splits_together_are_the_text_and_every_document_ends(
    tmp_path: Path, tokenizer: str
) -> None:
    source = tmp_path / "texts"
    source.mkdir()
    for name in "abc":
        (source / f"{name}.txt").write_text(name * 1000)
    config = config_for(source, tokenizer=tokenizer, bpe_vocabulary=260, held_out=0.2)
    corpus = prepare(config, tmp_path / "run")
    train, held_out = (
        [corpus.tokenizer.decode(part) for part in documents_of(split.ids, corpus)]
        for split in (corpus.train, corpus.held_out)
    )
    assert train == ["a" * 1000, "b" * 1000, "c" * 400]
    assert held_out == ["c" * 600]


def documents_of(ids: np.ndarray, corpus: corpus_module.Corpus) -> list[np.ndarray]:
    ends = np.flatnonzero(ids == corpus.tokenizer.end_of_text)
    assert ends[-1] == len(ids) - 1
    return np.split(ids[:-1], ends[:-1])


@settings(deadline=None)
@given(st.lists(st.text(min_size=1), min_size=1, max_size=5), st.floats(0.01, 0.5))
def test_a_split_loses_no_character_and_keeps_the_order(texts: list[str], share: float) -> None:
    total = sum(map(len, texts))
    if not 0 < round(total * share) < total:
        with pytest.raises(DataError, match=f"{total} characters is too short"):
            corpus_module._split(texts, share)
        return
    train, held_out = corpus_module._split(texts, share)
    assert "".join(train + held_out) == "".join(texts)
    assert len("".join(held_out)) == round(total * share)
    assert all(train) and all(held_out)


def test_the_bpe_is_not_trained_on_held_out_text(tmp_path: Path) -> None:
    found = []
    for end in "xy":
        source = tmp_path / f"{end}.txt"
        source.write_text(TEXT + end * 200)  # less than the 5 % that are held out
        config = config_for(source, tokenizer="bpe", bpe_vocabulary=280)
        found.append(prepare(config, tmp_path / end).tokenizer.fingerprint())
    assert found[0] == found[1]


def test_a_prepared_folder_is_opened_not_written_again(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    prepare(config_for(source), folder)
    before = {path.name: path.stat().st_ino for path in folder.iterdir()}
    prepare(config_for(source), folder)
    open_corpus(folder)
    assert {path.name: path.stat().st_ino for path in folder.iterdir()} == before
    assert set(before) == {"train.tokens", "held_out.tokens", "tokenizer.json", "data.json"}
    assert folder.stat().st_mode & 0o777 == 0o700


def test_layout_settings_do_not_belong_to_the_prepared_files(source: Path, tmp_path: Path) -> None:
    prepare(config_for(source), tmp_path / "run")
    prepare(config_for(source, sequence=7, batch=3, seed=5), tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"held_out": 0.1}, "held_out"),
        ({"tokenizer": "byte"}, "tokenizer"),
        ({"bpe_vocabulary": 271}, "tokenizer"),
        ({"tokenizer": "byte", "held_out": 0.1}, "tokenizer and held_out"),
    ],
)
def test_a_folder_prepared_with_other_settings_is_refused(
    source: Path, tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    bpe: dict[str, object] = {"tokenizer": "bpe", "bpe_vocabulary": 270}
    prepare(config_for(source, **bpe), tmp_path / "run")
    with pytest.raises(DataError, match=f"another {named}\n"):
        prepare(config_for(source, **bpe | changes), tmp_path / "run")


def test_a_folder_prepared_from_another_text_is_refused(source: Path, tmp_path: Path) -> None:
    prepare(config_for(source), tmp_path / "run")
    source.write_text(TEXT + "!")
    with pytest.raises(DataError, match="another text\n"):
        prepare(config_for(source), tmp_path / "run")


def test_a_tokenizer_file_that_changed_under_its_name_is_refused(
    source: Path, tmp_path: Path
) -> None:
    named = tmp_path / "tokenizer.json"
    train_bpe(TEXT, 270).save(named)
    prepare(config_for(source, tokenizer=str(named)), tmp_path / "run")
    train_bpe(TEXT, 271).save(named)
    with pytest.raises(DataError, match="another tokenizer\n"):
        prepare(config_for(source, tokenizer=str(named)), tmp_path / "run")


def test_a_preparation_that_was_killed_is_done_again(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    whole = prepare(config_for(source), folder).train.ids.tolist()
    (folder / "data.json").unlink()
    (folder / "train.tokens").write_bytes(b"half")
    with pytest.raises(DataError, match="not prepared"):
        open_corpus(folder)
    assert prepare(config_for(source), folder).train.ids.tolist() == whole


def test_processes_that_prepare_one_folder_together_agree(source: Path, tmp_path: Path) -> None:
    folder, config = tmp_path / "run", config_for(source, tokenizer="bpe", bpe_vocabulary=280)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=prepare, args=(config, folder)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert len(open_corpus(folder).train) > 0
    assert len(list(folder.iterdir())) == 4


def test_an_id_changed_on_disk_is_found_when_the_folder_is_opened(
    source: Path, tmp_path: Path
) -> None:
    prepare(config_for(source), tmp_path / "run")
    raw = bytearray((tmp_path / "run/train.tokens").read_bytes())
    raw[-1] = 0xFF
    (tmp_path / "run/train.tokens").write_bytes(raw)
    with pytest.raises(DataError, match="outside the vocabulary of 257"):
        open_corpus(tmp_path / "run")


def test_a_tokenizer_swapped_in_the_folder_is_refused(source: Path, tmp_path: Path) -> None:
    prepare(config_for(source), tmp_path / "run")
    train_bpe(TEXT, 257).save(tmp_path / "run/tokenizer.json")
    with pytest.raises(DataError, match="not the tokenizer that the tokens were made with"):
        open_corpus(tmp_path / "run")


def test_tokens_of_another_vocabulary_are_refused(source: Path, tmp_path: Path) -> None:
    prepare(config_for(source), tmp_path / "run")
    path = tmp_path / "run/held_out.tokens"
    write_tokens(path, np.array(open_tokens(path).ids), 300)
    with pytest.raises(DataError, match="held_out.tokens has vocabulary 300, the tokenizer 257"):
        open_corpus(tmp_path / "run")


@pytest.mark.parametrize("content", ["{", "[]", "\ud83d"])
def test_a_damaged_manifest_is_refused(source: Path, tmp_path: Path, content: str) -> None:
    prepare(config_for(source), tmp_path / "run")
    (tmp_path / "run/data.json").write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(DataError, match="data.json is damaged"):
        prepare(config_for(source), tmp_path / "run")


def test_a_file_in_the_folders_place_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(DataError, match="cannot make the folder: File exists"):
        prepare(config_for(source), tmp_path / "run")


def test_check_wants_every_row_of_a_step_to_be_another_sequence(
    source: Path, tmp_path: Path
) -> None:
    corpus = prepare(config_for(source), tmp_path / "run")
    available = (len(corpus.train) - 1) // 16
    corpus.check(sequence=16, draws=available)
    with pytest.raises(DataError, match=f"training split holds {available} sequences of 16 tok"):
        corpus.check(sequence=16, draws=available + 1)
    with pytest.raises(DataError, match="held-out split holds 0 sequences of 300"):
        corpus.check(sequence=300, draws=1)
