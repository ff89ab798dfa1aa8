"""Tiny jobs for test_launch.py, and a parent process that can be killed.

``python -m core_torch.tests.rank_jobs _rank ...`` is what launch starts instead of the real
command; ``python -m core_torch.tests.rank_jobs parent KIND GRACE`` launches two ranks itself.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from core_torch.cli import launch as launch_module
from core_torch.cli.launch import launch
from core_torch.cli.worker import Context, Job, main_of_rank
from core_torch.errors import NonFinite, PeerLost, TwinshardError

MODULE = "core_torch.tests.rank_jobs"


def echo(job: Job, context: Context) -> object:
    """Every rank sends its number and returns it with the job's value."""
    context.emit({"event": "hello", "value": job["value"]})
    return [context.rank, context.ranks, job["value"]]


def fail(job: Job, context: Context) -> None:
    """Rank 1 finds a NaN, after rank 0 has lost it as a peer."""
    is_up = Path(str(context.init_method).removeprefix("file://"))  # nobody else uses the store
    if context.rank == 1:
        is_up.touch()
        time.sleep(0.3)
        raise NonFinite("nan loss", where="step 3", likely="a large lr", next="--optim.lr 1e-4")
    while not is_up.exists():
        time.sleep(0.02)
    raise PeerLost("no answer from rank 1")


def bug(job: Job, context: Context) -> None:
    """Rank 1 meets a fault of ours; rank 0 would wait for ever."""
    if context.rank == 1:
        raise IndexError("list index out of range")
    sleep(job, context)


def killed(job: Job, context: Context) -> None:
    """Rank 1 is killed at step 7; rank 0 would wait for ever."""
    context.emit({"event": "progress", "step": 7})
    if context.rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    sleep(job, context)


def sleep(job: Job, context: Context) -> None:
    """Says its process id and sleeps."""
    context.emit({"event": "asleep", "pid": os.getpid()})
    time.sleep(600)


def stubborn(job: Job, context: Context) -> None:
    """Ignores polite signals and has a child process of its own."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    context.emit({"event": "asleep", "pid": child.pid})
    sleep(job, context)


KINDS = {
    "echo": echo,
    "fail": fail,
    "bug": bug,
    "killed": killed,
    "sleep": sleep,
    "stubborn": stubborn,
}


def parent(kind: str, grace_seconds: float) -> int:
    """Launches two ranks and writes the process ids that they report."""
    launch_module.GRACE_SECONDS = grace_seconds

    def tell(event: dict[str, object]) -> None:
        sys.stdout.write(f"{event['pid']}\n")
        sys.stdout.flush()

    try:
        launch({"kind": kind}, 2, tell, module=MODULE)
    except TwinshardError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "_rank":
        main_of_rank(sys.argv[2:], KINDS)
    sys.exit(parent(sys.argv[2], float(sys.argv[3])))
