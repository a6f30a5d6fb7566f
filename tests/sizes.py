"""Prints the size of the package: functions (docstrings left out), modules, imports between folders, circles and the
longest chain of imports."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.structure import PACKAGE, circles, closure, folder, folder_arrows, import_graph, longest_chain


def body_length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[1] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body[0]
    return (node.end_lineno or 0) - first.lineno + 1


def print_sizes() -> None:
    bodies, modules = [], []
    for path in sorted(PACKAGE.rglob("*.py")):
        text, place = path.read_text(), path.relative_to(PACKAGE.parent)
        modules.append((len(text.splitlines()), str(place)))
        functions = (
            node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        )
        bodies += [(body_length(node), f"{place}:{node.lineno} {node.name}") for node in functions]
    lengths = sorted(length for length, _ in bodies)
    p90, lines = lengths[int(0.9 * len(lengths))], sum(length for length, _ in modules)
    print(f"{len(bodies)} functions: median {median(lengths):.0f} lines, p90 {p90}, max {lengths[-1]}")
    print(f"largest function body: {max(bodies)[0]} lines, {max(bodies)[1]}")
    print(f"largest module: {max(modules)[0]} lines, {max(modules)[1]}; {lines} lines in {len(modules)} modules")


def print_structure() -> None:
    graph, on_import = import_graph(), import_graph(lazily=False)
    folders = {folder(module) for module in graph}
    print(f"{len(folder_arrows(graph))} imports between {len(folders)} folders, {len(circles(graph))} circles")
    chain = longest_chain(on_import)
    print(
        f"longest chain of imports: {len(chain)} modules, {' > '.join(name.removeprefix('paleo.') for name in chain)}"
    )
    print(f"paleo.predict loads {len(closure('paleo.predict', on_import))} modules")


if __name__ == "__main__":
    print_sizes()
    print_structure()
