"""Reads a model's folder of transformers: what it says, and its tensors one at a time.

Names in the index may not lead out of the folder. Files may be links, as in the cache of
Hugging Face; nothing but safetensors and JSON is taken from them.
"""

import dataclasses
import json
import math
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from core_torch.config import ModelConfig, problems_error
from core_torch.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch
from core_torch.hf.config import differences, from_json
from core_torch.hf.names import TOP, Place, places, to_ours
from core_torch.hf.write import CODES, CONFIG, INDEX, SINGLE, TOKENIZER
from core_torch.models import Model

PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
# Tables that older files keep beside the weights; they follow from config.json.
DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
HEAD, EMBEDDING = TOP["output.weight"], TOP["tok_embeddings.weight"]
MOST_JSON_BYTES = 64 << 20  # read whole, so refused before


class HfFolder:
    """A folder whose names, shapes and dtypes fit its config.json.

    Attributes:
        path: the folder.
        model: sizes, with the vocabulary.
        dtype: of the tensors, as config.json says; empty if it does not.
        notes: what was passed over or filled in, a line each.
        tokenizer: path of its tokenizer.json, or None.

    Raises:
        CheckpointError: no folder of a model.
        CheckpointCorrupt: a file is cut short or is no safetensors.
        CheckpointMismatch: tensors are missing, too many, or of other shapes.
        ConfigError: config.json asks for what Twinshard does not compute.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        found = from_json(_json(path / CONFIG), str(path / CONFIG))
        self.model, self.dtype, self.notes = found
        self._places = places(self.model, self.model.vocabulary)
        self._files = self._checked(_file_of_tensor(path))
        there = path / TOKENIZER
        self.tokenizer: Path | None = there if there.is_file() else None

    @property
    def parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(math.prod(place.shape) for place in self._places.values())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by its name in the model, in its order of rows, file by file."""
        by_file: dict[Path, list[str]] = {}
        for name, place in self._places.items():
            by_file.setdefault(self._files[place.name], []).append(name)
        for file, names in by_file.items():
            with _opened(file) as source:
                for name in names:
                    place = self._places[name]
                    yield name, to_ours(source.get_tensor(place.name), place)

    def _checked(self, files: dict[str, Path]) -> dict[str, Path]:
        """The file of each tensor, once all headers agree with config.json."""
        want = {place.name: place for place in self._places.values()}
        got: dict[str, tuple[str, tuple[int, ...]]] = {}
        for file in dict.fromkeys(files.values()):
            with _opened(file) as source:
                for name in source.keys():
                    part = source.get_slice(name)
                    if files.get(name) != file:
                        raise self._misfit(f"{name} lies in {file.name}, and the index differs")
                    got[name] = (part.get_dtype(), tuple(part.get_shape()))
        extra = sorted(name for name in got.keys() - want.keys() if not DERIVED.fullmatch(name))
        if HEAD in extra and self.model.tied:
            extra.remove(HEAD)
            self._check_tied(files)
        missing = [name for name in want if name not in got]
        if missing:
            raise self._misfit(f"{missing[0]} is missing ({len(missing)} of {len(want)} are)")
        if extra:
            raise self._misfit(f"{extra[0]} is no tensor of this model ({len(extra)} such)")
        for name, place in want.items():
            self._check_one(name, place, *got[name])
        return {name: files[name] for name in want}

    def _check_one(self, name: str, place: Place, code: str, shape: tuple[int, ...]) -> None:
        if shape != place.shape:
            raise self._misfit(f"{name} is {list(shape)}, config.json says {list(place.shape)}")
        if code not in CODES.values():
            raise self._misfit(f"{name} is {code}; {', '.join(CODES.values())} can be read")

    def _check_tied(self, files: dict[str, Path]) -> None:
        """A head beside a tied embedding must be the same: transformers would drop it."""
        both = []
        for name in (HEAD, EMBEDDING):
            if name not in files:
                return  # told as missing
            with _opened(files[name]) as source:
                both.append(source.get_tensor(name))
        if not torch.equal(*both):
            raise self._misfit(f"tie_word_embeddings is true, and {HEAD} is another weight")

    def _misfit(self, what: str) -> CheckpointMismatch:
        return CheckpointMismatch(
            what,
            where=str(self.path),
            likely="files of two models in one folder, an incomplete copy, or no plain Llama",
        )


def check_init(folder: str, config: ModelConfig) -> None:
    """Checks that a run of ``config`` can begin with a folder's weights; reads headers only.

    Args:
        folder: of the model.
        config: of the run, with the vocabulary filled in.

    Raises:
        ConfigError: the two models differ, with every field.
        TwinshardError: see ``HfFolder``.
    """
    _fitting(folder, config)


@torch.no_grad()
def load_weights(model: Model, folder: str) -> None:
    """Copies a folder's weights into a whole model, tensor by tensor, in the model's dtype.

    Raises:
        TwinshardError: see ``check_init``.
    """
    config = dataclasses.replace(model.config, vocabulary=model.vocabulary)
    params = dict(model.named_parameters())
    for name, x in _fitting(folder, config).tensors():
        params[name].copy_(x)


def _fitting(folder: str, config: ModelConfig) -> HfFolder:
    found = HfFolder(Path(folder))
    problems = differences(config, found.model)
    if problems:
        error = problems_error(problems)
        error.where = folder
        error.next = f"twinshard ckpt import {shlex.quote(folder)} --run RUN writes what fits"
        raise error
    return found


def _file_of_tensor(folder: Path) -> dict[str, Path]:
    """Which file holds which tensor: of the single file, else as the index says."""
    single = folder / SINGLE
    if single.is_file():
        with _opened(single) as source:
            return {name: single for name in source.keys()}
    if not (folder / INDEX).is_file():
        pickled = sorted(folder.glob("*.bin"))
        raise CheckpointError(
            f"{folder} has neither {SINGLE} nor {INDEX}",
            where=str(folder),
            likely=f"{pickled[0].name} is a pickle, which could run code" if pickled else "",
            next="save it with transformers' save_pretrained, which writes safetensors",
        )
    raw = _json(folder / INDEX)
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise _corrupt(folder / INDEX, "it has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not PLAIN_NAME.fullmatch(file):
            raise _corrupt(folder / INDEX, f"{name} lies in {file!r}, which is no plain file name")
        if not (folder / file).is_file():
            raise CheckpointError(
                f"{file} is missing, and holds {name}",
                where=str(folder),
                likely="an incomplete copy",
                next="copy the folder again",
            )
    return {name: folder / file for name, file in weight_map.items()}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file, whose header and length fit each other."""
    try:
        with safe_open(path, framework="pt", device="cpu") as source:
            yield source
    except (SafetensorError, OSError) as error:
        raise _corrupt(path, str(error)) from error


def _json(path: Path) -> Any:
    try:
        if path.stat().st_size > MOST_JSON_BYTES:
            raise _corrupt(path, f"it is longer than {MOST_JSON_BYTES} bytes")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path.parent} is no folder of a model: {path.name}: {error.strerror}",
            where=str(path),
            likely="a mistyped path, or a name on a hub: models are read from folders here",
        ) from error
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, f"it is not JSON: {error}") from error


def _corrupt(path: Path, message: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"{path.name} cannot be read: {message}",
        where=str(path),
        likely="a copy or download that was cut short, or an edited file",
        next="copy the folder again",
    )
