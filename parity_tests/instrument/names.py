"""The file that tells which of a user's parameters and modules are which of the model's.

    [model]        sizes, or config = "huggingface"; see ``sizes.py``
    [parameters]   "yours.{i}.weight" = "layers.{i}.attention.wq.weight"
    [modules]      "yours.{i}" = "layers.{i}"
    [layout]       rotary = "pairs" or "halves"

``{i}`` stands for the number of a block. A file names things and says nothing else: no code is
taken from it.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core_torch.config import ModelConfig, Problem
from core_torch.config_file import flatten
from core_torch.errors import ConfigError
from parity_tests.harness.names import Shapes, expected_shapes

MAPS = Path(__file__).parent / "maps"
SECTIONS = ("model", "parameters", "modules", "layout")
ROTARY = ("pairs", "halves")
NUMBER = "{i}"


@dataclass(frozen=True, kw_only=True, slots=True)
class NameMap:
    """A file as it is written."""

    where: str
    model: Mapping[str, Any]  # by dotted path
    parameters: Mapping[str, str]  # yours -> the model's
    modules: Mapping[str, str]  # yours -> unit
    rotary: str  # one of ROTARY


def read_map(name: str) -> NameMap:
    """Reads a file, or a map of the package by its name: ``huggingface-llama``.

    Raises:
        ConfigError: there is none, or all that is wrong with it.
    """
    path = Path(name)
    shipped = {x.stem.replace("_", "-"): x for x in sorted(MAPS.glob("*.toml"))}
    if not path.exists() and path.suffix != ".toml":
        if name not in shipped:
            raise ConfigError(
                f"map: there is no file {name!r}; maps of the package are {', '.join(shipped)}"
            )
        path = shipped[name]
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"map: cannot read {name!r}: {error.strerror}") from None
    except ValueError as error:
        likely = f"a name with {NUMBER} must stand in quotes" if "{" in str(error) else ""
        raise ConfigError(f"map: not valid TOML: {error}", where=name, likely=likely) from None
    problems = _form(tables)
    refuse(problems, name)
    own, modules, layout = (flatten(tables.get(x, {})) for x in SECTIONS[1:])
    return NameMap(
        where=name,
        model=flatten(tables["model"]),
        parameters=own,
        modules=modules,
        rotary=layout["rotary"],
    )


def refuse(problems: list[Problem], where: str) -> None:
    """Raises a ConfigError of all problems of a file, if there are any."""
    if problems:
        listed = "".join(f"\n    {p.path}: {p.message}" for p in problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(f"{count} of the map{listed}", where=where)


def _form(tables: Mapping[str, Any]) -> list[Problem]:
    """What is wrong before anything is known of the module."""
    problems = []
    for name in tables:
        if name not in SECTIONS:
            known = ", ".join(f"[{x}]" for x in SECTIONS)
            problems.append(Problem(f"[{name}]", f"unknown section{near(name, SECTIONS)}; {known}"))
    for name in ("model", "parameters"):
        if not isinstance(tables.get(name), dict) or not tables[name]:
            problems.append(Problem(f"[{name}]", "is missing"))
    for name in ("parameters", "modules"):
        problems += _rows(name, tables.get(name, {}))
    return problems + _layout(tables.get("layout", {}))


def _rows(section: str, table: Any) -> list[Problem]:
    problems = []
    for own, given in (flatten(table) if isinstance(table, dict) else {}).items():
        if not isinstance(given, str):
            problems.append(Problem(row(section, own), f"expected a name, got {given!r}"))
        elif own.count(NUMBER) != given.count(NUMBER) or own.count(NUMBER) > 1:
            message = f"{NUMBER} must stand once on both sides or on none, got {given!r}"
            problems.append(Problem(row(section, own), message))
    return problems


def _layout(table: Any) -> list[Problem]:
    given = table if isinstance(table, dict) else {}
    strange = [Problem(f"[layout] {x}", "unknown; rotary is known") for x in given if x != "rotary"]
    if (rotary := given.get("rotary")) in ROTARY:
        return strange
    means = "pairs (features 2j and 2j + 1 turn together) or halves (j and j + E/2)"
    return [Problem("[layout] rotary", f"must be {means}, got {rotary!r}"), *strange]


def row(section: str, key: str) -> str:
    """How messages name a line of the file."""
    return f'[{section}] "{key}"'


def near(name: str, known: Iterable[str]) -> str:
    """A question about the nearest known name, or nothing."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def expand(
    rows: Mapping[str, str], known: Iterable[str]
) -> tuple[dict[str, tuple[str, str]], set[str]]:
    """Applies rows to names: a row without a number goes before one that matches too.

    Returns:
        name -> (row that names it, what it is called), and the rows that name something.
    """
    found: dict[str, tuple[str, str]] = {}
    used: set[str] = set()
    patterns = [
        (re.compile(re.escape(own).replace(re.escape(NUMBER), r"(\d+)")), own, given)
        for own, given in sorted(rows.items(), key=lambda item: NUMBER in item[0])
    ]
    for name in known:
        for pattern, own, given in patterns:
            if (match := pattern.fullmatch(name)) is not None:
                used.add(own)
                number = match[1] if NUMBER in own else ""
                found.setdefault(name, (own, given.replace(NUMBER, number)))
    return found, used


