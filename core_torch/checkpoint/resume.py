"""From a committed step to a freshly built run, on the layout that saved it or on another.

The same number of replicas: each takes up its own state, in rows of whatever number of shards.
Another number: the saved replicas merge (sync/merge.py), and new replica n goes on with the inner
state of saved replica n modulo their number.
"""

from pathlib import Path

import torch

from core_torch.checkpoint.load import Reader
from core_torch.checkpoint.snapshot import cuts_of, layout_of, restore
from core_torch.checkpoint.sound import Saved, find
from core_torch.checkpoint.state import SavedState, Shard
from core_torch.errors import CheckpointMismatch
from core_torch.sync.merge import SavedReplica, merge
from core_torch.train import TrainState

ROWS = "counter/rows"


def resume(state: TrainState, folder: Path) -> None:
    """Puts a committed step into a freshly built run. All ranks must call this.

    Args:
        state: right from ``train.build``.
        folder: of a run, whose newest commit is meant, or of one step.

    Raises:
        CheckpointError: no such commit.
        CheckpointCorrupt: a file is not what the commit says.
        CheckpointMismatch: the commit belongs to another configuration.
    """
    reader = Reader(find(folder), layout_of(state.mesh), cuts_of(state))
    saved, now = reader.saved, state.mesh.replica.size
    _check_pace(state, saved)
    place = state.mesh.replica.index % saved.replicas
    own = _with_rows(reader.own(place), saved)
    if saved.replicas != now:
        counters = [reader.own(n, _is_counter) for n in range(saved.replicas)]
        taken = max(int(_with_rows(held, saved)[ROWS].local) for held in counters)
        rows = -(-taken * saved.replicas // now)  # the first of which nobody has taken any
        own[ROWS] = own[ROWS]._replace(local=torch.tensor(rows))
    restore(state, SavedState(reader.shared(), own, saved.scalars))
    if saved.replicas != now and state.sync is not None:
        merge(state.sync, [_replica(reader, n) for n in range(saved.replicas)], place)
        state.tokens = state.sync.votes.tokens


def _check_pace(state: TrainState, saved: Saved) -> None:
    """Where replicas differ in steps, steps in common are counted in tokens."""
    now = state.config.tokens_per_step
    before = saved.scalars.get("tokens_per_step", now)
    if state.sync is not None and state.sync.is_timed and before != now:
        raise CheckpointMismatch(
            f"tokens of a step over all replicas: saved {before}, now {now}",
            likely="the mesh or the batch was changed; method aedit counts its length, and the "
            "names of its commits, in such steps",
            next="keep mesh.replicas x mesh.shards x train.accumulate x data.batch as it was",
        )


def _with_rows(own: dict[str, Shard], saved: Saved) -> dict[str, Shard]:
    """With the count of rows that commits of before there was one lack."""
    if ROWS in own:
        return own
    fixed = saved.scalars["fixed"]
    of_step = fixed["train.accumulate"] * fixed["data.batch"] * saved.shards
    return own | {ROWS: Shard(own["counter/step"].local * of_step, (), 0)}


def _replica(reader: Reader, n: int) -> SavedReplica:
    own = {name: shard.local for name, shard in reader.own(n, _is_of_a_round).items()}
    params, residuals = (
        {k.removeprefix(kind): x for k, x in own.items() if k.startswith(kind)}
        for kind in ("param/", "residual/")
    )
    steps, tokens = (int(own[f"counter/{k}"]) for k in ("steps_since", "local_tokens"))
    return SavedReplica(params, residuals, steps, tokens)


def _is_counter(name: str) -> bool:
    return name.startswith("counter/")


def _is_of_a_round(name: str) -> bool:
    return name.startswith(("param/", "residual/", "counter/"))
