"""Datasets of Hugging Face's ``datasets`` as documents; the package is imported where used.

    from datasets import load_dataset
    from core_torch.data.hf_datasets import prepare_examples

    stream = load_dataset("NAME", split="train", streaming=True)
    prepare_examples(stream, Path("corpora/name"), DataConfig(tokenizer="bpe"), limit=100_000)

Any iterable of dictionaries will do. A stream is read once, into a file beside the new folder,
because preparing reads twice; the file is deleted at the end. The command ``twinshard data
prepare`` takes folders that ``Dataset.save_to_disk`` wrote, and never downloads.
"""

import dataclasses
import importlib
import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from core_torch.config import DataConfig
from core_torch.data.preparing import Tell, prepare_folder
from core_torch.data.sources import Unfit, missing_package
from core_torch.errors import DataError

Examples = Iterable[Mapping[str, Any]]


def prepare_examples(
    examples: Examples,
    out: Path,
    config: DataConfig,
    *,
    limit: int | None = None,
    processes: int = 1,
    tell: Tell = lambda doing, done, of: None,
) -> dict[str, Any]:
    """Writes a prepared folder from a dataset, streaming or not.

    Args:
        examples: dictionaries; each holds a document under ``config.field``.
        out: the new folder.
        config: its tokenizer, held_out and field.
        limit: examples that are taken from the beginning; None: all.
        processes: that encode; 1: this one does.
        tell: told of progress.

    Returns:
        What data.json says.

    Raises:
        DataError: as ``prepare_folder``.
    """
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=".examples-") as place:
            spool = Path(place) / "examples.jsonl"
            characters = 0
            with spool.open("w", encoding="ascii") as lines:
                for example in itertools.islice(examples, limit):
                    value = example.get(config.field)
                    characters += len(value) if isinstance(value, str) else 0
                    tell("fetching", characters, 0)
                    kept = {config.field: value if isinstance(value, str) else None}
                    lines.write(json.dumps(kept) + "\n")
            plain = dataclasses.replace(config, path="", mixture="")
            return prepare_folder(
                [str(spool)],
                out,
                plain,
                processes=processes,
                tell=tell,
                called=lambda text: text.replace(str(spool), "examples"),
            )
    except OSError as error:
        raise DataError(
            f"cannot write {out}: {error.strerror or error}",
            where=str(out.absolute()),
            likely="the disk is full; a stream needs as much as its text",
            next="make space, or take less by limit",
        ) from error


def load_saved(folder: Path) -> Examples:
    """Opens what ``Dataset.save_to_disk`` wrote.

    Raises:
        DataError: it cannot be opened.
        ConfigError: the package ``datasets`` is missing.
    """
    try:
        datasets: Any = importlib.import_module("datasets")  # an extra
    except ImportError as error:
        raise missing_package("datasets", folder) from error
    try:
        found: Examples = datasets.Dataset.load_from_disk(str(folder))
    except Exception as error:  # the library has no errors of its own for damaged files
        raise DataError(
            f"{folder} cannot be opened as a dataset: {str(error).splitlines()[0]}",
            where=str(folder.absolute()),
            likely="a copy that failed, or another version of datasets",
            next="save it again with save_to_disk",
        ) from error
    return found


def values_of(examples: Examples, field: str) -> Iterator[object]:
    """The field of each example."""
    for example in examples:
        yield example[field] if field in example else Unfit(f"have no field {field!r}")
