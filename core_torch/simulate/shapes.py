"""Parameters of a model and their cut over ranks, from its configuration alone.

The shapes are those of models/llama.py and gpt2.py, the units those of models/decoder.py, the cut
that of shard/access.py: chunks of ``ceil(rows / shards)`` rows. A test builds the model and
compares.
"""

from math import prod
from typing import NamedTuple

from core_torch.config import ModelConfig
from core_torch.errors import ConfigError
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

    Raises:
        ConfigError: only the code of a module of one's own knows its shapes.
    """
    if model.kind == "own":
        raise ConfigError(
            f"model.build: {model.build} knows the shapes, and a plan runs no code",
            next="build the module in Python and count its parameters",
        )
    embedding, norm = [Parameter("tok_embeddings.weight", (vocabulary, model.dim))], _norm(model)
    if model.kind == "gpt2":
        embedding.append(Parameter("pos_embeddings.weight", (model.context, model.dim)))
    blocks = {f"layers.{i}": _block(model, f"layers.{i}") for i in range(model.layers)}
    if model.tied:
        return {"embedding": [*embedding, *norm], **blocks}
    head = [*norm, Parameter("output.weight", (vocabulary, model.dim))]
    return {"embedding": embedding, **blocks, "head": head}


def _norm(model: ModelConfig) -> list[Parameter]:
    """The last norm."""
    kinds = ("weight", "bias") if model.kind == "gpt2" else ("weight",)
    return [Parameter(f"norm.{kind}", (model.dim,)) for kind in kinds]


def _block(model: ModelConfig, name: str) -> list[Parameter]:
    dim, hidden, width = model.dim, model.hidden, model.head_width
    q_dim, kv_dim = model.heads * width, model.kv_heads * width
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm": (dim,),
        "attention.wq": (q_dim, dim),
        "attention.wk": (kv_dim, dim),
        "attention.wv": (kv_dim, dim),
        "attention.wo": (dim, q_dim),
    }
    if model.kind == "qwen3":
        shapes |= {"attention.q_norm": (width,), "attention.k_norm": (width,)}
    shapes |= {
        "ffn_norm": (dim,),
        "feed_forward.w1": (hidden, dim),
        "feed_forward.w2": (dim, hidden),
    }
    if model.kind != "gpt2":
        shapes |= {"feed_forward.w3": (hidden, dim)}
    found = []
    for key, shape in shapes.items():
        found.append(Parameter(f"{name}.{key}.weight", shape))
        if model.kind == "gpt2" and key != "attention.wk":
            found.append(Parameter(f"{name}.{key}.bias", shape[:1]))
    return found


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
    lookups = {"pos_embeddings.weight"} | (set() if tied else {"tok_embeddings.weight"})
    matrices = [p for params in units.values() for p in params if len(p.shape) > 1]
    return numel([p for p in matrices if p.name not in lookups])


def has_rounds(method: str) -> bool:
    """Whether replicas part under a method."""
    return METHODS[method].unit != "none"