def name_parameters(
    told: NameMap, own: Shapes, aliases: Mapping[str, str], model: ModelConfig
) -> dict[str, str]:
    """The user's names of parameters and the model's, each exactly once.

    Args:
        told: the file.
        own: shapes of the module's parameters by its names.
        aliases: second names of parameters, for example of a tied head -> the name in ``own``.
        model: sizes of the model.

    Raises:
        ConfigError: all that does not fit.
    """
    expected = expected_shapes(model)
    found, used = expand(told.parameters, own)
    also, also_used = expand(told.parameters, aliases)
    problems = _unused(told, used | also_used, [*own, *aliases], model)
    taken: dict[str, str] = {}
    for name, shape in own.items():
        if name not in found:
            problems.append(_unmapped(name, shape, told, expected, taken))
            continue
        at, given = found[name]
        if given not in expected:
            problems.append(Problem(row("parameters", at), _stranger(name, given, expected, model)))
        elif given in taken:
            message = f"{name} and {taken[given]} are both called {given}"
            problems.append(Problem(row("parameters", at), message))
        else:
            taken[given] = name
            if shape != expected[given]:
                message = _misshapen(name, shape, given, expected[given])
                problems.append(Problem(row("parameters", at), message))
    for name, (at, given) in also.items():
        if given != "output.weight" or not model.tied:
            message = f"{name} is another name of {aliases[name]}, and cannot also be {given}"
            problems.append(Problem(row("parameters", at), f"{message}; tied = true would say so"))
    problems += _missing(taken, expected, own, found)
    refuse(problems, told.where)
    return {name: found[name][1] for name in own}


def name_modules(told: NameMap, known: Iterable[str], model: ModelConfig) -> dict[str, str]:
    """Modules whose outputs are compared, and their units.

    Raises:
        ConfigError: all that does not fit.
    """
    known, problems = list(known), []
    units = ["embedding", *(f"layers.{i}" for i in range(model.layers)), "head"]
    found, used = expand(told.modules, known)
    for at in told.modules:
        if at not in used:
            message = f"the module has no such part{near(at, _patterns(known))}"
            problems.append(Problem(row("modules", at), message))
    taken: dict[str, str] = {}
    for name, (at, unit) in found.items():
        if unit not in units:
            message = f"{unit!r} is no unit; units are embedding, layers.{NUMBER} below "
            problems.append(Problem(row("modules", at), f"{message}{model.layers}, and head"))
        elif unit in taken:
            message = f"{name} and {taken[unit]} both compute the unit {unit}"
            problems.append(Problem(row("modules", at), message))
        taken[unit] = name
    refuse(problems, told.where)
    return {name: unit for name, (_, unit) in found.items()}


def _patterns(names: Iterable[str]) -> list[str]:
    """Names as the file would write them, numbers of blocks as {i}."""
    plain = list(names)
    return [
        *plain,
        *dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", NUMBER, x, count=1) for x in plain),
    ]


def _unused(told: NameMap, used: set[str], known: list[str], model: ModelConfig) -> list[Problem]:
    """Rows that name no parameter. One for the head of a tied model is no mistake."""
    rows = [(own, x) for own, x in told.parameters.items() if own not in used]
    return [
        Problem(row("parameters", own), f"the module has none{near(own, _patterns(known))}")
        for own, given in rows
        if not (model.tied and given == "output.weight")
    ]


def _unmapped(
    name: str, shape: tuple[int, ...], told: NameMap, expected: Shapes, taken: Mapping[str, str]
) -> Problem:
    if name.endswith(".bias"):
        message = f"{name} {list(shape)} has no counterpart: the model has no biases"
        return Problem("[parameters]", f"{message}; build the module without")
    given = {told_as for told_as in told.parameters.values()}
    free = [
        x
        for x, size in expected.items()
        if size == shape and x not in taken and x not in given and _patterns([x])[-1] not in given
    ]
    hint = near(name, free) or (f"; of its shape are {', '.join(free[:3])}" if free else "")
    return Problem("[parameters]", f"{name} {list(shape)} is not mapped{hint}")


def _stranger(name: str, given: str, expected: Shapes, model: ModelConfig) -> str:
    if given == "output.weight":
        message = f"{name} is a head of its own, and [model] tied says that there is none"
        return f"{message}; leave out the row, or tied"
    number = re.match(r"layers\.(\d+)\.", given)
    if number and int(number[1]) >= model.layers:
        return f"{name} belongs to block {number[1]}, and [model] layers is {model.layers}"
    return f"{given!r} is no parameter of the model{near(given, expected)}"


def _misshapen(name: str, shape: tuple[int, ...], given: str, wanted: tuple[int, ...]) -> str:
    message = f"{name} is {list(shape)}, and {given} is {list(wanted)} by [model]"
    return f"{message}; stored [in, out], not [out, in]?" if shape == wanted[::-1] else message


def _missing(
    taken: Mapping[str, str], expected: Shapes, own: Shapes, found: Mapping[str, Any]
) -> list[Problem]:
    """Parameters of the model that nothing is mapped to."""
    free = [name for name in own if name not in found]
    problems = []
    for name, shape in expected.items():
        if name not in taken:
            same = [x for x in free if own[x] == shape]
            message = f"nothing is mapped to {name} {list(shape)}{near(name, same)}"
            if name == "output.weight":
                message += "; if it is the embedding's weight, [model] tied = true"
            elif number := re.match(r"layers\.(\d+)\.", name):
                message += f"; has the module a block {number[1]}?"
            problems.append(Problem("[parameters]", message))
    return problems
