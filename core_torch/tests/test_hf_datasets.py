"""Datasets of Hugging Face become prepared folders; with the real library where it is installed."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from core_torch.config import DataConfig
from core_torch.data.hf_datasets import prepare_examples
from core_torch.data.prepared import open_prepared
from core_torch.data.preparing import prepare_folder
from core_torch.errors import DataError

TEXTS = [f"Document {n}: to be, or not to be.\n" * 3 for n in range(50)]


def content(folder: Path) -> str:
    return open_prepared(folder).content


@pytest.fixture
def lines(tmp_path: Path) -> str:
    """The fingerprint of the same documents as JSON lines."""
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": x}) for x in TEXTS))
    prepare_folder([str(tmp_path / "a.jsonl")], tmp_path / "from_lines", DataConfig())
    return content(tmp_path / "from_lines")


def test_a_stream_is_read_once_and_leaves_only_the_folder(tmp_path: Path, lines: str) -> None:
    def stream() -> Iterator[dict[str, object]]:
        yield {"body": None}
        for text in TEXTS:
            yield {"body": text, "other": b"bytes"}
        pytest.fail("more than the limit was read")

    place, config = tmp_path / "place", DataConfig(field="body")
    told = prepare_examples(stream(), place / "out", config, limit=len(TEXTS) + 1)
    assert content(place / "out") == lines
    assert "1 lines hold no text" in told["skipped"][0]
    assert told["sources"][0]["path"] == "examples" and "/" not in told["skipped"][0]
    assert [path.name for path in place.iterdir()] == ["out"]


def test_examples_without_documents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no document"):
        prepare_examples([{"x": 1}], tmp_path / "place/out", DataConfig())
    assert list((tmp_path / "place").iterdir()) == []


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_the_library_s_datasets_streams_and_saved_folders_give_the_same_tokens(
    tmp_path: Path, lines: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"text": TEXTS})
    prepare_examples(dataset, tmp_path / "whole", DataConfig())
    prepare_examples(dataset.to_iterable_dataset(), tmp_path / "stream", DataConfig())
    datasets.disable_progress_bars()
    dataset.save_to_disk(str(tmp_path / "saved"))
    prepare_folder([str(tmp_path / "saved")], tmp_path / "from_saved", DataConfig())
    for name in ("whole", "stream", "from_saved"):
        assert content(tmp_path / name) == lines, name
    with pytest.raises(DataError, match="50 rows have no field 'body'"):
        prepare_folder([str(tmp_path / "saved")], tmp_path / "no", DataConfig(field="body"))
    (tmp_path / "saved/state.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be opened as a dataset"):
        prepare_folder([str(tmp_path / "saved")], tmp_path / "no", DataConfig())
