"""``paleo init`` and ``paleo schema``: files of one's own, and what may stand in them."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from paleo.cli.application import CATALOG, app

TemplateKind = Annotated[str, typer.Argument(metavar="KIND", help="device, link, system, model or run.")]
TemplateFile = Annotated[str | None, typer.Option("-o", "--output", metavar="FILE", help="The file. [stdout]")]
SchemaKind = Annotated[
    str, typer.Argument(metavar="KIND", help="A kind of file (device, model, …) or a command (estimate, scale, …).")
]


@app.command(rich_help_panel=CATALOG)
def init(kind: TemplateKind, output: TemplateFile = None) -> None:
    """A commented template of a file of your own: device, link, system, model or run."""
    from paleo.files import checked_output, write_text
    from paleo.specs.templates import template

    text = template(kind.strip().lower())
    if output is None:
        sys.stdout.write(text)
        return
    write_text(checked_output(output, (".yaml", ".yml")), text)
    sys.stderr.write(f"wrote {output}\n")


@app.command(rich_help_panel=CATALOG)
def schema(kind: SchemaKind) -> None:
    """JSON Schema of a kind of file, or of what a command prints with --json."""
    from paleo.report.schemas import schema_of

    sys.stdout.write(json.dumps(schema_of(kind.strip().lower()), indent=2) + "\n")
