"""Names in backticks in docstrings and comments are those of something that exists.

A name may be a word of the statement around it (a parameter, a local, an attribute), what a module of the package binds
at its top, a word that the package has as text (a key, an option, a value), a builtin, or a library. Fields and methods
of a class elsewhere are written with their class: ``Plan.mesh``.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.structure import PACKAGE, module_name, trees

CATALOG = PACKAGE.parent / "hardware_specs"
#: Words of others that the package has neither as a name nor as text, and whose they are.
WORDS_OF_OTHERS = {
    "BLOCK_H": "a constant of vLLM",
    "BertForMaskedLM": "an architecture of transformers",
    "Buffer": "a class of DeepEP",
    "F3": "a task, whose name is made with a number",
    "Tree": "an algorithm of NCCL",
    "__iadd__": "a method of torch's tensors",
    "_tanh": "the ending of names of activations",
    "adamw_torch": "an optimizer of transformers",
    "dim0": "a dim, whose name is made with a number",
    "dim1": "the same",
    "draft_vocab_size": "a key of EAGLE-3's configurations",
    "fused_qkv_a_proj": "a product of vLLM and SGLang",
    "get_job": "a function of the paper on ASHA",
    "kv_a_proj_with_mqa": "a product of TensorRT-LLM",
    "main_grad": "an attribute of Megatron-LM",
    "nn": "a module of torch",
    "num_fused_shared_experts": "an option of SGLang",
    "num_streams": "a variable of Transformer Engine",
    "overlap_moe_expert_parallel_comm": "an option of Megatron-Core",
    "sgemm_128x64": "a kernel of cuBLAS",
    "sglang": "an engine",
    "torchrun": "the launcher of torch",
    "weight_block_size": "a key of transformers' configurations",
}
_SPAN = re.compile(r"(?<!`)(``?)([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(\))?\1(?!`)")
_EXAMPLE = re.compile(r"^\s*(?:>>>|\.\.\.).*$", re.MULTILINE)
_COMMENT = re.compile(r"(?:^\s*|  )(#.*)$", re.MULTILINE)
_WORD = re.compile(r"[\w.\-]+\Z")
_PYTHON = {*dir(builtins), *keyword.kwlist, "self"}


class Reference(NamedTuple):
    """A name in backticks: where it stands, the words of the statement around it, and the class that this defines."""

    place: str
    name: str
    nearby: frozenset[str]
    owner: str = ""


def words_of(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Every name that code mentions, defines or takes as an argument."""
    for each in nodes:
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Attribute):
            yield each.attr
        elif isinstance(each, ast.arg | ast.keyword):
            yield each.arg or ""
        elif isinstance(each, ast.FunctionDef | ast.ClassDef):
            yield each.name
        elif isinstance(each, ast.alias):
            yield from (each.asname or each.name).split(".")


