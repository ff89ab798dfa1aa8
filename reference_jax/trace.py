"""Chapter 20. Trace: a run as numbers that two programs can compare.

You learn how to find the first wrong number among millions without storing them.

A tensor is written as a sketch (file `sketch`): its sum of squares, its largest element, and 16
sums of its elements with scrambled signs.

    (K1) sk_k = sum_i s_k(i) x_i
    (K2) sketches of shards add up to the sketch of the tensor, so a run on 2 x 2 ranks and one on a
         single device are compared without gathering anything
    (K3) ||x - y||^2 is about mean_k (sk_k(x) - sk_k(y))^2

Everything that a step makes is written in the order in which it is made, one line each:

    init      the weights that all start from
    data      inputs and targets
    forward   what leaves each unit of the model, and the loss
    backward  the derivative of the replica's loss with respect to that
    grad      of parameters, averaged over whoever averages, before clipping
    clip      the norm and the factor
    optim     what AdamW added to a parameter, and its moments
    sync.delta, vote, merge, clip, outer, params, end    a round, from d_n to theta

So the first line that differs names the culprit. Updates are written, never parameters: next to
the size of a parameter a missing update looks like a rounding.

How is a derivative with respect to the *inside* of the model taken? Zeros are added to what leaves
each unit; the derivative with respect to the zeros is the one wanted (``tapped``). The model does
that by itself on one device, once more after the run has done it: the run is not touched.

Who communicates: nobody; the run does, as it always does.
"""

import functools
import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from reference_jax.data import batch_of_all
from reference_jax.fsdp import rank_loss, replicate
from reference_jax.mesh import pretend_devices
from reference_jax.methods import TrainConfig, units_of
from reference_jax.model import Arrays, LlamaConfig, init_params, shapes, units
from reference_jax.record import Host, Record, Told, Voted
from reference_jax.sketch import sketch
from reference_jax.sync.penalty import clip_coefficient
from reference_jax.trace_file import Lines, Place, about
from reference_jax.train import Batches, Perturb, train


def parts(config: LlamaConfig) -> list[str]:
    """Units of the model that have an output, in order of the forward; tied or not."""
    return ["embedding", *(f"layers.{i}" for i in range(config.layers)), "head"]


@functools.partial(jax.jit, static_argnames=("config", "compute"))
def tapped(
    params_R: Arrays,
    inputs_RBT: Array,
    targets_RBT: Array,
    *,
    config: LlamaConfig,
    compute: str | None,
) -> tuple[Arrays, Arrays]:
    """What leaves each unit, and the derivative of the replica's loss with respect to it.

    Args:
        params_R: unpadded [R, ...].
        inputs_RBT: all sequences of each replica's step.
        targets_RBT: the same.
        config: of the model.
        compute: dtype of the computation, see ``Inner``.

    Returns:
        Two dicts by unit: embedding, blocks [R, B, T, D] and head [R, B, T, V].
    """

    def of_one(params: Arrays, inputs_BT: Array, targets_BT: Array) -> tuple[Arrays, Arrays]:
        def loss(added: Arrays) -> tuple[Array, Arrays]:
            seen: Arrays = {}

            def tap(unit: str, output: Array) -> Array:
                seen[unit] = output + added[unit]
                return seen[unit]

            batch = (inputs_BT, targets_BT)
            return rank_loss(params, *batch, config=config, compute=compute, tap=tap), seen

        dtype = compute or next(iter(params.values())).dtype
        widths = dict.fromkeys(parts(config), config.dim) | {"head": config.vocabulary}
        zeros = {name: jnp.zeros((*inputs_BT.shape, w), dtype) for name, w in widths.items()}
        gradients, outputs = jax.grad(loss, has_aux=True)(zeros)
        return outputs, gradients

    return jax.vmap(of_one)(params_R, inputs_RBT, targets_RBT)


