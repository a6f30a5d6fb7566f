"""Runs the notebooks and stores them with their outputs, so that they show what the program says today.

python -m tests.end_to_end.notebooks [NAME…]

Without names all of ``notebooks/`` run, a few minutes; a name is the beginning of a file's (``08``).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import nbclient
import nbformat

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LONGEST = 900  # seconds after which a cell hangs
#: What pandas names a styled table, and where Python says that an object lies.
TABLE_ID, ADDRESS = re.compile(r"\bT_[0-9a-f]{5}(?=\W|_)"), re.compile(r" at 0x[0-9a-f]+")


def executed(path: Path) -> nbformat.NotebookNode:
    """A notebook with the outputs that its cells have now."""
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=LONGEST, kernel_name="python3", resources=where).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
    return with_stable_outputs(notebook)


def with_stable_outputs(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook with the random ids of styled tables numbered in their order, and without addresses of objects: the
    same cells print the same file."""
    numbers: dict[str, str] = {}
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            for kind, text in output.get("data", {}).items():
                if isinstance(text, str) and kind.startswith("text/"):
                    text = TABLE_ID.sub(lambda match: numbers.setdefault(match[0], f"T_{len(numbers):05d}"), text)
                    output.data[kind] = ADDRESS.sub("", text)
    return notebook


def main(beginnings: Sequence[str]) -> None:
    """Runs the notebooks whose names begin so, and stores them."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # the kernel of this interpreter, not one of the user's
    for path in NOTEBOOKS:
        if not beginnings or path.name.startswith(tuple(beginnings)):
            nbformat.write(executed(path), path)
            sys.stdout.write(f"{path.name}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
