"""A token file is whole, of the size it says, and holds ids of its vocabulary only."""

import struct
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_torch.data.atomic import write_atomic
from core_torch.data.token_file import HEADER, open_tokens, write_tokens
from core_torch.errors import DataError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A token file of the ids 0..9 with vocabulary 257."""
    path = tmp_path / "train.tokens"
    write_tokens(path, np.arange(10), 257)
    return path


@settings(deadline=None)
@given(st.data(), st.sampled_from([1, 257, 65536, 65537, 2**32]))
def test_ids_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, vocabulary: int
) -> None:
    ids = data.draw(st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=20))
    path = tmp_path_factory.mktemp("tokens") / "t"
    write_tokens(path, np.array(ids, dtype=np.int64), vocabulary)
    file = open_tokens(path)
    file.check_ids()
    assert file.ids.tolist() == ids and len(file) == len(ids) and file.vocabulary == vocabulary


@pytest.mark.parametrize(("vocabulary", "dtype"), [(65536, "<u2"), (65537, "<u4")])
def test_ids_take_two_bytes_as_long_as_the_vocabulary_fits(
    tmp_path: Path, vocabulary: int, dtype: str
) -> None:
    write_tokens(tmp_path / "t", np.array([vocabulary - 1]), vocabulary)
    assert open_tokens(tmp_path / "t").ids.dtype == np.dtype(dtype)


def test_the_file_is_little_endian_and_laid_out_as_documented(path: Path) -> None:
    assert path.read_bytes() == (
        b"TWINTOKS" + struct.pack("<IIQQ", 1, 2, 257, 10) + struct.pack("<10H", *range(10))
    )


def test_the_ids_are_mapped_and_cannot_be_written(path: Path) -> None:
    ids = open_tokens(path).ids
    assert isinstance(ids, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1


@pytest.mark.parametrize("bad", [257, -1])
def test_an_id_outside_the_vocabulary_is_refused_with_its_position(
    tmp_path: Path, bad: int
) -> None:
    with pytest.raises(DataError, match=f"id {bad} at position 2 .* 257"):
        write_tokens(tmp_path / "t", np.array([0, 256, bad, bad]), 257)
    assert list(tmp_path.iterdir()) == []


def test_an_id_that_was_changed_on_disk_is_found_with_its_position(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[HEADER.size + 2 * 7 + 1] = 0xFF
    path.write_bytes(raw)
    with pytest.raises(DataError, match="id 65287 at position 7"):
        open_tokens(path).check_ids()


def test_no_tokens_are_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokens"):
        write_tokens(tmp_path / "t", np.array([], dtype=np.int64), 257)


@pytest.mark.parametrize("ids", [np.zeros((2, 2), np.int64), np.zeros(2)])
def test_only_flat_integers_are_ids(tmp_path: Path, ids: np.ndarray) -> None:
    with pytest.raises(ValueError, match="1-D integers"):
        write_tokens(tmp_path / "t", ids, 257)


@pytest.mark.parametrize("vocabulary", [0, 2**32 + 1])
def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path: Path, vocabulary: int) -> None:
    with pytest.raises(ValueError, match=f"got {vocabulary}"):
        write_tokens(tmp_path / "t", np.array([0]), vocabulary)


@pytest.mark.parametrize("cut", [1, 20, 30, 51])
def test_a_truncated_file_is_refused_wherever_it_was_cut(path: Path, cut: int) -> None:
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(DataError, match="train.tokens (has .* bytes|is not a token file)"):
        open_tokens(path)


def test_a_file_that_grew_is_refused_with_both_sizes(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(DataError, match="has 53 bytes; 10 ids need 52"):
        open_tokens(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ((b"NOTTOKEN", 1, 2, 257, 10), "is not a token file"),
        ((b"TWINTOKS", 2, 2, 257, 10), "format version 2"),
        ((b"TWINTOKS", 1, 4, 257, 5), "damaged header: 4 bytes per id"),
        ((b"TWINTOKS", 1, 2, 65537, 10), "damaged header: 2 bytes per id"),
        ((b"TWINTOKS", 1, 2, 0, 10), "vocabulary 0"),
        ((b"TWINTOKS", 1, 2, 257, 2**63), "ids need"),
        ((b"TWINTOKS", 1, 2, 257, 0), "0 ids"),
    ],
)
def test_a_header_that_is_not_ours_is_refused(
    path: Path, header: tuple[bytes, int, int, int, int], message: str
) -> None:
    path.write_bytes(HEADER.pack(*header) + path.read_bytes()[HEADER.size :])
    with pytest.raises(DataError, match=message) as caught:
        open_tokens(path)
    assert caught.value.where == str(path) and caught.value.likely and caught.value.next


def test_an_empty_file_with_a_sound_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(HEADER.pack(b"TWINTOKS", 1, 2, 257, 0))
    with pytest.raises(DataError, match="0 ids"):
        open_tokens(tmp_path / "t")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read gone.tokens"):
        open_tokens(tmp_path / "gone.tokens")


def test_a_write_that_fails_keeps_the_old_file_and_leaves_nothing_behind(path: Path) -> None:
    before = path.read_bytes()

    def chunks_that_break() -> object:
        yield b"half"
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match="cannot write train.tokens: No space left"):
        write_atomic(path, chunks_that_break())  # type: ignore[arg-type]
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot write t:"):
        write_tokens(tmp_path / "gone" / "t", np.array([0]), 257)


def test_a_reader_never_sees_half_of_a_file_while_two_writers_replace_it(path: Path) -> None:
    def write(value: int) -> None:
        for _ in range(20):
            write_tokens(path, np.full(5000, value), 257)

    writers = [threading.Thread(target=write, args=(value,)) for value in (3, 5)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        ids = np.array(open_tokens(path).ids)
        assert len(ids) == 10 or len(set(ids.tolist())) == 1
    for writer in writers:
        writer.join()
    assert list(path.parent.iterdir()) == [path]
