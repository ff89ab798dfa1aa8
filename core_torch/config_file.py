"""Configurations from and to TOML, and changes by dotted path. Standard library only.

A value is taken only if it has the field's type: whole numbers pass for numbers, nothing else
is converted. Every function collects all problems before it raises, so that one run of a
command shows everything that has to change.
"""

import dataclasses
import difflib
import json
import tomllib
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from core_torch.config import Problem, RunConfig, all_problems, problems_error
from core_torch.errors import ConfigError

ConfigT = TypeVar("ConfigT")

DEFAULTS = RunConfig()
BUILD = "model.build"  # a command line's or a program's word only
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def from_toml(path: str | Path, base: RunConfig = DEFAULTS) -> RunConfig:
    """The configuration in a TOML file; what the file leaves out is taken from ``base``.

    Raises:
        ConfigError: the file is missing or not TOML; or names all unknown keys, wrong types
            and values that cannot work, together.
    """
    config, problems = apply(base, load_values(path))
    problems += all_problems(config)
    if problems:
        error = problems_error(problems)
        error.where = str(path)
        raise error
    return config


def from_values(values: Mapping[str, Any], base: ConfigT) -> ConfigT:
    """``base`` changed by nested ``values``, the inverse of ``dataclasses.asdict``.

    Raises:
        ConfigError: names all unknown keys, wrong types and values that cannot work.
    """
    config, problems = apply(base, flatten(values))
    problems += all_problems(config)
    if problems:
        raise problems_error(problems)
    return config


def replace_at(config: ConfigT, values: Mapping[str, Any]) -> ConfigT:
    """``config`` with some fields changed, e.g. ``{"sync.every": 4}``.

    Raises:
        ConfigError: names all unknown paths and wrong types. Whether the values can work
            together is for ``check`` to say.
    """
    changed, problems = apply(config, values)
    if problems:
        raise problems_error(problems)
    return changed


def to_toml(config: Any) -> str:
    """TOML text that ``from_toml`` reads back exactly. Fields that are None are left out, and
    those that no file may set: a comment says that there was one.
    """
    return "\n".join(_lines(config, "")) + "\n"


def load_values(path: str | Path) -> dict[str, Any]:
    """Values in a TOML file by dotted path, not yet compared with any configuration.

    Raises:
        ConfigError: the file is missing, not UTF-8 or not TOML; or it names code to be run.
    """
    try:
        values = flatten(tomllib.loads(Path(path).read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {str(path)!r}: {error.strerror}",
            likely=_similar_files(Path(path)),
            next="twinshard train --help",
        ) from None
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise ConfigError(f"not valid TOML: {error}", where=str(path)) from None
    if BUILD in values:
        raise ConfigError(
            f"{BUILD} names code to be run, which no file may; got {values[BUILD]!r}",
            where=str(path),
            likely="a configuration of somebody else, or one edited by hand",
            next=f"take the line out; if you trust the code, --{BUILD} pkg:function",
        )
    return values


def apply(config: ConfigT, values: Mapping[str, Any]) -> tuple[ConfigT, list[Problem]]:
    """``config`` with the ``values`` that fit it, and problems of those that do not."""
    known = kinds(config)
    fitting, problems = {}, []
    for path, value in values.items():
        if path not in known:
            problems.append(unknown(path, known))
            continue
        try:
            fitting[path] = _typed(known[path], value)
        except (TypeError, OverflowError):
            problems.append(misfit(path, known[path], value))
    return _replace(config, fitting), problems


def kinds(config: Any, prefix: str = "") -> dict[str, Any]:
    """Type of every field of a configuration and of those inside it, by dotted path."""
    found: dict[str, Any] = {}
    for name, kind in get_type_hints(type(config)).items():
        if dataclasses.is_dataclass(kind):
            found |= kinds(getattr(config, name), f"{prefix}{name}.")
        else:
            found[prefix + name] = kind
    return found


def from_text(kind: Any, text: str) -> Any:
    """The value of type ``kind`` that ``text`` means on the command line.

    Raises:
        ValueError: it means none.
    """
    if get_origin(kind) in (Union, types.UnionType):
        for option in get_args(kind):
            try:
                return from_text(option, text)
            except ValueError:
                continue
    elif get_origin(kind) is Literal:
        if text in get_args(kind):
            return text
    elif kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
    elif kind is types.NoneType:
        if text.lower() == "none":
            return None
    else:
        return kind(text)
    raise ValueError(text)


def misfit(path: str, kind: Any, value: Any) -> Problem:
    """The problem of a value that is not of the field's type."""
    message = f"expected {_describe(kind)}, got {value!r}"
    if get_origin(kind) is Literal and isinstance(value, str):
        message += _did_you_mean(difflib.get_close_matches(value, get_args(kind), n=1))
    return Problem(path, message)


def unknown(path: str, known: Iterable[str]) -> Problem:
    """The problem of a key that no configuration has, with the keys that may be meant."""
    known = list(known)
    inside = [k for k in known if k.startswith(f"{path}.")]
    if inside:
        return Problem(path, f"is a section, not a value; it has keys such as {inside[0]}")
    same_name = [k for k in known if k.rpartition(".")[2] == path.rpartition(".")[2]]
    near = difflib.get_close_matches(path, known, n=1, cutoff=0.75)
    near = near or same_name[:3] or difflib.get_close_matches(path, known, n=1)
    return Problem(path, "unknown key" + _did_you_mean(near))


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one dictionary by dotted path."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inside = isinstance(value, Mapping)
        flat |= flatten(value, f"{prefix}{name}.") if inside else {prefix + name: value}
    return flat


def _typed(kind: Any, value: Any) -> Any:
    """``value`` if it is of type ``kind``, else TypeError. A bool is never a number here."""
    if get_origin(kind) in (Union, types.UnionType):
        for option in get_args(kind):
            try:
                return _typed(option, value)
            except TypeError:
                continue
    elif get_origin(kind) is Literal:
        if isinstance(value, str) and value in get_args(kind):
            return value
    elif kind is float and type(value) is int:
        return float(value)
    elif type(value) is kind:
        return value
    raise TypeError(value)


def _replace(config: ConfigT, values: Mapping[str, Any]) -> ConfigT:
    own = {path: value for path, value in values.items() if "." not in path}
    inside: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        section, dot, rest = path.partition(".")
        if dot:
            inside.setdefault(section, {})[rest] = value
    sections = {name: _replace(getattr(config, name), part) for name, part in inside.items()}
    return dataclasses.replace(config, **own, **sections)  # type: ignore[type-var]


def _lines(config: Any, prefix: str) -> list[str]:
    """TOML lines of one table and those inside it; scalars first, as TOML demands."""
    own, tables = [], []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            path = prefix + field.name
            tables += ["", f"[{path}]", *_lines(value, f"{path}.")]
        elif not field.metadata.get("from_file", True):
            if value != field.default:
                own.append(f"# {field.name} is not read from a file; give it again")
        elif value is not None:
            own.append(f"{field.name} = {_scalar(value)}")
    return own + tables


def _scalar(value: bool | int | float | str) -> str:
    if isinstance(value, str):
        # JSON and TOML agree on strings but for the control code 7f, which TOML escapes.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _describe(kind: Any) -> str:
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_describe(k) for k in get_args(kind) if k is not types.NoneType)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    return _WORDS[kind]


def _did_you_mean(near: Iterable[str]) -> str:
    names = " or ".join(near)
    return f"; did you mean {names}?" if names else ""


def _similar_files(path: Path) -> str:
    folder = path.parent
    names = [p.name for p in folder.glob("*.toml")] if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {str(folder / near[0])!r}?" if near else ""
