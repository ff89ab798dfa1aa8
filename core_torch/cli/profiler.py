"""A profile of some inner steps of every rank, on request.

RUN/profile gets a Chrome trace of each rank, for https://ui.perfetto.dev or chrome://tracing, and
with ``--profile.memory`` on a GPU a snapshot of its memory, for https://pytorch.org/memory_viz.
The snapshot is torch's own format, which is a pickle: open nobody else's.
"""

from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile

from core_torch.cli.events import OnEvent
from core_torch.cli.watch_options import ProfileOptions

FOLDER = "profile"
_MOST_EVENTS = 200_000  # of a memory snapshot


class StepProfiler:
    """Records the wanted steps; a context manager around all.

    Args:
        options: which steps, and whether memory.
        folder: of the run.
        rank: of this process, for the names of files.
        device: of this process.
        emit: takes a note that says where the files are.
    """

    def __init__(
        self,
        options: ProfileOptions,
        folder: Path,
        *,
        rank: int,
        device: torch.device,
        emit: OnEvent,
    ) -> None:
        self._range, self._memory = options.range, options.memory
        self._folder, self._name, self._emit = folder / FOLDER, f"rank-{rank:04d}", emit
        self._is_cuda = device.type == "cuda"
        self._running: profile | None = None

    def before(self, step: int) -> None:
        """Call before each inner step, which begins or ends the recording where it should."""
        wanted = self._range is not None and self._range[0] <= step <= self._range[1]
        if wanted and self._running is None:
            self._start()
        elif not wanted and self._running is not None:
            self._stop()

    def _start(self) -> None:
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._is_cuda
        self._running = profile(activities=kinds, profile_memory=self._memory)
        if self._memory and self._is_cuda:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)
        self._running.start()

    def _stop(self) -> None:
        assert self._running is not None
        self._running.stop()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._running.export_chrome_trace(str(self._folder / f"{self._name}.json"))
        self._running = None
        about = "a trace of each rank"
        if self._memory and self._is_cuda:
            torch.cuda.memory._dump_snapshot(str(self._folder / f"{self._name}-memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
            about += " and a snapshot of its memory"
        elif self._memory:
            about += ", with its allocations; a snapshot needs a GPU"
        self._emit({"event": "note", "text": f"{self._folder}: {about}"})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._running is not None:
            self._stop()
