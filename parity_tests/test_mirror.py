"""Each mirrored file declares the same functions, arguments, defaults and fields in both cores."""

import ast
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAIRS = [
    "sync/penalty.py",
    "sync/outer.py",
    "sync/wire.py",
    "adamw.py",
    "schedules.py",
    "sketch.py",
]

# What only the core has, and why. An entry that no longer applies fails the test too.
ONLY_IN_CORE = {
    ("adamw.py", "AdamW"): "torch's optimizer protocol; the reference keeps state in a pytree",
    ("sync/penalty.py", "init_stats.device"): "jit places the reference's arrays",
}


def declared(path: Path) -> dict[str, Any]:
    """Public names of a file: arguments with kind and default, fields, constants."""
    found: dict[str, Any] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = arguments(node.args)
        elif isinstance(node, ast.ClassDef):
            fields = [b for b in node.body if isinstance(b, ast.AnnAssign)]
            found[node.name] = [(ast.unparse(b.target), text(b.value)) for b in fields]
        elif isinstance(node, ast.Assign):
            found |= {ast.unparse(target): text(node.value) for target in node.targets}
    return {name: value for name, value in found.items() if not name.startswith("_")}


def arguments(args: ast.arguments) -> list[tuple[str, str, str | None]]:
    """(name, kind, default) of every argument, in order."""
    assert not args.vararg and not args.kwarg, "spell the arguments of a mirrored function"
    positional = args.posonlyargs + args.args
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    found = [(a.arg, "positional", text(d)) for a, d in zip(positional, defaults, strict=True)]
    return found + [
        (a.arg, "keyword", text(d)) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]


def text(node: ast.expr | None) -> str | None:
    """Source of an expression, or None if there is none."""
    return None if node is None else ast.unparse(node)


def without_extras(pair: str, core: dict[str, Any]) -> dict[str, Any]:
    """The core's declarations less what ``ONLY_IN_CORE`` lists for this file."""
    kept = dict(core)
    for name in [name for file, name in ONLY_IN_CORE if file == pair]:
        function, _, argument = name.partition(".")
        if argument:
            assert argument in [a[0] for a in kept[function]], f"{name} is not in the core"
            kept[function] = [a for a in kept[function] if a[0] != argument]
        else:
            del kept[function]
    return kept


@pytest.mark.parametrize("pair", PAIRS)
def test_pair_is_a_mirror(pair: str) -> None:
    core, reference = declared(ROOT / "core_torch" / pair), declared(ROOT / "reference_jax" / pair)
    assert without_extras(pair, core) == reference
    assert list(without_extras(pair, core)) == list(reference), "same order, to read side by side"
