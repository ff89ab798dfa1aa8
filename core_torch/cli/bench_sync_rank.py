"""``twinshard bench sync``, on each rank: join the other replica over the link, then measure."""

from typing import Any

from core_torch.bench.sync_rank import measure
from core_torch.cli.bench_rank import joined_over
from core_torch.cli.worker import Context, Job
from core_torch.config import MeshConfig


def run(job: Job, context: Context) -> dict[str, Any]:
    """One phase."""
    config = MeshConfig(replicas=context.ranks, device="cpu")
    with joined_over(job["network"], config, context) as mesh:
        return measure(job, mesh, context.emit)
