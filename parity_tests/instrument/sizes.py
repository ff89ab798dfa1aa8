"""Sizes of a user's model in the words of the reference: written down, or read from its config."""

from collections.abc import Mapping
from typing import Any

from core_torch.config import ModelConfig, Problem, all_problems
from core_torch.config_file import apply
from core_torch.errors import ConfigError
from parity_tests.instrument.names import NameMap, refuse

NEEDED = ("vocabulary", "dim", "layers", "heads", "kv_heads", "hidden", "norm_eps", "rope_theta")
NO_PART = ("context", "init_std", "build")  # of ModelConfig: change nothing that is compared
SAME_AS = {  # fields of LlamaConfig
    "vocab_size": "vocabulary",
    "hidden_size": "dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "hidden",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied",
}
ONLY: dict[str, tuple[Any, ...]] = {  # what the reference computes
    "model_type": ("llama",),
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}
HARMLESS = (
    "max_position_embeddings initializer_range use_cache pad_token_id bos_token_id eos_token_id "
    "pretraining_tp attention_dropout head_dim rope_parameters rope_theta rope_scaling"
).split()
ROPE_TYPES = ("default", "llama3")
SCALING = {  # of Hugging Face's rope settings
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_context",
}


def sizes_of(told: NameMap, config: Any) -> ModelConfig:
    """What [model] says, filled up from the module's own config if it says so.

    Args:
        told: the file.
        config: ``module.config``, or None.

    Raises:
        ConfigError: all that is missing, wrong, or computed in a way that the reference does not.
    """
    values, problems = dict(told.model), list[Problem]()
    source = values.pop("config", None)
    if source == "huggingface":
        if config is None:
            raise ConfigError(
                '[model] config = "huggingface", and the module has no config',
                where=told.where,
                next=f"write down {', '.join(NEEDED)} and tied in [model]",
            )
        read, problems = from_huggingface(config)
        values = read | values
    elif source is not None:
        problems.append(Problem("[model] config", f'"huggingface" is known, got {source!r}'))
    given = {key: x for key, x in values.items() if key not in NO_PART}
    problems += [Problem(f"[model] {x}", "has no part here") for x in values if x not in given]
    model, found = apply(ModelConfig(), given)
    problems += [p._replace(path=f"[model] {p.path}") for p in found]
    problems += [Problem(f"[model] {x}", "is missing") for x in NEEDED if x not in given]
    if model.kind != "llama":
        message = f"a module is compared with a llama, the reference's, got {model.kind!r}"
        problems.append(Problem("[model] kind", message))
    if not problems:
        problems = [p._replace(path=f"[model] {p.path}") for p in all_problems(model)]
        if model.vocabulary < 1:
            problems.append(
                Problem("[model] vocabulary", f"must be at least 1, got {model.vocabulary}")
            )
    refuse(problems, told.where)
    return model


def from_huggingface(config: Any) -> tuple[dict[str, Any], list[Problem]]:
    """Sizes of a ``LlamaConfig``, of this major version of transformers or the one before."""
    values: dict[str, Any] = {x: getattr(config, own, None) for own, x in SAME_AS.items()}
    problems = []
    for name, allowed in ONLY.items():
        if (value := getattr(config, name, allowed[0])) not in allowed:
            wanted = " or ".join(map(repr, allowed))
            problems.append(Problem(f"config.{name}", f"the reference has {wanted}, got {value!r}"))
    dim, heads, head_dim = values["dim"], values["heads"], getattr(config, "head_dim", None)
    if head_dim and dim and heads and head_dim * heads != dim:
        message = f"the reference has hidden_size / num_attention_heads, got {head_dim}"
        problems.append(Problem("config.head_dim", message))
    problems += _strange(config)
    rope = getattr(config, "rope_parameters", None) or _rope_before(config)
    read, found = _rope(rope)
    return {k: v for k, v in values.items() if v is not None} | read, problems + found


def _strange(config: Any) -> list[Problem]:
    """Fields of its class that nobody here knows, and that are not what they are by default."""
    kind = type(config)
    known = {*SAME_AS, *ONLY, *HARMLESS}
    fields = [name for name in vars(kind).get("__annotations__", {}) if name not in known]
    return [
        Problem(f"config.{name}", f"is unknown here and is {getattr(config, name)!r}")
        for name in fields
        if hasattr(config, name) and getattr(config, name) != getattr(kind, name, None)
    ]


def _rope_before(config: Any) -> dict[str, Any]:
    """The same settings as transformers 4 keeps them."""
    scaling = dict(getattr(config, "rope_scaling", None) or {"rope_type": "default"})
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling.pop("type"))
    return {"rope_theta": getattr(config, "rope_theta", None), **scaling}


def _rope(rope: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        message = f"the reference knows {' and '.join(ROPE_TYPES)}, got {kind!r}"
        return {"rope_theta": rope.get("rope_theta")}, [Problem("config.rope_type", message)]
    values = {"rope_theta": rope.get("rope_theta")}
    is_plain = {"partial_rotary_factor": 1.0, "attention_factor": 1.0}
    scaling = SCALING if kind == "llama3" else {}
    problems = [
        Problem(f"config.{name}", f"is unknown to the reference and is {value!r}")
        for name, value in rope.items()
        if name not in ("rope_type", "rope_theta", *scaling)
        and value not in (None, is_plain.get(name))
    ]
    values |= {f"rope_scaling.{ours}": rope.get(theirs) for theirs, ours in scaling.items()}
    return {key: x for key, x in values.items() if x is not None}, problems
