"""``paleo list`` and ``paleo show``: what the catalog holds."""

from __future__ import annotations

from typing import Annotated

import typer

from paleo.cli.application import CATALOG, app
from paleo.cli.options import AsJson
from paleo.cli.output import show_document

Kind = Annotated[str | None, typer.Argument(metavar="[KIND]", help="models, devices, links, systems, …")]
EntryName = Annotated[str, typer.Argument(metavar="NAME", help="Any name of the catalog, or a YAML file.")]


@app.command("list", rich_help_panel=CATALOG)
def list_(
    kind: Kind = None,
    as_json: AsJson = False,
) -> None:
    """What the catalog holds."""
    from paleo.report import describe, tables

    kinds = [kind] if kind is not None else list(describe.KINDS)
    entries = {name: describe.lines(name) for name in kinds}
    counts = {name: f"{len(lines)}: {', '.join(list(lines)[:4])}, …" for name, lines in entries.items()}
    table = tables.catalog("kinds of entries (paleo list KIND)", counts) if kind is None else None
    show_document(lambda: entries, lambda: table or tables.catalog(str(kind), entries[str(kind)]), as_json)


@app.command(rich_help_panel=CATALOG)
def show(
    name: EntryName,
    as_json: AsJson = False,
) -> None:
    """All that is known of one model, device, link, system, collective, layer, strategy or optimizer."""
    from rich.console import Group

    from paleo.report import describe, tables

    entries = describe.find(name)
    show_document(
        lambda: {kind: describe.document(entry) for kind, entry in entries},
        lambda: Group(*(tables.facts(f"{kind} {name}", describe.facts(entry)) for kind, entry in entries)),
        as_json,
    )
