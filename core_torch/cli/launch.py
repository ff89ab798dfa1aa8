"""Starts the ranks of a job on this machine, listens to them, and leaves none behind.

``launch`` returns when all ranks have ended. However it ends, by a result, an error, a signal
or a bug, every process that it started is gone and the temporary folder is removed. If this
process itself is killed, the ranks notice (see ``worker``) and end by themselves.
"""

import json
import selectors
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

from core_torch.cli.events import Event, OnEvent, RankFailed, error_from
from core_torch.cli.ranks import Place, Rank, Team
from core_torch.cli.signals import SAME_SECONDS
from core_torch.errors import EXIT_INTERRUPTED, PeerLost, TwinshardError

GRACE_SECONDS = 3.0  # between asking a rank to end and making it end
_STACKS_SECONDS = 1.0  # for writing stacks into the logs
_POLL_SECONDS = 0.05


class Interrupted(TwinshardError):
    """The user or the system asked for an end; told in one line, with the way on."""

    exit_code = EXIT_INTERRUPTED

    def __str__(self) -> str:
        where = f" at {self.where}" if self.where else ""
        return f"Interrupted: {self.what}{where}" + (f"; go on: {self.next}" if self.next else "")


class _Failure(NamedTuple):
    """Why a launch failed; the one with the least weight is the cause, others follow from it."""

    weight: int  # -1 asked to end, 0 a cause, 1 asked to stop, 2 a fault, 3 a lost peer
    error: TwinshardError
    log_of: Rank | None = None  # whose last lines help to understand it


def launch(
    job: dict[str, Any],
    ranks: int,
    on_event: OnEvent,
    *,
    module: str = "core_torch",
    silence_seconds: float | None = None,
    logs: Path | None = None,
    places: Sequence[Place] = (),
    preemptible: bool = False,
) -> Any:
    """Runs a job on ``ranks`` processes and returns the result of rank 0.

    Args:
        job: JSON values; ``job["kind"]`` picks the function, see ``worker``.
        ranks: number of processes.
        on_event: gets every event of the job itself, with its ``rank``, in this process.
        module: started as ``python -m module _rank ...``.
        silence_seconds: longest time without an event from any rank.
        logs: existing folder that keeps the ranks' output; a temporary one if None.
        places: where each rank runs, if not simply here.
        preemptible: whether the ranks, told SIGTERM once, come to an end of their own.

    Raises:
        TwinshardError: the error of the rank that failed first; PeerLost if a rank was killed
            or all were silent for too long; Interrupted after Ctrl-C or SIGTERM.
    """
    with tempfile.TemporaryDirectory(prefix="twinshard-") as name, _Signals() as signals:
        folder = Path(name)  # readable by its owner only
        (folder / "job.json").write_text(json.dumps(job))
        team = Team(module, ranks, folder / "job.json", folder / "store", logs or folder, places)
        with _Launch(on_event, silence_seconds, signals, preemptible) as running:
            for number in range(ranks):
                running.add(Rank.start(team, number))
            while not running.has_ended():
                running.listen()
            return running.result()


