"""``twinshard doctor``, on each rank: are collectives and initial weights what they must be?

Every result is compared with one computed here from the rank numbers alone. The values are
small whole numbers, so sums and means are exact in any order.
"""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from core_torch.cli.worker import Context, Job
from core_torch.config import MeshConfig, ModelConfig
from core_torch.mesh import Mesh, build_mesh, joined, rank_from_environment
from core_torch.models import build_model
from core_torch.shard.fsdp2 import shard_with_fsdp2

DEADLINE_SECONDS = 30.0
_BLOCK = 3  # elements per rank
_MODEL = ModelConfig(dim=16, layers=1, heads=2, kv_heads=1, hidden=24, context=16)
_VOCABULARY = 257  # odd, so that shards are uneven


class Collective(NamedTuple):
    """One collective: how to call it, what it must give, and whether Twinshard relies on it."""

    name: str
    call: Callable[
        [Tensor, Tensor, bool], Any
    ]  # -> dist.Work or None; (output, input, asynchronous)
    want: Callable[[Tensor, int], Tensor]  # from all ranks' inputs (ranks, n) and the rank
    is_used: bool = True


def run(job: Job, context: Context) -> dict[str, Any]:
    """Sends a "check" event per check and returns facts about torch on rank 0."""
    place = rank_from_environment()
    assert place is not None, "launch says which rank this is"
    config = MeshConfig(replicas=context.ranks, deadline_seconds=DEADLINE_SECONDS)
    with joined(config, place, context.init_method) as mesh:
        for collective in COLLECTIVES:
            context.emit(check_collective(collective, mesh.device))
        context.emit(check_rows_of_initial_weights())
        for shards in range(1, context.ranks + 1):
            if context.ranks % shards == 0:
                shape = MeshConfig(replicas=context.ranks // shards, shards=shards)
                context.emit(check_mesh_of_initial_weights(build_mesh(shape, mesh.device)))
        context.emit(check_torch_meta_init(mesh))
        return {
            "device": str(mesh.device),
            "backend": dist.get_backend(),
            "threads_per_rank": torch.get_num_threads(),
        }


def inputs_of(ranks: int, device: torch.device) -> Tensor:
    """(ranks, ranks * _BLOCK) what each rank contributes; no two numbers are equal."""
    count = ranks * ranks * _BLOCK
    return torch.arange(1.0, count + 1, device=device).reshape(ranks, ranks * _BLOCK) * ranks


def check_collective(collective: Collective, device: torch.device) -> dict[str, Any]:
    """Calls a collective synchronously and asynchronously and compares the results."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inputs = inputs_of(ranks, device)
    want = collective.want(inputs, rank)
    for asynchronous in (False, True):
        output = torch.full_like(want, -1.0)
        how = "async" if asynchronous else "sync"
        try:
            work = collective.call(output, inputs[rank].clone(), asynchronous)
            if work is not None:
                work.wait()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            state = "failed" if collective.is_used else "not offered"
            return check(collective.name, state, str(error).splitlines()[0], collective.is_used)
        if not torch.equal(output, want):
            detail = f"{how}: want {want.tolist()}, got {output.tolist()}"
            return check(collective.name, "wrong", detail, collective.is_used)
    return check(collective.name, "ok", "sync and async", collective.is_used)


def check_rows_of_initial_weights() -> dict[str, Any]:
    """Whether no matrix of a new model holds the same row twice."""
    model = build_model(_MODEL, _VOCABULARY, seed=0)
    for name, param in model.named_parameters():
        if param.ndim == 2 and len(torch.unique(param, dim=0)) < len(param):
            return check("initial weights: rows distinct", "wrong", f"{name} repeats rows")
    return check("initial weights: rows distinct", "ok", "")


def check_mesh_of_initial_weights(mesh: Mesh) -> dict[str, Any]:
    """Whether a sharded new model holds the same weights as an unsharded one."""
    shape = f"{mesh.replica.size} x {mesh.shard.size}"
    name = f"initial weights: mesh {shape} as one rank"
    want = checksum(build_model(_MODEL, _VOCABULARY, seed=0))
    got = checksum(shard_with_fsdp2(build_model(_MODEL, _VOCABULARY, seed=0), mesh).module)
    return check(name, "ok" if got == want else "wrong", f"sha256 {got[:12]}")


def checksum(model: nn.Module) -> str:
    """SHA-256 over all parameters, sharded ones as whole tensors."""
    digest = hashlib.sha256()
    for name, param in model.named_parameters():
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        digest.update(name.encode())
        digest.update(whole.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def check_torch_meta_init(mesh: Mesh) -> dict[str, Any]:
    """Whether torch's own way, to shard first and draw afterwards, would repeat rows.

    Twinshard never draws that way; who adds it must know what it does here.
    """
    with torch.device("meta"):
        layer = nn.Linear(4, 4 * dist.get_world_size(), bias=False)
    fully_shard(layer, mesh=_flat(mesh))
    layer.to_empty(device=mesh.device)
    torch.manual_seed(0)
    layer.reset_parameters()
    weight = layer.weight
    assert isinstance(weight, DTensor)
    whole = weight.full_tensor()
    repeats = len(whole) - len(torch.unique(whole, dim=0))
    state = "warning" if repeats else "ok"
    detail = f"repeats {repeats} of {len(whole)} rows" if repeats else ""
    return check("torch's meta-device initialisation (not used)", state, detail, False)


def check(name: str, state: str, detail: str, is_used: bool = True) -> dict[str, Any]:
    """The event for one finished check."""
    return {"event": "check", "name": name, "state": state, "detail": detail, "used": is_used}


def _flat(mesh: Mesh) -> Any:
    return mesh.torch_mesh["replica"]  # doctor's first mesh has all ranks on this axis


def _all_reduce(output: Tensor, given: Tensor, asynchronous: bool) -> Any:
    output.copy_(given)
    return dist.all_reduce(output, async_op=asynchronous)


def _broadcast(output: Tensor, given: Tensor, asynchronous: bool) -> Any:
    output.copy_(given)
    return dist.broadcast(output, src=0, async_op=asynchronous)


def _all_gather(output: Tensor, given: Tensor, asynchronous: bool) -> Any:
    return dist.all_gather_single(output, given, async_op=asynchronous)


def _all_to_all(output: Tensor, given: Tensor, asynchronous: bool) -> Any:
    return dist.all_to_all_single(output, given, async_op=asynchronous)


def _scatter_sum(output: Tensor, given: Tensor, asynchronous: bool) -> Any:
    return dist.reduce_scatter_single(output, given, async_op=asynchronous)


def _scatter_mean(output: Tensor, given: Tensor, asynchronous: bool) -> Any:
    mean = dist.ReduceOp.AVG
    return dist.reduce_scatter_single(output, given, op=mean, async_op=asynchronous)


def _own_block(x: Tensor, rank: int) -> Tensor:
    return x[rank * _BLOCK : (rank + 1) * _BLOCK]


COLLECTIVES = (
    Collective("all_reduce SUM", _all_reduce, lambda x, rank: x.sum(0)),
    Collective("all_gather", _all_gather, lambda x, rank: x.flatten()),
    Collective("reduce_scatter SUM", _scatter_sum, lambda x, r: _own_block(x.sum(0), r)),
    Collective("reduce_scatter AVG", _scatter_mean, lambda x, r: _own_block(x.mean(0), r), False),
    Collective(
        "all_to_all_single",
        _all_to_all,
        lambda x, r: torch.cat([_own_block(row, r) for row in x]),
        False,
    ),
    Collective("broadcast", _broadcast, lambda x, rank: x[0], False),
)
