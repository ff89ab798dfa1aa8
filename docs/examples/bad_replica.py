"""One replica goes wrong for five steps: EDiT with its penalty, and without.

    torchrun --standalone --nproc-per-node 3 docs/examples/bad_replica.py --out runs/bad
    twinshard report runs/bad/clean runs/bad/penalty runs/bad/no_penalty --out runs/bad/report

Trains one small model three times on three replicas: undisturbed; with replica 1 taking five
inner steps at a hundred times the learning rate, under the penalty; and the same with the
penalty switched off. The fault begins when the penalty's statistics are warm.
"""

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from core_torch.checkpoint.commit import latest
from core_torch.cli.session import Session
from core_torch.config import (
    CheckpointConfig,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PenaltyConfig,
    RunConfig,
    ScheduleConfig,
    SyncConfig,
    TrainConfig,
)
from core_torch.config_file import to_toml
from core_torch.data.corpus import open_corpus, prepare
from core_torch.mesh import joined, rank_from_environment

BAD_REPLICA, FACTOR, BAD_STEPS = 1, 100.0, 5
EVERY, WARMUP, WARM_ROUNDS = 4, 8, 10
OFF = PenaltyConfig(exclude=False, weigh=False, clip=False)


def make_config(out: Path, name: str, steps: int, seed: int) -> RunConfig:
    """The run called ``name``."""
    on = PenaltyConfig(warmup_rounds=WARM_ROUNDS)
    config = RunConfig(
        run=str(out / name),
        model=ModelConfig(dim=64, layers=2, heads=4, kv_heads=2, hidden=176, context=256),
        data=DataConfig(sequence=64, batch=8, seed=seed),
        mesh=MeshConfig(replicas=3, device="cpu"),
        optim=OptimConfig(lr=4e-3),
        sync=SyncConfig(every=EVERY, warmup=WARMUP, penalty=OFF if name == "no_penalty" else on),
        train=TrainConfig(steps=steps, evaluate_every=EVERY, evaluate_sequences=96, seed=seed),
        checkpoint=CheckpointConfig(every=0),
    )
    rise = WARMUP * config.tokens_per_step
    return replace(config, schedule=ScheduleConfig(warmup_tokens=rise))


def disturb(session: Session, first: int) -> None:
    """Raises the learning rate of one replica for inner steps ``first`` .. first + 4."""
    state = session.state
    if state.mesh.replica.index != BAD_REPLICA:
        return

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if first <= state.step + 1 < first + BAD_STEPS:  # the loop sets lr anew in every step
            for group in optimizer.param_groups:
                group["lr"] *= FACTOR

    state.optimizer.register_step_pre_hook(before)


def main() -> None:
    """Runs all three and prints their validation losses."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--out", type=Path, default=Path("runs/bad"))
    words.add_argument("--steps", type=int, default=120)
    words.add_argument("--fault", type=int, default=61, help="first bad inner step")
    words.add_argument("--seed", type=int, default=0)
    options = words.parse_args()
    place = rank_from_environment()
    assert place is not None, "start me with torchrun --nproc-per-node 3"
    names = ("clean", "penalty", "no_penalty")
    configs = [make_config(options.out, name, options.steps, options.seed) for name in names]
    assert all(latest(Path(config.run)) is None for config in configs), "--out holds runs already"
    with joined(configs[0].mesh, place, None) as mesh:
        if mesh.is_lead:
            prepare(configs[0].data, options.out / "data")
        dist.barrier()  # nobody reads what the lead still writes
        for name, config in zip(names, configs, strict=True):
            corpus = open_corpus(options.out / "data")
            Path(config.run).mkdir(parents=True, exist_ok=True)
            session = Session(config, mesh, corpus, resume_from=None, emit=lambda event: None)
            if mesh.is_lead:
                text = to_toml(config)
                (Path(config.run) / "config.toml").write_text(text, encoding="utf-8")
            if name != "clean":
                disturb(session, options.fault)
            summary = session.run()
            if summary is not None:
                loss = math.log(summary["validation_perplexity"])
                line = f"{name}: validation loss {loss:.4f}, {summary['anomalies']} left out"
                print(line, flush=True)  # noqa: T201 - an example shows its result


if __name__ == "__main__":
    main()
