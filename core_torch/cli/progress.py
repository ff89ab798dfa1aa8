"""Shows runs while they train: live bars in a terminal, ten lines per run elsewhere."""

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from core_torch.report.text import human_bytes, human_count, method_title

_LINES = 10


class ProgressView:
    """Takes the events of training ("begin", then "step") and shows them on standard error."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}", markup=False),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = TaskID(0)
        self._title = ""
        self._steps = 1
        self._first: tuple[float, int] | None = None  # time and tokens of the first step

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        """Shows one event; those of other jobs are none of its business."""
        if event["event"] == "begin":
            self._title, self._steps = method_title(event["method"]), event["steps"]
            self._first = None
            self._task = self._bars.add_task(
                self._title, total=self._steps, completed=event["step"], facts="starting"
            )
        elif event["event"] == "step":
            self._show(event)
        elif event["event"] == "note":
            self._console.print(event["text"], highlight=False, markup=False, soft_wrap=True)

    def _show(self, event: dict[str, Any]) -> None:
        step, steps, facts = event["step"], self._steps, self._facts(event)
        self._bars.update(self._task, completed=step, facts=facts)
        is_tenth = step * _LINES // steps > (step - 1) * _LINES // steps
        if is_tenth and not self._console.is_terminal:
            line = f"{self._title}: step {step}/{steps}, {facts}"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

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
