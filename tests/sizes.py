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
        text = path.read_text()
        modules.append((len(text.splitlines()), str(path.relative_to(PACKAGE.parent))))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                bodies.append((body_length(node), f"{path.relative_to(PACKAGE.parent)}:{node.lineno} {node.name}"))
    lengths = sorted(length for length, _ in bodies)
    print(f"{len(bodies)} functions: median {median(lengths):.0f} lines, p90 {lengths[int(0.9 * len(lengths))]}, max {lengths[-1]}")
    print(f"largest function body: {max(bodies)[0]} lines, {max(bodies)[1]}")
    print(f"largest module: {max(modules)[0]} lines, {max(modules)[1]}; {sum(n for n, _ in modules)} lines in {len(modules)} modules")


if __name__ == "__main__":
    main()
