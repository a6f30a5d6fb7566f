"""Commented templates of spec files, read from package data."""

from __future__ import annotations

from pathlib import Path

from paleo.errors import SpecError, near

_FOLDER = Path(__file__).parent / "templates"


def kinds() -> list[str]:
    """List the kinds of spec files that have a template."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def template(kind: str) -> str:
    """Return the commented template of a kind of spec file.

    Parameters
    ----------
    kind : str
        ``device``, ``link``, ``system`` and so on.

    Returns
    -------
    str
        YAML.

    Raises
    ------
    SpecError
        If there is no template of that kind.

    Examples
    --------
    >>> template("link").splitlines()[1]
    'kind: ethernet # pcie, nvlink, nvswitch, infinity_fabric, ici, qpi, ethernet, infiniband, efa, slingshot, other'
    """
    if kind not in kinds():
        raise SpecError(f"no template of {kind!r:.80}; {near(kind, kinds())}")
    return (_FOLDER / f"{kind}.yaml").read_text(encoding="utf-8")
