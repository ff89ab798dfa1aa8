"""Command-line words to values: ``--section.key value`` for every field of a dataclass.

tyro renders the help from the fields' comments. Reading is done here, with the same types and
the same words as for TOML files, because a parser that stops at the first mistake would make
people correct their command word by word.

Spellings: ``--a.b value``, ``--a.b=value``, ``--a.b-c`` for ``a.b_c``; for switches also
``--a.b``, ``--a.no-b`` and ``--no-a.b``; the short forms of ``SHORT``. The word after an
option that does not start with ``--`` is its value.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from core_torch.config import Problem
from core_torch.config_file import from_text, kinds, misfit, unknown

SHORT = {"steps": "train.steps"}  # what everybody types


class Scanned(NamedTuple):
    """Words of a command: values by dotted path, the other words, and what is wrong."""

    values: dict[str, Any]
    words: list[str]
    problems: list[Problem]


def scan(args: Sequence[str], known: Mapping[str, Any]) -> Scanned:
    """Sorts ``args`` into values of the ``known`` fields, other words, and problems.

    Args:
        args: words after the command's name.
        known: type of each field by dotted path, see ``config_file.kinds``.
    """
    found = Scanned({}, [], [])
    rest = list(args)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            found.words.append(word)
            continue
        option, equals, text = word.partition("=")
        path, negated = _field(option, known)
        given = text if equals else None
        if given is None and not negated and rest and not rest[0].startswith("--"):
            given = rest.pop(0)
        if path not in known:
            problem = unknown(path, known)
            found.problems.append(problem._replace(path=option))
        elif given is None and known[path] is bool:
            found.values[path] = not negated
        elif given is None or negated:
            hint = "takes no value after 'no'" if negated else "needs a value"
            found.problems.append(Problem(path, hint))
        else:
            _read(path, given, known[path], found)
    return found


def _field(option: str, known: Mapping[str, Any]) -> tuple[str, bool]:
    """The dotted path that an option names, and whether it says no to a switch."""
    path = option.removeprefix("--").replace("-", "_")
    path = path if path in known else SHORT.get(path, path)
    if path in known:
        return path, False
    section, dot, name = path.rpartition(".")
    for positive in (path.removeprefix("no_"), section + dot + name.removeprefix("no_")):
        if positive != path and known.get(positive) is bool:
            return positive, True
    return path, False


def _read(path: str, text: str, kind: Any, found: Scanned) -> None:
    try:
        text.encode()  # file names may hold bytes that no TOML file can
        found.values[path] = from_text(kind, text)
    except ValueError:
        found.problems.append(misfit(path, kind, text))


def wants_help(args: Sequence[str]) -> bool:
    """Whether the words ask for help instead of work."""
    return "-h" in args or "--help" in args


def show_help(usage: str, summary: str, *bases: Any) -> None:
    """Prints the options that the dataclass instances ``bases`` define, with their comments.

    Args:
        usage: the command and its words, e.g. ``twinshard sample RUN``.
        summary: what the command does.
        bases: their values are shown as defaults.
    """
    import tyro  # only help needs it, and it takes a fifth of a second

    inline: Any = tyro.conf.arg(name="")  # one namespace for the fields of all bases
    members = [
        (f"part{i}", Annotated[type(base), inline], dataclasses.field(default=base))
        for i, base in enumerate(bases)
    ]
    options = dataclasses.make_dataclass("Options", members, frozen=True)
    try:
        tyro.cli(
            options,
            prog=usage,
            description=summary,
            args=["--help"],
            use_underscores=True,
            config=(tyro.conf.FlagConversionOff,),
        )
    except SystemExit:
        return  # tyro leaves the process after its help


def known_kinds(*bases: Any) -> dict[str, Any]:
    """Types of all fields of several dataclass instances by dotted path."""
    return {path: kind for base in bases for path, kind in kinds(base).items()}
