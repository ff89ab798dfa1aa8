"""The book is in order: numbered chapters, each with its opening, each able to show itself.

Run here are the chapters that take no time, and those whose ``main`` nothing else exercises; what
the others show is what their own tests compute. All of them: ``python -m reference_jax.<chapter>``.
"""

import ast
import importlib
import re
from pathlib import Path

import pytest

import reference_jax

FOLDER = Path(reference_jax.__file__).parent
LISTED = re.findall(
    r"[a-z_0-9]+",
    (reference_jax.__doc__ or "").partition("reading order: ")[2].partition(". Each")[0],
)
SHOWN = {
    "mesh": ("[2@replica,8@shard,6]", "axis 0 is gone"),
    "data": ("sequences of its shards",),
    "clock": ("steps, enters",),
    "manual": ("reduce_scatter", "'replica': {'all-reduce': 20800}", "weights"),
    "tensor_parallel": ("[2@tp,2@shard,2,8,8]", "'tp': {'all-reduce'", "4 x [B, T, D]"),
}


def docstring(chapter: str) -> str:
    """The opening of a chapter."""
    return ast.get_docstring(ast.parse((FOLDER / f"{chapter}.py").read_text("utf-8"))) or ""


def test_every_file_is_a_chapter_in_the_list_or_says_what_it_is_instead() -> None:
    files = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    assert len(LISTED) == len(set(LISTED)) and {*LISTED} <= files
    for name in files - {*LISTED}:
        assert "No chapter: " in docstring(name) or "core_torch/" in docstring(name), name


@pytest.mark.parametrize("chapter", LISTED)
def test_a_chapter_says_its_number_what_you_learn_and_who_communicates(chapter: str) -> None:
    text = docstring(chapter)
    assert text.startswith(f"Chapter {LISTED.index(chapter) + 1}. ")
    assert "\nYou learn " in text and "\nWho communicates: " in text
    names = {
        x.name
        for x in ast.parse((FOLDER / f"{chapter}.py").read_text("utf-8")).body
        if isinstance(x, ast.FunctionDef)
    }
    assert "main" in names


@pytest.mark.parametrize("chapter", SHOWN)
def test_a_chapter_shows_itself(
    chapter: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"reference_jax.{chapter}")
    monkeypatch.setattr(module, "pretend_devices", lambda count: None, raising=False)
    module.main()
    said = capsys.readouterr().out
    assert [part for part in SHOWN[chapter] if part not in said] == []
