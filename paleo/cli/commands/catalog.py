"""``paleo list`` and ``paleo show``: what the catalog holds."""

from __future__ import annotations

from typing import Annotated

import typer

from paleo.cli.application import CATALOG, app, show_document
from paleo.cli.options import AsJson, completes
from paleo.errors import SpecError


def _kinds(incomplete: str) -> list[str]:
    from paleo.report.describe import KINDS

    return [kind for kind in KINDS if kind.startswith(incomplete)]


Kind = Annotated[
    str | None, typer.Argument(metavar="[KIND]", help="models, devices, links, systems, … [all]", autocompletion=_kinds)
]
EntryName = Annotated[
    list[str],
    typer.Argument(
        metavar="[KIND] NAME",
        help="Any name of the catalog, or a YAML file; perhaps its kind.",
        autocompletion=completes("models", "devices", "links", "systems", "software", "calibrations"),
    ),
]


@app.command("list", rich_help_panel=CATALOG)
def list_(
    kind: Kind = None,
    as_json: AsJson = False,
) -> None:
    """What the catalog holds.

    \b
    paleo list systems
    paleo list software --json
    """
    from paleo.report import describe, tables

    kinds = [kind] if kind is not None else list(describe.KINDS)
    entries = {name: describe.lines(name) for name in kinds}
    counts = {name: f"{len(lines)}: {', '.join(list(lines)[:4])}, …" for name, lines in entries.items()}
    table = tables.catalog("kinds of entries (paleo list KIND)", counts) if kind is None else None
    show_document(lambda: entries, lambda: table or tables.catalog(str(kind), entries[str(kind)]), as_json)


@app.command(rich_help_panel=CATALOG)
def show(
    words: EntryName,
    as_json: AsJson = False,
) -> None:
    """All that is known of one model, device, link, system, software, collective, layer, strategy or optimizer.

    A name that several kinds share may stand behind its kind: `paleo show software megatron-core`.

    \b
    paleo show dgx-h100
    paleo show software megatron-core
    """
    from rich.console import Group

    from paleo.report import describe, tables

    *kind, name = words[-2:]
    if len(words) > 2:
        raise SpecError(f"show takes NAME or KIND NAME, not {len(words)} words")
    entries = describe.find(name, *kind)
    show_document(
        lambda: {kind: describe.document(entry) for kind, entry in entries},
        lambda: Group(
            *(
                part
                for kind, entry in entries
                for part in tables.described(f"{kind} {name}", describe.facts(entry), describe.settings(entry))
            )
        ),
        as_json,
    )
