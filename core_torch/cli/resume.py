"""``--resume``: from which folder a run goes on, decided before any rank starts."""

import shlex
from pathlib import Path
from typing import NamedTuple

from core_torch.checkpoint.commit import STEP, latest, read_commit
from core_torch.checkpoint.sound import find
from core_torch.config import RunConfig
from core_torch.errors import ConfigError


class Start(NamedTuple):
    """Where a run begins."""

    folder: str | None = None  # of a run, to take its newest sound commit, or of one step
    is_required: bool = False  # without a commit there it does not begin at all
    continues: bool = False  # the run's own commit: its records go on


def start_of(word: str, config: RunConfig) -> Start:
    """What ``--resume`` means for a run whose folder is known.

    Args:
        word: never, auto (the run's newest commit, or anew without one), or a path: the folder
            of a run or of one of its commits.
        config: of the run.

    Raises:
        CheckpointError: nothing is committed at the path.
        ConfigError: it is a commit of this run that newer ones follow.
    """
    if word == "never":
        return Start()
    if word == "auto":
        return Start(config.run, continues=True)
    path, own = Path(word), Path(config.run).resolve()
    step = find(path)
    if not STEP.fullmatch(path.absolute().name):
        return Start(word, is_required=True, continues=path.resolve() == own)
    read_commit(step)
    if step.resolve().parent.parent != own:
        return Start(word, is_required=True)
    newest = latest(own)
    if newest is not None and newest.name > step.name:
        raise ConfigError(
            f"--resume {word}: {config.run} goes on to {newest.name}",
            likely="two histories in one folder could not be told apart",
            next=f"--run FOLDER begins another run at {step.name}; "
            f"twinshard train {shlex.quote(config.run)}/config.toml --resume auto goes on",
        )
    return Start(word, is_required=True, continues=True)
