"""One name map: a parameter is called the same, and has the same shape, in both cores.

Names are torch's ("layers.0.attention.wq.weight"), weights lie as torch lays them ([out, in]),
so a shard of one core is a shard of the other. In a nested tree of the reference the name is
the path, its parts joined by dots.
"""

from collections.abc import Mapping
from typing import Any

from core_torch.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def expected_shapes(model: ModelConfig) -> Shapes:
    """Every parameter of ``model`` in reading order, written down apart from both cores."""
    d, v = model.dim, model.vocabulary
    block = _gpt2_block(model) if model.kind == "gpt2" else _llama_block(model)
    shapes: Shapes = {"tok_embeddings.weight": (v, d)}
    if model.kind == "gpt2":
        shapes["pos_embeddings.weight"] = (model.context, d)
    for i in range(model.layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in block.items()}
    shapes["norm.weight"] = (d,)
    if model.kind == "gpt2":
        shapes["norm.bias"] = (d,)
    if not model.tied:
        shapes["output.weight"] = (v, d)
    return shapes


def _llama_block(model: ModelConfig) -> Shapes:
    d, f, e = model.dim, model.hidden, model.head_dim or model.dim // model.heads
    q, kv = model.heads * e, model.kv_heads * e
    norms: Shapes = {"attention.q_norm.weight": (e,), "attention.k_norm.weight": (e,)}
    return {
        "attention_norm.weight": (d,),
        "attention.wq.weight": (q, d),
        "attention.wk.weight": (kv, d),
        "attention.wv.weight": (kv, d),
        "attention.wo.weight": (d, q),
        **(norms if model.kind == "qwen3" else {}),
        "ffn_norm.weight": (d,),
        "feed_forward.w1.weight": (f, d),
        "feed_forward.w2.weight": (d, f),
        "feed_forward.w3.weight": (f, d),
    }


def _gpt2_block(model: ModelConfig) -> Shapes:
    d, f, e = model.dim, model.hidden, model.head_dim or model.dim // model.heads
    q, kv = model.heads * e, model.kv_heads * e
    matrices = {
        "attention_norm": (d,),
        "attention.wq": (q, d),
        "attention.wk": (kv, d),
        "attention.wv": (kv, d),
        "attention.wo": (d, q),
        "ffn_norm": (d,),
        "feed_forward.w1": (f, d),
        "feed_forward.w2": (d, f),
    }
    shapes: Shapes = {}
    for name, shape in matrices.items():
        shapes[f"{name}.weight"] = shape
        if name != "attention.wk":
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


def unit_of(name: str, *, tied: bool) -> str:
    """The unit a parameter belongs to: "embedding", "layers.3" or "head".

    A tied model has no head: embedding and final norm form one unit.
    """
    if name.startswith("layers."):
        return ".".join(name.split(".")[:2])
    is_first = name.startswith(("tok_embeddings.", "pos_embeddings."))
    return "embedding" if tied or is_first else "head"


def by_unit(names: list[str], *, tied: bool) -> dict[str, list[str]]:
    """Names grouped by unit, both in the order of ``names``."""
    units: dict[str, list[str]] = {}
    for name in names:
        units.setdefault(unit_of(name, tied=tied), []).append(name)
    return units


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested mappings and sequences by dotted name."""
    if isinstance(tree, Mapping):
        items = list(tree.items())
    elif isinstance(tree, list | tuple):
        items = list(enumerate(tree))
    else:
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for key, value in items:
        leaves |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves


def same_names(core: Mapping[str, Any], reference: Mapping[str, Any]) -> list[str]:
    """The names both have, in the core's order.

    Raises:
        AssertionError: a name is missing on one side; a comparison would skip it in silence.
    """
    missing, extra = core.keys() - reference.keys(), reference.keys() - core.keys()
    assert not missing and not extra, (
        f"only in the core: {sorted(missing)}; only in the reference: {sorted(extra)}"
    )
    return list(core)
