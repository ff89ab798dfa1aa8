"""Names and row order of the tensors of a Llama or a Qwen 3 here and in transformers.

Both keep matrices [out, in]. The rotary embedding turns neighbouring features here, and a
feature of the first half of a head with one of the second half there: rows of the query and key
projections change places, each head for itself, and so do the gains of Qwen 3's norms of heads.

Shapes: H heads of width E, D columns.
"""

from typing import NamedTuple

from torch import Tensor

from core_torch.config import ModelConfig
from core_torch.errors import ConfigError

TOP = {  # here -> transformers
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
}
NORMS_OF_HEADS = {  # of Qwen 3
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
}


class Place(NamedTuple):
    """Where a tensor of the model stands in transformers' files."""

    name: str
    shape: tuple[int, ...]
    turned_heads: int  # heads whose rows change places; 0: none do


def places(model: ModelConfig, vocabulary: int) -> dict[str, Place]:
    """Every tensor of the model by its name here. A tied model has no head of its own.

    Raises:
        ConfigError: a kind that is not written and read in these files.
    """
    if model.kind not in ("llama", "qwen3"):
        raise ConfigError(
            f"model.kind: {model.kind} is neither written nor read for transformers; "
            "llama and qwen3 are",
            next="model.safetensors in the run's folder holds its tensors under their own names",
        )
    dim, hidden, width = model.dim, model.hidden, model.head_width
    q_dim, kv_dim = model.heads * width, model.kv_heads * width
    shapes = {"wq": (q_dim, dim), "wk": (kv_dim, dim), "wv": (kv_dim, dim), "wo": (dim, q_dim)}
    shapes |= {"w1": (hidden, dim), "w2": (dim, hidden), "w3": (hidden, dim)}
    norms = dict.fromkeys(("q_norm", "k_norm"), (width,))
    heads = {"wq": model.heads, "wk": model.kv_heads, "q_norm": 1, "k_norm": 1}
    found = {"tok_embeddings.weight": Place(TOP["tok_embeddings.weight"], (vocabulary, dim), 0)}
    for i in range(model.layers):
        for own, theirs in (BLOCK | (NORMS_OF_HEADS if model.kind == "qwen3" else {})).items():
            which = own.split(".")[-2]
            shape = (shapes | norms).get(which, (dim,))
            place = Place(f"model.layers.{i}.{theirs}", shape, heads.get(which, 0))
            found[f"layers.{i}.{own}"] = place
    found["norm.weight"] = Place(TOP["norm.weight"], (dim,), 0)
    if not model.tied:
        found["output.weight"] = Place(TOP["output.weight"], (vocabulary, dim), 0)
    return found


def pairs_of_halves(x: Tensor, heads: int) -> Tensor:
    """(H * E, ...): rows j and j + E / 2 of each head become rows 2 j and 2 j + 1."""
    return x.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(x.shape)


def halves_of_pairs(x: Tensor, heads: int) -> Tensor:
    """The inverse of ``pairs_of_halves``."""
    return x.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(x.shape)


def to_theirs(x: Tensor, place: Place) -> Tensor:
    """A tensor of the model as transformers keeps it."""
    return halves_of_pairs(x, place.turned_heads) if place.turned_heads else x


def to_ours(x: Tensor, place: Place) -> Tensor:
    """A tensor of transformers as the model keeps it."""
    return pairs_of_halves(x, place.turned_heads) if place.turned_heads else x
