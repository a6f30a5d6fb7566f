"""Imports go down only, packages of one level do not know each other, and powers of ten stand in units.py alone."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.structure import trees

#: From the bottom up; parts of one line may not import each other.
LEVELS: list[set[str]] = [
    {"docstrings", "errors"},
    {"units", "registry", "files", "events"},
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
    {"search", "importers", "logs", "serving"},
    {"launch"},
    {"studies"},
    {"tuning"},
    {"cluster"},
    {"tables"},
    {"calibrate"},
    {"report"},
    {"answers"},
    {"questions", "services"},
    {"serve_train_split"},
    {"cli", "demo"},
    {"__init__", "__main__"},
]
HEIGHT = {part: level for level, parts in enumerate(LEVELS) for part in parts}
#: Every module by the parts of its name behind the package: ``("search", "plans")``.
MODULES = {tuple(name.split(".")[1:]) or ("__init__",): tree for name, tree in trees().items()}


def imported_parts(tree: ast.AST) -> set[tuple[str, int]]:
    """Parts of paleo that a module imports, with the line; annotations under TYPE_CHECKING count too."""
    parts = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            names = [node.module or ""] if node.module != "paleo" else [f"paleo.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        parts |= {(name.split(".")[1], node.lineno) for name in names if name.startswith("paleo.")}
    return parts


def test_every_part_has_its_level() -> None:
    assert {module[0] for module in MODULES} <= set(HEIGHT)


def test_imports_go_down() -> None:
    upward = []
    for (importer, *rest), tree in MODULES.items():
        for part, line in imported_parts(tree):
            if part not in HEIGHT:  # `from paleo import __version__` and the public names of the package
                allowed = importer in {"cli", "report", "demo", "__main__"}
            else:
                allowed = HEIGHT[part] < HEIGHT[importer] or part == importer
            upward += [] if allowed else [f"{'.'.join([importer, *rest])}:{line} imports {part}"]
    assert upward == []


HEAVY = {"pandas", "matplotlib", "networkx", "torch", "onnx", "scipy", "transformers"}
NEVER = {"torch", "onnx", "scipy", "transformers"}
MAY_BE_HEAVY = {"tables", "calibrate", "report", "importers"}


def test_heavy_imports_are_lazy() -> None:
    """Only the edges import heavy libraries when they are loaded; torch, onnx and scipy never."""
    eager = []
    for module, tree in MODULES.items():
        forbidden = NEVER if module[0] in MAY_BE_HEAVY else HEAVY
        for node in tree.body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            loaded = {name.split(".")[0] for name in names} & forbidden
            eager += [f"{'.'.join(module)}:{node.lineno} imports {name}" for name in loaded]
    assert eager == []


def is_scale(value: object) -> bool:
    """Whether a literal converts units: 10^6, 10^9, … and 10^-3 to 10^-9, or a power of 1024."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        return False
    scales = {1e6, 1e9, 1e12, 1e15, 1e-3, 1e-6, 1e-9}
    return float(value) in scales | {1024.0, 1024.0**2, 1024.0**3, 2.0**40}


def test_powers_of_ten_stand_in_units_alone() -> None:
    """A bare 1e9 or 1024 in code is a hidden conversion; limits that are no units say so by another value."""
    scales = [
        f"{'.'.join(module)}:{node.lineno}: {node.value!r}"
        for module, tree in MODULES.items()
        if module != ("units",)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and is_scale(node.value)
    ]
    assert scales == []


def test_the_picture_of_the_rooms_shows_every_room() -> None:
    """`python docs/architecture.py` draws it anew; its line counts may be older."""
    picture = (Path(__file__).resolve().parents[2] / "docs" / "architecture.svg").read_text()
    assert set(re.findall(r">(\w+)</text>", picture)) == {module[0] for module, tree in MODULES.items() if tree.body}
