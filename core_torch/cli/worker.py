"""The rank's side of ``launch``: run one job, tell the parent, and never outlive it.

A job is JSON: ``{"kind": ..., ...}``. Its kind picks a function from a table in code; files
name no code. The function takes the job and a ``Context`` and returns something for JSON.
"""

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from core_torch.cli.events import EventWriter, OnEvent, error_event
from core_torch.errors import TwinshardError

if TYPE_CHECKING:
    from core_torch.mesh import RankInfo

KINDS = {
    "train": "core_torch.cli.train_rank",
    "doctor": "core_torch.cli.doctor_rank",
    "bench_shard": "core_torch.cli.bench_rank",
    "bench_sync": "core_torch.cli.bench_sync_rank",
}


class Context(NamedTuple):
    """What a job's function knows about its place."""

    rank: int
    ranks: int
    init_method: str | None  # file://... of the ranks' store; None under torchrun
    emit: OnEvent  # sends an event to the parent


Job = dict[str, Any]
JobFunction = Callable[[Job, Context], Any]


def run_job(job: Job, context: Context) -> Any:
    """Runs the job in this process and returns its result."""
    run: JobFunction = importlib.import_module(KINDS[job["kind"]]).run
    return run(job, context)


def torchrun_place() -> "RankInfo | None":
    """This process's place if torchrun started it, else None."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None  # asked first, because mesh imports torch
    from core_torch.mesh import rank_from_environment

    return rank_from_environment()


def run_here(job: Job, place: "RankInfo", on_event: OnEvent) -> Any:
    """Runs the job in a process that torchrun started; ``on_event`` gets this rank's events."""
    return run_job(job, Context(place.rank, place.world, None, on_event))


def main_of_rank(words: list[str], kinds: Mapping[str, JobFunction] | None = None) -> NoReturn:
    """Entry point of a process that ``launch`` started.

    Args:
        words: path of the job, path of the store, rank, number of ranks, descriptor of the
            pipe for events.
        kinds: functions to use instead of the table of this file.
    """
    job_path, store, rank, ranks, pipe = words
    os.set_inheritable(int(pipe), False)
    emit = EventWriter(int(pipe))
    context = Context(int(rank), int(ranks), f"file://{store}", emit)
    folder = Path(job_path).parent
    threading.Thread(target=_die_with_parent, args=[folder], daemon=True).start()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # launch asks for stacks before it gives up
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    code = 0
    try:
        job = json.loads(Path(job_path).read_text())
        result = kinds[job["kind"]](job, context) if kinds else run_job(job, context)
        emit({"event": "done", "result": result})
    except BaseException as error:  # whatever it is, the parent must hear of it
        if not isinstance(error, TwinshardError | KeyboardInterrupt):
            traceback.print_exc()
        emit(error_event(error))
        code = error.exit_code if isinstance(error, TwinshardError) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a process group that lost its peers can block an orderly exit for ever


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _die_with_parent(folder: Path) -> NoReturn:
    """Waits for the end of standard input, which only the parent's end can bring.

    Removes what ``launch`` made in its temporary folder, file by file, since it no longer can.
    """
    while os.read(0, 1024):
        pass
    with contextlib.suppress(OSError):  # the other ranks remove the same files
        for path in (folder / "job.json", folder / "store", *folder.glob("rank-*.log")):
            path.unlink(missing_ok=True)
        folder.rmdir()
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)
