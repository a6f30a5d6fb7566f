"""Functions and constants that only their own module uses are private: a public name is for readers of other files."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

from tests.structure import PACKAGE, trees

ROOT = PACKAGE.parent
#: Folders and files in which a name of the package may be used, or be described.
READERS = (
    "paleo",
    "docs",
    "notebooks",
    "benchmarks",
    "tests",
    "models",
    "hardware_specs",
    "CONTRIBUTING.md",
    "README.md",
)
SUFFIXES = {".py", ".md", ".ipynb", ".html", ".js", ".yaml"}
#: Decorators that register nothing.
PLAIN_DECORATORS = {"cache", "lru_cache", "contextmanager", "overload"}
_WORD = re.compile(r"[A-Za-z_]\w*")


@cache
def file_counts() -> Counter[str]:
    """In how many files each word stands."""
    counts: Counter[str] = Counter()
    for reader in READERS:
        path = ROOT / reader
        files = [path] if path.is_file() else (each for each in path.rglob("*") if each.suffix in SUFFIXES)
        for file in files:
            counts.update(set(_WORD.findall(file.read_text(errors="ignore"))))
    return counts


def defined(tree: ast.Module) -> Iterator[str]:
    """Public constants of a module, and its functions that no decorator registers."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            decorators = {ast.unparse(each).partition("(")[0].rpartition(".")[2] for each in node.decorator_list}
            names = [node.name] if decorators <= PLAIN_DECORATORS else []
        elif isinstance(node, ast.Assign):
            names = [each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)]
        else:
            names = [node.target.id] if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else []
        yield from (name for name in names if not name.startswith("_"))


def annotations(tree: ast.Module) -> Iterator[ast.AST]:
    """Types that signatures, fields and bases state."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield from ast.walk(node.annotation)
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            yield from ast.walk(node.returns)
        elif isinstance(node, ast.ClassDef):
            yield from (each for base in node.bases for each in ast.walk(base))


def needlessly_public(tree: ast.Module, counts: Counter[str]) -> list[str]:
    """Public names of a module that no other file has, and that stand neither in a signature nor in a string."""
    typed = {node.id for node in annotations(tree) if isinstance(node, ast.Name)}
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return [name for name in defined(tree) if counts[name] < 2 and name in loaded - typed - strings]


def test_names_that_one_module_uses_are_private() -> None:
    modules = {module: tree for module, tree in trees().items() if not module.startswith("paleo.cli.commands")}
    found = {module: needlessly_public(tree, file_counts()) for module, tree in modules.items()}
    assert {module: names for module, names in found.items() if names} == {}


def test_a_needlessly_public_name_is_found() -> None:
    text = "LIMIT = 3\nHOOK = 1\nKind = int\ndef area(side: Kind) -> float:\n    return side**LIMIT\n_x = area(2)\n"
    tree = ast.parse(text)
    assert needlessly_public(tree, Counter(HOOK=2, area=1, LIMIT=1, Kind=1)) == ["LIMIT", "area"]
    assert needlessly_public(tree, Counter(LIMIT=2, area=3)) == []
