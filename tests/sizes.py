"""Prints the size of the package beside the last release: code lines, modules, functions, docstrings, imports.

Code lines leave out blanks, comments and docstrings. Bodies leave out docstrings.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.structure import PACKAGE, circles, import_graph, longest_chain

#: Sizes of release 0.3.0, counted by this script.
LAST_RELEASE = {
    "code lines": 41_441,
    "modules": 324,
    "functions": 4_006,
    "public functions with parameters": 1_825,
    "of these with a Parameters section": 0,
    "body length, median": 4,
    "body length, p90": 14,
    "body length, max": 40,
    "folders": 31,
    "imports between folders": 171,
    "circles of imports": 0,
    "longest chain of imports": 14,
}
_NO_CODE = frozenset(
    (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
)
_DOCUMENTED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module


def body_length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[1] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body[0]
    return (node.end_lineno or 0) - first.lineno + 1


def code_lines(text: str) -> int:
    """Count the lines that hold code.

    >>> code_lines('a = 1  # one\\n\\n"a constant"\\n')
    2
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def public_functions(package: Path = PACKAGE) -> Iterator[tuple[Path, ast.FunctionDef]]:
    """Yield functions and methods with parameters whose names, classes and modules are public."""
    for path in sorted(package.rglob("*.py")):
        if not any(part.startswith("_") and part != "__init__.py" for part in path.relative_to(package).parts):
            yield from ((path, node) for node in _public(ast.parse(path.read_text())) if parameters(node))


def _public(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Yield the functions of a module and the methods of its classes; functions inside functions are nobody else's."""
    for node in ast.iter_child_nodes(tree):
        private = isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name.startswith("_")
        if isinstance(node, ast.FunctionDef) and not private:
            yield node
        elif not isinstance(node, ast.FunctionDef) and not private:
            yield from _public(node)


def parameters(node: ast.FunctionDef) -> list[str]:
    """Name the parameters of a function as a docstring does, without ``self``."""
    arguments = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    arguments += [f"*{node.args.vararg.arg}"] if node.args.vararg else []
    arguments += [argument.arg for argument in node.args.kwonlyargs]
    arguments += [f"**{node.args.kwarg.arg}"] if node.args.kwarg else []
    return [name for name in arguments if name not in ("self", "cls")]


def room(module: str) -> str:
    """Name the folder of a module; modules of the package itself share one.

    >>> room("paleo.pricing.links.group"), room("paleo.predict")
    ('paleo.pricing.links', 'paleo')
    """
    if PACKAGE.parent.joinpath(*module.split(".")).is_dir():
        return module
    return module.rpartition(".")[0]


def sizes() -> dict[str, int]:
    """Measure the package."""
    texts = [path.read_text() for path in PACKAGE.rglob("*.py")]
    bodies = sorted(
        body_length(node)
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    public = [node for _, node in public_functions()]
    graph = import_graph()
    counts = (
        sum(map(code_lines, texts)),
        len(texts),
        len(bodies),
        len(public),
        sum("Parameters\n" in (ast.get_docstring(node) or "") for node in public),
        bodies[len(bodies) // 2],
        bodies[int(0.9 * len(bodies))],
        bodies[-1],
        len({room(module) for module in graph}),
        len({(room(a), room(b)) for a, b in graph.edges if room(a) != room(b)}),
        len(circles(graph)),
        len(longest_chain(import_graph(lazily=False))),
    )
    return dict(zip(LAST_RELEASE, counts, strict=True))


if __name__ == "__main__":
    print(f"{'size of the package':36}{'now':>8}{'0.3.0':>8}")
    for name, count in sizes().items():
        print(f"{name:36}{count:8,}{LAST_RELEASE[name]:8,}")
