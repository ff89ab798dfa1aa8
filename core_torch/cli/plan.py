"""``twinshard plan``: what a run will take, before anything is started. Needs no torch."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from core_torch.cli.plan_options import PlanOptions
from core_torch.config import RunConfig
from core_torch.errors import EXIT_OK, ConfigError
from core_torch.report.text import counted, human_bytes, human_count, mesh_title, method_title
from core_torch.simulate.budget import (
    USABLE,
    Duration,
    Plan,
    duration,
    fits,
    mean_bytes,
    plan_of,
    smallest_change,
)
from core_torch.simulate.shapes import has_rounds, numel

_BYTE_TOKENS = 257  # of the "byte" tokenizer, see data/tokenizer.py
_DAY = 24 * 3600.0
_PLACES = {
    "always": "all the time",
    "step": "in a step",
    "round": "in a round",
    "host": "host, not the device",
}


def run(options: tuple[PlanOptions, RunConfig], words: list[str]) -> int:
    """Prints the plan, and writes it where the options say.

    Returns:
        0, or 1 where ``--memory`` was given and the run does not fit.

    Raises:
        ConfigError: the vocabulary is not known, or a file cannot be written.
    """
    own, config = options
    plan = plan_of(config, vocabulary_of(config))
    took = _duration(own, plan)
    console = Console()
    console.print(Text(described(plan)))
    for table in (units_table(plan), memory_table(plan), traffic_table(plan), work_table(plan)):
        console.print(table)
    for line in (*notes(plan), *times(plan, took), *verdict(own, plan)):
        console.print(Text(line))
    if own.json:
        _write(own.json, json.dumps(facts_of(own, plan, took), indent=1))
    limit = own.memory_bytes
    return EXIT_OK if limit is None or fits(plan, limit) else 1


def vocabulary_of(config: RunConfig) -> int:
    """Token ids of the model, where they follow from the configuration.

    Raises:
        ConfigError: only the tokenizer's file knows.
    """
    known = {"byte": _BYTE_TOKENS, "bpe": config.data.bpe_vocabulary}
    found = config.model.vocabulary or known.get(config.data.tokenizer)
    if not found:
        raise ConfigError(
            f"model.vocabulary: is that of {config.data.tokenizer}, which a plan does not read",
            next="twinshard plan ... --model.vocabulary NUMBER",
        )
    return found


def described(plan: Plan) -> str:
    """What was planned, in a line."""
    config = plan.config
    mesh, shard = config.mesh, config.shard
    way = shard.method + ("" if shard.compile == "off" else f" compiled by {shard.compile}")
    return (
        f"{human_count(plan.parameters)} parameters, {mesh_title(mesh)}, {way}, "
        f"{method_title(config.sync.method)}, "
        f"{config.train.dtype} stored, {computed(config)} computed."
    )


def computed(config: RunConfig) -> str:
    """The dtype of forward and backward."""
    return config.train.dtype if config.train.compute == "same" else config.train.compute


def units_table(plan: Plan) -> Table:
    """Parameters by unit, equal blocks in one row."""
    table = _table("unit", "parameters", "tensors", numbers=(1, 2))
    layers = plan.config.model.layers
    for name, params in plan.units.items():
        if name.startswith("layers.") and name != "layers.0":
            continue
        is_block = name == "layers.0"
        shown = f"layers.0 ... layers.{layers - 1}, each" if is_block and layers > 1 else name
        table.add_row(shown, f"{numel(params):,}", str(len(params)))
    table.add_row("all", f"{plan.parameters:,}", str(sum(map(len, plan.units.values()))))
    return table


def memory_table(plan: Plan) -> Table:
    """Bytes of the fullest rank by category."""
    table = _table("bytes of a rank", "size", "when", "", numbers=(1,))
    for part in plan.memory:
        note = "" if part.checked else "estimate"
        table.add_row(part.name, human_bytes(part.bytes), _PLACES[part.place], note)
    table.add_row("most on the device at once", human_bytes(plan.peak_bytes), "", "estimate")
    return table


def traffic_table(plan: Plan) -> Table:
    """Payload bytes that a rank sends, by axis, operation and occasion."""
    table = _table("payload of a rank", "axis", "operation", "what", "size", numbers=(4,))
    for occasion, messages in occasions(plan):
        totals: dict[tuple[str, str, str], int] = {}
        for m in messages:
            key = (m.axis, m.op.replace("_", "-"), m.what)
            totals[key] = totals.get(key, 0) + m.bytes
        for place, (key, size) in enumerate(totals.items()):
            table.add_row("" if place else occasion, *key, human_bytes(size))
    for axis in axes_of(plan):
        mean = human_bytes(mean_bytes(plan, axis))
        table.add_row("mean step, no warm-up", axis, "", "all", mean)
    return table


def occasions(plan: Plan) -> Iterator[tuple[str, list[Any]]]:
    """When messages are sent, and which."""
    sync, traffic = plan.config.sync, plan.traffic
    if not has_rounds(sync.method):
        yield "every step", traffic.synchronous_step
        return
    if sync.warmup:
        yield f"each of {counted(sync.warmup, 'warm-up step')}", traffic.synchronous_step
    yield "every step", traffic.local_step
    every = sync.every if isinstance(sync.every, str) else counted(sync.every, "step")
    yield f"round, each {every}", traffic.round


def axes_of(plan: Plan) -> tuple[str, ...]:
    """Axes of a plan's messages; those that cut a replica further only where they do."""
    mesh = plan.config.mesh
    inner = [name for name in ("tp", "pp") if getattr(mesh, name) > 1]
    return ("shard", *inner, "model", "replica") if inner else ("shard", "replica")


