"""Chapter 21. Hand-over: a run that begins in one program and ends in the other.

You learn what the state of a run is, by seeing that nothing else is needed to go on.

    runs/mine/ckpt/step-00000400/
      tensors/shard-MMMM.safetensors       anchor/NAME, velocity/NAME, in_flight/NAME
      replica-NNNN/shard-MMMM.safetensors  param/, exp_avg/, exp_avg_sq/, step/, residual/NAME, and
                                           counter/WHAT, whole numbers in which replicas may differ
      state.json                           counts, statistics, and a table: which rows lie in which
                                           file
      COMMIT.json                          written last: size and SHA-256 of every file

That is the checkpoint of core_torch; docs/checkpoints.md has each state and its owner. The files
of a folder cut every tensor into rows, as chapter `fsdp` does. ``read`` joins them, whatever their
number, and places them on the reference's own mesh; ``write`` cuts them into as many as you say.

    (H1) what is read is what was written, bit for bit: nothing is converted on the way
    (H2) a batch is a function of counters (B3), a learning rate of tokens (T1), so a few whole
         numbers tell where to go on
    (H3) each program counts from what it reads: steps since a round, tokens agreed (V1), time since
         a round as a duration, never as a date

So "JAX-interoperable" is a matter of files, not of bindings: nothing here knows torch.

Who communicates: nobody; one process reads and writes for all ranks.
"""

import itertools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import numpy as np

from reference_jax.aedit import Pace
from reference_jax.commit_file import Saved, load, save
from reference_jax.data import batch_of_all
from reference_jax.fsdp import TrainState, place, replicate
from reference_jax.local_sgd import Measured
from reference_jax.mesh import EVERYWHERE, ONE_EACH, pretend_devices, put
from reference_jax.methods import Rounds, Started, TrainConfig, units_of
from reference_jax.model import LlamaConfig, init_params, shapes
from reference_jax.record import Host
from reference_jax.streaming import Flight
from reference_jax.sync.penalty import Verdict
from reference_jax.trace_file import plain
from reference_jax.train import Run, train

COUNTERS = (
    "step",
    "rows",
    "steps_since",
    "local_tokens",
    "is_due",
    "wants_checkpoint",
    "elapsed_ns",
)


class Layout(NamedTuple):
    """How a rank reads its batches; what one rank of the core is told."""

    batch: int  # sequences of a rank and micro-batch
    sequence: int
    seed: int


def read(folder: str | Path, config: TrainConfig) -> Run:
    """The run of a committed step, to be given to ``train``. (H1..H3)

    Args:
        folder: ``.../ckpt/step-XXXXXXXX``.
        config: the same run in the words of the reference; its shards may be others.

    Raises:
        ValueError: see ``load``; or the commit is of another run, or of one whose due round
            waits for the next forward, which the reference performs at once.
    """
    saved = load(folder)
    names = list(shapes(config.model))
    told = {k.removeprefix("param/") for k in saved.own[0] if k.startswith("param/")}
    fixed = saved.scalars["fixed"]
    if fixed["sync.method"] != config.method or told != set(names):
        raise ValueError(f"{folder} is of another method or model than {config}")
    if len(saved.own) != config.replicas:
        raise ValueError(f"{folder} has {len(saved.own)} replicas, not {config.replicas}")
    if any(one.get("counter/is_due", 0) for one in saved.own):
        raise ValueError(f"in {folder} a round waits for the next forward; save a step later")
    if tokens := saved.scalars.get("tokens_per_step"):
        of_step = tokens // (config.replicas * fixed["data.sequence"])
        if any(one["counter/rows"] != one["counter/step"] * of_step for one in saved.own):
            raise ValueError(f"{folder} went on from another layout; its batches begin elsewhere")

    def of(kind: str) -> Host:
        return {k: np.stack([one[f"{kind}/{k}"] for one in saved.own]) for k in names}

    # A run takes its anchor from equal replicas; all of it is overwritten in a moment.
    run = Run(config, replicate({k: x[0] for k, x in of("param").items()}, config.replicas))
    theta, mean, square = (
        place(of(kind), run.mesh, axis=1) for kind in ("param", "exp_avg", "exp_avg_sq")
    )
    counts = {k: put(x, run.mesh, ONE_EACH) for k, x in of("step").items()}
    run.state, run.rounds = TrainState(theta, mean, square, counts), None
    run.steps_R = np.array([one["counter/step"] for one in saved.own])
    run.step = int(run.steps_R.max())
    sync = saved.scalars["sync"]
    if sync is not None and sync["has_parted"]:
        with jax.set_mesh(run.mesh):
            run.rounds = Rounds(config, run.state)
            _fill(run, run.rounds, saved)
        if config.method == "aedit":
            of_rank = config.accumulate * fixed["data.batch"] * fixed["data.sequence"]
            run.pace = _pace(config, saved, of_one=of_rank * saved.shards)
    return run


