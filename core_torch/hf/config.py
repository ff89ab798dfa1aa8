"""config.json of a Llama or Qwen 3 model to a ``ModelConfig`` and back.

Read are the spellings of transformers 4 (``rope_theta``, ``rope_scaling``) and 5
(``rope_parameters``); written are both, since each reader passes over the other's. What the file
leaves out has the value that transformers gives it, never Twinshard's own default. What would
change the computation is refused by name; what is not known here is listed.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from core_torch.config import ModelConfig, Problem, RopeScaling, all_problems
from core_torch.config_file import apply
from core_torch.errors import ConfigError

SAME = {  # config.json -> ModelConfig
    "vocab_size": "vocabulary",
    "hidden_size": "dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "hidden",
    "max_position_embeddings": "context",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied",
    "initializer_range": "init_std",
}
NEEDED = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)
LEFT_OUT: dict[str, Any] = {  # what transformers takes then
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
LEFT_OUT_BY_QWEN3: dict[str, Any] = {  # Llama: as many kv heads as heads, and dim / heads
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "head_dim": 128,
}
THETA_LEFT_OUT = 10_000.0
SCALING = {  # of rope type llama3 -> RopeScaling; all of them must be there
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_context",
}
ROPE_TYPES = ("default", "llama3")
ONLY: dict[str, tuple[Any, ...]] = {  # what Twinshard's Llama computes; first: if left out
    "model_type": ("llama", "qwen3"),
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "layer_types": (None,),
    "partial_rotary_factor": (1.0, None),
    "rope_interleaved": (False, None),
    "use_qk_norm": (False, None),
    "qk_norm": (False, None),
    "clip_qkv": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "embedding_multiplier": (1.0, None),
    "residual_multiplier": (1.0, None),
    "attention_multiplier": (None,),
    "logits_scaling": (1.0, None),
    "num_local_experts": (None,),
    "quantization_config": (None,),
    "auto_map": (None,),  # its code, not transformers', would compute
}
CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
WITHOUT_EFFECT = set(
    "architectures max_window_layers "
    "transformers_version dtype torch_dtype use_cache bos_token_id eos_token_id pad_token_id "
    "pretraining_tp head_dim rope_parameters rope_theta rope_scaling return_dict "
    "output_hidden_states output_attentions _name_or_path is_decoder is_encoder_decoder "
    "chunk_size_feed_forward id2label label2id problem_type _attn_implementation_autoset".split()
)
DTYPES = ("float32", "float64", "bfloat16", "float16")


class Found(NamedTuple):
    """A config.json."""

    model: ModelConfig
    dtype: str  # of the tensors, as the file says; empty if it does not
    notes: list[str]  # what was passed over or filled in


def from_json(raw: Any, where: str) -> Found:
    """The model that a config.json describes.

    Args:
        raw: its content.
        where: its path, for messages.

    Raises:
        ConfigError: all that is missing, wrong, or computed in a way that Twinshard does not.
    """
    if not isinstance(raw, dict):
        raise ConfigError("config.json holds no object", where=where)
    values, notes = _sizes(raw)
    problems = [Problem(name, "is missing") for name in NEEDED if raw.get(name) is None]
    problems += _refused(raw)
    rope, found, more = _rope(raw)
    problems, notes = problems + found, notes + more + _strange(raw)
    kind = {"kind": raw["model_type"]} if raw.get("model_type") in CLASSES else {}
    model, found = apply(ModelConfig(), values | rope | kind)
    problems += found
    if not problems:
        problems = all_problems(model)
        if model.vocabulary < 1:
            problems.append(Problem("vocabulary", f"must be at least 1, got {model.vocabulary}"))
    if problems:
        listed = "".join(f"\n    {_theirs(p.path)}: {p.message}" for p in problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(
            f"{count} of config.json{listed}",
            where=where,
            likely="not a plain Llama or Qwen 3, or one that needs what Twinshard does not compute",
        )
    return Found(model, _dtype(raw), notes)


def to_json(
    model: ModelConfig, vocabulary: int, *, dtype: str, end_of_text: int | None
) -> dict[str, Any]:
    """config.json of a model, for transformers 4 and 5.

    Args:
        model: its sizes.
        vocabulary: token ids; ``model.vocabulary`` may be 0.
        dtype: of the tensors beside it.
        end_of_text: id at which text ends, or None. Written either way: transformers would take 2.
    """
    scaling = model.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling.factor != 1.0:
        rope = {theirs: getattr(scaling, own) for theirs, own in SCALING.items()}
        rope["rope_type"] = "llama3"
    return {
        "architectures": [CLASSES[model.kind]],
        "model_type": model.kind,
        **{theirs: getattr(model, own) for theirs, own in SAME.items()},
        "vocab_size": vocabulary,
        "head_dim": model.head_width,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "rope_parameters": {**rope, "rope_theta": model.rope_theta},
        "rope_theta": model.rope_theta,
        "rope_scaling": rope if len(rope) > 1 else None,
        "dtype": dtype,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
        "use_cache": True,
    }


def _theirs(path: str) -> str:
    """A path of ModelConfig by the name that config.json has for it."""
    names = {own: theirs for theirs, own in SAME.items()}
    return names.get(path, path)


def _sizes(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fields that mean the same, and what was filled in."""
    filled = LEFT_OUT | {"num_key_value_heads": raw.get("num_attention_heads")}
    if raw.get("model_type") == "qwen3":
        filled |= LEFT_OUT_BY_QWEN3
    values, notes = {}, []
    for theirs, own in (SAME | {"head_dim": "head_dim"}).items():
        value = raw.get(theirs)
        if value is None and (value := filled.get(theirs)) is not None:
            notes.append(f"{theirs} is not written: {value}, as transformers takes it")
        if value is not None:
            values[own] = value
    if _is_plain_width(values):
        values["head_dim"] = 0
    return values, notes


