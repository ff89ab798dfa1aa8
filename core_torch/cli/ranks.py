"""One rank as the parent sees it: a process, its pipe of events, its log.

Each rank leads a process group and session of its own, so that a Ctrl-C in the terminal
reaches the parent only, and so that whatever a rank started ends with it.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from core_torch.cli.events import Event, EventLines

_ROOT = Path(__file__).parents[2]
_TAIL_LINES, _TAIL_BYTES = 20, 1 << 14


class Place(NamedTuple):
    """Where one rank runs, if not like all others."""

    prefix: Sequence[str] = ()  # words before its command, which they must end up running
    environment: Mapping[str, str] = MappingProxyType({})  # added to its variables


class Team(NamedTuple):
    """What all ranks of one launch share."""

    module: str  # run as ``python -m``
    ranks: int
    job: Path  # JSON
    store: Path  # file through which the ranks find each other
    logs: Path  # folder of the ranks' output
    places: Sequence[Place] = ()  # one per rank, or none


class Rank:
    """A started rank."""

    def __init__(self, number: int, process: subprocess.Popen[bytes], pipe: int, log: Path) -> None:
        self.number = number
        self.pipe = pipe
        self.log = log
        self.exit_code: int | None = None  # negative: the signal that ended it
        self.failed = False  # it sent an error
        self.done = False
        self.result: Any = None
        self._process = process
        self._lines = EventLines()

    @classmethod
    def start(cls, team: Team, number: int) -> Self:
        """Starts rank ``number`` of a team."""
        reader, writer = os.pipe()
        log = team.logs / f"rank-{number}.log"
        words = [team.job, team.store, number, team.ranks, writer]
        place = team.places[number] if team.places else Place()
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [
                        *place.prefix,
                        *(sys.executable, "-m", team.module, "_rank"),
                        *map(str, words),
                    ],
                    stdin=subprocess.PIPE,  # never written; its end says that the parent is gone
                    stdout=output,
                    stderr=output,
                    pass_fds=[writer],
                    start_new_session=True,
                    env={**_environment(number, team.ranks), **place.environment},
                )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        os.set_blocking(reader, False)
        return cls(number, process, reader, log)

    def read(self) -> list[Event]:
        """Events that have arrived since the last call."""
        events = []
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.pipe, 1 << 16):
                events += self._lines.feed(data)
        for event in events:
            self.failed |= event["event"] == "error"
            if event["event"] == "done":
                self.done, self.result = True, event["result"]
        return events

    def has_ended(self) -> bool:
        """Whether the process has ended; whatever it left in its group is killed then."""
        if self.exit_code is None:
            self.exit_code = self._process.poll()
            if self.exit_code is not None:
                self._kill_group()
        return self.exit_code is not None

    def send(self, number: signal.Signals) -> None:
        """Signals the process if it is still ours, SIGKILL to its whole group."""
        if self.has_ended():
            return
        if number == signal.SIGKILL:
            self._kill_group()
        else:
            self._process.send_signal(number)

    def close(self) -> None:
        """Kills what is left and frees the pipes."""
        self.send(signal.SIGKILL)
        self.exit_code = self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        os.close(self.pipe)

    def tail(self) -> str:
        """The last lines of the rank's output, indented, without control codes."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
        return "".join(f"\n    | {''.join(filter(str.isprintable, line))}" for line in lines)

    def _kill_group(self) -> None:
        # The group's id is the process's: nobody else can have it before we reap the process,
        # and right after that only once the system has used up all other ids.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _environment(number: int, ranks: int) -> dict[str, str]:
    env = dict(os.environ)
    env.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the machine
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    env.setdefault("GLOO_SOCKET_IFNAME", ",".join(loopback))  # nothing from outside can connect
    path = [str(_ROOT), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return env | {
        "RANK": str(number),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(number),
        "LOCAL_WORLD_SIZE": str(ranks),
        "PYTHONUNBUFFERED": "1",
    }
