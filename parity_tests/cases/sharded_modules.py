"""Modules with odd parameters, and what a sharded module does when it is read and freed.

Each function runs on all ranks of the pool over a mesh of its first ``shards`` ranks. Imports no
jax.
"""

from collections import Counter
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from core_torch.mesh import Mesh
from core_torch.models import token_loss
from core_torch.models.llama import Llama
from core_torch.shard import parametrise
from core_torch.shard.compile import compile_model
from core_torch.shard.schedule import CompileOptions
from core_torch.shard.simple_fsdp import Precision, simple_fsdp
from parity_tests.cases import sharded_training as training
from parity_tests.cases.part_mesh import mesh_over
from parity_tests.cases.sharded_training import ADAMW, batch, compiler, gradients_of
from parity_tests.harness.rank_mesh import mesh_for
from parity_tests.harness.torch_bridge import shards_of, to_numpy

ODD_VOCABULARY = 257
EAGER: dict[str, Any] = {"method": "simple_fsdp"}


class Odd(nn.Module):
    """What a parametrisation can trip over, in one model."""

    counter: Tensor
    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ODD_VOCABULARY, 8)  # 65, 65, 65 and 62 rows on four ranks
        self.scale = nn.Parameter(torch.tensor(1.5))  # no dimension to cut; read twice
        self.twice = nn.Linear(8, 8)  # a module used twice, and its weight once more
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.gate = nn.Linear(8, 1)  # bias and weight of one row: three ranks hold nothing
        self.register_buffer("offset", torch.linspace(-1.0, 1.0, 8))
        self.register_buffer("counter", torch.zeros(()))
        self.head = nn.Linear(8, ODD_VOCABULARY, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """(B, T, ODD_VOCABULARY) logits."""
        self.counter += 1
        x = self.embed(tokens_BT) * self.scale + self.offset
        x = self.twice(torch.tanh(self.twice(x))) * self.scale
        x = torch.tanh(self.frozen(x) + F.linear(x, self.twice.weight))
        return self.head(x * self.gate(x))


def odd_model() -> Odd:
    """With the same float64 weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Odd().to(torch.float64)


def odd_rows(index: int, shards: int) -> Tensor:
    """This rank's part of 8 sequences of 5 tokens."""
    whole = torch.arange(40).mul(101).remainder(ODD_VOCABULARY).view(8, 5)
    return whole.chunk(shards)[index]


def odd_step(model: nn.Module, rows: Tensor) -> float:
    """Forward and backward; returns the loss."""
    loss = token_loss(model(rows), rows.roll(1, dims=1))
    loss.backward()
    return loss.item()


def odd(shards: int, options: dict[str, Any] | None) -> dict[str, Any] | None:
    """Two micro-batches, one optimizer step, another micro-batch."""
    mesh = mesh_over(1, shards)
    if mesh is None:
        return None
    model = simple_fsdp(odd_model(), mesh.torch_mesh["shard"], axes=axes_of(mesh))
    if options is not None:
        compile_model(model, compiler(options))
    return odd_account(model, mesh.shard.index, shards) | {
        "scopes": [(d.op, d.scope) for d in mesh.ledger.trace or []]
    }


def odd_account(model: nn.Module, index: int, shards: int) -> dict[str, Any]:
    """What one rank, or one process alone, makes of the odd model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    rows = odd_rows(index, shards)
    halves = [odd_step(model, half) for half in rows.chunk(2)]
    accumulated = {name: grad.clone() for name, grad in gradients_of(model)}
    optimizer.step()
    optimizer.zero_grad()
    after = odd_step(model, rows)
    return {
        "losses": [*halves, after],
        "accumulated": shards_of(accumulated),
        "grads": shards_of(gradients_of(model)),
        "params": shards_of(model.named_parameters()),
        "counter": to_numpy(dict(model.named_buffers())["counter"]),
        "without": [name for name, p in model.named_parameters() if p.grad is None],
    }


def axes_of(mesh: Mesh) -> Any:
    """The axes whose ledger the test reads; the trace starts empty."""
    mesh.ledger.trace = []
    return mesh.axis("pp"), mesh.shard


def counts(mesh: Mesh) -> dict[str, int]:
    """Collectives since the last call, by operation."""
    seen = Counter(d.op for d in mesh.ledger.trace or [])
    mesh.ledger.trace = []
    return dict(seen)


def sharded_llama(shards: int, **how: Any) -> tuple[Llama, Mesh] | None:
    """An eager model, unless ``how`` holds options of the compiler."""
    mesh = mesh_over(1, shards)
    if mesh is None:
        return None
    mesh.ledger.trace = []
    return training.sharded(EAGER | how, mesh)[0], mesh


def loss_of(model: nn.Module, mesh: Mesh, step: int = 0) -> Tensor:
    """Loss of one of ``sharded_training.batch``'s batches."""
    inputs, targets = batch(step, mesh.shard.index, mesh.shard.size)
    return token_loss(model(inputs), targets)


def resharding(reshard: bool) -> dict[str, Any] | None:
    """Gathers in the forward, in the backward, and of a forward that trains nothing."""
    built = sharded_llama(2, reshard=reshard)
    if built is None:
        return None
    model, mesh = built
    loss = loss_of(model, mesh)
    forward = counts(mesh)
    loss.backward()
    backward = counts(mesh)
    with torch.no_grad():
        loss_of(model.eval(), mesh)
    return {"forward": forward, "backward": backward, "evaluation": counts(mesh)}


def alive_after_forward(reshard: bool) -> int | None:
    """Gathered parameters that are still in memory when the forward has returned."""
    built = sharded_llama(2, reshard=reshard)
    if built is None:
        return None
    model, mesh = built
    made: list[StorageWeakRef] = []
    enter = parametrise._GATHERED.enter

    def noting(full: Tensor, source: Any) -> None:
        made.append(StorageWeakRef(full.untyped_storage()))
        enter(full, source)

    with mock.patch.object(parametrise._GATHERED, "enter", noting):
        loss = loss_of(model, mesh)
    assert loss.requires_grad and len(made) == 21
    return sum(not ref.expired() for ref in made)


def evaluation(options: dict[str, Any] | None) -> dict[str, Any] | None:
    """Losses with and without gradients, of a model that is or is not compiled."""
    how = {} if options is None else {"options": options}
    built = sharded_llama(2, **how)
    if built is None:
        return None
    model, mesh = built
    training_loss = loss_of(model, mesh).item()
    with torch.no_grad():
        quiet = loss_of(model.eval(), mesh)
    return {"train": training_loss, "eval": quiet.item(), "requires_grad": quiet.requires_grad}


def reading() -> dict[str, Any] | None:
    """What a person finds with print and pdb."""
    built = sharded_llama(2)
    if built is None:
        return None
    model, _ = built
    weight = model.layers[0].attention.wq.weight  # type: ignore[union-attr]
    held = dict(model.named_parameters())["layers.0.attention.wq.weight"]
    assert isinstance(held, DTensor)
    return {
        "read": to_numpy(weight),  # type: ignore[arg-type]
        "kind": type(weight).__name__,
        "held": to_numpy(held),
        "class": type(model.layers[0]).__name__,
        "is a block": isinstance(model.layers[0], type(training.llama({}).layers[0])),
    }


def two_models(options: dict[str, Any] | None) -> dict[str, Any]:
    """Two models of one class: bfloat16 over the shards, float32 over the replicas."""
    mesh = mesh_for(2, 2)
    mesh.ledger.trace = []
    models = {}
    for axis, dtype in ((mesh.shard, torch.bfloat16), (mesh.replica, None)):
        model = simple_fsdp(
            training.llama({}),
            mesh.torch_mesh[axis.name],
            precision=Precision(compute_dtype=dtype),
            axes=(mesh.axis("pp"), axis),
        )
        if options is not None:
            compile_model(model, CompileOptions(backend="aot_eager", **options))
        models[axis.name] = model
    told: dict[str, Any] = {}
    for _ in range(2):
        for name, model in models.items():
            mesh.ledger.trace = []
            logits = model(batch(0, 0, 2)[0])
            token_loss(logits, batch(0, 0, 2)[1]).backward()
            told[name] = {
                "logits": str(logits.dtype),
                "grads": sorted({str(grad.dtype) for _, grad in gradients_of(model)}),
                "axes": sorted({d.axis for d in mesh.ledger.trace}),
                "dtypes": sorted({d.dtype for d in mesh.ledger.trace}),
            }
    return told


def equal_data(shards: int) -> dict[str, Any] | None:
    """Gradients when every rank has the same rows: their mean is each one's own."""
    built = sharded_llama(shards, dtype="float64")
    if built is None:
        return None
    model, _ = built
    inputs, targets = batch(0, 0, 1)
    token_loss(model(inputs), targets).backward()
    return shards_of(gradients_of(model))


def tied(options: dict[str, Any] | None) -> dict[str, Any] | None:
    """A tied embedding and head after two steps."""
    how = {} if options is None else {"options": options}
    built = sharded_llama(2, tied=True, **how)
    if built is None:
        return None
    model, mesh = built
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(2):
        mesh.ledger.trace = []
        loss_of(model, mesh, step).backward()
        scatters = [(d.scope, d.numel) for d in mesh.ledger.trace or [] if d.op == "reduce_scatter"]
        optimizer.step()
        optimizer.zero_grad()
    ends = [m._parameters["weight"] for m in (model.tok_embeddings, model.output)]
    return {
        "one": ends[0] is ends[1],
        "parameters": len(list(model.parameters())),
        "states": len(optimizer.state),
        "scatters": scatters,
        "params": shards_of(model.named_parameters()),
    }
