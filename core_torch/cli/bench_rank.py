"""``twinshard bench``, on each rank: join the others over the link, then measure."""

from typing import Any

from core_torch.bench.modelled import joined_late
from core_torch.bench.shard_rank import measure
from core_torch.cli.worker import Context, Job
from core_torch.config import MeshConfig
from core_torch.mesh import joined, rank_from_environment


def run(job: Job, context: Context) -> list[dict[str, Any]]:
    """One phase of one launch."""
    place = rank_from_environment()
    assert place is not None, "launch says which rank this is"
    config = MeshConfig(shards=context.ranks, device="cpu")
    link = job["network"]
    joining = (
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
    with joining as mesh:
        return measure(job, mesh, context.emit)
