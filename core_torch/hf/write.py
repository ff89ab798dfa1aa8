"""Writes a model's folder as transformers reads it, one tensor in memory at a time."""

import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core_torch.config import ModelConfig
from core_torch.data.atomic import write_atomic
from core_torch.data.tokenizer import ByteTokenizer, Tokenizer
from core_torch.errors import ConfigError
from core_torch.hf.byte_tokenizer import byte_tokenizer_json
from core_torch.hf.config import to_json
from core_torch.hf.names import Place, places, to_theirs

CODES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
PART = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")
MAX_SHARD_BYTES = 5_000_000_000  # as transformers cuts

Read = Callable[[str], Tensor]  # a tensor of the model by its name


def write_folder(
    folder: Path,
    model: ModelConfig,
    vocabulary: int,
    read: Read,
    *,
    dtype: torch.dtype,
    tokenizer: Tokenizer,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[Path]:
    """Writes weights, index, config.json and tokenizer. config.json comes last.

    Args:
        folder: made if missing; must hold no model.
        model: its sizes.
        vocabulary: token ids of the model.
        read: gives each tensor of the model, as often as it is asked.
        dtype: that the files hold; tensors are cast to it.
        tokenizer: of the run.
        max_shard_bytes: a file holds no more, but for a single tensor that is larger.

    Returns:
        The files.

    Raises:
        ConfigError: the folder holds a model already.
        DataError: a file cannot be written.
    """
    taken = sorted(p.name for p in folder.iterdir() if _is_ours(p)) if folder.is_dir() else []
    if taken:
        raise ConfigError(f"out: {folder} holds a model already: {taken[0]}", next="another --out")
    folder.mkdir(parents=True, exist_ok=True)
    wanted = places(model, vocabulary)
    files = _cut(wanted, dtype.itemsize, max_shard_bytes)
    for file, names in files.items():
        held = {name: wanted[name] for name in names}
        write_atomic(folder / file, _file(held, read, dtype))
    if len(files) > 1:
        total = sum(_count(place) for place in wanted.values()) * dtype.itemsize
        weight_map = {wanted[name].name: file for file, names in files.items() for name in names}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_tokenizer(folder, tokenizer)
    said = str(dtype).removeprefix("torch.")
    end = tokenizer.end_of_text
    _write_json(folder / CONFIG, to_json(model, vocabulary, dtype=said, end_of_text=end))
    return sorted(p for p in folder.iterdir() if _is_ours(p))


def _is_ours(path: Path) -> bool:
    """Whether this is a name that ``write_folder`` gives."""
    fixed = (SINGLE, INDEX, CONFIG, TOKENIZER, TOKENIZER_CONFIG)
    return path.name in fixed or PART.fullmatch(path.name) is not None


def _count(place: Place) -> int:
    return int(torch.Size(place.shape).numel())


def _cut(wanted: Mapping[str, Place], width: int, limit: int) -> dict[str, list[str]]:
    """Names by file, in order; a file is closed before it would exceed the limit."""
    groups: list[list[str]] = []
    room = 0
    for name, place in wanted.items():
        size = _count(place) * width
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": x for i, x in enumerate(groups, 1)}


def _file(held: Mapping[str, Place], read: Read, dtype: torch.dtype) -> Iterator[bytes]:
    """A safetensors file: length of the header, header, then the tensors one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for place in held.values():
        begin, end = end, end + _count(place) * dtype.itemsize
        header[place.name] = {
            "dtype": CODES[dtype],
            "shape": list(place.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    yield struct.pack("<Q", len(text)) + text
    for name, place in held.items():
        x = to_theirs(read(name), place).to(dtype).contiguous()
        assert tuple(x.shape) == place.shape, f"{name} is {list(x.shape)}"
        yield x.view(torch.uint8).numpy().tobytes()


def _write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """tokenizer.json, and which class of transformers reads it."""
    if isinstance(tokenizer, ByteTokenizer):
        write_atomic(folder / TOKENIZER, [byte_tokenizer_json().encode()])
    else:
        tokenizer.save(folder / TOKENIZER)
    end = tokenizer.end_of_text
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    if end is not None:
        settings["eos_token"] = tokenizer_name(folder / TOKENIZER, end)
    _write_json(folder / TOKENIZER_CONFIG, settings)


def tokenizer_name(path: Path, token: int) -> str:
    """What a tokenizer.json calls one of its special tokens."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    return next(str(x["content"]) for x in raw["added_tokens"] if x["id"] == token)


def _write_json(path: Path, value: Any) -> None:
    write_atomic(path, [(json.dumps(value, indent=2) + "\n").encode()])
