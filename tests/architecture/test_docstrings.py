"""Docstrings of public functions name their parameters, in the form of numpydoc."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.sizes import parameters, public_functions
from tests.structure import PACKAGE

#: Least share of public functions with parameters that describe them; methods without a docstring, which fulfil a
#: protocol that is described where it is defined, count as lacking.
LEAST_DESCRIBED = 0.97
#: Words with which no summary of a function begins: it begins with a verb.
NO_VERBS = ("a", "all", "an", "as", "each", "how", "no", "of", "one", "some", "that", "the", "those", "what", "whether")
#: Sections in their order (numpydoc's style guide).
SECTIONS = ("Parameters", "Returns", "Yields", "Raises", "Notes", "References", "Examples")


def documented(docstring: str) -> list[str]:
    """Read the names of the section of parameters; several may share a line.

    >>> documented("Add.\\n\\nParameters\\n----------\\na, b : int\\n    Numbers.\\n\\nReturns\\n-------\\nint")
    ['a', 'b']
    """
    section = re.search(r"^Parameters\n-+\n(.*?)(?=^\w+\n-{3,}$|\Z)", docstring, re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^(\S.*?)(?: : .*)?$", section.group(1), re.MULTILINE) if section else []
    return [name.strip() for line in lines for name in line.split(",")]


@cache
def functions() -> list[tuple[Path, ast.FunctionDef]]:
    return list(public_functions())


def place(path: Path, node: ast.FunctionDef) -> str:
    return f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}"


def described() -> list[tuple[Path, ast.FunctionDef, str]]:
    """List the public functions with a section of parameters."""
    texts = ((path, node, ast.get_docstring(node) or "") for path, node in functions())
    return [(path, node, text) for path, node, text in texts if documented(text)]


def test_public_functions_describe_their_parameters() -> None:
    assert len(described()) >= LEAST_DESCRIBED * len(functions())


def test_sections_name_exactly_the_parameters() -> None:
    wrong = {
        place(path, node): documented(text)
        for path, node, text in described()
        if sorted(documented(text)) != sorted(parameters(node))
    }
    assert wrong == {}


def test_sections_stand_in_their_order() -> None:
    titles = {place(path, node): re.findall(r"^(\w+)\n-{3,}$", text, re.MULTILINE) for path, node, text in described()}
    assert {
        name: found for name, found in titles.items() if found != [title for title in SECTIONS if title in found]
    } == {}


def test_summaries_are_one_line_that_begins_with_a_verb() -> None:
    summaries = {place(path, node): text.split("\n\n")[0] for path, node, text in described()}
    long = [name for name, summary in summaries.items() if "\n" in summary or not summary.endswith(".")]
    nouns = [name for name, summary in summaries.items() if summary.split()[0].lower() in NO_VERBS]
    assert long + nouns == []
