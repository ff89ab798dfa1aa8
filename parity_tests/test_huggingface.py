"""Models to ``transformers`` and back: equal logits, and a run that begins with its weights.

transformers computes norms and rotary tables in float32, whatever the model's dtype. So each
model is compared twice: with everything widened to float64, where only formulas can differ, and
as it is, where the angle of a late position costs accuracy.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from core_torch.checkpoint.export import load_model
from core_torch.cli import main
from core_torch.config import ModelConfig, RopeScaling
from core_torch.config_file import from_toml
from core_torch.data.batches import Layout, batch_for, count_sequences
from core_torch.data.corpus import open_corpus
from core_torch.data.tokenizer import ByteTokenizer
from core_torch.hf.folder import HfFolder, load_weights
from core_torch.hf.write import write_folder
from core_torch.models import Model, build_model
from core_torch.models.build import draw
from parity_tests.instrument.widen import Widening

POSITIONS = 500
SIZES = ModelConfig(
    vocabulary=300, dim=32, layers=2, heads=4, kv_heads=2, hidden=48, context=512, init_std=0.3
)
LLAMA3 = RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64)
MODELS = {  # and how many bytes a file may have
    "plain": (replace(SIZES, rope_theta=10_000.0), 1 << 30),
    "tied": (replace(SIZES, tied=True), 1 << 30),
    "llama3": (replace(SIZES, rope_scaling=LLAMA3, rope_theta=500.0), 20_000),
    "qwen3": (replace(SIZES, kind="qwen3", head_dim=10, rope_theta=10_000.0), 1 << 30),
}
FORMULAS = 1e-12  # float64, about 1e3 additions in a row, logits of a few units
# An angle of up to 500 radians has a relative error of at most 3 roundings of float32 (the
# frequency's power, its quotient, the product): 500 * 3 * 2^-24 = 9e-5 radians at the last
# positions. Through two layers a logit of size 10 moves by less than ten times that.
AS_IT_IS = 1e-3


@pytest.fixture
def transformers() -> Any:
    """The library, silent."""
    library = pytest.importorskip("transformers", minversion="5.20")
    library.utils.logging.disable_progress_bar()
    return library


def wide_and_narrow(transformers: Any, folder: Path, tokens: Tensor) -> Iterator[Tensor]:
    """Logits of the folder's model: all of it in float64, and as the library computes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    narrow, widening = model.model.rotary_emb, Widening(is_active=True)
    with widening:  # its tables are made as it is built
        model.model.rotary_emb = type(narrow)(config=model.config)
    with torch.no_grad(), widening.over(model):
        yield model(tokens).logits
    model.model.rotary_emb = narrow
    with torch.no_grad():
        yield model(tokens).logits


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_logits_of_an_exported_model_at_500_positions(
    transformers: Any, tmp_path: Path, name: str
) -> None:
    config, limit = MODELS[name]
    model = build_model(config, config.vocabulary, seed=3, dtype=torch.float64)
    with torch.no_grad():
        for own, p in model.named_parameters():
            if own.endswith(("q_norm.weight", "k_norm.weight")):  # or their order could be any
                p.add_(0.3 * draw(own, p, seed=3))
    params = {n: p.detach() for n, p in model.named_parameters()}
    write_folder(
        tmp_path / "out",
        config,
        config.vocabulary,
        params.__getitem__,
        dtype=torch.float64,
        tokenizer=ByteTokenizer(),
        max_shard_bytes=limit,
    )
    tokens = torch.randint(300, (2, POSITIONS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model(tokens)
    wide, narrow = wide_and_narrow(transformers, tmp_path / "out", tokens)
    assert ours.abs().max() > 1, "logits too small to tell anything"
    assert (wide - ours).abs().max() < FORMULAS
    assert (narrow - ours).abs().max() < AS_IT_IS


def test_a_random_qwen3_of_transformers_is_read(transformers: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        intermediate_size=48,
        max_position_embeddings=512,
        initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 1234.5},
    )
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for block in model.model.layers:
            for gain in (block.self_attn.q_norm.weight, block.self_attn.k_norm.weight):
                gain += 0.3 * torch.randn(12)
    model.save_pretrained(tmp_path)
    found = HfFolder(tmp_path)
    assert (found.model.kind, found.model.head_dim) == ("qwen3", 12)
    ours, tokens = imported(tmp_path, found.model), torch.arange(POSITIONS)[None] % 300
    with torch.no_grad():
        assert (ours(tokens) - model(tokens).logits).abs().max() < AS_IT_IS


def test_the_comparison_would_see_another_theta(transformers: Any, tmp_path: Path) -> None:
    model = foreign(transformers, tmp_path / "out")
    ours = imported(tmp_path / "out", replace(SIZES, rope_theta=1234.5))
    other = build_model(replace(SIZES, rope_theta=1235.5), 300, seed=0)
    other.load_state_dict(ours.state_dict())
    tokens = torch.arange(POSITIONS)[None] % 300
    with torch.no_grad():
        expected = model(tokens).logits
        assert (ours(tokens) - expected).abs().max() < AS_IT_IS
        assert (other(tokens) - expected).abs().max() > AS_IT_IS


def foreign(transformers: Any, folder: Path) -> Any:
    """A model of transformers with random weights, saved in ``folder``."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 1234.5},
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="30KB")
    return model


def imported(folder: Path, config: ModelConfig) -> Model:
    """A model here with the weights of ``folder``."""
    model = build_model(config, config.vocabulary, seed=0)
    load_weights(model, str(folder))
    return model


def test_a_random_model_of_transformers_trains_on_and_goes_back(
    transformers: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Import, two steps, export of the end and of the commit, and a resume without the import."""
    monkeypatch.chdir(tmp_path)
    model = foreign(transformers, tmp_path / "theirs")
    assert len(list(Path("theirs").glob("model-*.safetensors"))) > 1
    Path("text.txt").write_text("To be, or not to be, that is the question.\n" * 200)
    assert main(["ckpt", "import", "theirs", "--run", "mine"]) == 0
    said = capsys.readouterr().out
    assert "300 token ids, in float32" in said
    assert "no tokenizer.json: text is read as bytes" in said
    assert "twinshard train mine/config.toml" in said
    assert from_toml("mine/config.toml").model.rope_theta == 1234.5
    options = "--data.path text.txt --data.sequence 64 --data.batch 2"
    options += " --train.steps 2 --train.evaluate-sequences 2 --mesh.device cpu --sync.warmup 1"
    words = ["train", "mine/config.toml", *options.split()]
    assert main([*words, "--model.rope-theta", "10000"]) == 2  # before anything starts
    assert "model.rope_theta: is 10000.0" in capsys.readouterr().err
    assert not Path("mine/logs").exists()
    assert main(words) == 0
    first = json.loads(Path("mine/metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(loss_of(model, Path("mine/data")), abs=1e-5)

    assert main(["ckpt", "export", "mine", "--out", "end", "--max-shard-bytes", "40000"]) == 0
    assert main(["ckpt", "export", "mine", "--out", "two", "--step", "2"]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    tokens = torch.arange(POSITIONS)[None] % 257
    config = from_toml("mine/config.toml")
    with torch.no_grad():
        ours = load_model(Path("mine"), config, 257)(tokens)
        end, anchor = (
            transformers.AutoModelForCausalLM.from_pretrained(name)(tokens).logits
            for name in ("end", "two")
        )
    assert (end - ours).abs().max() < AS_IT_IS
    assert (anchor - ours).abs().max() > AS_IT_IS  # the anchor of step 1, which was in the warm-up
    Path("theirs").rename("gone")
    assert main([*words, "--resume", "auto", "--train.steps", "3"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained("end")
    assert tokenizer("bé", add_special_tokens=False)["input_ids"] == list("bé".encode())


def loss_of(model: Any, data: Path) -> float:
    """What a model of transformers loses on replica 0's first batch."""
    ids = open_corpus(data).train.ids
    count = count_sequences(len(ids), 64)
    layout = Layout(num_sequences=count, sequence=64, batch=2, replicas=1, shards=1, seed=0)
    inputs, targets = batch_for(ids, layout, step=0, replica=0, shard=0)
    with torch.no_grad():
        logits = model(torch.from_numpy(np.ascontiguousarray(inputs))).logits
    return float(F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten()))