def work_table(plan: Plan) -> Table:
    """Tokens, operations, checkpoint."""
    config = plan.config
    steps, tokens = config.train.steps, config.tokens_per_step
    table = _table("work", "per step", "in all", numbers=(1, 2))
    table.add_row("tokens, all ranks", human_count(tokens), human_count(tokens * steps))
    for name, flops in (("FLOPs", plan.token_flops), ("with recomputation", plan.done_flops)):
        if name == "FLOPs" or plan.done_flops != plan.token_flops:
            each = flops * tokens
            table.add_row(f"{name}, all ranks", f"{each:.3g}", f"{each * steps:.3g}")
    table.add_row("a commit", human_bytes(plan.checkpoint_bytes), "")
    kept = plan.checkpoint_bytes * config.checkpoint.keep
    table.add_row(f"commits kept ({config.checkpoint.keep})", human_bytes(kept), "")
    return table


def notes(plan: Plan) -> Iterator[str]:
    """What the figures mean."""
    yield "FLOPs of a token: 6 P + 6 L T H E, P elements of matrices that multiply it; causal."
    yield "Evaluation, samples and headers of files come on top. Estimates: see docs/plan.md."
    if isinstance(plan.config.sync.every, str):
        yield "Rounds go by the clock: they are not in the mean step."
    if plan.config.mesh.tp > 1:
        yield "Messages over tp are torch's own. Products wait for them: they are never hidden."
    if plan.config.mesh.pp > 1:
        yield (
            f"Memory and payload are those of a rank of pp index {plan.stage}, whose device is "
            "fullest. FLOPs are the mean over the stages."
        )
        yield f"In a step the stages wait for each other {100 * plan.bubble:.1f} % of the time."


def times(plan: Plan, took: Duration | None) -> Iterator[str]:
    """How long a step and the run take at the given rates."""
    if took is None:
        return
    steps = plan.config.train.steps
    slices = f" {took.tp:.3g} s to slices," if took.tp else ""
    slices += f" {took.pp:.3g} s to stages," if took.pp else ""
    yield (
        f"A step computes {took.compute:.3g} s; sends{slices} {took.shard:.3g} s to shards and "
        f"{took.replica:.3g} s to replicas, on rings."
    )
    yield (
        f"The run takes {took.hidden * steps / _DAY:.3g} days if all messages are hidden, "
        f"{took.exposed * steps / _DAY:.3g} if none is."
    )


def verdict(own: PlanOptions, plan: Plan) -> Iterator[str]:
    """Whether the run fits, and what would make it fit."""
    limit = own.memory_bytes
    if limit is None:
        return
    needs = f"{human_bytes(plan.peak_bytes)} of {human_bytes(USABLE * limit)}"
    share = f"{100 * USABLE:.0f} % of {own.memory}"
    if fits(plan, limit):
        yield f"It fits: {needs}, which are {share}."
        return
    yield f"It does not fit: {needs}, which are {share}."
    change = smallest_change(plan, limit)
    if change is None:
        yield "No recomputation, offload or number of shards makes it fit: try a smaller batch."
        return
    words, found = change
    times = found.config.mesh.shards // plan.config.mesh.shards
    more = f"; {times} times the ranks, and tokens of a step" if times > 1 else ""
    yield f"Smallest change that does: {' '.join(words)} ({human_bytes(found.peak_bytes)}{more})."


def facts_of(own: PlanOptions, plan: Plan, took: Duration | None) -> dict[str, Any]:
    """The content of the JSON file; sizes in bytes, durations in seconds."""
    config, limit = plan.config, own.memory_bytes
    change = None if limit is None or fits(plan, limit) else smallest_change(plan, limit)
    return {
        "kind": "plan",
        "config": asdict(config),
        "vocabulary": plan.vocabulary,
        "parameters": plan.parameters,
        "units": {name: numel(params) for name, params in plan.units.items()},
        "memory": [part._asdict() for part in plan.memory],
        "stage": plan.stage,
        "bubble": plan.bubble,
        "peak_bytes": plan.peak_bytes,
        "traffic": {
            kind: [m._asdict() for m in messages]
            for kind, messages in plan.traffic._asdict().items()
        },
        "mean_step_bytes": {axis: mean_bytes(plan, axis) for axis in axes_of(plan)},
        "checkpoint_bytes": plan.checkpoint_bytes,
        "tokens_per_step": config.tokens_per_step,
        "tokens": config.tokens_per_step * config.train.steps,
        "flops_per_token": plan.token_flops,
        "flops_per_token_with_recomputation": plan.done_flops,
        "seconds_per_step": None if took is None else asdict(took),
        "fits": None if limit is None else fits(plan, limit),
        "smallest_change": None if change is None else change[0],
    }


def _duration(own: PlanOptions, plan: Plan) -> Duration | None:
    if not own.tflops:
        return None
    return duration(
        plan,
        tflops=own.tflops,
        bandwidth=own.bandwidth,
        replica_bandwidth=own.replica_bandwidth or own.bandwidth,
    )


def _table(*headings: str, numbers: tuple[int, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place in numbers else "left")
    return table


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"json: cannot write {path!r}: {error.strerror}") from None
