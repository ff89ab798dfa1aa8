"""The table of commands. A command's own file is imported only when its words make sense."""

import difflib
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from core_torch import __version__
from core_torch.cli.arguments import known_kinds, scan, show_help, wants_help
from core_torch.cli.ckpt_hf_options import CkptExportOptions, CkptImportOptions
from core_torch.cli.ckpt_options import (
    CkptLsOptions,
    CkptPruneOptions,
    CkptShowOptions,
    CkptVerifyOptions,
)
from core_torch.cli.data_options import DataPrepareOptions, DataShowOptions
from core_torch.cli.launch_options import KubernetesOptions, SlurmOptions, TorchrunOptions
from core_torch.cli.options import (
    BenchOptions,
    BenchSyncOptions,
    DemoOptions,
    DoctorOptions,
    GraphOptions,
    ReportOptions,
    SampleOptions,
    TrainOptions,
)
from core_torch.cli.parity_options import (
    ParityCanaryOptions,
    ParityCheckOptions,
    ParityDiffOptions,
    ParityMineOptions,
    ParityRecordOptions,
    ParityRunOptions,
)
from core_torch.cli.plan_options import PlanOptions
from core_torch.cli.worker import torchrun_place
from core_torch.config import Problem, RunConfig, all_problems
from core_torch.config_file import apply, load_values
from core_torch.errors import EXIT_OK, ConfigError


class Command(NamedTuple):
    """One row: how the command is called and what runs it.

    ``file`` has ``run(options, words) -> exit code``; for train, options are the pair of its
    own and the run's configuration.
    """

    usage: str
    summary: str
    bases: tuple[Any, ...]
    fewest_words: int
    most_words: int
    file: str


COMMANDS = {
    "demo": Command(
        "demo",
        "Trains a small model with each method on this machine and compares them.",
        (DemoOptions(),),
        0,
        0,
        "core_torch.cli.demo",
    ),
    "train": Command(
        "train [CONFIG.toml]",
        "Trains a model. Options override the file, the file overrides the defaults.",
        (TrainOptions(), RunConfig()),
        0,
        1,
        "core_torch.cli.train",
    ),
    "sample": Command(
        "sample RUN",
        "Writes text with the model of a run.",
        (SampleOptions(),),
        1,
        1,
        "core_torch.cli.sample",
    ),
    "report": Command(
        "report RUN [RUN ...]",
        "Compares runs: a table, and a page with their curves.",
        (ReportOptions(),),
        1,
        1000,
        "core_torch.cli.report",
    ),
    "ckpt ls": Command(
        "ckpt ls RUN",
        "Lists the commits of a run, and which do not count.",
        (CkptLsOptions(),),
        1,
        1,
        "core_torch.cli.ckpt",
    ),
    "ckpt verify": Command(
        "ckpt verify RUN|STEP",
        "Reads all files of commits: a damaged one ends with code 4.",
        (CkptVerifyOptions(),),
        1,
        1,
        "core_torch.cli.ckpt",
    ),
    "ckpt show": Command(
        "ckpt show RUN|STEP",
        "Shows what a commit holds: counters, settings, tensors, files.",
        (CkptShowOptions(),),
        1,
        1,
        "core_torch.cli.ckpt",
    ),
    "ckpt prune": Command(
        "ckpt prune RUN",
        "Deletes all but the newest commits of a run.",
        (CkptPruneOptions(),),
        1,
        1,
        "core_torch.cli.ckpt",
    ),
    "ckpt export": Command(
        "ckpt export RUN",
        "Writes the model of a run for Hugging Face's transformers.",
        (CkptExportOptions(),),
        1,
        1,
        "core_torch.cli.ckpt_hf",
    ),
    "ckpt import": Command(
        "ckpt import DIR",
        "Prepares a run that begins with a Llama in Hugging Face's files.",
        (CkptImportOptions(),),
        1,
        1,
        "core_torch.cli.ckpt_hf",
    ),
    "data prepare": Command(
        "data prepare SOURCE [SOURCE ...]",
        "Turns files of documents into a folder of tokens, for runs of any length.",
        (DataPrepareOptions(),),
        1,
        1000,
        "core_torch.cli.data",
    ),
    "data show": Command(
        "data show DIR",
        "Shows a folder of tokens: sizes, fingerprint, beginning.",
        (DataShowOptions(),),
        1,
        1,
        "core_torch.cli.data",
    ),
    "bench shard": Command(
        "bench shard",
        "Measures ways to shard a model side by side: time, memory, communication.",
        (BenchOptions(),),
        0,
        0,
        "core_torch.cli.bench",
    ),
    "bench sync": Command(
        "bench sync",
        "Measures rounds: a slow replica under EDiT and A-EDiT, and what a forward hides.",
        (BenchSyncOptions(),),
        0,
        0,
        "core_torch.cli.bench_sync",
    ),
    "graph": Command(
        "graph",
        "Models a step under SimpleFSDP before and after each pass, and draws it.",
        (GraphOptions(),),
        0,
        0,
        "core_torch.cli.graph",
    ),
    "plan": Command(
        "plan [CONFIG.toml]",
        "Foretells memory, messages, work and time of a run. Starts nothing.",
        (PlanOptions(), RunConfig()),
        0,
        1,
        "core_torch.cli.plan",
    ),
    "launch torchrun": Command(
        "launch torchrun",
        "Prints the line that starts a run on each of several machines.",
        (TorchrunOptions(),),
        0,
        0,
        "core_torch.cli.launch_scripts",
    ),
    "launch slurm": Command(
        "launch slurm",
        "Prints a script for sbatch that begins a run and goes on with it.",
        (SlurmOptions(),),
        0,
        0,
        "core_torch.cli.launch_scripts",
    ),
    "launch kubernetes": Command(
        "launch kubernetes",
        "Prints a manifest for kubectl, as JSON: an indexed Job and its Service.",
        (KubernetesOptions(),),
        0,
        0,
        "core_torch.cli.launch_scripts",
    ),
    "parity run": Command(
        "parity run",
        "Compares the core with the reference over methods, meshes, dtypes, models and shardings.",
        (ParityRunOptions(),),
        0,
        0,
        "core_torch.cli.parity_matrix",
    ),
    "parity canary": Command(
        "parity canary",
        "Puts known faults into the running core: the comparison must find each where it acts.",
        (ParityCanaryOptions(),),
        0,
        0,
        "core_torch.cli.parity_matrix",
    ),
    "parity record": Command(
        "parity record",
        "Writes the trace of a run: what the core, or the reference, computed, value by value.",
        (ParityRecordOptions(),),
        0,
        0,
        "core_torch.cli.parity",
    ),
    "parity check": Command(
        "parity check [FOLDER]",
        "Runs the core beside recorded traces of the reference, those of the package or others.",
        (ParityCheckOptions(),),
        0,
        1,
        "core_torch.cli.parity",
    ),
    "parity diff": Command(
        "parity diff A B",
        "Compares two traces and names the first event in which they part.",
        (ParityDiffOptions(),),
        2,
        2,
        "core_torch.cli.parity",
    ),
    "parity mine": Command(
        "parity mine",
        "Runs your own torch model beside the reference: forward, gradients, steps of AdamW.",
        (ParityMineOptions(),),
        0,
        0,
        "core_torch.cli.parity_mine",
    ),
    "doctor": Command(
        "doctor",
        "Checks this machine: versions, memory, collectives, initial weights.",
        (DoctorOptions(),),
        0,
        0,
        "core_torch.cli.doctor",
    ),
}


