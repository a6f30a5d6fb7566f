"""Prints the longest function bodies and modules of the package, docstrings left out."""

from __future__ import annotations

import ast
from pathlib import Path
from statistics import median

PACKAGE = Path(__file__).resolve().parents[1] / "paleo"


def body_length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[1] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body[0]
    return (node.end_lineno or 0) - first.lineno + 1


def main() -> None:
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


if __name__ == "__main__":
    main()
