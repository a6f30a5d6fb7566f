"""Texts of docstrings: what the section ``Parameters`` says about each name, for help texts and schemas."""

from __future__ import annotations

import inspect
import re
from typing import NamedTuple

_HEADING = "\n\nParameters\n----------\n"
_ENTRY = re.compile(r"^(\w+)(?: : (.*))?\n((?:    .*\n?)+)", re.MULTILINE)


class ParameterEntry(NamedTuple):
    """Entry of a docstring's section ``Parameters``: the word after the name, and the description below the name."""

    type_word: str
    text: str


def split_parameters_section(docstring: str | None) -> tuple[str, dict[str, ParameterEntry]]:
    """Split the section ``Parameters``, which comes last, from a docstring.

    Parameters
    ----------
    docstring : str, optional
        Docstring of a function or of a class.

    Returns
    -------
    tuple of (str, dict of str to Meaning)
        The docstring without the section, and the meaning of each parameter, on one line.

    Examples
    --------
    >>> text = "Order machines.\\n\\nParameters\\n----------\\ncount : N\\n    Number of\\n    machines."
    >>> split_parameters_section(text)
    ('Order machines.', {'count': ParameterEntry(type_word='N', text='Number of machines.')})
    """
    head, _, section = inspect.cleandoc(docstring or "").partition(_HEADING)
    return head, {name: ParameterEntry(word, " ".join(text.split())) for name, word, text in _ENTRY.findall(section)}
