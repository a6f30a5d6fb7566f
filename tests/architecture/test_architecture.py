"""Imports go down only, packages of one level do not know each other, and powers of ten stand in units.py alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "paleo"

#: From the bottom up; parts of one line may not import each other.
LEVELS: list[set[str]] = [
    {"errors"},
    {"units", "registry", "files"},
    {"operations", "learning"},
    {"layers", "collectives"},
    {"specs"},
    {"network", "schedules"},
    {"parallel"},
    {"lowering", "pricing"},
    {"compression"},
    {"step"},
    {"consistency"},
    {"predict"},
    {"search", "importers", "logs"},
    {"studies"},
    {"validate"},
    {"calibrate"},
    {"report"},
    {"cli", "demo"},
    {"__init__", "__main__"},
]
HEIGHT = {part: level for level, parts in enumerate(LEVELS) for part in parts}
MODULES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The top-level part that a module belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(tree: ast.AST) -> set[tuple[str, int]]:
    """Parts of paleo that a module imports, with the line; annotations under TYPE_CHECKING count too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            names = [node.module or ""] if node.module != "paleo" else [f"paleo.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith("paleo."):
                found.add((name.split(".")[1], node.lineno))
    return found


def test_every_part_has_its_level() -> None:
    assert {part_of(path) for path in MODULES} <= set(HEIGHT)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    own = part_of(path)
    for part, line in imported_parts(ast.parse(path.read_text())):
        if part not in HEIGHT:  # `from paleo import __version__` and the public names of the package
            assert own in {"cli", "report", "demo", "__main__"}, f"{path.name}:{line} imports paleo.{part}"
            continue
        below = HEIGHT[part] < HEIGHT[own]
        assert below or part == own, f"{path.name}:{line}: {own} imports {part}, which stands above or beside it"


HEAVY = {"pandas", "matplotlib", "networkx", "torch", "onnx", "scipy", "transformers"}
MAY_BE_HEAVY = {"validate", "calibrate", "report", "importers"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_heavy_imports_are_lazy(path: Path) -> None:
    """Only the edges import heavy libraries when they are loaded; torch, onnx and scipy never."""
    own = part_of(path)
    tree = ast.parse(path.read_text())
    for node in tree.body:
        names = (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        for name in {name.split(".")[0] for name in names} & HEAVY:
            assert own in MAY_BE_HEAVY and name not in {"torch", "onnx", "scipy", "transformers"}, (
                f"{path.name}:{node.lineno} imports {name}"
            )


def is_scale(value: object) -> bool:
    """Whether a literal converts units: 10^6, 10^9, … and 10^-3 to 10^-9, or a power of 1024."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        return False
    scales = {1e6, 1e9, 1e12, 1e15, 1e-3, 1e-6, 1e-9}
    return float(value) in scales | {1024.0, 1024.0**2, 1024.0**3, 2.0**40}


@pytest.mark.parametrize(
    "path", [p for p in MODULES if p.name != "units.py"], ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_powers_of_ten_stand_in_units_alone(path: Path) -> None:
    """A bare 1e9 or 1024 in code is a hidden conversion; limits that are no units say so by another value."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant):
            assert not is_scale(node.value), f"{path.name}:{node.lineno}: {node.value!r} belongs into units.py"