def run_command(words: list[str]) -> int:
    """Runs the command that ``words`` name and returns its exit code.

    Raises:
        ConfigError: unknown command, or all that is wrong with its words, before any work.
    """
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return EXIT_OK
    if words[0] in ("-V", "--version"):
        print(f"twinshard {__version__}")
        return EXIT_OK
    name, *args = words
    inner = [key.partition(" ")[2] for key in COMMANDS if key.startswith(f"{name} ")]
    if inner:
        name, args = _inner_command(name, args, inner)
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"no command {name!r}{hint}", next="twinshard --help")
    command = COMMANDS[name]
    if wants_help(args):
        show_help(f"twinshard {command.usage}", command.summary, *command.bases)
        return EXIT_OK
    try:
        options, rest = parse(name, args)
    except ConfigError as error:
        place = torchrun_place()
        if place is not None and place.rank > 0:  # every rank reads the same words
            raise SystemExit(error.exit_code) from None
        raise
    run: Callable[[Any, list[str]], int] = importlib.import_module(command.file).run
    return run(options[0] if len(options) == 1 else options, rest)


def _inner_command(name: str, args: list[str], inner: list[str]) -> tuple[str, list[str]]:
    """A command of two words, and the words after it."""
    if args and args[0] in inner:
        return f"{name} {args[0]}", args[1:]
    if wants_help(args):
        args = []
    said = f"{args[0]!r} is none" if args else "not said which"
    raise ConfigError(
        f"after {name} comes {' or '.join(inner)}; {said}",
        next=f"twinshard {name} {inner[0]} --help",
    )


def overview() -> str:
    """The text of ``twinshard --help``."""
    rows = [f"  {command.usage:<22}{command.summary}" for command in COMMANDS.values()]
    return "\n".join(
        [
            "Twinshard: sharded training with local SGD, one algorithm, two cores.",
            "",
            "usage: twinshard COMMAND [OPTIONS]",
            "",
            *rows,
            "",
            "twinshard COMMAND --help lists the options of a command.",
        ]
    )


def parse(name: str, args: list[str]) -> tuple[tuple[Any, ...], list[str]]:
    """Options of the command ``name``, one object per base, and its other words.

    Raises:
        ConfigError: all that is wrong.
    """
    command = COMMANDS[name]
    values, words, problems = scan(args, known_kinds(*command.bases))
    extra = words[command.most_words :]
    problems += [Problem(word, "is one word too many") for word in extra]
    if len(words) < command.fewest_words:
        missing = [word for word in command.usage.split() if word.isupper()][len(words)]
        problems.append(Problem(missing, f"is missing: {_missing(name, missing)}"))
    options = []
    for base in command.bases:
        if isinstance(base, RunConfig) and words:
            base = _with_file(base, words[0], problems)
        own = {path: value for path, value in values.items() if path in known_kinds(base)}
        base, _ = apply(base, own)  # scan has checked the types
        problems += all_problems(base)
        options.append(base)
    if problems:
        raise _error(name, problems)
    return tuple(options), words


def _missing(name: str, word: str) -> str:
    """What a missing word of a command would have named."""
    if name.startswith("data "):
        return "a file or folder of documents" if word == "SOURCE" else "the folder of tokens"
    what = "trace" if name.startswith("parity ") else "model" if word == "DIR" else "run"
    return f"the folder of a {what}"


def _with_file(base: RunConfig, path: str, problems: list[Problem]) -> RunConfig:
    """``base`` with the values of a TOML file; adds to ``problems``."""
    try:
        config, found = apply(base, load_values(path))
    except ConfigError as error:
        if not problems:
            raise  # says more than a line of a list can
        config, found = base, [Problem(path, error.what)]
    problems += found
    return config


def _error(name: str, problems: list[Problem]) -> ConfigError:
    listed = "".join(f"\n    {p.path}: {p.message}" for p in problems)
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return ConfigError(f"{count}{listed}", next=f"twinshard {name} --help")
