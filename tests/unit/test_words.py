"""Words that say nothing to a stranger stay out of help texts, table headings, messages and public names."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from paleo.cli import app_with_all_commands
from tests.structure import trees

BANNED = frozenset(
    [
        "figures",
        "kept",
        "settled",
        "stated",
        "shown",
        "drawn",
        "own",
        "held",
        "lent",
        "alone",
        "beside",
        "left",
        "marks",
    ]
)
#: Rooms whose public names and messages are free of these words; in the others their number may only fall.
DONE = frozenset(["answers", "cli", "questions", "report"])
MOST_NAMES = {"calibrate": 1, "importers": 2, "lowering": 1, "parallel": 1, "pricing": 3, "serving": 2, "tables": 3}
MOST_MESSAGES = {
    "calibrate": 4, "lowering": 1, "parallel": 1, "pricing": 2, "step": 1, "studies": 5, "tables": 14,
}  # fmt: skip
ERRORS = frozenset(["SpecError", "PlanError", "CapacityError", "GraphError"])


def banned(text: str) -> list[str]:
    """Find the banned words of a text or of a name; rows that are held out of a fit, and the left of a plot, are fine.

    >>> banned("time_left beside it"), banned("leftover")
    (['left', 'beside'], [])
    """
    plain = re.sub(r"held[- ]out|upper left|text-align:left", "", text.lower())
    return [word for word in re.findall(r"[a-z]+", plain) if word in BANNED]


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def public_names() -> Iterator[tuple[str, str]]:
    """Yield the room and name of every public module, function, class and method."""
    for module, tree in trees().items():
        yield room(module), module.rpartition(".")[2]
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                yield room(module), node.name


def texts(node: ast.AST) -> Iterator[str]:
    """Yield the string constants of an expression, those of formatted texts included."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def calls(names: frozenset[str]) -> Iterator[tuple[str, ast.Call]]:
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                yield module, node


def counted(entries: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    """Collect the entries with a banned word by room."""
    found: dict[str, list[str]] = {}
    for place, text in entries:
        if banned(text):
            found.setdefault(place, []).append(text)
    return found


def excess(found: dict[str, list[str]], most: dict[str, int]) -> dict[str, list[str]]:
    return {place: entries for place, entries in found.items() if len(entries) > most.get(place, 0)}


def test_help_texts_are_free_of_them() -> None:
    group: Any = typer.main.get_command(app_with_all_commands())
    helps = [(name, command.help or "") for name, command in group.commands.items()]
    helps += [
        (f"{name} {parameter.name}", f"{getattr(parameter, 'help', '')} {getattr(parameter, 'rich_help_panel', '')}")
        for name, command in group.commands.items()
        for parameter in command.params
    ]
    assert {name: text for name, text in helps if banned(text)} == {}


def test_table_headings_are_free_of_them() -> None:
    headings = [(module, text) for module, call in calls(frozenset(["grid", "Attribute"])) for text in texts(call)]
    assert {module: text for module, text in headings if banned(text)} == {}


def sentences(tree: ast.AST) -> Iterator[str]:
    """Yield the texts with spaces of a module, without its docstrings."""
    docstrings = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None
        if isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield from [node.value] if " " in node.value.strip() else []


#: Said by ``show`` of a field of a layer, in JSON too.
AS_BEFORE = " if left out"


def test_sentences_of_reports_are_free_of_them() -> None:
    reports = [(module, tree) for module, tree in trees().items() if room(module) == "report"]
    found = {
        module: [text for text in sentences(tree) if banned(text) and text != AS_BEFORE] for module, tree in reports
    }
    assert {module: each for module, each in found.items() if each} == {}


def test_pages_are_free_of_them() -> None:
    templates = Path(__file__).resolve().parents[2] / "paleo" / "report" / "templates"
    pages = {path.name: re.sub(r"{[{%].*?[%}]}|<[^>]*>", " ", path.read_text()) for path in templates.glob("*.html")}
    assert len(pages) >= 2
    assert {name: banned(text) for name, text in pages.items() if banned(text)} == {}


def test_public_names_are_free_of_them() -> None:
    assert excess(counted(public_names()), MOST_NAMES) == {}
    assert DONE.isdisjoint(MOST_NAMES)


@pytest.mark.slow
def test_messages_are_free_of_them() -> None:
    messages = ((room(module), text) for module, call in calls(ERRORS) for text in texts(call))
    assert excess(counted(messages), MOST_MESSAGES) == {}
    assert DONE.isdisjoint(MOST_MESSAGES)


@pytest.mark.slow
@pytest.mark.parametrize("most", ["names", "messages"])
def test_the_lists_are_no_longer_than_they_must_be(most: str) -> None:
    """A room that improves lowers its number."""
    entries = (
        public_names()
        if most == "names"
        else ((room(module), text) for module, call in calls(ERRORS) for text in texts(call))
    )
    allowed = MOST_NAMES if most == "names" else MOST_MESSAGES
    numbers = Counter({place: len(found) for place, found in counted(entries).items()})
    assert {place: number for place, number in allowed.items() if number > numbers[place] + 3} == {}


def test_the_glossary_holds_each_term_once() -> None:
    glossary = (Path(__file__).resolve().parents[2] / "docs" / "glossary.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \|", glossary, re.MULTILINE)
    terms = Counter(term.strip() for row in rows if row not in ("Term", "---") for term in row.split(","))
    assert len(terms) > 100
    assert {term: count for term, count in terms.items() if count > 1} == {}
