"""``twinshard bench``, on each rank: join the others over the link, then measure."""

from contextlib import AbstractContextManager
from typing import Any

from core_torch.bench.modelled import joined_late
from core_torch.bench.shard_rank import measure
from core_torch.cli.worker import Context, Job
from core_torch.config import MeshConfig
from core_torch.mesh import Mesh, joined, rank_from_environment


def run(job: Job, context: Context) -> list[dict[str, Any]]:
    """One phase of one launch."""
    config = MeshConfig(shards=context.ranks, device="cpu")
    with joined_over(job["network"], config, context) as mesh:
        return measure(job, mesh, context.emit)


def joined_over(
    link: dict[str, Any], config: MeshConfig, context: Context
) -> AbstractContextManager[Mesh]:
    """The mesh of ranks that the link of a job connects."""
    place = rank_from_environment()
    assert place is not None, "launch says which rank this is"
    return (
        joined_late(
            config,
            place,
            context.init_method,
            rate=link["rate_bits_per_second"],
            delay=link["delay_seconds"],
        )
        if link["kind"] == "modelled"
        else joined(config, place, context.init_method)
    )
