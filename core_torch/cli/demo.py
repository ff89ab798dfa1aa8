"""``twinshard demo``: the same model, text and number of tokens with several methods, compared.

Four ranks start once, as 2 replicas x 2 shards, and train one method after the other. The
numbers below were chosen so that two CPU cores are enough; they show the mechanics and the
bytes, and say nothing about which method is better at scale. With several seeds every method is
repeated, and the table gives mean and spread.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from rich.console import Console

from core_torch.cli.launch import launch
from core_torch.cli.options import DemoOptions
from core_torch.cli.progress import ProgressView
from core_torch.cli.resume import Start
from core_torch.cli.run_folder import DATA, LOGS, write_outcome
from core_torch.cli.train import check_corpus
from core_torch.config import (
    CheckpointConfig,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    StreamingConfig,
    SyncConfig,
    TimedConfig,
    TrainConfig,
    check,
)
from core_torch.data.corpus import prepare
from core_torch.errors import EXIT_OK, ConfigError
from core_torch.report import repeated_table, write_report
from core_torch.report.records import load_run, write_json
from core_torch.report.table import comparison_table
from core_torch.report.text import sanitise

MARKER = "demo.json"  # says that a folder is a demo's, which the next demo may replace
PROMPT = "KING HENRY.\n"
SILENCE_SECONDS = 120.0
JSON_FIELDS = (
    "method",
    "loss",
    "validation_perplexity",
    "vocabulary",
    "tokens",
    "tokens_per_second",
    "replica_bytes",
    "rounds",
    "anomalies",
)


def run(options: DemoOptions, words: list[str]) -> int:
    """Trains, compares and says where everything is.

    Raises:
        TwinshardError: see ``errors``.
    """
    out = Path(options.out)
    configs = [
        demo_config(method, out, quick=options.quick, seed=seed)
        for method in options.chosen
        for seed in range(options.seeds)
    ]
    for config in configs:
        check(config)
    _clear(out, configs)
    check_corpus(configs[0], prepare(configs[0].data, out / DATA))
    console = Console()
    summaries = _train(configs, out, console)
    for config in configs:
        write_outcome(config, None, next=f"twinshard sample {config.run}")
    folders = [Path(config.run) for config in configs]
    page = write_report(folders, out)
    console.print()
    found = [load_run(folder) for folder in folders]
    console.print(comparison_table(found) if options.seeds == 1 else repeated_table(found))
    _show_samples(folders[:: options.seeds], console)
    _say_where(page, configs, console)
    if options.json:
        rows = [{name: summary[name] for name in JSON_FIELDS} for summary in summaries]
        if options.seeds > 1:
            for row, config in zip(rows, configs, strict=True):
                row["seed"] = config.train.seed
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        write_json(Path(options.json), {"methods": rows})
    return EXIT_OK


def demo_config(method: Any, out: Path, *, quick: bool, seed: int = 0) -> RunConfig:
    """One run of one method; all methods see the same number of tokens.

    A-EDiT ends at the first round after that number, so it sees a little more.
    """
    layers, steps, every, warmup = (2, 80, 16, 6) if quick else (3, 240, 20, 20)
    config = RunConfig(
        run=str(out / (f"{method}-seed-{seed}" if seed else method)),
        model=ModelConfig(dim=64, layers=layers, heads=4, kv_heads=2, hidden=176, context=256),
        data=DataConfig(sequence=64, batch=8, seed=seed),
        mesh=MeshConfig(replicas=2, shards=2, device="cpu", deadline_seconds=100.0),
        optim=OptimConfig(lr=4e-3),
        sync=_sync(method, every=every, warmup=warmup, seconds="3s" if quick else "5s"),
        train=TrainConfig(
            steps=steps,
            evaluate_every=steps // 4,
            evaluate_sequences=64 if quick else 128,
            seed=seed,
        ),
        checkpoint=CheckpointConfig(every=0),
    )
    rise = steps // 20 * config.tokens_per_step
    return dataclasses.replace(config, schedule=ScheduleConfig(warmup_tokens=rise))


def _sync(method: Any, *, every: int, warmup: int, seconds: str) -> SyncConfig:
    """Settings of a method; a round of A-EDiT lasts about as long as the others' on two cores."""
    if method == "synchronous":
        return SyncConfig(method=method, every=every)
    if method == "aedit":
        timed = TimedConfig(min_total_steps=4)
        return SyncConfig(method=method, every=seconds, warmup=warmup, timed=timed)
    if method == "streaming_diloco":
        streaming = StreamingConfig(fragments=2, delay=2)
        return SyncConfig(method=method, every=every, warmup=warmup, streaming=streaming)
    return SyncConfig(method=method, every=every, warmup=warmup)


