"""Errors that Paleo raises on purpose.

    PaleoError              something that a user can correct; the CLI prints the message and exits 2
    ├── SpecError           a file, key or value is wrong: hardware, model, run, table
    ├── GraphError          a network is not consistent: shapes, cycles, missing inputs
    ├── PlanError           a strategy is not possible for this network and this system
    └── CapacityError       the answer is no: it does not fit; the CLI exits 1

A message says where the error is (file and key), what was found, what was expected, and the nearest valid value.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

#: Longest name for which near names are searched. Longer ones are not misspelt, and the search takes quadratic time.
_LONGEST_NAME = 200
#: Shortest text that counts as a part of longer names; shorter ones occur in many names by chance.
_SHORTEST_PART = 3


class PaleoError(Exception):
    """Base class of all errors that a user can correct."""


class SpecError(PaleoError, ValueError):
    """Error for a wrong file, key or value (it is a ValueError too, so that pydantic adds the key)."""


class GraphError(PaleoError):
    """Error for a network with mismatched shapes, cycles or missing inputs."""


class PlanError(PaleoError):
    """Error for a strategy that is not possible for this network and this system."""


class CapacityError(PaleoError):
    """Error for a valid plan that does not fit on the machine."""


def suggest_names(name: str, known: Iterable[str], *, most: int = 3, within: str = "") -> str:
    """Suggest known names that are similar to an unknown one, as the end of an error message.

    Names that contain the whole text come before names that are spelt like it. If there are few names, all are listed.

    Parameters
    ----------
    name : str
        The name as written.
    known : iterable of str
        Names that exist.
    most : int, optional
        Most names to suggest.
    within : str, optional
        Path of the group that holds the names, which stands before each of them.

    Returns
    -------
    str
        For example ``nearest: 'resnet50'``.

    Examples
    --------
    >>> suggest_names("resnet5", ["resnet50", "vgg16"]), suggest_names("h100", ["h800-8", "gcp-h100-8g"])
    ("nearest: 'resnet50'", "nearest: 'gcp-h100-8g'")
    >>> suggest_names("layer", ["policy", "layers"], within="recompute")
    "nearest: 'recompute.layers'"
    """
    names = sorted(set(known))
    word = name[:_LONGEST_NAME].lower()
    holding = [known_name for known_name in names if len(word) >= _SHORTEST_PART and word in known_name.lower()]
    close = get_close_matches(word, holding or names, n=most, cutoff=0.0 if holding else 0.5)
    if not close:  # the last part of a path may be meant
        ends = {known_name.rpartition(".")[2].lower(): known_name for known_name in names}
        close = [ends[end] for end in get_close_matches(word, ends, n=most, cutoff=0.5)]
    group = f"{within}." if within else ""
    if close:
        return "nearest: " + ", ".join(repr(group + name) for name in close)
    if len(names) <= 24:
        return "known: " + (", ".join(repr(group + name) for name in names) or "none")
    return f"{len(names)} names are known, none of them near"