def _fill(run: Run, rounds: Rounds, saved: Saved) -> None:
    """What replicas agree on, what is in flight, and counts."""
    sync, names = saved.scalars["sync"], list(shapes(run.config.model))
    if sync["units"] != [unit for unit, _ in rounds.units]:
        raise ValueError(f"the commit has the units {sync['units']}, the run {rounds.units}")

    def agreed(kind: str, of: list[str]) -> dict[str, jax.Array]:
        return place({k: saved.shared[f"{kind}/{k}"] for k in of}, run.mesh, axis=0)

    def numbers(x: Any, like: jax.Array) -> jax.Array:
        return put(np.array(x, like.dtype), run.mesh, EVERYWHERE)

    stats = rounds.sync.stats
    stats = stats._replace(**{k: numbers(x, getattr(stats, k)) for k, x in sync["stats"].items()})
    owed = dict(rounds.sync.owed)  # zeros where the core has coded nothing yet
    coded = [k for k in names if f"residual/{k}" in saved.own[0]] if owed else []
    left = {k: np.stack([one[f"residual/{k}"] for one in saved.own]) for k in coded}
    owed |= place(left, run.mesh, axis=1)
    anchor, velocity = agreed("anchor", names), agreed("velocity", names)
    rounds.sync = rounds.sync._replace(anchor=anchor, velocity=velocity, stats=stats, owed=owed)
    rounds.numbered = sync["rounds"]
    rounds.since = dict(zip(rounds.since, sync["steps_since"], strict=True))
    for one in sync["flights"]:
        units = tuple(rounds.units[u] for u in one["members"])
        verdict = {k: put(np.array(x), run.mesh, EVERYWHERE) for k, x in one["verdict"].items()}
        norm_UR, weight_UR = (numbers(one[k], stats.mean_R) for k in ("norm", "weight"))
        accept_U = put(np.array(one["accept"]), run.mesh, EVERYWHERE)
        measured = Measured(norm_UR, Verdict(**verdict), weight_UR, accept_U)
        combined = agreed("in_flight", [name for _, of_unit in units for name in of_unit])
        counts = {"round": one["number"], "empty": False}
        counts |= {k: one[k] for k in ("step", "forced", "steps")}
        rounds.flights.append(Started(counts, units, Flight(measured, combined)))


def _pace(config: TrainConfig, saved: Saved, *, of_one: int) -> Pace:
    """(V1..V5) counters and clocks; ``of_one``: tokens of one replica's step."""
    total = config.steps * config.replicas * of_one
    agreed = saved.scalars["sync"]["agreed_tokens"]
    pace = Pace(config.timed, tokens=of_one, agreed=agreed, total=total)
    for n, one in enumerate(saved.own):
        pace.steps[n] = int(one["counter/steps_since"])
        pace.local[n] = int(one["counter/local_tokens"])
        pace.triggers[n].began_ns = pace.clocks[n]() - int(one["counter/elapsed_ns"])
    return pace


def write(folder: str | Path, run: Run, layout: Layout, *, shards: int | None = None) -> Path:
    """Commits a run between two steps, so that core_torch resumes it. (H1..H3)

    Args:
        folder: of the run; the commit becomes ``ckpt/step-XXXXXXXX`` in it.
        run: of the reference.
        layout: of one rank's batches in the core.
        shards: of a replica in the core; None: as many as the reference has. Resuming is exact
            if their batches together are those of the reference's shards.

    Raises:
        ValueError: by the clock, when a replica waits for its round: the core commits while
            all step.
    """
    if run.pace is not None and not all(run.pace.is_active()):
        raise ValueError("a replica waits for its round; save after the next one")
    shards = run.config.shards if shards is None else shards
    tokens = run.config.accumulate * layout.batch * layout.sequence * shards
    rows = tokens // layout.sequence
    own = [_own(run, n, of_one=tokens, rows=rows) for n in range(run.config.replicas)]
    saved = Saved(plain(_scalars(run, layout, of_one=tokens)), _shared(run), own, shards)
    return save(folder, saved)


def _shared(run: Run) -> Host:
    if run.rounds is None:
        return {}
    sync = run.rounds.sync
    found = {f"anchor/{k}": x for k, x in run.host(sync.anchor, axis=0).items()}
    found |= {f"velocity/{k}": x for k, x in run.host(sync.velocity, axis=0).items()}
    for one in run.rounds.flights:
        flying = run.host(one.flight.combined, axis=0)
        found |= {f"in_flight/{k}": x for k, x in flying.items()}
    return found