def _clear(out: Path, configs: list[RunConfig]) -> None:
    """Makes the folder; removes what an earlier demo left there, and nothing else.

    Raises:
        ConfigError: the folder holds something that no demo made.
    """
    if out.is_dir() and any(out.iterdir()):
        try:
            old = json.loads((out / MARKER).read_text(encoding="utf-8"))["folders"]
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{out} is not empty and holds no demo",
                likely="the folder belongs to something else",
                next="twinshard demo --out ANOTHER_FOLDER",
            ) from None
        for name in old:
            if isinstance(name, str) and Path(name).name == name:
                shutil.rmtree(out / name, ignore_errors=True)
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    folders = [DATA, LOGS, *(Path(config.run).name for config in configs)]
    write_json(out / MARKER, {"folders": folders})
    (out / LOGS).mkdir(mode=0o700, exist_ok=True)


def _train(configs: list[RunConfig], out: Path, console: Console) -> list[dict[str, Any]]:
    """Trains all runs in one launch, shows them, returns their summaries."""
    runs = [
        {
            "config": dataclasses.asdict(config),
            "data": str(out / DATA),
            "resume": Start(),
            "stop_after": 0,
            "force": False,
            "prompt": PROMPT,
        }
        for config in configs
    ]
    first = configs[0]
    methods = len({config.sync.method for config in configs})
    seeds = f", {len(configs) // methods} seeds each" if len(configs) > methods else ""
    console.print(
        f"{methods} methods{seeds}, {first.mesh.replicas} replicas x {first.mesh.shards} shards, "
        f"{first.train.steps} steps of {first.tokens_per_step} tokens each; starting "
        f"{first.mesh.ranks} ranks",
        highlight=False,
    )
    with ProgressView() as view:
        result: list[dict[str, Any]] = launch(
            {"kind": "train", "runs": runs, "preemptible": False},
            first.mesh.ranks,
            view,
            silence_seconds=SILENCE_SECONDS,
            logs=out / LOGS,
        )
    return result


def _show_samples(folders: list[Path], console: Console) -> None:
    """Text before training once, and after it by each method."""
    for number, folder in enumerate(folders):
        texts = load_run(folder).samples
        if number == 0:
            console.print("\n[bold]before training[/bold]")
            console.print(_excerpt(texts["prompt"], texts["before"]), markup=False, highlight=False)
        console.print(f"\n[bold]after training: {folder.name}[/bold]")
        console.print(_excerpt(texts["prompt"], texts["after"]), markup=False, highlight=False)


def _excerpt(prompt: str, text: str) -> str:
    return sanitise(prompt + text)


def _say_where(page: Path, configs: list[RunConfig], console: Console) -> None:
    last = configs[-1]
    lines = [
        f"report   {page}",
        f"figures  {page.parent}/*.png",
        f"runs     {', '.join(config.run for config in configs)}",
        f'next     twinshard sample {last.run} --prompt "To be, or not" --tokens 300',
        "         twinshard train --data.path YOUR.txt --mesh.replicas 2 --mesh.shards 2 "
        "--sync.method edit",
    ]
    console.print()
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
