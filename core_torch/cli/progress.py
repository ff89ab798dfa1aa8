"""Shows a run while it trains: a live bar in a terminal, ten lines elsewhere."""

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from core_torch.report.text import human_bytes, human_count

_LINES = 10


class ProgressView:
    """Takes the events of a training job and shows them on standard error."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._title = title
        self._first: tuple[float, int] | None = None  # time and tokens of the first event
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}", markup=False),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=None, facts="starting")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        """Shows one event; those of other jobs are none of its business."""
        if event["event"] != "progress":
            return
        facts = self._facts(event)
        step, steps = event["step"], event["steps"]
        if self._console.is_terminal:
            self._bar.update(self._task, completed=step, total=steps, facts=facts)
        elif step * _LINES // steps > (step - 1) * _LINES // steps:
            self._console.print(f"{self._title}: step {step}/{steps}, {facts}", highlight=False)

    def _facts(self, event: dict[str, Any]) -> str:
        facts = [f"loss {event['loss']:.4f}"]
        now, tokens = time.monotonic(), event["tokens"]
        if self._first is None:
            self._first = (now, tokens)
        elif now > self._first[0]:
            speed = (tokens - self._first[1]) / (now - self._first[0])
            facts.append(f"{human_count(speed)} tokens/s")
        facts.append(f"{human_bytes(event['replica_bytes'])} between replicas")
        return ", ".join(facts)