class _Signals:
    """Counts SIGINT and SIGTERM while it is entered, instead of obeying them."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))


class _Launch:
    """The running ranks, what they said, and the signals that they are still to get."""

    def __init__(
        self, on_event: OnEvent, silence: float | None, signals: _Signals, preemptible: bool
    ) -> None:
        self._preemptible = preemptible
        self._asked: _Failure | None = None  # a SIGTERM that the ranks were left to obey
        self._asked_at = 0.0
        self._on_event = on_event
        self._silence = silence
        self._signals = signals
        self._obeyed = 0  # signals of this process that have been passed on
        self._ranks: list[Rank] = []
        self._selector = selectors.DefaultSelector()
        self._failures: list[_Failure] = []
        self._to_send: list[tuple[float, signal.Signals]] = []  # (when, what), in order
        self._stopping = False  # a signal was sent: later deaths are our doing
        self._last_word = time.monotonic()
        self._step: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for rank in self._ranks:
            rank.close()
        self._selector.close()

    def add(self, rank: Rank) -> None:
        """Takes charge of a started rank."""
        self._ranks.append(rank)
        self._selector.register(rank.pipe, selectors.EVENT_READ, rank)

    def has_ended(self) -> bool:
        """Whether no rank runs any more."""
        return all(rank.exit_code is not None for rank in self._ranks)

    def result(self) -> Any:
        """What rank 0 returned; raises the error that explains the others."""
        if all(rank.done for rank in self._ranks):
            return self._ranks[0].result
        asked = [] if self._asked is None else [self._asked]
        cause = min(self._failures + asked, key=lambda failure: failure.weight)
        if cause.log_of and (tail := cause.log_of.tail()):
            cause.error.likely += f"; the end of its log:{tail}"
        raise cause.error

    def listen(self) -> None:
        """Waits for a moment, takes what arrived, and acts on what happened."""
        for key, _ in self._selector.select(_POLL_SECONDS):
            self._take(key.data)
        for rank in self._ranks:
            if rank.exit_code is None and rank.has_ended():
                self._take(rank)
                self._selector.unregister(rank.pipe)
                self._judge_end(rank)
        self._pass_signals_on()
        self._check_silence()
        while self._to_send and self._to_send[0][0] <= time.monotonic():
            _, number = self._to_send.pop(0)
            self._stopping = True
            for rank in self._ranks:
                rank.send(number)

    def _take(self, rank: Rank) -> None:
        for event in rank.read():
            self._last_word = time.monotonic()
            self._step = event.get("step", self._step)
            if event["event"] == "error":
                self._fail(self._weighed(rank, event))
            elif event["event"] != "done":
                self._on_event(event | {"rank": rank.number})

    def _weighed(self, rank: Rank, event: Event) -> _Failure:
        error = error_from(event, rank.number)
        if isinstance(error, RankFailed):
            error.likely = "a fault of Twinshard"
            return _Failure(2, error, rank)
        # To lose a peer is mostly the consequence of another rank's error.
        return _Failure(3 if isinstance(error, PeerLost) else 0, error)

    def _judge_end(self, rank: Rank) -> None:
        """Notes a failure if the rank ended without a result and without saying why."""
        if rank.done or rank.failed or self._stopping:
            return
        code = rank.exit_code or 0
        if code >= 0:
            what = f"rank {rank.number} ended with exit code {code} and no result"
            self._fail(_Failure(2, RankFailed(what, likely="a fault of Twinshard"), rank))
            return
        if self._asked is not None and code == -signal.SIGTERM:  # too early to know better
            self._fail(self._asked)
            return
        name = signal.Signals(-code).name
        likely = "out of memory, or somebody killed it" if name == "SIGKILL" else "a native fault"
        what = f"rank {rank.number} of {len(self._ranks)} was killed by {name}"
        self._fail(_Failure(0, PeerLost(what, where=self._where(), likely=likely), rank))

    def _fail(self, failure: _Failure) -> None:
        """Notes a failure; at the first, the other ranks are left a moment to fail as well."""
        self._failures.append(failure)
        if len(self._failures) == 1:
            now = time.monotonic()
            self._to_send = [
                (now + GRACE_SECONDS, signal.SIGTERM),
                (now + 2 * GRACE_SECONDS, signal.SIGKILL),
            ]

    def _pass_signals_on(self) -> None:
        new, now = self._signals.received[self._obeyed :], time.monotonic()
        if new and self._asked is not None and now - self._asked_at < SAME_SECONDS:
            same = [number for number in new if number == signal.SIGTERM]
            self._obeyed += len(same)
            new = [number for number in new if number != signal.SIGTERM]
        if not new:
            return
        error = Interrupted(f"{new[0].name}", where=self._where())
        if self._preemptible and self._obeyed == 0 and new[0] == signal.SIGTERM:
            self._obeyed, self._asked, self._asked_at = 1, _Failure(1, error), now
            for rank in self._ranks:
                rank.send(new[0])
            return
        self._obeyed += len(new)
        self._failures.append(_Failure(-1, error))
        if self._obeyed == 1:
            self._to_send = [(now, new[0]), (now + GRACE_SECONDS, signal.SIGKILL)]
        else:  # asked again: at once
            self._to_send = [(now, signal.SIGKILL)]

    def _check_silence(self) -> None:
        now = time.monotonic()
        if self._silence is None or now - self._last_word < self._silence or self._failures:
            return
        mute = [rank for rank in self._ranks if rank.exit_code is None]
        names = ", ".join(str(rank.number) for rank in mute)
        error = PeerLost(
            f"no word from rank {names} for {self._silence:g} s",
            where=self._where(),
            likely="a rank hangs, or the machine is overloaded",
        )
        self._failures.append(_Failure(2, error, mute[0]))
        self._to_send = [
            (now, signal.SIGUSR1),  # stacks into the logs
            (now + _STACKS_SECONDS, signal.SIGKILL),
        ]

    def _where(self) -> str:
        return "" if self._step is None else f"step {self._step}"
