"""Torch ranks that live as long as the test session. Imports neither torch nor JAX.

Starting ranks and joining them costs many times what a parity case does, so tests send
functions to ranks that are already up. Plain subprocesses: ``multiprocessing`` would either
fork a process in which JAX runs threads or import the test runner's ``__main__`` again.

``run`` is one request to all ranks. If one of them raises, the others get a short grace to
raise as well (the first traceback to arrive is not always the cause), then all are killed:
their collectives no longer match. A rank that ends, or the deadline, kills them too. The
next ``run`` starts new ones.
"""

import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from parity_tests.harness import codec
from parity_tests.harness.messages import receive, send

START_SECONDS = 270.0  # four imports of torch on a busy machine; below pytest's 300
GRACE_SECONDS = 2.0
LOG_LINES = 120  # one full stack and what came before it


class RanksFailed(RuntimeError):
    """At least one rank raised, ended, or did not answer in time; says which and why."""


class _Team:
    """The rank processes of one world size."""

    def __init__(self, ranks: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="twinshard-ranks-"))
        self._sockets: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                self._start(rank, ranks)
            self.collect(time.monotonic() + START_SECONDS)
        except BaseException:
            self.end()
            raise

    def _start(self, rank: int, world: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        self._sockets.append(ours)
        argv = [str(theirs.fileno()), str(rank), str(world), str(self._folder / "store")]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        with theirs, self._log(rank).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "parity_tests.harness.rank_main", *argv],
                stdin=subprocess.PIPE,  # never written: its end tells the rank that we are gone
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            )
        self._processes.append(process)

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"

    def ask(self, request: bytes, deadline: float) -> list[Any]:
        """Sends ``request`` to every rank and returns their results, rank 0 first."""
        for peer in self._sockets:
            try:
                send(peer, request)
            except OSError:
                break  # this rank has ended; collect says so
        return self.collect(deadline)

    def collect(self, deadline: float) -> list[Any]:
        """One answer of every rank, by ``deadline`` on the monotonic clock.

        Raises:
            RanksFailed: with every traceback that arrived and the log of every silent rank.
        """
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        with selectors.DefaultSelector() as selector:
            for rank, peer in enumerate(self._sockets):
                selector.register(peer, selectors.EVENT_READ, rank)
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    rank, peer = key.data, self._sockets[key.data]
                    selector.unregister(peer)
                    result, failure = self._read(rank, peer)
                    if failure:
                        failures[rank] = failure
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                    else:
                        results[rank] = result
        silent = set(range(len(self._sockets))) - set(results) - set(failures)
        if silent or failures:
            raise RanksFailed(self._report(failures, silent))
        return [results[rank] for rank in range(len(self._sockets))]

    def _read(self, rank: int, peer: socket.socket) -> tuple[Any, str | None]:
        try:
            message = receive(peer)
        except OSError:
            message = None
        if message is None:
            code = self._processes[rank].wait(timeout=10)
            return None, f"ended with code {code}\n{self._tail(rank)}"
        result, failure = codec.decode(message)
        return result, failure

    def _report(self, failures: dict[int, str], silent: set[int]) -> str:
        for rank in silent:
            self._processes[rank].send_signal(signal.SIGUSR1)  # writes its stacks into its log
        time.sleep(0.3 if silent else 0.0)
        parts = [f"rank {rank}: {text}" for rank, text in failures.items()]
        parts += [f"rank {rank}: no answer\n{self._tail(rank)}" for rank in sorted(silent)]
        return "\n".join(parts)

    def _tail(self, rank: int) -> str:
        lines = self._log(rank).read_text(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-LOG_LINES:])

    def end(self) -> None:
        """Kills the ranks; they hold nothing that could be lost."""
        for peer in self._sockets:
            peer.close()
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class RankPool:
    """Runs module-level functions on torch ranks; one set of ranks per world size."""

    def __init__(self) -> None:
        self._teams: dict[int, _Team] = {}
        self._mutant: str | None = None

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int = 4,
        deadline: float = 120.0,
        mutant: str | None = None,
    ) -> list[Any]:
        """Runs ``function(*args)`` on every rank and returns the results, rank 0 first.

        Args:
            function: at the top of a module that the ranks can import and that needs no JAX.
            args: plain data (see ``codec``), the same for all ranks.
            ranks: size of the world.
            deadline: seconds until the ranks are killed; not counting their start.
            mutant: fault of ``mutants.py`` to inject for this request.

        Raises:
            RanksFailed: a rank raised, ended or missed the deadline.
            TypeError: an argument is not plain data, or the function has no importable name.
        """
        request = codec.encode((name_of(function), tuple(args), mutant or self._mutant))
        if ranks not in self._teams:
            self._teams[ranks] = _Team(ranks)
        try:
            return self._teams[ranks].ask(request, time.monotonic() + deadline)
        except BaseException:
            self._teams.pop(ranks).end()
            raise

    @contextmanager
    def mutated(self, mutant: str) -> Iterator[None]:
        """Injects ``mutant`` into every request of the block."""
        self._mutant, kept = mutant, self._mutant
        try:
            yield
        finally:
            self._mutant = kept

    def close(self) -> None:
        """Ends all ranks."""
        while self._teams:
            self._teams.popitem()[1].end()


def name_of(function: Callable[..., Any]) -> str:
    """``module:qualname``, by which a rank finds the function.

    Raises:
        TypeError: a lambda or an inner function, which nobody else can import.
    """
    if "<" in function.__qualname__:
        raise TypeError(f"{function.__qualname__} is not at the top of a module")
    return f"{function.__module__}:{function.__qualname__}"