def _own(run: Run, n: int, *, of_one: int, rows: int) -> Host:
    state, found = run.state, dict[str, np.ndarray]()
    arrays = {"param": state.params, "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
    if run.rounds is not None and _owes(run):
        arrays["residual"] = run.rounds.sync.owed
    for kind, of_all in arrays.items():
        found |= {f"{kind}/{k}": x_R[n] for k, x_R in run.host(of_all).items()}
    found |= {f"step/{k}": np.array(np.asarray(x_R)[n]) for k, x_R in state.step.items()}
    steps = int(run.steps_R[n])
    counted = dict.fromkeys(COUNTERS, 0) | {"step": steps, "rows": steps * rows}
    if run.config.method == "synchronous":
        counted = {k: counted[k] for k in ("step", "rows")}
    elif run.pace is not None:
        pace = run.pace
        counted |= {"steps_since": pace.steps[n], "local_tokens": pace.local[n]}
        counted["elapsed_ns"] = pace.clocks[n]() - pace.triggers[n].began_ns
    else:
        begun = 0 if run.rounds is None else run.config.warmup
        counted["local_tokens"] = (run.step - begun) * of_one
        if run.rounds is not None:
            counted["steps_since"] = next(iter(run.rounds.since.values()))
    return found | {f"counter/{k}": np.array(x, np.int64) for k, x in counted.items()}


def _scalars(run: Run, layout: Layout, *, of_one: int) -> dict[str, Any]:
    config, of_step = run.config, run.config.replicas * of_one
    agreed = 0 if run.rounds is None else config.warmup * of_step
    step, tokens = run.step, run.step * of_step
    if run.pace is not None:
        agreed = run.pace.agreed
        step, tokens = agreed // of_step, run.pace.estimate(0)
    is_timed = config.method == "aedit"
    fixed = {
        "sync.method": config.method,
        "sync.every": f"{config.timed.interval_ns / 1e9:g}s" if is_timed else config.every,
        "sync.warmup": config.warmup,
        "sync.wire": config.wire,
        "train.dtype": next(iter(run.state.params.values())).dtype.name,
        "train.accumulate": config.accumulate,
    }
    fixed |= {f"data.{k}": x for k, x in layout._asdict().items()}
    told = {"step": step, "tokens": tokens, "fixed": fixed, "config_hash": None}
    sync = _sync_scalars(run, agreed=agreed) if config.method != "synchronous" else None
    return told | {"replica_bytes": 0, "shard_bytes": 0, "sync": sync}


def _sync_scalars(run: Run, *, agreed: int) -> dict[str, Any]:
    names = [unit for unit, _ in units_of(run.config)]
    told = {"agreed_tokens": agreed, "units": names, "has_parted": run.rounds is not None}
    if run.rounds is None:
        return told
    sync, flights = run.rounds.sync, []
    for counts, units, (measured, _) in run.rounds.flights:
        decided = {"norm": measured.norm_UR, "weight": measured.weight_UR}
        flights.append(
            {k: counts[k] for k in ("step", "forced", "steps")}
            | {"number": counts["round"], "members": [names.index(unit) for unit, _ in units]}
            | {k: np.array(x).tolist() for k, x in decided.items()}
            | {"accept": np.array(measured.accept_U).tolist(), "verdict": _lists(measured.verdict)}
        )
    since = list(run.rounds.since.values())
    return told | {
        "rounds": run.rounds.numbered,
        "steps_since": [0] * len(names) if run.config.method == "aedit" else since,
        "stats": _lists(sync.stats),
        "flights": flights,
        "coded": list(range(len(names))) if _owes(run) else [],
    }


def _lists(fields: NamedTuple) -> dict[str, Any]:
    return {k: np.array(x).tolist() for k, x in fields._asdict().items()}


def _owes(run: Run) -> bool:
    """Whether replicas send fewer bits, so that each owes something."""
    return run.config.wire != "fp32" and run.config.replicas > 1


def main() -> None:
    """Stops between two rounds, writes, forgets, reads on another mesh, and goes on."""
    pretend_devices(4)
    model = LlamaConfig(vocabulary=64, dim=8, layers=1, heads=2, kv_heads=1, hidden=12)
    config = TrainConfig(model=model, method="edit", replicas=2, shards=1, steps=6, every=2)
    tokens = np.random.default_rng(0).integers(0, 64, 1024)
    dealt = {"replicas": 2, "shards": 1, "batch": 2, "sequence": 8, "seed": 0}

    def batches(step: int) -> tuple[np.ndarray, np.ndarray]:
        return batch_of_all(tokens, step=step, **dealt)

    params = init_params(model, seed=0, dtype="float32")
    whole = list(train(config, batches, params=params))
    run = Run(config, replicate(params, 2))
    for record in itertools.islice(train(config, batches, run=run), 3):
        print(f"step {record.step}: loss {record.loss_R}")
    with TemporaryDirectory() as folder:
        path = write(folder, run, Layout(batch=1, sequence=8, seed=0), shards=2)
        for file in sorted(path.rglob("*.*")):
            print(f"    {file.relative_to(path.parent)}: {file.stat().st_size} bytes")
        again = read(path, config)
    assert again.rounds is not None
    print(f"read: step {again.step}, rounds so far {again.rounds.numbered}", end="")
    print(f", steps since the last {again.rounds.since}")
    for record, known in zip(train(config, batches, run=again), whole[3:], strict=True):
        is_same = all((record.params[k] == x).all() for k, x in known.params.items())
        print(f"step {record.step}: loss {record.loss_R}", end="")
        print(f", the bits of a run without a stop {is_same}")


if __name__ == "__main__":
    main()
