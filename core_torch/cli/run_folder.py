"""Names inside a run's folder, and its last words: outcome.json."""

import itertools
import shlex
import sys
from pathlib import Path

from core_torch.config import RunConfig
from core_torch.config_file import BUILD, from_toml, replace_at
from core_torch.errors import EXIT_OK, ConfigError, DataError, TwinshardError
from core_torch.report.records import metrics_path, write_json

CONFIG = "config.toml"
DATA = "data"  # folder of the prepared text
LOGS = "logs"  # folder of the ranks' output


def config_of(folder: Path, *, build: str = "") -> RunConfig:
    """The configuration that a run was trained with.

    Raises:
        DataError: not a run's folder.
        ConfigError: its config.toml was changed into one that cannot work.
    """
    if not (folder / CONFIG).is_file():
        raise DataError(
            f"{folder} is no run: it has no {CONFIG}",
            likely="a mistyped path, or the folder above the runs",
            next=f"twinshard train --run {shlex.quote(str(folder))}",
        )
    return from_toml(folder / CONFIG, replace_at(RunConfig(), {BUILD: build}))


def named(config: RunConfig, *, under_torchrun: bool) -> RunConfig:
    """``config`` with a folder: the one given, or a new one.

    Ranks that torchrun starts choose by themselves, so theirs has a fixed name.
    """
    if config.run:
        return config
    if under_torchrun:
        return replace_at(config, {"run": "runs/torchrun"})
    names = (f"runs/{config.sync.method}-{n:03d}" for n in itertools.count(1))
    return replace_at(config, {"run": next(name for name in names if not Path(name).exists())})


def check_unused(config: RunConfig) -> None:
    """Checks that a new run would not mix its records with those of an older one.

    Raises:
        ConfigError: the folder holds records.
    """
    folder = Path(config.run)
    if metrics_path(folder, 0).exists():
        raise ConfigError(
            f"{config.run} holds a run already",
            next="--resume auto goes on with it, --run FOLDER begins another",
        )


def write_outcome(config: RunConfig, error: TwinshardError | None, *, next: str) -> None:
    """Writes RUN/outcome.json, because a launcher above us may flatten the exit code.

    Args:
        config: of the run.
        error: what ended it; None if it is complete.
        next: the command to go on with.
    """
    folder = Path(config.run)
    if not folder.is_dir():
        return
    outcome = {
        "exit_code": EXIT_OK if error is None else error.exit_code,
        "state": "finished" if error is None else type(error).__name__,
        "message": "" if error is None else str(error),
        "next": next,
    }
    try:
        write_json(folder / "outcome.json", outcome)
    except OSError as problem:
        print(f"outcome.json could not be written: {problem}", file=sys.stderr)
