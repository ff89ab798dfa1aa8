"""Jobs of several ranks for test_bench.py: ``python -m core_torch.tests.bench_jobs _rank ...``."""

import sys
import time

import torch
import torch.distributed as dist

from core_torch.bench.modelled import joined_late
from core_torch.bench.variants import AsynchronousAllGather, ExchangeAndSum
from core_torch.cli.bench_rank import run as bench
from core_torch.cli.worker import Context, Job, main_of_rank
from core_torch.config import MeshConfig
from core_torch.mesh import joined, rank_from_environment

MODULE = "core_torch.tests.bench_jobs"
DELAY = 0.05  # seconds


def own_collectives(job: Job, context: Context) -> list[float]:
    """What the collectives that FSDP2 is given make of the ranks' numbers, on every rank."""
    place = rank_from_environment()
    assert place is not None
    with joined(MeshConfig(shards=context.ranks), place, context.init_method) as mesh:
        group, rank, ranks = mesh.shard.group, context.rank, context.ranks
        assert group is not None
        rows = torch.arange(2.0 * ranks) + 100.0 * rank
        for op, factor in ((dist.ReduceOp.SUM, ranks), (dist.ReduceOp.AVG, 1)):
            total = torch.full((2,), -1.0)
            ExchangeAndSum()(total, rows.clone(), group, op)
            mean = torch.tensor([2.0 * rank, 2.0 * rank + 1]) + 100.0 * (ranks - 1) / 2
            torch.testing.assert_close(total, factor * mean, rtol=0, atol=0)
        gathered = torch.empty(2 * ranks)
        work = AsynchronousAllGather()(gathered, torch.full((2,), float(rank)), group)
        assert work is not None
        work.wait()
        return gathered.tolist()


def late_collectives(job: Job, context: Context) -> list[float]:
    """Results and delays of a modelled line; returns what each collective took in delays."""
    place = rank_from_environment()
    assert place is not None
    config = MeshConfig(shards=context.ranks)
    taken = []
    with joined_late(config, place, context.init_method, rate=1e9, delay=DELAY) as mesh:
        group, rank, ranks = mesh.shard.group, context.rank, context.ranks
        mine, every = torch.full((2,), float(rank)), torch.empty(2 * ranks)
        rows, row = torch.arange(2.0 * ranks), torch.empty(2)
        total = mine.clone()
        calls = (
            lambda: dist.all_gather_single(every, mine, group=group, async_op=True),
            lambda: dist.reduce_scatter_single(row, rows, group=group, async_op=True),
            lambda: dist.all_reduce(total, group=group, async_op=True),
            lambda: dist.all_to_all_single(
                torch.empty(2 * ranks), rows, group=group, async_op=True
            ),
        )
        for call in calls:
            dist.barrier()
            begin = time.monotonic()
            call().wait()
            taken.append((time.monotonic() - begin) / DELAY)
        assert every.tolist() == [float(i // 2) for i in range(2 * ranks)]
        assert row.tolist() == [ranks * 2.0 * rank, ranks * (2.0 * rank + 1)]
        assert total.tolist() == [ranks * (ranks - 1) / 2] * 2
    return taken


KINDS = {
    "own_collectives": own_collectives,
    "late_collectives": late_collectives,
    "bench_shard": bench,
}

if __name__ == "__main__":
    main_of_rank(sys.argv[2:], KINDS)
