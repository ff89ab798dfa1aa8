"""Pages and README against the code: links, equation numbers, names, command lines, defaults."""

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from core_torch.cli.commands import COMMANDS, parse
from core_torch.config import METHODS, RunConfig
from core_torch.config_file import from_text, kinds

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
CODE = [
    path
    for package in ("core_torch", "reference_jax", "parity_tests")
    for path in sorted((ROOT / package).rglob("*.py"))
    if path != Path(__file__)
]
PAGE_OF = {
    "A": "algorithms/synchronous",
    "S": "algorithms/synchronous",
    "O": "algorithms/diloco",
    "P": "algorithms/edit",
    "R": "algorithms/edit",
    "Q": "algorithms/wire",
    "G": "sharding/simple_fsdp",
}
ELSEWHERE = {"O4": "algorithms/co2", "O5": "algorithms/co2", "O6": "algorithms/streaming"}
WITH_EQUATIONS = [DOCS / f"{name}.md" for name in sorted({*PAGE_OF.values(), *ELSEWHERE.values()})]
SET_UP = ["pip install . && twinshard demo", "pip install '.[dev]' && pytest"]

GROUPS = [[name.split()[0]] for name in COMMANDS if " " in name]  # may be named as a whole

NUMBER = r"[AGOPQRS]\d"
CITATION = re.compile(rf"\(({NUMBER})\)\.\.\(({NUMBER})\)|\(({NUMBER}(?:(?:\.\.|, ){NUMBER})*)\)")
HEADER = re.compile(rf"[Ee]quations\s+(\({NUMBER}\)\.\.\({NUMBER}\)) in (docs/\w+/\w+\.md)")
NODE = re.compile(r"`([\w/]+\.py)(?:::([\w.]+))?`")
MODULE = re.compile(r"python -m ((?:core_torch|reference_jax|parity_tests)[\w.]*)")
pages = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


def text_of(path: Path) -> str:
    """Content of a page or source file."""
    return path.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> Iterator[str]:
    """Fenced blocks of a page in one language."""
    for found in re.finditer(rf"^```{language}\n(.*?)^```$", text_of(page), re.M | re.S):
        yield found[1]


def commands(page: Path) -> Iterator[str]:
    """Every line of the page's shell blocks, continued lines joined."""
    for block in blocks(page, "bash"):
        yield from filter(None, block.replace("\\\n", " ").splitlines())


def spread(numbers: str) -> set[str]:
    """{"P1", "P2", "P3"} for "P1..P3", "P1, P2, P3" or "(P1)..(P3)"."""
    found = set()
    for part in re.sub(r"[()]", "", numbers).split(", "):
        first, _, last = part.partition("..")
        last = last or first
        assert first[0] == last[0], numbers
        found |= {f"{first[0]}{i}" for i in range(int(first[1]), int(last[1]) + 1)}
    return found


def cited(path: Path) -> set[str]:
    """Numbers of equations that a source file cites."""
    matches = CITATION.finditer(text_of(path))
    return set().union(*(spread(m[3] or f"{m[1]}..{m[2]}") for m in matches))


def defined(page: Path) -> list[str]:
    """Numbers of the equations that a page writes out, in order."""
    return [
        n for block in blocks(page, "text") for n in re.findall(rf"^\(({NUMBER})\) ", block, re.M)
    ]


def names_in(path: Path) -> set[str]:
    """Functions, classes and methods of a Python file."""
    found = set()
    for node in ast.parse(text_of(path)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{x.name}" for x in node.body if isinstance(x, ast.FunctionDef)}
    return found


def check_words(words: list[str]) -> None:
    """Parses the words after ``twinshard`` as the command would; makes files that it reads."""
    size = 2 if " ".join(words[:2]) in COMMANDS else 1
    name, args = " ".join(words[:size]), words[size:]
    assert name in COMMANDS, name
    for file in (Path(word) for word in args if word.endswith(".toml")):
        assert not file.is_absolute() and ".." not in file.parts, f"{file} is outside the test's"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    if "--help" not in args:
        parse(name, args)


@pages
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text_of(page))
    here = [link for link in links if not link.startswith(("http://", "https://"))]
    assert not [link for link in here if not (page.parent / link).exists()]


def test_every_page_is_in_the_table_of_contents() -> None:
    trees = "".join(
        re.findall(r"^```\{toctree\}\n(.*?)^```$", text_of(DOCS / "index.md"), re.M | re.S)
    )
    listed = {line for line in trees.splitlines() if line and not line.startswith(":")}
    there = {str(p.relative_to(DOCS).with_suffix("")) for p in PAGES[1:]}
    assert listed == there - {"index"}


def test_each_equation_is_written_out_once_on_the_page_of_its_letter() -> None:
    for page in PAGES[1:]:
        numbers = defined(page)
        assert len(numbers) == len(set(numbers)), f"{page.name} defines a number twice"
        name = str(page.relative_to(DOCS).with_suffix(""))
        assert {ELSEWHERE.get(n, PAGE_OF[n[0]]) for n in numbers} <= {name}


@pytest.mark.parametrize("package", ["core_torch", "reference_jax"])
def test_code_cites_exactly_the_equations_of_the_pages(package: str) -> None:
    written = {n for page in WITH_EQUATIONS for n in defined(page)}
    files = [path for path in CODE if path.relative_to(ROOT).parts[0] == package]
    in_code = set().union(*map(cited, files))
    assert sorted(in_code - written) == [], "cited in code, on no page"
    assert sorted(written - in_code) == [], "on a page, cited nowhere in code"


