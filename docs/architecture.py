"""Draws docs/architecture.svg, the rooms of the package and their imports, from the imports themselves.

Run ``python docs/architecture.py`` from the root of the checkout; mkdocs draws the picture anew for each site.
"""

from __future__ import annotations

import sys
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.architecture.test_architecture import LEVELS  # noqa: E402
from tests.sizes import code_lines  # noqa: E402
from tests.structure import PACKAGE, import_graph  # noqa: E402

PICTURE = ROOT / "docs" / "architecture.svg"
WIDTH, ROW, BOX, BOUND_MARGIN = 880, 64, 30, 10
_STYLE = (
    "text{font:12px sans-serif;text-anchor:middle;fill:#123}.lines{font-size:10px;fill:#567}"
    "rect{fill:#e8f0fa;stroke:#5b84b1}path{fill:none;stroke:#9ab;stroke-width:1}"
)


def room(module: str) -> str:
    """Name the part of the package right below its root that a module belongs to."""
    return (module.split(".")[1:] or ["__init__"])[0]


def room_sizes() -> dict[str, int]:
    """Count the code lines of every room."""
    lines: dict[str, int] = {}
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        lines[part] = lines.get(part, 0) + code_lines(path.read_text())
    return lines


def drawn_imports() -> list[tuple[str, str]]:
    """List the imports between rooms that do not follow from others (the transitive reduction)."""
    modules = import_graph()
    pairs = {(room(a), room(b)) for a, b in modules.edges}
    rooms = nx.DiGraph((a, b) for a, b in pairs if a != b and b != "__init__")  # all may import the version
    return sorted(nx.transitive_reduction(rooms).edges)


def svg() -> str:
    """Draw the rooms by level, the highest on top, with their code lines and imports."""
    lines, places, shapes = room_sizes(), {}, []
    rows = [sorted(level & set(lines)) for level in reversed(LEVELS)]
    for row, parts in enumerate(part for part in rows if part):
        step = WIDTH / len(parts)
        for column, part in enumerate(parts):
            x, y, width = step * (column + 0.5), BOUND_MARGIN + row * ROW, min(150.0, step - 2 * BOUND_MARGIN)
            places[part] = (x, y)
            shapes.append(f'<rect x="{x - width / 2:.0f}" y="{y}" width="{width:.0f}" height="{BOX}" rx="5"/>')
            shapes.append(f'<text x="{x:.0f}" y="{y + 13}">{part}</text>')
            shapes.append(f'<text class="lines" x="{x:.0f}" y="{y + 25}">{lines[part]:,} lines</text>')
    arrows = []
    for importer, imported in drawn_imports():
        (x, y), (to_x, to_y) = places[importer], places[imported]
        arrows.append(
            f'<path d="M{x:.0f} {y + BOX} C{x:.0f} {y + ROW} {to_x:.0f} {to_y - ROW + BOX} {to_x:.0f} {to_y}"/>'
        )
    height = BOUND_MARGIN + ROW * sum(1 for row in rows if row)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    return "\n".join([head, f"<style>{_STYLE}</style>", *arrows, *shapes, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(svg(), encoding="utf-8")
