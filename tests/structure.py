"""The import graph of the package: its modules, the folders they lie in, circles, and the longest chain."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import networkx as nx

PACKAGE = Path(__file__).resolve().parents[1] / "paleo"


def module_name(path: Path, package: Path = PACKAGE) -> str:
    """``paleo.search.plans`` for its file; a folder's name for its ``__init__``."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def trees(package: Path = PACKAGE) -> Mapping[str, ast.Module]:
    """Every module by its name, parsed."""
    return {module_name(path, package): ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}


def nodes_run_on_import(tree: ast.AST) -> Iterator[ast.AST]:
    """All of a tree but the bodies of functions, and imports for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        checked = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not checked and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from nodes_run_on_import(node)


def imported(tree: ast.AST, known: Mapping[str, ast.Module], *, lazily: bool) -> Iterator[str]:
    """Modules of the package that a tree imports; a name imported from a folder may be a module. ``lazily``: inside
    functions, too."""
    for node in ast.walk(tree) if lazily else nodes_run_on_import(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                yield module if module in known else str(node.module)


@cache
def import_graph(package: Path = PACKAGE, *, lazily: bool = True) -> nx.DiGraph[str]:
    """An arrow from each module to each that it imports; files without code are left out."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(name for name, tree in trees(package).items() if tree.body)
    for name, tree in trees(package).items():
        modules = imported(tree, trees(package), lazily=lazily)
        graph.add_edges_from((name, module) for module in modules if module != name)
    return graph


def folder(module: str, package: Path = PACKAGE) -> str:
    """The folder that a module lies in; a module of the package itself stands for itself."""
    is_folder = package.parent.joinpath(*module.split(".")).is_dir()
    parent = module if is_folder else module.rpartition(".")[0]
    return module if parent == package.name else parent


def folder_arrows(graph: nx.DiGraph[str], package: Path = PACKAGE) -> set[tuple[str, str]]:
    """Pairs of folders of which the first imports from the second."""
    pairs = {(folder(module, package), folder(other, package)) for module, other in graph.edges}
    return {(importer, other) for importer, other in pairs if importer != other}


def circles(graph: nx.DiGraph[str]) -> list[list[str]]:
    """Sets of modules that import one another, directly or through others."""
    return sorted(sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1)


def longest_chain(graph: nx.DiGraph[str]) -> list[str]:
    """The longest path along imports; a circle counts as one of its modules."""
    condensed = nx.condensation(graph)
    return [min(condensed.nodes[part]["members"]) for part in nx.dag_longest_path(condensed)]


def closure(module: str, graph: nx.DiGraph[str]) -> set[str]:
    """The modules of the package that are loaded with a module."""
    return {module, *nx.descendants(graph, module)}
