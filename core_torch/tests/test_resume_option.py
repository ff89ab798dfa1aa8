"""``--resume``, ``--stop-after`` and commits by the clock, from the command line to the folder."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core_torch.checkpoint import background
from core_torch.checkpoint.commit import commits
from core_torch.checkpoint.save import save
from core_torch.cli import main, train, train_rank
from core_torch.cli.resume import Start, start_of
from core_torch.cli.worker import Context
from core_torch.config import RunConfig
from core_torch.errors import CheckpointError, ConfigError
from core_torch.report.records import load_run
from core_torch.tests.checkpoint_cases import commit_step
from core_torch.tests.test_cli_train import folder, words

__all__ = ["folder"]  # the fixture


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of ``folder``; the one rank of a run is this process."""
    stores = iter(range(100))

    def launch(job: dict[str, Any], ranks: int, on_event: Callable[..., None], **_: Any) -> Any:
        assert ranks == 1
        store = folder / f"store-{next(stores)}"
        return train_rank.run(job, Context(0, 1, f"file://{store}", on_event))

    monkeypatch.setattr(train, "launch", launch)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    return folder


def steps_in(run: Path) -> list[int]:
    return [record.step for record in load_run(run).metrics[0]]


def names(run: Path) -> list[str]:
    return [path.name for path in commits(run)]


def test_a_run_stops_where_it_is_told_to_and_ends_when_called_again(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(*words: Any, **options: Any) -> Path:
        time.sleep(0.2)
        return save(*words, **options)

    monkeypatch.setattr(background, "save", slowly)  # who ends has to wait for it
    line = words("a", "--train.steps", "5", "--sync.every", "2")
    assert main([*line, "--stop-after", "3"]) == 75
    assert "Preempted: step 3 is committed" in capsys.readouterr().err
    assert (names(here / "a"), steps_in(here / "a")) == (["step-00000003"], [1, 2, 3])
    assert not (here / "a" / "summary.json").exists()
    assert main([*line, "--stop-after", "3", "--resume", "auto"]) == 0
    assert steps_in(here / "a") == [1, 2, 3, 4, 5]
    straight = words("b", "--train.steps", "5", "--sync.every", "2")
    assert main(straight) == 0
    losses = [[r.loss for r in load_run(here / run).metrics[0]] for run in ("a", "b")]
    assert losses[0] == losses[1]


def test_a_path_begins_another_run_at_that_commit(here: Path) -> None:
    line = words("a", "--train.steps", "4", "--checkpoint.every", "2")
    assert main(line) == 0
    assert names(here / "a") == ["step-00000002", "step-00000004"]
    other = words("b", "--train.steps", "4", "--resume", "a/ckpt/step-00000002")
    assert main(other) == 0
    assert (steps_in(here / "b"), names(here / "b")) == ([3, 4], ["step-00000004"])
    assert [r.loss for r in load_run(here / "b").metrics[0]] == [
        r.loss for r in load_run(here / "a").metrics[0]
    ][2:]
    assert main(words("c", "--train.steps", "5", "--resume", "a")) == 0
    assert steps_in(here / "c") == [5]


def test_a_path_to_a_damaged_commit_is_an_error_and_to_a_run_takes_the_one_before(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words("a", "--train.steps", "4", "--checkpoint.every", "2")) == 0
    newest = here / "a" / "ckpt" / "step-00000004"
    file = newest / "replica-0000" / "shard-0000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(words("b", "--train.steps", "4", "--resume", str(newest))) == 4
    assert "CheckpointCorrupt: " in capsys.readouterr().err
    assert main(words("c", "--train.steps", "4", "--resume", "a")) == 0
    assert "passed over a damaged checkpoint" in capsys.readouterr().err
    assert steps_in(here / "c") == [3, 4]


def test_a_commit_of_other_tokens_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words("a", "--train.steps", "2")) == 0
    bpe = ["--data.tokenizer", "bpe", "--data.bpe-vocabulary", "300", "--model.vocabulary", "400"]
    code = main(words("b", "--train.steps", "4", "--resume", "a", *bpe))
    assert code == 4
    assert "the tokenizer of step-00000002 is not that of " in capsys.readouterr().err


def test_commits_come_by_the_clock_of_the_lead(here: Path) -> None:
    more = ["--checkpoint.every", "0.001s", "--checkpoint.keep", "9", "--sync.warmup", "6"]
    assert main(words("a", "--train.steps", "7", *more)) == 0
    assert names(here / "a") == [f"step-0000000{step}" for step in (2, 4, 6, 7)]


def config(run: Path) -> RunConfig:
    return RunConfig(run=str(run))


def test_words_of_resume_mean_a_folder_and_whether_the_run_goes_on(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    old, new = commit_step(own, 4), commit_step(own, 6)
    foreign = commit_step(other, 4)
    assert start_of("never", config(own)) == Start()
    assert start_of("auto", config(own)) == Start(str(own), False, True)
    assert start_of(str(new), config(own)) == Start(str(new), True, True)
    assert start_of(str(own), config(own)) == Start(str(own), True, True)
    assert start_of(str(foreign), config(own)) == Start(str(foreign), True, False)
    assert start_of(str(other), config(own)) == Start(str(other), True, False)
    with pytest.raises(ConfigError, match="goes on to step-00000006"):
        start_of(str(old), config(own))
    for missing in (tmp_path / "nowhere", other / "ckpt" / "step-00000009"):
        with pytest.raises(CheckpointError):
            start_of(str(missing), config(own))
