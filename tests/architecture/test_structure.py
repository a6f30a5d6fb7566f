"""No circles among modules, one class of a name, and names that are nouns."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import BY_PARAMETER, SLOW_FILES, SLOW_TESTS, TOGETHER, group
from tests.sizes import body_length
from tests.structure import circles, closure, import_graph, longest_chain, trees

#: Lines of the longest body: helpers with one caller are written where they are used, so bodies may fill a screen.
LONGEST_BODY = 60
#: Modules of the longest chain of imports, and modules that are loaded with `paleo.predict`.
LONGEST_CHAIN, MOST_LOADED = 14, 40

#: Files that a new axis of the mesh, or a new policy of recomputation, may touch.
MOST_TOUCHED = 6
#: Tables of measurements say in columns of their own how their rows ran.
TABLES = "paleo.tables."

#: Names that say nothing of what they stand for.
PRONOUNS = frozenset(
    [
        "made",
        "one",
        "found",
        "own",
        "held",
        "it",
        "here",
        "what",
        "thing",
        "things",
        "stuff",
        "rest",
        "some",
        "there",
        "then",
        "these",
        "those",
        "they",
        "this",
        "that",
        "them",
        "theirs",
        "whose",
        "who",
        "asked",
        "said",
        "told",
        "given",
        "bought",
        "paid",
        "put",
        "fed",
        "shown",
        "wanted",
    ]
)


@pytest.mark.slow
def test_no_modules_import_each_other() -> None:
    """Imports inside functions count, too."""
    assert circles(import_graph()) == []


def test_chains_of_imports_are_short() -> None:
    """Of imports that run when a module is loaded."""
    chain = longest_chain(import_graph(lazily=False))
    assert len(chain) <= LONGEST_CHAIN, chain


def test_a_prediction_loads_few_modules() -> None:
    loaded = closure("paleo.predict", import_graph(lazily=False))
    assert len(loaded) <= MOST_LOADED, sorted(loaded)


def test_files_whose_tests_form_a_group_are_there() -> None:
    files = {path.stem for path in Path(__file__).parents[1].rglob("test_*.py")}
    assert sorted((TOGETHER | BY_PARAMETER | SLOW_FILES) - files) == []
    table = "tests/measured/test_kernel_tables.py::test_errors[gemm.csv.gz]"
    assert group(table) == group(table.replace("errors", "devices")) != group(table.replace("gemm", "conv"))


def test_slow_tests_are_there() -> None:
    texts = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert sorted(name for name in SLOW_TESTS if f"def {name}(" not in texts) == []


def test_no_two_classes_have_one_name() -> None:
    homes = defaultdict(list)
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def named(function: ast.AST) -> Iterator[str]:
    """Parameters and variables of a function, those of functions within it too."""
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


@pytest.mark.slow
def test_parameters_and_variables_are_nouns() -> None:
    pronouns = [
        f"{module}:{node.lineno} {node.name}: {name}"
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for name in sorted(PRONOUNS & set(named(node)))
    ]
    assert pronouns == []


@pytest.mark.slow
def test_no_function_is_longer_than_a_screen() -> None:
    """Lines of a body without its docstring."""
    lengths = {
        f"{module}:{node.lineno} {node.name}": body_length(node)
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: length for name, length in lengths.items() if length > LONGEST_BODY} == {}


def naming(word: str) -> list[str]:
    """Modules that name a word as a value or in a message (``word=8``), but for readers of measurements and tables of
    frameworks' keys."""
    named = re.compile(rf"(.*\W)?{word}=?", re.DOTALL)
    return [
        module
        for module, tree in trees().items()
        if not module.startswith((TABLES, "paleo.launch."))
        and any(
            isinstance(node, ast.Constant) and isinstance(node.value, str) and named.fullmatch(node.value)
            for node in ast.walk(tree)
        )
    ]


@pytest.mark.slow
@pytest.mark.parametrize("word", ["shard", "spatial", "selective"])
def test_an_axis_of_the_mesh_or_a_policy_of_recomputation_touches_few_files(word: str) -> None:
    """The axes and the policy that came last; all else follows from `AXES`, `BATCH_AXES`, `RECOMPUTE_POLICIES`."""
    homes = naming(word)
    sys.stdout.write(f"{word}: {len(homes)} files: {', '.join(homes)}\n")
    assert 0 < len(homes) <= MOST_TOUCHED
