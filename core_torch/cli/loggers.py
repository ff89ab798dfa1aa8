"""Loggers beside the records: they are told what metrics.jsonl gets, and may fail.

The JSON lines are the truth. A logger that cannot begin, or raises later, is left out from then
on with a note; the run goes on.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from core_torch.cli.events import OnEvent
from core_torch.cli.watch_options import LogOptions

SCALARS = (
    "loss",
    "validation_loss",
    "grad_norm",
    "lr",
    "tokens",
    "seconds",
    "replica_bytes",
    "shard_bytes",
)


class Logger(Protocol):
    """Somebody who is told numbers."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the numbers of one inner step."""

    def close(self) -> None:
        """The run ends, or stops."""


class TensorBoard:
    """Event files for TensorBoard.

    Args:
        folder: of the files.
        first_step: what was written from here on by a run that was lost is hidden.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # an extra

        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run on Weights & Biases; ``WANDB_MODE=offline`` keeps it in the folder.

    Args:
        project: its name there.
        folder: of the run, whose name it gets.
        config: what is shown beside it.
    """

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")  # an extra
        self._run = wandb.init(
            project=project, name=folder.name, dir=str(folder), config=dict(config)
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Loggers:
    """All loggers of a run; a context manager.

    Args:
        makers: by name, what begins each.
        emit: takes a note about one that fails.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Logger]], emit: OnEvent) -> None:
        self._emit = emit
        self._open: dict[str, Logger] = {}
        for name, make in makers.items():
            self._try(name, partial(self._begin, name, make))

    def log(self, record: Mapping[str, Any]) -> None:
        """Tells all what a line of metrics.jsonl says."""
        values = {name: record[name] for name in SCALARS if record[name] is not None}
        for name, logger in list(self._open.items()):
            self._try(name, partial(logger.log, record["step"], values))

    def _begin(self, name: str, make: Callable[[], Logger]) -> None:
        self._open[name] = make()

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever somebody else's package raises
            self._open.pop(name, None)
            text = f"{name} is left out from here on: {type(error).__name__} {error}"
            self._emit({"event": "note", "text": text})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name, logger in list(self._open.items()):
            self._try(name, logger.close)


def makers_of(
    options: LogOptions, folder: Path, config: Mapping[str, Any], first_step: int
) -> dict[str, Callable[[], Logger]]:
    """What begins each logger that ``options`` ask for; imports nothing yet."""
    makers: dict[str, Callable[[], Logger]] = {}
    if options.tensorboard:
        makers["tensorboard"] = lambda: TensorBoard(folder / "tensorboard", first_step)
    if options.wandb:
        makers["wandb"] = lambda: WandB(options.wandb, folder, config)
    return makers