def test_a_file_that_names_a_page_cites_equations_of_that_page() -> None:
    found = [(path, m) for path in CODE for m in HEADER.finditer(text_of(path))]
    assert len(found) >= 7, "the headers of the mirrored files and of sync_round.py are not read"
    for path, match in found:
        missing = spread(match[1]) - set(defined(ROOT / match[2]))
        assert not missing, f"{path.name}: {match[2]} lacks {sorted(missing)}"


@pytest.mark.parametrize("page", WITH_EQUATIONS, ids=lambda p: p.stem)
def test_every_equation_has_a_row_with_core_reference_and_test(page: Path) -> None:
    rows = re.findall(
        rf"^\| ({NUMBER}[^|]*) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", text_of(page), re.M
    )
    assert set().union(*(spread(row[0]) for row in rows)) == set(defined(page))
    for number, core, reference, test in rows:
        assert core.startswith("`core_torch/"), number
        assert reference.startswith("`reference_jax/"), number
        assert "::test_" in test, number


@pages
def test_every_function_and_test_that_a_page_names_exists(page: Path) -> None:
    problems = []
    for file, name in NODE.findall(text_of(page)):
        if "/" not in file:
            continue  # a bare file name in running text
        if not (ROOT / file).is_file():
            problems.append(file)
        elif name and name not in names_in(ROOT / file):
            problems.append(f"{file}::{name}")
    for module in MODULE.findall(text_of(page)):
        path = ROOT / module.replace(".", "/")
        if not (path.with_suffix(".py").is_file() or path.is_dir()):
            problems.append(module)
    assert not problems


@pages
def test_every_command_line_parses(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for line in (part for command in commands(page) for part in command.split(" && ")):
        program, *words = shlex.split(line)
        if program == "twinshard":
            check_words(words)
        elif program == "torchrun" and "core_torch" not in words:
            assert [w for w in words if w.endswith(".py") and (ROOT / w).is_file()], line
        elif program == "torchrun":
            ours = words.index("core_torch")
            assert words[ours - 2 : ours] == ["-m", "--"], "torchrun would read our options"
            check_words(words[ours + 1 :])
        elif program == "pytest":
            assert not [w for w in words if "/" in w and not (ROOT / w).exists()], line
        else:
            assert program in ("pip", "python"), f"what is {line!r}?"
    for words in map(shlex.split, re.findall(r"`twinshard ([^`\n]+)`", text_of(page))):
        if words not in GROUPS:
            check_words(words)


def test_the_readme_has_exactly_two_commands_to_set_up_and_is_short() -> None:
    assert [line for line in commands(README) if "install" in line] == SET_UP
    assert len(text_of(README).splitlines()) < 150


def test_the_table_of_built_methods_is_that_of_the_code() -> None:
    page = text_of(DOCS / "architecture.md")
    built = page.partition("## Table of methods: built")[2].partition("\n## ")[0]
    assert tuple(re.findall(r"^\| \[(\w+)\]", built, re.M)) == METHODS


@pytest.mark.parametrize(
    ("page", "count"),
    [("edit", 10), ("streaming", 3), ("co2", 2), ("aedit", 2)],
)
def test_defaults_on_the_page_of_a_method_are_those_of_the_configuration(
    page: str, count: int
) -> None:
    text = text_of(DOCS / "algorithms" / f"{page}.md")
    rows = re.findall(r"^\| `(sync\.[\w.]+)` \| ([^ ,|]+)", text, re.M)
    assert len(rows) == count
    config = RunConfig()
    for path, shown in rows:
        value: object = config
        for part in path.split("."):
            value = getattr(value, part)
        assert from_text(kinds(config)[path], shown) == value, path


def alone(loop: str) -> list[str]:
    """Lines that a page's Python prints on one rank."""
    one = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", loop],
        cwd=ROOT,
        env=os.environ | one | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_loop_on_the_page_of_the_library_runs_as_it_stands() -> None:
    [loop] = blocks(DOCS / "library.md", "python")
    assert alone(loop) == [
        "step 9: round 1 of step 8, left out 0",
        "step 13: round 2 of step 12, left out 0",
        "end: round 3 of step 14, forced True",
    ]


def test_the_example_of_a_bad_replica_runs(tmp_path: Path) -> None:
    """Two steps of each of its three runs, on three ranks."""
    script = str(DOCS / "examples" / "bad_replica.py")
    words = ["--standalone", "--nproc-per-node", "3", script, "--steps", "2", "--fault", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, "--out", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert lines == ["clean", "penalty", "no_penalty"]


def test_the_loop_on_the_page_of_simple_fsdp_runs_as_it_stands() -> None:
    """Under the compiler, which takes seconds."""
    [loop] = blocks(DOCS / "sharding" / "simple_fsdp.md", "python")
    assert [line.split(" ")[0] for line in alone(loop)] == ["forward", "backward"]


def test_options_on_the_page_of_simple_fsdp_are_those_of_the_compiler() -> None:
    schedule = ast.parse(text_of(ROOT / "core_torch" / "shard" / "schedule.py"))
    [options] = [
        node
        for node in schedule.body
        if isinstance(node, ast.ClassDef) and node.name == "CompileOptions"
    ]
    fields = [x for x in options.body if isinstance(x, ast.AnnAssign)]
    code = {ast.unparse(x.target): ast.unparse(x.value or x).strip("'").lower() for x in fields}
    page = text_of(DOCS / "sharding" / "simple_fsdp.md")
    rows = re.findall(r"^\| `(\w+)` \| `?(\w+)`? \|", page, re.M)
    del code["costs"]
    assert dict(rows) == code