def _is_plain_width(values: Mapping[str, Any]) -> bool:
    """Whether heads together are as wide as the residual stream, as without a ``head_dim``."""
    dim, heads, width = (values.get(x) for x in ("dim", "heads", "head_dim"))
    return all(isinstance(x, int) for x in (dim, heads, width)) and width * heads == dim  # type: ignore[operator]


def _refused(raw: Mapping[str, Any]) -> list[Problem]:
    """Fields that would make another computation of it."""
    problems = []
    for name, allowed in ONLY.items():
        value = raw.get(name, allowed[0])
        if name == "layer_types" and isinstance(value, list) and {*value} <= {"full_attention"}:
            continue
        if name == "sliding_window" and raw.get("use_sliding_window") is False:
            continue
        if value not in allowed:
            wanted = " or ".join(repr(x) for x in allowed if x is not None) or "none"
            problems.append(Problem(name, f"Twinshard computes with {wanted}, got {value!r}"))
    wanted = CLASSES.get(raw.get("model_type", ""), "")
    if wanted and raw.get("architectures", [wanted]) not in ([wanted], None):
        message = f"Twinshard computes {wanted}, got {raw['architectures']!r}"
        problems.append(Problem("architectures", message))
    return problems


def _strange(raw: Mapping[str, Any]) -> list[str]:
    """A line for each field without effect here that a reader may wonder about."""
    known = {*SAME, *ONLY, *WITHOUT_EFFECT, "attention_dropout"}
    notes = []
    if raw.get("attention_dropout"):
        notes.append(f"attention_dropout {raw['attention_dropout']} is not applied in training")
    return notes + [
        f"{name} is not known here and has no effect: {repr(value)[:60]}"
        for name, value in raw.items()
        if name not in known
    ]


def _rope(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem], list[str]]:
    """theta and scaling by path of ModelConfig, from whichever spelling is there."""
    spellings = {x: raw[x] for x in ("rope_parameters", "rope_scaling") if raw.get(x) is not None}
    for name, value in spellings.items():
        if not isinstance(value, dict):
            return {}, [Problem(name, f"must be an object, got {value!r}")], []
    read = [_one_spelling(value) for value in spellings.values()] or [{}]
    thetas = [x["rope_theta"] for x in (*read, raw) if x.get("rope_theta") is not None]
    kinds = [{k: v for k, v in x.items() if k != "rope_theta"} for x in read]
    if any(t != thetas[0] for t in thetas) or any(k != kinds[0] for k in kinds):
        message = f"contradicts rope_theta or rope_scaling: {spellings}, {raw.get('rope_theta')}"
        return {}, [Problem("rope_parameters", message)], []
    notes = [] if thetas else [f"rope_theta is not written: {THETA_LEFT_OUT:g}, as transformers"]
    values: dict[str, Any] = {"rope_theta": thetas[0] if thetas else THETA_LEFT_OUT}
    name = next(iter(spellings), "rope_parameters")
    scaling, problems = _scaling(name, kinds[0])
    return values | scaling, problems, notes


def _one_spelling(value: Mapping[str, Any]) -> dict[str, Any]:
    """A rope object with its type under one name, and without what says nothing."""
    found = {k: v for k, v in value.items() if v is not None and k not in ("type", "rope_type")}
    return {"rope_type": value.get("rope_type") or value.get("type") or "default", **found}


def _scaling(name: str, rope: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        message = f"Twinshard computes {' and '.join(ROPE_TYPES)}, got {kind!r}"
        return {}, [Problem(f"{name}.rope_type", message)]
    fields = SCALING if kind == "llama3" else {}
    plain = {"partial_rotary_factor": 1.0, "attention_factor": 1.0}
    problems = [
        Problem(f"{name}.{k}", f"is unknown to rope type {kind}, got {v!r}")
        for k, v in rope.items()
        if k not in ("rope_type", *fields) and v != plain.get(k)
    ]
    problems += [Problem(f"{name}.{k}", "is missing") for k in fields if k not in rope]
    values = {f"rope_scaling.{own}": rope[k] for k, own in fields.items() if k in rope}
    return values, problems


def _dtype(raw: Mapping[str, Any]) -> str:
    value = raw.get("dtype") or raw.get("torch_dtype") or ""
    return str(value).removeprefix("torch.")


def differences(config: ModelConfig, found: ModelConfig) -> list[Problem]:
    """Where a run's model is not the one of a folder.

    The context may be shorter, and the spread of initial weights is of no importance.
    """
    names = [x for x in SAME.values() if x not in ("context", "init_std")]
    names += ["kind", "head_width", "rope_theta"]
    pairs = [(x, getattr(config, x), getattr(found, x)) for x in names]
    scaling: tuple[RopeScaling, RopeScaling] = (config.rope_scaling, found.rope_scaling)
    if any(x.factor != 1.0 for x in scaling):
        inside = ("factor", "low_freq_factor", "high_freq_factor", "original_context")
        pairs += [(f"rope_scaling.{x}", *(getattr(s, x) for s in scaling)) for x in inside]
    return [
        Problem(f"model.{name}", f"is {own!r}, and the folder's is {theirs!r}")
        for name, own, theirs in pairs
        if own != theirs
    ]
