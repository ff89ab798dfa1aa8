"""Folders of Hugging Face's Llamas: written piece by piece, read back bit for bit, or refused."""

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from core_torch.checkpoint.stream import saved_model
from core_torch.config import ModelConfig
from core_torch.data.tokenizer import ByteTokenizer, load_tokenizer, train_bpe
from core_torch.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    ConfigError,
)
from core_torch.hf.folder import HfFolder, check_init, load_weights
from core_torch.hf.names import halves_of_pairs, pairs_of_halves
from core_torch.hf.write import write_folder
from core_torch.models import Model, build_model
from core_torch.tests.checkpoint_cases import commit_step, full_tensors

SIZES = ModelConfig(dim=16, layers=2, heads=4, kv_heads=2, hidden=24, context=32)
VOCABULARY = 257
EMBEDDING, QUERY = "model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"


def model_of(config: ModelConfig = SIZES) -> Model:
    """A small model with random weights."""
    return build_model(config, VOCABULARY, seed=1)


def reader(model: Model) -> Callable[[str], Tensor]:
    """Its tensors by name."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    return lambda name: params[name]


def written(
    folder: Path,
    model: Model,
    *,
    dtype: torch.dtype = torch.float32,
    limit: int = 1 << 30,
    read: Callable[[str], Tensor] | None = None,
) -> Path:
    """``folder`` with the model in it."""
    write_folder(
        folder,
        model.config,
        VOCABULARY,
        read or reader(model),
        dtype=dtype,
        tokenizer=ByteTokenizer(),
        max_shard_bytes=limit,
    )
    return folder


def files_of(folder: Path) -> list[Path]:
    """Its files of weights."""
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("limit", [1 << 30, 5000])
def test_what_is_written_in_one_file_or_many_is_read_back_bit_for_bit(
    tmp_path: Path, tied: bool, limit: int
) -> None:
    model = model_of(replace(SIZES, tied=tied))
    folder = written(tmp_path / "out", model, limit=limit)
    found = dict(HfFolder(folder).tensors())
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, p in model.named_parameters():
        assert torch.equal(found[name], p), name
    assert (len(files_of(folder)) > 1) is (limit == 5000)
    assert (folder / "model.safetensors.index.json").exists() is (limit == 5000)


def test_the_library_reads_the_same_tensors_from_one_file_and_from_many(tmp_path: Path) -> None:
    whole = load_file(written(tmp_path / "one", model_of()) / "model.safetensors")
    many = written(tmp_path / "many", model_of(), limit=5000)
    index = json.loads((many / "model.safetensors.index.json").read_text())
    parts = {path.name: load_file(path) for path in files_of(many)}
    assert index["weight_map"].keys() == whole.keys()
    for name, file in index["weight_map"].items():
        assert parts[file][name].numpy().tobytes() == whole[name].numpy().tobytes(), name
    sizes = {f: sum(x.nbytes for x in held.values()) for f, held in parts.items()}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert all(size <= 5000 or len(parts[f]) == 1 for f, size in sizes.items())


def test_tensors_pass_through_memory_one_at_a_time(tmp_path: Path) -> None:
    model, alive, most = model_of(), [0], 0

    def read(name: str) -> Tensor:
        nonlocal most
        copy = reader(model)(name).clone()
        alive[0] += 1
        weakref.finalize(copy, lambda: alive.__setitem__(0, alive[0] - 1))
        most = max(most, alive[0])
        return copy

    written(tmp_path / "out", model, read=read)
    assert most <= 2  # the last one may still be bound while the next is read


def test_rows_of_query_and_key_change_places_within_their_head_and_back() -> None:
    x = torch.arange(12)[:, None]
    paired = pairs_of_halves(x, 2)
    assert paired.flatten().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert torch.equal(halves_of_pairs(paired, 2), x)


def test_weights_are_cast_to_what_is_asked_and_loaded_in_the_models_dtype(tmp_path: Path) -> None:
    model = model_of()
    folder = written(tmp_path / "out", model, dtype=torch.bfloat16)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    into = build_model(SIZES, VOCABULARY, seed=2, dtype=torch.float64)
    load_weights(into, str(folder))
    for (name, got), p in zip(into.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(got, p.to(torch.bfloat16).double()), name


def test_a_folder_with_a_model_is_not_written_over(tmp_path: Path) -> None:
    folder = written(tmp_path / "out", model_of())
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="holds a model already"):
        written(folder, build_model(SIZES, VOCABULARY, seed=5))
    assert (folder / "model.safetensors").read_bytes() == before


def truncate(folder: Path) -> None:
    """Cuts the last byte off the last file."""
    path = files_of(folder)[-1]
    path.write_bytes(path.read_bytes()[:-1])


def lose_a_file(folder: Path) -> None:
    """Deletes one file of several."""
    files_of(folder)[1].unlink()


def lead_out(folder: Path) -> None:
    """Lets the index name a file elsewhere."""
    path = folder / "model.safetensors.index.json"
    raw = json.loads(path.read_text())
    raw["weight_map"][EMBEDDING] = "../secret.safetensors"
    path.write_text(json.dumps(raw))


def swap(folder: Path) -> None:
    """Lets the index name the wrong file for a tensor."""
    path = folder / "model.safetensors.index.json"
    raw = json.loads(path.read_text())
    raw["weight_map"][QUERY] = raw["weight_map"][EMBEDDING]
    path.write_text(json.dumps(raw))


def spoil(folder: Path) -> None:
    """Makes config.json something else."""
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (truncate, CheckpointCorrupt, "cannot be read"),
        (lose_a_file, CheckpointError, "is missing, and holds"),
        (lead_out, CheckpointCorrupt, "no plain file name"),
        (swap, CheckpointMismatch, "the index differs"),
        (spoil, CheckpointCorrupt, "not JSON"),
    ],
)
def test_a_damaged_folder_is_refused(
    tmp_path: Path, damage: Callable[[Path], None], kind: type[CheckpointError], message: str
) -> None:
    folder = written(tmp_path / "out", model_of(), limit=5000)
    damage(folder)
    with pytest.raises(kind, match=message):
        HfFolder(folder)


def test_a_truncated_single_file_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "out", model_of())
    truncate(folder)
    with pytest.raises(CheckpointCorrupt, match="model.safetensors cannot be read"):
        HfFolder(folder)


def changed(folder: Path, **tensors: Tensor | None) -> Path:
    """The folder with some tensors replaced, added, or taken away (None)."""
    path = folder / "model.safetensors"
    held = load_file(path) | {name.replace("__", "."): x for name, x in tensors.items()}
    save_file({name: x for name, x in held.items() if x is not None}, path)
    return folder


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (None, f"{QUERY} is missing"),
        (torch.zeros(16, 8), r"is \[16, 8\], config.json says \[16, 16\]"),
        (torch.zeros(16, 16, dtype=torch.int8), "is I8"),
    ],
    ids=["missing", "shape", "quantised"],
)
def test_tensors_that_do_not_fit_config_json_are_refused(
    tmp_path: Path, tensor: Tensor | None, message: str
) -> None:
    folder = changed(written(tmp_path / "out", model_of()), **{QUERY.replace(".", "__"): tensor})
    with pytest.raises(CheckpointMismatch, match=message):
        HfFolder(folder)


def test_tensors_of_no_use_are_refused_but_for_old_rotary_tables(tmp_path: Path) -> None:
    folder = written(tmp_path / "out", model_of())
    changed(folder, **{"model__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(2)})
    assert len(dict(HfFolder(folder).tensors())) == 21
    changed(folder, **{"model__layers__0__self_attn__q_proj__bias": torch.ones(16)})
    with pytest.raises(CheckpointMismatch, match="q_proj.bias is no tensor of this model"):
        HfFolder(folder)


def test_a_tied_model_may_repeat_its_embedding_but_not_have_another_head(tmp_path: Path) -> None:
    model = model_of(replace(SIZES, tied=True))
    folder = written(tmp_path / "out", model)
    changed(folder, lm_head__weight=model.get_parameter("tok_embeddings.weight").detach().clone())
    assert "output.weight" not in dict(HfFolder(folder).tensors())
    changed(folder, lm_head__weight=torch.zeros(VOCABULARY, 16))
    with pytest.raises(CheckpointMismatch, match="lm_head.weight is another weight"):
        HfFolder(folder)


def test_pickles_and_strange_folders_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no folder of a model"):
        HfFolder(tmp_path)
    folder = written(tmp_path / "out", model_of())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="neither model.safetensors") as caught:
        HfFolder(folder)
    assert "pickle" in str(caught.value) and "save_pretrained" in str(caught.value)


def test_a_run_of_another_theta_does_not_begin_with_these_weights(tmp_path: Path) -> None:
    folder = str(written(tmp_path / "out", model_of()))
    fitting = replace(SIZES, vocabulary=VOCABULARY)
    check_init(folder, fitting)
    with pytest.raises(ConfigError, match=r"model\.rope_theta: is 10000\.0") as caught:
        check_init(folder, replace(fitting, rope_theta=1e4))
    assert "twinshard ckpt import" in str(caught.value)


def test_the_tokenizer_goes_along_with_equal_ids(tmp_path: Path) -> None:
    text = "12 <|end_of_text|> €" + "".join(map(chr, range(0x800)))
    ours = ByteTokenizer()
    theirs = load_tokenizer(written(tmp_path / "out", model_of()) / "tokenizer.json")
    assert np.array_equal(theirs.encode(text), ours.encode(text))
    assert (theirs.vocabulary, theirs.end_of_text) == (ours.vocabulary, ours.end_of_text)
    ids = np.arange(257)
    assert theirs.decode(ids[32:128]) == ours.decode(ids[32:128])
    bpe = train_bpe(text * 3, 270)
    write_folder(
        tmp_path / "bpe",
        SIZES,
        VOCABULARY,
        reader(model_of()),
        dtype=torch.float32,
        tokenizer=bpe,
    )
    assert load_tokenizer(tmp_path / "bpe" / "tokenizer.json").fingerprint() == bpe.fingerprint()
    said = json.loads((tmp_path / "bpe" / "tokenizer_config.json").read_text())
    assert said["eos_token"] == "<|end_of_text|>"


@pytest.mark.parametrize("shards", [1, 3])
def test_the_anchor_of_a_commit_is_read_whole_from_the_files_of_all_shards(
    tmp_path: Path, shards: int
) -> None:
    step = commit_step(tmp_path, 5, replicas=2, shards=shards)
    with saved_model(tmp_path, None, {"output.weight": (7, 3)}) as read:
        assert torch.equal(read("output.weight"), full_tensors(99)["param/output.weight"])
    with (
        pytest.raises(CheckpointMismatch, match="norm.weight does not fit"),
        saved_model(tmp_path, 5, {"output.weight": (7, 3), "norm.weight": (3,)}),
    ):
        pass
    path = step / "tensors" / f"shard-{shards - 1:04d}.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with (
        pytest.raises(CheckpointCorrupt, match="sha256"),
        saved_model(tmp_path, 5, {"output.weight": (7, 3)}),
    ):
        pass
