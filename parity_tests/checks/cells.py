"""Which runs the two cores are compared on: method x mesh x dtype x model, and their numbers.

Needs neither torch nor JAX. A cell is one choice of the four; ``COVERING`` holds every pair of
choices of a Llama at least once in 16 cells, ``every_cell`` the full product. Cells that differ
in shards only take the same draws per replica and step, so one trace of the reference serves them.
So it does for ``SIMPLE``, six cells under SimpleFSDP whose runs are among those of ``COVERING``.
"""

import dataclasses
import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

Settings = tuple[tuple[str, Any], ...]  # a dictionary that can be hashed
Fault = tuple[int, int, str, float]  # after this step, on this replica, parameter, value
Sharding = Literal["fsdp2", "simple_fsdp", "simple_fsdp_aot"]  # the last: compiled, aot_eager

METHODS = ("synchronous", "post_local_sgd", "diloco", "edit")
MESHES = ((1, 1), (1, 4), (2, 2), (4, 1))
DTYPES = ("float64", "float32")
MODELS: dict[str, dict[str, Any]] = {
    "tiny": dict(layers=1, vocabulary=61, dim=16, heads=2, kv_heads=2, hidden=32, rope_theta=1e4),
    # Over 16 positions one rotary frequency is kept, one interpolated, two are divided.
    "gqa": dict(
        layers=2,
        vocabulary=64,
        dim=32,
        heads=4,
        kv_heads=2,
        hidden=40,
        rope_theta=100.0,
        rope_scaling=dict(
            factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=32
        ),
    ),
    # On 4 shards: wk and wv leave the last rank empty, everything else uneven.
    "odd": dict(layers=2, vocabulary=257, dim=18, heads=3, kv_heads=1, hidden=27),
    "tied": dict(layers=1, vocabulary=53, dim=16, heads=2, kv_heads=1, hidden=29, tied=True),
    # Heads are wider together than the residual stream.
    "qwen": dict(
        kind="qwen3",
        layers=1,
        vocabulary=59,
        dim=24,
        heads=4,
        kv_heads=2,
        head_dim=8,
        hidden=36,
        rope_theta=1e4,
    ),
    "gpt2": dict(
        kind="gpt2", layers=1, vocabulary=53, dim=16, heads=2, kv_heads=2, hidden=40, tied=True
    ),
}
LLAMAS = ("tiny", "gqa", "odd", "tied")
SHARD_CONFIG: dict[Sharding, dict[str, str]] = {
    "fsdp2": {},
    "simple_fsdp": {"method": "simple_fsdp"},
    "simple_fsdp_aot": {"method": "simple_fsdp", "compile": "aot_eager"},
}
SEQUENCE, ROWS, DATA_SEED = 16, 4, 3  # rows: sequences per replica and micro-batch
END = 256  # of a document, to the core's tokenizer
SEQUENCES = 150  # fewer than the draws of a run, so that epochs change
OPTIM = dict(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-4, weight_decay=0.1, max_norm=0.5)
SCHEDULE = dict(shape="cosine", final_ratio=0.1, decay_share=0.2)
# Thresholds so low that every part of the penalty acts within a few rounds.
PENALTY: Settings = (
    ("warmup_rounds", 2),
    ("temperature", 0.2),
    ("temperature_unit", "median"),
    ("max_norm", 0.2),
    ("ema_alpha", 0.5),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One comparison: what runs, on which mesh, in which numbers."""

    method: str
    replicas: int
    shards: int
    dtype: str
    model: str
    blocks: int = 0  # 0: the model's
    steps: int = 16
    warmup: int = 2
    every: int = 4
    compute: str = "same"
    penalty: Settings = PENALTY
    sync: Settings = ()  # of the method: the fields of SyncConfig
    step_ns: tuple[int, ...] = ()  # by the clock: what a step of each replica takes
    faults: tuple[Fault, ...] = ()
    sharding: Sharding = "fsdp2"  # of the core; the reference needs no more than shards
    packing: str = "stream"

    def __str__(self) -> str:
        mesh = f"{self.replicas}x{self.shards}"
        how = "" if self.sharding == "fsdp2" else f"-{self.sharding}"
        how += "" if self.packing == "stream" else f"-{self.packing}"
        how += "".join(f"-{x}" for name, x in self.sync if name in ("wire", "layerwise"))
        return f"{self.method}-{mesh}-{self.dtype}-{self.model}{how}"

    @property
    def mesh(self) -> tuple[int, int]:
        """Replicas, shards."""
        return self.replicas, self.shards

    @property
    def on_one_shard(self) -> "Cell":
        """The cell whose trace of the reference this one shares."""
        return dataclasses.replace(self, shards=1, sharding="fsdp2")

    @property
    def layers(self) -> int:
        """Transformer blocks."""
        return self.blocks or int(MODELS[self.model]["layers"])

    @property
    def accumulate(self) -> int:
        """Micro-batches per inner step."""
        return 2 if self.model == "gqa" else 1

    @property
    def width(self) -> int:
        """Terms of the longest dot product: over the vocabulary, or over a step's tokens."""
        tokens = self.replicas * self.accumulate * ROWS * SEQUENCE
        return max(MODELS[self.model]["vocabulary"], MODELS[self.model]["hidden"], tokens)

    @property
    def tokens_per_step(self) -> int:
        """Over all replicas."""
        return self.replicas * self.accumulate * ROWS * SEQUENCE


def _dtype_of(replicas: int, model: str) -> str:
    """Fixed by replicas and model, so that few programs are compiled."""
    narrow = {(1, "tiny"), (1, "tied"), (2, "gqa"), (4, "gqa"), (4, "odd"), (4, "tied")}
    return "float32" if (replicas, model) in narrow else "float64"


COVERING = [
    Cell(
        method=METHODS[(i + j) % 4],
        replicas=mesh[0],
        shards=mesh[1],
        dtype=_dtype_of(mesh[0], model),
        model=model,
    )
    for i, mesh in enumerate(MESHES)
    for j, model in enumerate(LLAMAS)
]
# Documents of five tokens on average, of a model that knows the id of their end.
DOCUMENTS = Cell(
    method="edit",
    replicas=2,
    shards=2,
    dtype="float64",
    model="odd",
    blocks=1,
    packing="documents",
)
# Other architectures change nothing but the gradients: one run of each.
ARCHITECTURES = [
    Cell(method="edit", replicas=2, shards=2, dtype="float64", model=model)
    for model in MODELS
    if model not in LLAMAS
]


def _simple(method: str, mesh: tuple[int, int], model: str, sharding: Sharding) -> Cell:
    return Cell(
        method=method,
        replicas=mesh[0],
        shards=mesh[1],
        dtype=_dtype_of(mesh[0], model),
        model=model,
        sharding=sharding,
    )


SIMPLE = [
    _simple("synchronous", (1, 4), "tied", "simple_fsdp"),
    _simple("edit", (1, 4), "odd", "simple_fsdp_aot"),
    _simple("edit", (2, 2), "gqa", "simple_fsdp"),
    _simple("post_local_sgd", (2, 2), "tied", "simple_fsdp_aot"),
    _simple("diloco", (4, 1), "tied", "simple_fsdp"),
    _simple("synchronous", (4, 1), "gqa", "simple_fsdp_aot"),
]


SECOND = 10**9
_two, _four = (
    partial(Cell, replicas=n, shards=m, dtype="float64", model="tiny", steps=13)
    for n, m in ((2, 2), (4, 1))
)
_late: Settings = (("streaming", (("fragments", 2), ("delay", 3), ("mix", 0.25))),)
_timed: Settings = (("timed", (("min_total_steps", 1),)),)
_rho: Settings = (("timed", (("min_total_steps", 9), ("step_weight", 0.5))),)
# Methods whose exchanges are used late, go by the clock, or are coded. Streams of int8 are cut
# into blocks by shard, and the reference has one.
ROWS_OF_METHODS = [
    _two(method="streaming_diloco"),
    _four(method="streaming_diloco", sync=_late),
    _two(method="co2", every=3),
    _four(method="co2", sync=(("co2", (("clip", 0.001),)),)),
    _two(method="co2_star", every=3),
    _four(method="co2_star", sync=(("co2", (("staleness", False),)), ("wire", "int8"))),
    _two(method="edit", sync=(("wire", "bf16"),)),
    _four(method="diloco", sync=(("wire", "int8"),)),
    _two(method="aedit", sync=_timed, step_ns=(SECOND, 2 * SECOND)),
    _four(method="aedit", sync=_rho, step_ns=(SECOND, 2 * SECOND, 3 * SECOND, 9 * SECOND)),
]
LAYERWISE = [
    _two(method="edit", every=3, sync=(("layerwise", True),)),
    _four(method="edit", every=3, sync=(("layerwise", True),)),
]


def every_cell() -> list[Cell]:
    """The full product."""
    return [
        Cell(method=method, replicas=mesh[0], shards=mesh[1], dtype=dtype, model=model)
        for method, mesh, dtype, model in itertools.product(METHODS, MESHES, DTYPES, MODELS)
    ]


def every_simple_cell() -> list[Cell]:
    """All methods, meshes of four ranks and both shardings, of the two models that are hardest."""
    shardings: tuple[Sharding, ...] = ("simple_fsdp", "simple_fsdp_aot")
    return [
        dataclasses.replace(cell, sharding=sharding)
        for cell, sharding in itertools.product(every_cell(), shardings)
        if cell.dtype == "float64" and cell.model in ("odd", "tied") and cell.mesh != (1, 1)
    ]


def core_changes(cell: Cell) -> dict[str, Any]:
    """The cell as changes to the core's default configuration; plain data."""
    is_edit, is_local = cell.method in ("edit", "aedit"), cell.method != "synchronous"
    sync: dict[str, Any] = {"method": cell.method, "every": cell.every}
    sync["warmup"] = cell.warmup if is_local else 0
    if cell.method == "aedit":
        sync["every"] = f"{cell.every}s"
    if is_edit:
        sync |= {"penalty": dict(cell.penalty), "layerwise": False}  # E5 ties the two schedules
    sync |= {k: dict(v) if isinstance(v, tuple) else v for k, v in cell.sync}
    train = {"steps": cell.steps, "dtype": cell.dtype, "compute": cell.compute}
    return {
        "model": MODELS[cell.model] | {"layers": cell.layers, "context": SEQUENCE},
        "data": {"sequence": SEQUENCE, "batch": ROWS // cell.shards, "seed": DATA_SEED}
        | {"packing": cell.packing},
        "mesh": {"replicas": cell.replicas, "shards": cell.shards},
        "shard": dict(SHARD_CONFIG[cell.sharding]),
        "optim": dict(OPTIM),
        "schedule": SCHEDULE | {"warmup_tokens": 3 * cell.tokens_per_step},
        "sync": sync,
        "train": train | {"accumulate": cell.accumulate},
    }


def tokens_of(cell: Cell) -> np.ndarray:
    """Training tokens. The last id of the vocabulary never occurs.

    So a value in its embedding's row reaches no loss and no gradient of an untied model.
    """
    unseen = MODELS[cell.model]["vocabulary"] - 1
    draws = np.random.default_rng(11).geometric(0.06, SEQUENCES * SEQUENCE + 1)
    tokens = (draws % unseen).astype(np.uint16)
    if cell.packing == "documents":
        tokens[np.random.default_rng(12).random(len(tokens)) < 0.2] = END
    return tokens


def parameters_of(cell: Cell, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Initial weights for both cores. Gains are not 1, or a wrong norm could hide."""
    params = {}
    for i, (name, shape) in enumerate(shapes.items()):
        noise = np.random.default_rng([5, i]).normal(size=shape)
        params[name] = (0.2 * noise if len(shape) > 1 else 1 + 0.3 * noise).astype(cell.dtype)
    return params
