"""One run on one rank: build or resume, train, record, commit, evaluate, export.

``train`` runs one session, ``demo`` several on the same mesh, one after the other.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from core_torch.checkpoint.background import Saver
from core_torch.checkpoint.export import FILE, empty_model, export_model, load_model
from core_torch.checkpoint.resume import resume
from core_torch.checkpoint.snapshot import layout_of, snapshot
from core_torch.cli.events import OnEvent
from core_torch.cli.loggers import Loggers, makers_of
from core_torch.cli.options import SampleOptions
from core_torch.cli.preemption import Agreement, Wish
from core_torch.cli.profiler import StepProfiler
from core_torch.cli.sample import continue_text
from core_torch.cli.signals import StopWish
from core_torch.cli.watch_options import LogOptions, ProfileOptions
from core_torch.collectives import gather_json, psum
from core_torch.config import RunConfig
from core_torch.data.corpus import Corpus
from core_torch.errors import Preempted, TwinshardError
from core_torch.evaluation import evaluate
from core_torch.mesh import Mesh
from core_torch.report.records import RecordWriter, load_run, write_json
from core_torch.report.summary import summarise
from core_torch.sync.events import RoundEvent
from core_torch.train import StepRecord, TrainState, build, finish, train

SAMPLE_TOKENS = 160

Write = Callable[[StepRecord | None, RoundEvent | None], None]


class Session:
    """A run in its folder, from one rank's point of view.

    Args:
        config: of the run; ``config.run`` is the folder.
        mesh: joined; its ledger starts anew.
        corpus: prepared.
        resume_from: folder of a committed step to go on from; None starts anew.
        emit: takes events: "begin", then "step" after each inner step.
        asked: whether a signal asks this process to stop; None: none can.
        stop_after: inner step at which the run commits and ends as if asked to; 0: none.
        log: who else is told what metrics.jsonl gets.
        profile: which steps to look into.
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        corpus: Corpus,
        *,
        resume_from: Path | None,
        emit: OnEvent,
        asked: StopWish | None = None,
        stop_after: int = 0,
        log: LogOptions | None = None,
        profile: ProfileOptions | None = None,
    ) -> None:
        self._log, self._profile = log or LogOptions(), profile or ProfileOptions()
        self.config, self.mesh, self.corpus, self.emit = config, mesh, corpus, emit
        self.folder = Path(config.run)
        mesh.ledger.reset()
        self.state: TrainState = build(config, mesh, corpus, resumes=resume_from is not None)
        if resume_from is not None:
            resume(self.state, resume_from)
        continues = resume_from is not None and resume_from.resolve().is_relative_to(
            self.folder.resolve()
        )
        self.saver = self._saver(self.state.common_step if continues else None)
        self.agreement, self.asked = Agreement(self.state), asked or StopWish()
        self.stop_after = 0 if self.state.step >= stop_after else stop_after
        self._committed_at = time.monotonic()

    def run(self) -> dict[str, Any] | None:
        """Trains to the end. Returns the summary on the lead, None on other ranks.

        Raises:
            Preempted: asked to stop, it committed a step; on all ranks, after the same step.
        """
        state = self.state
        self.emit(
            {
                "event": "begin",
                "method": self.config.sync.method,
                "step": state.step,
                "steps": self.config.train.steps,
            }
        )
        if self.mesh.is_lead:  # the model of an earlier end is older than what comes now
            (self.folder / FILE).unlink(missing_ok=True)
        try:
            self._train()
        except TwinshardError:
            self.saver.settle()
            raise
        return self._conclude()

    def _train(self) -> None:
        """All steps, with their records and commits."""
        with self._records() as write, self._profiler() as profiler:
            profiler.before(self.state.step + 1)
            for record in train(self.state):
                write(record, record.round)
                stops = self._commit_if_due()
                line = {**record.as_line(), "committed": self.saver.committed}
                self.emit({"event": "step", **line})
                if stops:
                    self.saver.wait()
                    raise self._preempted()
                profiler.before(record.step + 1)
            self.agreement.close()
            self.commit()  # before the closing round, so that the run can be extended exactly
            self.saver.wait()
            for event in finish(self.state):
                write(None, event)

    def _commit_if_due(self) -> bool:
        """Commits if it is time; True if the run stops here, on all ranks alike."""
        by_votes = self.agreement.is_by_votes
        mine = Wish(stop=bool(self.asked.signal) or self._is_over, commit=self._time_is_up())
        wish = self.agreement.after_step(mine)
        if self._is_over and not by_votes:  # all count the same steps, so nobody has to ask
            wish = Wish(stop=True)
        if not self._commit_is_due(wished=wish.stop or wish.commit):
            return False
        if by_votes:  # all commit here, and learn who stops
            wish = self.agreement.ask(mine)
        self.commit()
        return wish.stop

    @property
    def _is_over(self) -> bool:
        """Whether the step after which to stop is reached."""
        return 0 < self.stop_after <= self.state.step

    def _time_is_up(self) -> bool:
        """Whether by the lead's clock it is time to commit; the others obey."""
        seconds = self.config.checkpoint.seconds
        if seconds is None or not self.mesh.is_lead:
            return False
        return time.monotonic() - self._committed_at >= seconds

    def _preempted(self) -> Preempted:
        self.agreement.close()
        why = f"--stop-after {self.stop_after}" if self._is_over else "SIGTERM, to it or to a rank"
        step = self.state.common_step
        return Preempted(f"step {step} is committed, the rest is still to do", likely=why)

    def _commit_is_due(self, *, wished: bool = False) -> bool:
        """Whether to commit after this step. Replicas of unequal speed vote on it in a round."""
        every, sync = self.config.checkpoint.every, self.state.sync
        is_mine = isinstance(every, int) and every > 0 and self.state.step % every == 0
        is_mine |= wished
        if sync is None or not sync.is_timed or sync.state is None:
            return is_mine
        sync.votes.wants_checkpoint |= is_mine
        agreed, sync.votes.checkpoint_agreed = sync.votes.checkpoint_agreed, False
        return agreed

    def commit(self) -> None:
        """Commits this step, or begins to, unless it is committed already."""
        step = self.state.common_step
        if self.saver.newest != step:
            self.saver.save(snapshot(self.state), step)
            self._committed_at = time.monotonic()

    def _saver(self, committed: int | None) -> Saver:
        """What writes this run's commits; all ranks make it together."""
        deadline = timedelta(seconds=self.config.mesh.deadline_seconds)
        group = dist.new_group(backend="gloo", timeout=deadline)  # messages of saves alone
        return Saver(
            self.folder,
            layout_of(self.mesh),
            asynchronous=self.config.checkpoint.asynchronous,
            gather=lambda value: gather_json(value, device=torch.device("cpu"), group=group),
            tokenizer=self.corpus.train.path.parent / "tokenizer.json",
            keep=self.config.checkpoint.keep,
            committed=committed,
        )

    @contextmanager
    def _records(self) -> Iterator[Write]:
        """The first rank of every replica writes its own records."""
        if self.mesh.model.index != 0:
            yield lambda record, event: None
            return
        with RecordWriter(self.folder, self.mesh.replica.index) as writer, self._loggers() as tell:

            def write(record: StepRecord | None, event: RoundEvent | None) -> None:
                if record is not None:
                    writer.step(record.as_line())
                    tell.log(record.as_line())
                if event is not None:
                    writer.event(asdict(event))

            yield write

    def _loggers(self) -> Loggers:
        """Those of the lead; on other ranks none."""
        wanted = self._log if self.mesh.is_lead else LogOptions()
        first = self.state.step + 1
        return Loggers(makers_of(wanted, self.folder, asdict(self.config), first), self.emit)

    def _profiler(self) -> StepProfiler:
        """Every rank's own."""
        device, rank = self.mesh.device, dist.get_rank()
        return StepProfiler(self._profile, self.folder, rank=rank, device=device, emit=self.emit)

    def _conclude(self) -> dict[str, Any] | None:
        """Evaluates and exports the anchor; writes summary.json once all records are there."""
        sent_bytes = self.mesh.ledger.bytes_over("replica")
        validation_loss = evaluate(self.state)
        export_model(self.state, self.folder)
        held = torch.tensor(sum(p.numel() for p in self.state.model.parameters()))
        parameters = psum(held.to(self.mesh.device), self.mesh.pp, scope="summary")
        dist.barrier()
        if not self.mesh.is_lead:
            return None
        found = load_run(self.folder)
        summary = summarise(
            found.metrics,
            found.events,
            method=self.config.sync.method,
            replicas=self.config.mesh.replicas,
            shards=self.config.mesh.shards,
            validation_loss=validation_loss,
            vocabulary=self.state.model.vocabulary,
            parameters=int(parameters),
            replica_bytes=sent_bytes,
        )
        write_json(self.folder / "summary.json", summary)
        return summary


def write_samples(config: RunConfig, corpus: Corpus, prompt: str) -> None:
    """Writes what the model says after ``prompt``, before and after training; one process."""
    folder, options = Path(config.run), SampleOptions(prompt=prompt, tokens=SAMPLE_TOKENS)
    before = empty_model(config, corpus.tokenizer.vocabulary)
    after = load_model(folder, config, corpus.tokenizer.vocabulary)
    texts = {
        "prompt": prompt,
        "before": continue_text(before, corpus.tokenizer, options),
        "after": continue_text(after, corpus.tokenizer, options),
    }
    write_json(folder / "samples.json", texts)
