"""Rules of the house that a reader can rely on, checked over all three packages."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("core_torch", "reference_jax", "parity_tests")
READING_ORDER = (
    "errors config_base config_data config_model config_sync config_parallel config_pipeline "
    "config collectives mesh sketch trace data models hf adamw schedules shard parallel sync taps "
    "evaluation train checkpoint report simulate bench cli"
).split()
STANDARD_LIBRARY_ONLY = (
    "errors",
    "config_base",
    "config_data",
    "config_sync",
    "config_parallel",
    "config_pipeline",
    "config",
    "config_file",
)
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "yaml"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "pickle.load", "pickle.loads", "pickle.Unpickler"}
MOST_LINES, MOST_LINES_OF_A_FUNCTION, TRIVIAL_LINES = 400, 60, 3
FORBIDDEN_IMPORTS = {
    "core_torch": {"reference_jax", "parity_tests"},
    "reference_jax": {"core_torch", "parity_tests"},
    "parity_tests": set(),
}

FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
CORE_FILES = [p for p in FILES if p.relative_to(ROOT).parts[0] == "core_torch"]


def is_test(path: Path) -> bool:
    """True for tests and what only they use."""
    return "tests" in path.parts or path.name.startswith("test_") or path.name == "conftest.py"


def part_of(path: Path) -> str:
    """Part of core_torch a file belongs to: ``sync`` for core_torch/sync/outer.py."""
    return path.relative_to(ROOT / "core_torch").parts[0].removesuffix(".py")


def tree_of(path: Path) -> ast.Module:
    """Syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.AST, bool]]:
    """(qualified name, node, whether others can reach it) of every function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{outer}{node.name}"
            yield name, node, not any(part.startswith("_") for part in name.split("."))
            yield from functions(node, f"{name}._inside.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{outer}{node.name}.")
        else:
            yield from functions(node, outer)


def imported(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, dotted module) of every import; ``from a import b`` gives ``a.b``."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write the whole module name"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def called(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, text of what is called) of every call."""
    return [(n.lineno, ast.unparse(n.func)) for n in ast.walk(tree) if isinstance(n, ast.Call)]


def torch_names(tree: ast.AST) -> set[str]:
    """Names in a file that stand for torch, one of its modules or something from it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    names.add(alias.asname or "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def assigned(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, root name) of every assignment to an attribute, ``setattr`` included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.lineno, ast.unparse(node).partition(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            yield node.lineno, ast.unparse(node.args[0]).partition(".")[0]


def files(paths: list[Path]) -> pytest.MarkDecorator:
    """One test per file."""
    return pytest.mark.parametrize("path", paths, ids=lambda p: str(p.relative_to(ROOT)))


@files(FILES)
def test_a_file_is_short_and_says_what_it_is_for(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES, "split it by idea"
    assert ast.get_docstring(tree_of(path)), "no docstring"


@files(FILES)
def test_functions_are_short_and_public_ones_are_documented(path: Path) -> None:
    problems = []
    for name, node, is_public in functions(tree_of(path)):
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > MOST_LINES_OF_A_FUNCTION:
            problems.append(f"line {node.lineno}: {name} has {lines} lines")
        needs_docstring = is_public and lines > TRIVIAL_LINES and not is_test(path)
        # What a property or a method of a known protocol is for, its class says.
        if needs_docstring and "." not in name and not ast.get_docstring(node):
            problems.append(f"line {node.lineno}: {name} has no docstring")
    assert not problems


@files([p for p in CORE_FILES if not is_test(p)])
def test_the_core_imports_in_reading_order(path: Path) -> None:
    here = part_of(path)
    if here in ("__init__", "__main__"):
        here = "errors" if here == "__init__" else "cli"
    own = [m.split(".") for _, m in imported(tree_of(path)) if m.startswith("core_torch.")]
    later = {m[1] for m in own if order_of(m[1]) > order_of(here)}
    assert not later, f"{here} may not import {sorted(later)}"


def order_of(part: str) -> int:
    """Place in the reading order; ``config_file`` stands beside ``config``."""
    alias = {"config_file": "config", "__version__": "errors"}  # the version heads the package
    return READING_ORDER.index(alias.get(part, part))


@files([p for p in CORE_FILES if part_of(p) in STANDARD_LIBRARY_ONLY])
def test_errors_and_configs_need_the_standard_library_only(path: Path) -> None:
    roots = {module.partition(".")[0] for _, module in imported(tree_of(path))}
    assert roots <= set(sys.stdlib_module_names) | {"core_torch"}


@files(FILES)
def test_the_cores_do_not_know_each_other_and_only_the_command_knows_the_parity_tests(
    path: Path,
) -> None:
    package = path.relative_to(ROOT).parts[0]
    tree = tree_of(path)
    forbidden = FORBIDDEN_IMPORTS[package]
    if package == "core_torch" and part_of(path) == "cli":
        forbidden = forbidden - {"parity_tests"}
        at_top = [m for node in tree.body for _, m in imported_here(node)]
        assert not any(m.startswith("parity_tests") for m in at_top), "import it where it is used"
    met = [(line, m) for line, m in imported(tree) if m.partition(".")[0] in forbidden]
    assert not met


def imported_here(node: ast.stmt) -> list[tuple[int, str]]:
    """Imports of a statement at the top of a file, not those inside functions."""
    return imported(node) if isinstance(node, ast.Import | ast.ImportFrom) else []


@files(FILES)
def test_nothing_is_assigned_into_torch(path: Path) -> None:
    tree = tree_of(path)
    names = torch_names(tree)
    assert not [(line, root) for line, root in assigned(tree) if root in names]


@files(FILES)
def test_no_file_reads_data_that_could_run_code(path: Path) -> None:
    tree = tree_of(path)
    modules = [(line, m) for line, m in imported(tree) if m.partition(".")[0] in UNSAFE_MODULES]
    if is_test(path):  # a test may write a pickle, to see it refused
        modules = [(line, m) for line, m in modules if m != "pickle"]
    calls = [(line, name) for line, name in called(tree) if name in UNSAFE_CALLS]
    keywords = [
        (node.value.lineno, "allow_pickle")
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and ast.unparse(node) == "allow_pickle=True"
    ]
    assert not modules and not calls and not keywords


@files(FILES)
def test_only_the_command_and_the_mains_of_the_reference_print(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    if package == "core_torch" and part_of(path) in ("cli", "__main__"):
        return
    tree = tree_of(path)
    allowed = {
        line
        for name, node, _ in functions(tree)
        if package == "reference_jax" and name == "main"
        for line, _ in called(node)
    }
    assert not [line for line, name in called(tree) if name == "print" and line not in allowed]


# Each rule's eye, shown what it must see.


def test_the_eye_for_assignments_sees_aliases_and_setattr() -> None:
    tree = ast.parse(
        "import torch.distributed as dist\ndist.x = 1\nsetattr(dist.y, 'z', 2)\na.b = 3"
    )
    names = torch_names(tree)
    assert [line for line, root in assigned(tree) if root in names] == [2, 3]


def test_the_eye_for_functions_knows_public_from_private() -> None:
    tree = ast.parse("class A:\n def f(self):\n  def g(): 0\n def _h(self): 0\ndef k(): 0")
    found = {name: is_public for name, _, is_public in functions(tree)}
    assert found == {"A.f": True, "A.f._inside.g": False, "A._h": False, "k": True}


def test_the_eye_for_imports_sees_those_inside_functions() -> None:
    tree = ast.parse("def f():\n from core_torch import cli\n import pickle")
    assert imported(tree) == [(2, "core_torch.cli"), (3, "pickle")]
