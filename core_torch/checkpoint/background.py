"""Commits of a run from one rank's point of view: at once, or while training goes on.

Asynchronously ``save`` returns when the state is copied. A thread then writes, hashes and flushes
it, agrees with the threads of the other ranks, and commits. Their messages need a process group of
their own, or they would meet those of training. One save is on its way at a time; what went wrong
with it is raised at the next one, or when somebody waits for it, on all ranks alike.
"""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from core_torch.checkpoint.commit import AtPoint, no_fault
from core_torch.checkpoint.save import Gather, save
from core_torch.checkpoint.staging import Staging
from core_torch.checkpoint.state import Layout, SavedState


class _Flight(threading.Thread):
    """A save on its way. Ends with the process, however that ends."""

    def __init__(self, step: int, work: Callable[[], Path]) -> None:
        super().__init__(name=f"save of step {step}", daemon=True)
        self.step, self._work = step, work
        self.problem: Exception | None = None

    def run(self) -> None:
        try:
            self._work()
        except Exception as error:  # whatever it is, who waits must hear of it
            self.problem = error


class Saver:
    """Saves steps of one run; all ranks call its methods together.

    Args:
        run_folder: folder of the run, seen by all ranks.
        layout: place of this rank.
        asynchronous: write while training goes on.
        gather: as for ``save.save``; if asynchronous, over a process group that nobody else uses.
        tokenizer: file to keep beside the tensors.
        keep: commits that stay, at least 2.
        committed: the newest step of the folder.
        at_point: called with the names of points at which tests interfere.
    """

    def __init__(
        self,
        run_folder: Path,
        layout: Layout,
        *,
        asynchronous: bool,
        gather: Gather,
        tokenizer: Path | None,
        keep: int,
        committed: int | None = None,
        at_point: AtPoint = no_fault,
    ) -> None:
        self._write = partial(
            save,
            run_folder,
            mesh_layout=layout,
            gather=gather,
            tokenizer=tokenizer,
            keep=keep,
            at_point=at_point,
        )
        self._asynchronous, self._committed = asynchronous, committed
        self._staging = Staging()
        self._flight: _Flight | None = None

    @property
    def newest(self) -> int | None:
        """The newest step that is committed or on its way."""
        return self._committed if self._flight is None else self._flight.step

    @property
    def committed(self) -> int | None:
        """The newest step that is known to be committed."""
        flight = self._flight
        done = flight is not None and not flight.is_alive() and flight.problem is None
        return flight.step if flight is not None and done else self._committed

    def save(self, state: SavedState, step: int) -> None:
        """Commits ``state`` as ``step``; asynchronously it only begins to.

        Raises:
            CheckpointError: this step, or the one on its way, could not be written.
        """
        self.wait()
        if not self._asynchronous:
            self._write(Staging().copy(state), step=step)
            self._committed = step
            return
        staged = self._staging.copy(state)
        self._flight = _Flight(step, partial(self._write, staged, step=step))
        self._flight.start()

    def wait(self) -> None:
        """Returns when nothing is on its way.

        Raises:
            CheckpointError: it could not be written; earlier commits are kept.
        """
        self.settle()
        flight, self._flight = self._flight, None
        if flight is None:
            return
        if flight.problem is not None:
            raise flight.problem
        self._committed = flight.step

    def settle(self) -> None:
        """Lets what is on its way end, well or not; for a run that ends by another error."""
        if self._flight is not None:
            self._flight.join()
