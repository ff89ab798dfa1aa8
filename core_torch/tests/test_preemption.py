"""Asked to stop, by a signal or an option: all ranks commit the same step, exit 75 and go on."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from core_torch.checkpoint.commit import commits
from core_torch.checkpoint.sound import verify
from core_torch.cli import preemption
from core_torch.cli.preemption import Agreement, Wish
from core_torch.cli.signals import SAME_SECONDS, StopWish, listening
from core_torch.tests.test_cli_train import ROOT, folder, words
from core_torch.train import TrainState

__all__ = ["folder"]  # the fixture


def test_sigterm_commits_a_step_and_names_the_command_that_goes_on(folder: Path) -> None:
    more = ["--mesh.replicas", "2", "--sync.every", "4", "--schedule.shape", "constant"]
    process = subprocess.Popen(
        [sys.executable, "-m", "core_torch", *words("a", *more, "--train.steps", "1000000")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = folder / "a" / "metrics.jsonl"
    end = time.monotonic() + 90
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # as ``timeout`` does: to the process, and to its group
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 75, stderr
    assert "Preempted: step " in stderr and "Traceback" not in stderr
    [commit] = commits(folder / "a")
    verify(commit)
    assert int(commit.name[-8:]) % 4 == 0  # the replicas met in a round
    outcome = json.loads((folder / "a" / "outcome.json").read_text())
    assert (outcome["exit_code"], outcome["state"]) == (75, "Preempted")
    command = f"twinshard train a/config.toml --resume auto     (from {commit.name})"
    assert outcome["next"] == command and command in stderr


def test_the_second_signal_ends_at_once_but_not_one_that_belongs_to_the_first() -> None:
    wish = StopWish()
    wish.note(signal.SIGTERM, None)
    wish.note(signal.SIGTERM, None)  # a job system told the launcher, which told the rank
    assert wish.signal == "SIGTERM"
    wish._at -= SAME_SECONDS + 1
    with pytest.raises(KeyboardInterrupt):
        wish.note(signal.SIGTERM, None)


def test_sigterm_is_a_wish_only_while_a_run_that_can_commit_listens() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with listening(to_signals=True) as wish:
        os.kill(os.getpid(), signal.SIGTERM)
        assert wish.signal == "SIGTERM"
    with listening(to_signals=False):
        assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGTERM) is before


class Wire:
    """Messages between ranks that are threads; the k-th of each rank belong together."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.lock = ranks, threading.Condition()
        self.sent: list[list[Tensor]] = []
        self.count = threading.local()
        self.ReduceOp = SimpleNamespace(MAX=max)

    def all_reduce(self, x: Tensor, *, op: Any, group: Any, async_op: bool) -> Any:
        number = self.count.k = getattr(self.count, "k", -1) + 1
        with self.lock:
            if len(self.sent) <= number:
                self.sent.append([])
            self.sent[number].append(x.clone())
            self.lock.notify_all()

        def wait() -> None:
            with self.lock:
                assert self.lock.wait_for(lambda: len(self.sent[number]) == self.ranks, 20)
                x.copy_(torch.stack(self.sent[number]).amax(0))

        return SimpleNamespace(wait=wait)


def answers(
    monkeypatch: pytest.MonkeyPatch, mine: Callable[[int, int], Wish], **settings: Any
) -> tuple[list[list[int]], int]:
    """Steps at which each of three ranks hears of a wish, and messages per rank."""
    wire = Wire(3)
    monkeypatch.setattr(preemption, "dist", wire)
    sync: dict[str, Any] = {"method": "edit", "every": 4, "warmup": 2} | settings
    heard: list[list[int]] = [[], [], []]

    def live(rank: int) -> None:
        mesh = SimpleNamespace(device="cpu", replica=SimpleNamespace(size=3))
        config = SimpleNamespace(sync=SimpleNamespace(**sync))
        engine = SimpleNamespace(is_timed=False, state=None)
        state = SimpleNamespace(mesh=mesh, config=config, sync=engine, step=0)
        agreement = Agreement(cast(TrainState, state))
        for step in range(1, 13):
            state.step, engine.is_synchronous = step, step < sync["warmup"]
            if any(agreement.after_step(mine(rank, step))):
                heard[rank].append(step)
        agreement.close()

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return heard, len(wire.sent)


def asked_at(step: int) -> Callable[[int, int], Wish]:
    """Rank 1 wishes to stop from ``step`` on."""
    return lambda rank, now: Wish(stop=rank == 1 and now >= step)


def test_all_ranks_hear_of_a_wish_at_the_next_round_and_say_nothing_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard, messages = answers(monkeypatch, asked_at(5))
    assert heard == [[6, 10]] * 3
    assert messages == 1 + 3  # the step of the warm-up, and where rounds belong: 2, 6, 10


def test_in_synchronous_steps_the_answer_comes_a_step_later_so_that_none_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard, _ = answers(monkeypatch, asked_at(5), warmup=100)
    assert heard == [[6, 7, 8, 9, 10, 11, 12]] * 3


def test_where_rounds_are_late_so_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    heard, _ = answers(monkeypatch, asked_at(5), method="co2")
    assert heard == [[10]] * 3


def test_one_wish_for_a_commit_is_one_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def lead(rank: int, now: int) -> Wish:
        return Wish(commit=rank == 0 and now in (5, 6))  # its clock starts anew once it is heard

    heard, _ = answers(monkeypatch, lead, warmup=100)
    assert heard == [[6]] * 3
