"""Parameters of a model and their cut over ranks, from its configuration alone.

The shapes are those of models/llama.py, the units those of shard/wrap.py, the cut that of
shard/access.py: chunks of ``ceil(rows / shards)`` rows. A test builds the model and compares.
"""

from math import prod
from typing import NamedTuple

from core_torch.config import ModelConfig
from core_torch.sync.methods import METHODS, Rules

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


class Parameter(NamedTuple):
    """One parameter of the whole model."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    def chunk(self, shards: int) -> int:
        """Elements of a chunk, padding included; rank 0 holds as many."""
        return -(-self.shape[0] // shards) * prod(self.shape[1:])


Units = dict[str, list[Parameter]]


def units_of_model(model: ModelConfig, vocabulary: int) -> Units:
    """Parameters of each unit, in order of the forward; a tied head is the embedding's.

    Args:
        model: checked.
        vocabulary: token ids, where the configuration leaves it to the tokenizer.
    """
    embedding = Parameter("tok_embeddings.weight", (vocabulary, model.dim))
    norm = Parameter("norm.weight", (model.dim,))
    blocks = {f"layers.{i}": _block(model, f"layers.{i}") for i in range(model.layers)}
    if model.tied:
        return {"embedding": [embedding, norm], **blocks}
    head = [norm, Parameter("output.weight", (vocabulary, model.dim))]
    return {"embedding": [embedding], **blocks, "head": head}


def _block(model: ModelConfig, name: str) -> list[Parameter]:
    dim, hidden = model.dim, model.hidden
    kv_dim = model.kv_heads * (dim // model.heads)
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm": (dim,),
        "attention.wq": (dim, dim),
        "attention.wk": (kv_dim, dim),
        "attention.wv": (kv_dim, dim),
        "attention.wo": (dim, dim),
        "ffn_norm": (dim,),
        "feed_forward.w1": (hidden, dim),
        "feed_forward.w2": (dim, hidden),
        "feed_forward.w3": (hidden, dim),
    }
    return [Parameter(f"{name}.{key}.weight", shape) for key, shape in shapes.items()]


def sync_units(units: Units, rules: Rules) -> Units:
    """What the exchanges of a method cover, as sync/units.py groups it; none if it has none."""
    held = list(units.values())
    if rules.method.unit == "none":
        return {}
    if rules.method.unit == "model":
        return {"model": [p for params in held for p in params]}
    if rules.method.unit == "fragments":
        count = rules.fragments
        return {
            f"fragment.{k}": [p for params in held[k::count] for p in params] for k in range(count)
        }
    return units


def numel(parameters: list[Parameter]) -> int:
    """Elements of several parameters."""
    return sum(p.numel for p in parameters)


def chunks(parameters: list[Parameter], shards: int) -> int:
    """Elements of several parameters on rank 0, which no other rank exceeds."""
    return sum(p.chunk(shards) for p in parameters)


def count_products(units: Units, *, tied: bool) -> int:
    """Elements of the matrices that multiply every token: a lookup is no product."""
    everything = sum(numel([p for p in params if len(p.shape) > 1]) for params in units.values())
    return everything if tied else everything - numel(units["embedding"])


def has_rounds(method: str) -> bool:
    """Whether replicas part under a method."""
    return METHODS[method].unit != "none"
