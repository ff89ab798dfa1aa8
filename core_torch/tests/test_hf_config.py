"""config.json of Hugging Face's Llamas: what is read, carried, filled in, listed and refused."""

from typing import Any

import pytest

from core_torch.config import ModelConfig, RopeScaling
from core_torch.errors import ConfigError
from core_torch.hf.config import differences, from_json, to_json

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PLAIN: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "initializer_range": 0.01,
    "rope_theta": 12345.0,
    "head_dim": 8,
    "torch_dtype": "bfloat16",
}
MODEL = ModelConfig(
    vocabulary=61,
    dim=32,
    layers=3,
    heads=4,
    kv_heads=2,
    hidden=40,
    context=512,
    norm_eps=1e-6,
    rope_theta=12345.0,
    tied=True,
    init_std=0.01,
)
SCALED = ModelConfig(
    vocabulary=61,
    dim=32,
    heads=4,
    rope_scaling=RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64
    ),
)
QWEN = ModelConfig(kind="qwen3", vocabulary=61, dim=24, heads=4, kv_heads=2, head_dim=8)


def without(*names: str, **more: Any) -> dict[str, Any]:
    """``PLAIN`` with some fields left out and others added."""
    return {k: v for k, v in PLAIN.items() if k not in names} | more


def test_every_size_is_carried_over() -> None:
    assert from_json(PLAIN, "config.json") == (MODEL, "bfloat16", [])


def test_theta_and_scaling_are_read_in_the_spellings_of_transformers_4_and_5() -> None:
    spellings: list[dict[str, Any]] = [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {
            "rope_theta": 5e5,
            "rope_scaling": {"rope_type": "llama3", **LLAMA3},
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
        },
    ]
    for spelling in spellings:
        model = from_json(without("rope_theta", **spelling), "x").model
        assert (model.rope_theta, model.rope_scaling) == (5e5, SCALED.rope_scaling), spelling


@pytest.mark.parametrize("scaling", [None, {"rope_type": "default"}, {"type": "default"}])
def test_no_scaling_and_the_default_are_the_same(scaling: Any) -> None:
    assert from_json(without(rope_scaling=scaling), "x").model == MODEL


def test_what_is_not_written_has_the_value_of_transformers_and_is_told() -> None:
    names = ("rope_theta", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings")
    found = from_json(without(*names, "head_dim", "architectures"), "x")
    model = found.model
    assert (model.rope_theta, model.kv_heads, model.norm_eps) == (10_000.0, 4, 1e-6)
    assert model.context == 2048
    assert sorted(note.split()[0] for note in found.notes) == sorted(names)


@pytest.mark.parametrize("model", [MODEL, SCALED, ModelConfig(vocabulary=9), QWEN])
def test_what_is_written_is_read_back(model: ModelConfig) -> None:
    raw = to_json(model, model.vocabulary, dtype="float32", end_of_text=None)
    assert from_json(raw, "x") == (model, "float32", [])
    for name in ("rope_parameters", "rope_theta", "rope_scaling"):  # one spelling is enough
        rest = {k: v for k, v in raw.items() if k != name}
        if name != "rope_theta" or raw["rope_scaling"] is None:
            assert from_json(rest, "x").model == model, name


def test_qwen3_is_read_with_what_transformers_fills_in_for_it() -> None:
    """As its files are: a window that is off, and a width of heads that nothing divides."""
    told = without("head_dim", "num_key_value_heads", "max_position_embeddings") | {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "num_attention_heads": 64,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }
    found = from_json(told, "x")
    model = found.model
    assert (model.kind, model.head_dim, model.kv_heads, model.context) == ("qwen3", 128, 32, 32768)
    assert len(found.notes) == 3
    with pytest.raises(ConfigError, match=r"\n    sliding_window"):
        from_json(told | {"use_sliding_window": True}, "x")
    with pytest.raises(ConfigError, match=r"\n    architectures"):
        from_json(told | {"architectures": ["LlamaForCausalLM"]}, "x")
    paths = [p.path for p in differences(MODEL, model)]
    assert {"model.kind", "model.head_width"} <= set(paths)


def test_a_width_of_heads_that_the_sizes_give_is_no_choice() -> None:
    assert from_json(without(head_dim=16), "x").model.head_dim == 16
    assert from_json(without(head_dim=8), "x").model.head_dim == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "mistral"),
        ("architectures", ["LlamaForSequenceClassification"]),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("sliding_window", 4096),
        ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("head_dim", 7),
        ("head_dim", "8"),
        ("partial_rotary_factor", 0.5),
        ("final_logit_softcapping", 30.0),
        ("quantization_config", {"bits": 4}),
        ("auto_map", {"AutoModelForCausalLM": "modeling.Mine"}),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", "2"),
        ("vocab_size", 0),
        ("hidden_size", True),
        ("rope_theta", 0.0),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_scaling", {"rope_type": "llama3", **LLAMA3, "beta_fast": 32}),
        ("rope_scaling", [8.0]),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 10_000.0}),
    ],
    ids=str,
)
def test_what_would_change_the_computation_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        from_json(without(**{field: value}), "here/config.json")
    assert f"\n    {field}" in str(caught.value)
    assert "here/config.json" in str(caught.value)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match="3 problems") as caught:
        from_json(without("hidden_size", hidden_act="relu", attention_bias=True), "x")
    for name in ("hidden_size: is missing", "hidden_act", "attention_bias"):
        assert name in str(caught.value)


def test_fields_that_nobody_here_knows_are_listed_and_known_ones_without_effect_are_not() -> None:
    found = from_json(without(new_thing=[1, 2], use_cache=True, bos_token_id=1), "x")
    assert found.model == MODEL
    assert found.notes == ["new_thing is not known here and has no effect: [1, 2]"]
    dropped = from_json(without(attention_dropout=0.1), "x").notes
    assert dropped == ["attention_dropout 0.1 is not applied in training"]


def test_a_file_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="no object"):
        from_json([PLAIN], "x")


def test_a_run_may_differ_in_context_and_spread_of_weights_only() -> None:
    other = from_json(without(max_position_embeddings=64, initializer_range=0.5), "x").model
    assert differences(MODEL, other) == []
    moved = from_json(without(rope_theta=10_000.0, tie_word_embeddings=False), "x").model
    assert [p.path for p in differences(MODEL, moved)] == ["model.tied", "model.rope_theta"]
    scaled = from_json(without(rope_scaling={"rope_type": "llama3", **LLAMA3}), "x").model
    paths = [p.path for p in differences(MODEL, scaled)]
    assert "model.rope_scaling.factor" in paths