class Writer:
    """Turns the records of a run into lines.

    Args:
        file: written to.
        config: of the run.
        batches: of the run.
        begun: the parameters [R, ...] that the next step begins with.
    """

    def __init__(self, file: TextIO, config: TrainConfig, batches: Batches, begun: Host) -> None:
        self.lines, self.config, self.batches, self.begun = Lines(file), config, batches, begun
        self.members = dict(units_of(config))  # unit of an exchange -> its parameters

    def start(self) -> None:
        """What all begin with."""
        self._params("init", "", self.begun, dict.fromkeys(range(self.config.replicas), 0))

    def record(self, record: Record) -> None:
        """An inner step, or a tick of the clock, and what rounds did after it."""
        # Each replica counts its own steps, and one that waits writes nothing.
        steps = {int(n): int(record.steps_R[n]) for n in np.flatnonzero(record.is_active_R)}
        batch = self._data(steps)
        self._model(batch, steps, record.loss_R)
        self._optimizer(record, steps)
        for one in record.told:
            late = record.step - one.event["step"]
            at = [int(s) - late for s in record.steps_R]
            if isinstance(one, Voted):
                self._voted(one, at)
            else:
                self._told(one, at)
        self.begun = record.params

    def _params(self, phase: str, suffix: str, arrays_R: Host, steps: dict[int, int]) -> None:
        for unit, names in units(self.config.model):
            for name in names:
                for n, step in steps.items():
                    place = Place(step, phase)
                    self.lines.tensor(place, unit, name + suffix, n, arrays_R[name][n])

    def _data(self, steps: dict[int, int]) -> list[np.ndarray]:
        """Inputs and targets [replicas that step, micro-batches, sequences, T]."""
        k = self.config.accumulate
        sides = []
        for side in range(2):
            rows = [
                [self.batches((step - 1) * k + i)[side][n] for i in range(k)]
                for n, step in steps.items()
            ]
            sides.append(np.array(rows).reshape(len(steps), k, -1, rows[0][0].shape[-1]))
        for i in range(k):
            for name, of_all in zip(("inputs", "targets"), sides, strict=True):
                for row, (n, step) in enumerate(steps.items()):
                    self.lines.tensor(Place(step, "data"), None, f"{name}.{i}", n, of_all[row, i])
        return sides

    def _model(self, batch: list[np.ndarray], steps: dict[int, int], loss_R: np.ndarray) -> None:
        params_R = {k: x[list(steps)] for k, x in self.begun.items()}
        tokens = [x.reshape(len(steps), -1, x.shape[-1]) for x in batch]
        config, compute = self.config.model, self.config.inner.compute
        outputs, gradients = tapped(params_R, *tokens, config=config, compute=compute)
        names = parts(config)
        self._taps("forward", "output", {name: outputs[name] for name in names}, steps)
        for n, step in steps.items():
            self.lines.value(Place(step, "forward"), None, "loss", n, loss=loss_R[n])
        backward = {name: gradients[name] for name in reversed(names)}
        self._taps("backward", "gradient", backward, steps)

    def _taps(self, phase: str, name: str, of_all: Arrays, steps: dict[int, int]) -> None:
        k = self.config.accumulate
        for i in range(k):
            for unit, x in of_all.items():
                for row, (n, step) in enumerate(steps.items()):
                    mine = np.split(np.asarray(x[row]), k)[i]
                    self.lines.tensor(Place(step, phase), unit, f"{name}.{i}", n, mine)

    def _optimizer(self, record: Record, steps: dict[int, int]) -> None:
        self._params("grad", "", record.grads, steps)
        most = self.config.inner.max_norm
        for n, step in steps.items():
            norm = record.grad_norm_R[n]
            factor = clip_coefficient(jnp.asarray(norm), max_norm=most, eps=1e-6) if most else 1.0
            clip = {"norm": norm, "factor": float(factor)}
            self.lines.value(Place(step, "clip"), None, "gradient", n, **clip)
        update = {k: x - self.begun[k] for k, x in record.inner_params.items()}
        self._params("optim", "/update", update, steps)
        for suffix, moment in zip(("/exp_avg", "/exp_avg_sq"), record.inner_moments, strict=True):
            self._params("optim", suffix, moment, steps)
        for n, step in steps.items():
            rate = {"lr": record.lr, "tokens": record.tokens}
            self.lines.value(Place(step, "optim"), None, "rate", n, **rate)

    def _voted(self, one: Voted, at: list[int]) -> None:
        event = one.event
        if not event["empty"]:
            for unit in event["units"]:
                for name in self.members[unit]:
                    for n, step in enumerate(at):
                        place = Place(step, "sync.delta", event["round"])
                        self.lines.tensor(place, unit, name, n, one.pseudo[name][n])
        for u, unit in enumerate(event["units"]):
            for n, steps in enumerate(event["steps"]):
                keys = ("norm", "finite", "flagged", "rearmed", "anomalous", "weight")
                vote = {key: event[key][u][n] for key in keys} | {"steps": steps}
                self.lines.value(Place(at[0], "sync.vote", event["round"]), unit, "vote", n, **vote)

    def _told(self, one: Told, at: list[int]) -> None:
        event = one.event
        for u, unit in enumerate([] if event["empty"] else event["units"]):
            merge, clip, outer, moved = (
                Place(at[0], f"sync.{name}", event["round"])
                for name in ("merge", "clip", "outer", "params")
            )
            names = self.members[unit]
            for name in names:
                self.lines.tensor(merge, unit, name, None, one.combined[name])
            keys = {"norm": "combined_norm", "clip": "clip", "gap": "gap", "rollback": "rollback"}
            self.lines.value(
                clip, unit, "outer", None, **{key: event[field][u] for key, field in keys.items()}
            )
            for name in names:
                self.lines.tensor(outer, unit, f"{name}/anchor", None, one.anchor_moved[name])
                self.lines.tensor(outer, unit, f"{name}/velocity", None, one.velocity[name])
            for name in names:
                for n, step in enumerate(at):
                    place = moved._replace(step=step)
                    self.lines.tensor(place, unit, name, n, one.params_moved[name][n])
        self._end(one, Place(at[0], "sync.end", event["round"]))

    def _end(self, one: Told, end: Place) -> None:
        told = {"forced": one.event["forced"], "empty": one.event["empty"]}
        self.lines.value(end, None, "round", None, **told)
        if self.config.method not in ("edit", "aedit") or not self.config.penalty.exclude:
            return
        for u, unit in enumerate(one.event["units"]):
            for n in range(self.config.replicas):
                seen = {key.removesuffix("_R"): x[u, n] for key, x in one.stats.items()}
                self.lines.value(end, unit, "statistics", n, **seen)


