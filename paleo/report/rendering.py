"""Pages as jinja2 templates, with their style sheets and scripts; a page holds all it needs and loads nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from paleo.report.columns import percent, tenths
from paleo.units import counted, duration, gibibytes

_FOLDER = Path(__file__).parent / "templates"


def rendered(template: str, **context: Any) -> str:
    """Render a page; values are escaped.

    Parameters
    ----------
    template : str
        Name of a file in the folder `templates`.
    **context
        What the template names; ``source`` reads a style sheet or script into the page.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    for function in (counted, duration, gibibytes, percent, tenths):
        environment.filters[function.__name__] = function
    environment.globals["source"] = lambda name: Markup((_FOLDER / name).read_text(encoding="utf-8"))
    return environment.get_template(template).render(**context)