def names_bound(body: Iterable[ast.stmt]) -> Iterator[str]:
    """What the statements of a module, or of a class, bind."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield statement.name
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in statement.names)
        else:
            yield from (n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


class Names:
    """What the modules of a package define, and the names in backticks in their docstrings and comments."""

    def __init__(self, package: str, sources: Mapping[str, tuple[ast.Module, str]]) -> None:
        self.package = package
        self.top = {name: {*names_bound(tree.body)} for name, (tree, _) in sources.items()}
        self.anywhere = {part for name in sources for part in name.split(".")}.union(*self.top.values())
        self.members: dict[str, set[str]] = {}
        self.bases: dict[str, list[str]] = {}
        self.words: set[str] = set()
        self.libraries: set[str] = set()
        self.references: list[Reference] = []
        for module, (tree, text) in sources.items():
            nearby = frozenset(word for statement in tree.body for word in self._read(module, statement))
            comments = "\n".join(_COMMENT.findall(text))
            self._refer(f"{ast.get_docstring(tree)}\n{comments}", Reference(module, "", nearby))

    def _read(self, module: str, statement: ast.stmt) -> frozenset[str]:
        """Keep what a statement at the top of a module defines and says; return its words."""
        nodes = list(ast.walk(statement))
        nearby, owner = frozenset(words_of(nodes)), statement.name if isinstance(statement, ast.ClassDef) else ""
        docstrings: set[ast.AST] = set()
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
                self.words |= {node.value} if _WORD.match(node.value) else set()
            elif isinstance(node, ast.Import):
                names = ((alias.asname, alias.name.partition(".")[0]) for alias in node.names)
                self.libraries.update(name for pair in names for name in pair if name)
            elif isinstance(node, ast.ImportFrom):
                self.libraries.add((node.module or "").partition(".")[0])
            elif isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                docstrings.add(node.body[0].value)  # type: ignore[attr-defined]
                self._refer(text, Reference(f"{module}:{node.lineno}", "", nearby, owner))
            if isinstance(node, ast.ClassDef):
                stored = (
                    n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
                )
                self.members.setdefault(node.name, set()).update(names_bound(node.body), stored)
                self.bases[node.name] = [ast.unparse(base).partition("[")[0].split(".")[-1] for base in node.bases]
        return nearby

    def _refer(self, text: str, reference: Reference) -> None:
        for _, name in _SPAN.findall(_EXAMPLE.sub("", text)):
            self.references.append(reference._replace(name=name))

    def members_of(self, owner: str) -> set[str]:
        """What a class and those that it inherits from define."""
        return self.members.get(owner, set()).union(*(self.members_of(base) for base in self.bases.get(owner, ())))

    @cached_property
    def all_members(self) -> set[str]:
        return set().union(*self.members.values())

    def exists(self, reference: Reference) -> bool:
        first, *rest = reference.name.split(".")
        if reference.name in self.words or first in WORDS_OF_OTHERS:
            return True
        if not rest:
            known = (reference.nearby, self.anywhere, self.libraries, _PYTHON, self.members_of(reference.owner))
            return any(first in names for names in known)
        if first in self.members:
            return rest[0] in self.members_of(first)
        if first == self.package:
            return self._path_exists(reference.name)
        parts = reference.nearby | self.words | self.all_members
        return first in self.libraries or (first in parts | self.anywhere and parts.issuperset(rest))

    def _path_exists(self, path: str) -> bool:
        """Say whether a path from the package leads to a module, to what one binds, or to a member of a class there."""
        module, rest = path, list[str]()
        while module not in self.top:
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
        exported_lazily = module == self.package and {*rest[:1]} <= self.words
        return ({*rest[:1]} <= self.top[module] or exported_lazily) and (
            len(rest) < 2 or rest[1] in self.members_of(rest[0])
        )

    def unknown(self) -> list[str]:
        return sorted({f"{each.place} {each.name}" for each in self.references if not self.exists(each)})


def texts() -> dict[str, str]:
    return {module_name(path): path.read_text() for path in PACKAGE.rglob("*.py")}


def test_names_in_docstrings_and_comments_exist() -> None:
    found = Names("paleo", {name: (trees()[name], text) for name, text in texts().items()})
    found.words |= {path.name for folder in (PACKAGE, CATALOG) for path in folder.rglob("*.yaml")}
    assert len(found.references) > 2_000
    assert found.unknown() == []


def test_words_of_others_are_needed() -> None:
    every = "".join(texts().values())
    assert [word for word in WORDS_OF_OTHERS if not re.search(rf"`(\w+\.)?{word}\b", every)] == []


RIGHT = {"docstring": "Box.size", "of_class": "pack.box.Box.widen", "of_method": "factor", "comment": "np.float64"}
EXAMPLE = '''
"""A module with ``{docstring}``."""
import numpy as np

class Base:
    size: int

class Box(Base):
    """A box, `{of_class}`."""

    def widen(self, factor: float) -> float:
        """Widen by ``{of_method}``; the key ``--far`` is no name.

        >>> "``this``"
        """
        return factor * self.size  # as a `{comment}`
'''


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        ("docstring", "Box.sizes"),
        ("docstring", "crate"),
        ("of_class", "pack.boxes"),
        ("of_class", "pack.box.Crate"),
        ("of_class", "pack.box.Box.width"),
        ("of_method", "factors"),
        ("of_method", "factor.width"),
        ("comment", "crate.float64"),
    ],
)
def test_a_name_that_does_not_exist_is_found(place: str, wrong: str) -> None:
    right, false = (EXAMPLE.format(**RIGHT | changed) for changed in ({}, {place: wrong}))
    for text, expected in ((right, []), (false, [wrong])):
        found = Names("pack", {"pack": (ast.parse(""), ""), "pack.box": (ast.parse(text), text)})
        assert [name.split()[1] for name in found.unknown()] == expected


ROOT = PACKAGE.parent
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_PATH = re.compile(r"`(?:pytest )?((?:tests|paleo|notebooks|benchmarks|docs|models)/[\w./\-]+\.\w+)")
_REGISTRATION = re.compile(r"`@?(?:(\w+)\.register|(\w+)\()")


@cache
def words_of_the_package() -> frozenset[str]:
    return frozenset(word for path in PACKAGE.rglob("*.py") for word in re.findall(r"\w+", path.read_text()))


def missing(text: str) -> list[str]:
    """Paths that do not exist (those that a reader writes aside), and calls in tables that the package lacks."""
    written = ("NAME", "example")
    paths = [path for path in _PATH.findall(text) if not any(word in path for word in written)]
    rows = "\n".join(re.findall(r"^\|.*\|$", text, re.MULTILINE))
    called = ["".join(names) for names in _REGISTRATION.findall(rows)]
    unknown = [name for name in called if name not in words_of_the_package()]
    return [*(path for path in paths if not (ROOT / path).exists()), *unknown]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_functions_that_pages_name_exist(page: Path) -> None:
    assert missing(page.read_text()) == []


def test_a_missing_file_or_function_is_found() -> None:
    row = "| a link | `@NOTHING.register` or `add_nothing(x)` | `register_schedule(x)` |"
    text = f"`paleo/nothing.py`, `paleo/NAME.py`\n{row}\n"
    assert missing(text) == ["paleo/nothing.py", "NOTHING", "add_nothing"]