def put_down(
    folder: str | Path,
    config: TrainConfig,
    batches: Batches,
    records: Iterable[Record],
    begun: Mapping[str, np.ndarray],
    *,
    data_hash: str = "",
) -> list[Record]:
    """Writes the trace of records as they come, and hands them on.

    Args:
        folder: made if it is not there.
        config: of the run.
        batches: of the run, as ``train`` takes them.
        records: from ``train``, from the first step or from any other.
        begun: the parameters [R, ...] before the first of them.
        data_hash: what the tokens are known by.
    """
    folder, kept = Path(folder), []
    folder.mkdir(parents=True, exist_ok=True)
    known = {name: np.asarray(begun[name]) for name in shapes(config.model)}
    meta = about(config, known, tokens=batches(0)[0].size * config.accumulate)
    meta["data_hash"] = data_hash
    (folder / "meta.json").write_text(json.dumps(meta, indent=1, allow_nan=False) + "\n")
    with (folder / "events.0.jsonl").open("w") as file:
        writer = Writer(file, config, batches, known)
        for record in records:
            if record.step == 1:
                writer.start()
            writer.record(record)
            kept.append(record)
    return kept


def write(
    folder: str | Path,
    config: TrainConfig,
    batches: Batches,
    *,
    params: Mapping[str, ArrayLike] | None = None,
    dtype: str = "float32",
    perturb: Perturb | None = None,
    data_hash: str = "",
) -> list[Record]:
    """Runs ``train`` and writes its trace; arguments and errors are those of ``train``."""
    if params is None:
        params = init_params(config.model, seed=0, dtype=dtype)
    records = train(config, batches, params=params, perturb=perturb)
    begun = replicate(params, config.replicas)
    return put_down(folder, config, batches, records, begun, data_hash=data_hash)


def main() -> None:
    """Sketches of two shards add up; 16 numbers tell a distance; a run and its first lines."""
    pretend_devices(2)
    x, noise = np.random.default_rng(0).normal(size=(2, 64, 32))
    whole, first, rest = sketch(x, 0), sketch(x[:40], 0), sketch(x[40:], 40 * 32)
    for k in range(3):
        print(f"sum {k} of rows 0..39 {first.sk[k]:8.3f}, of rows 40..63 {rest.sk[k]:8.3f}", end="")
        print(f", of all {whole.sk[k]:8.3f}")
    for size in (1e-2, 1e-6, 1e-10):
        gap = np.array(sketch(x + size * noise, 0).sk) - whole.sk
        told, truth = np.sqrt(np.mean(gap**2)), size * np.linalg.norm(noise)
        print(f"true distance {truth:.2e}, told by 16 sums {told:.2e}")
    model = LlamaConfig(vocabulary=64, dim=8, layers=1, heads=2, kv_heads=1, hidden=12)
    config = TrainConfig(model=model, method="diloco", replicas=2, shards=1, steps=2, every=2)
    layout = {"replicas": 2, "shards": 1, "batch": 2, "sequence": 8, "seed": 0}
    tokens = np.arange(1024) * 7 % 64
    with TemporaryDirectory() as folder:
        write(folder, config, lambda step: batch_of_all(tokens, step=step, **layout))
        events = [json.loads(line) for line in (Path(folder) / "events.0.jsonl").open()]
    print(f"{len(events)} lines of two steps and a round:")
    for phase, lines in itertools.groupby(events, key=lambda event: event["phase"]):
        told, *others = lines
        what = f"sum2 {told['sum2']:.3e}" if "sk" in told else str(told["value"])[:60]
        print(f"    {phase:11} {1 + len(others):3} lines; {told['unit']} {told['name']}: {what}")


if __name__ == "__main__":
    main()
