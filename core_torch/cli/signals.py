"""SIGTERM as a wish to stop, which a run fulfils when it has committed."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SAME_SECONDS = 2.0  # signals closer than this are one: some systems tell launcher and ranks


class StopWish:
    """Whether a signal asked this process to stop, and which."""

    def __init__(self) -> None:
        self.signal = ""
        self._at = 0.0

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler: the first signal is a wish, a second one ends the process at once."""
        now = time.monotonic()
        if not self.signal:
            self.signal, self._at = signal.Signals(number).name, now
        elif now - self._at > SAME_SECONDS:
            raise KeyboardInterrupt(signal.Signals(number).name)


@contextmanager
def listening(*, to_signals: bool) -> Iterator[StopWish]:
    """Takes SIGTERM as a wish while it is entered, in the main thread and if asked to."""
    wish = StopWish()
    if not to_signals or threading.current_thread() is not threading.main_thread():
        yield wish
        return
    previous = signal.signal(signal.SIGTERM, wish.note)
    try:
        yield wish
    finally:
        signal.signal(signal.SIGTERM, previous)
