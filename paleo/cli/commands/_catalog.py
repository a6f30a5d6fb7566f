"""``paleo list`` and ``paleo show``: what the catalog holds."""

from __future__ import annotations

from typing import Annotated

import typer

from paleo.cli.application import CATALOG_HELP_GROUP, app, print_result, save_plot
from paleo.cli.options import JsonOption, PlotFileOption, catalog_name_completion
from paleo.errors import SpecError


def _kinds(incomplete: str) -> list[str]:
    from paleo.report.catalog import DESCRIPTIONS_BY_KIND

    return [kind for kind in DESCRIPTIONS_BY_KIND if kind.startswith(incomplete)]


@app.command("list", rich_help_panel=CATALOG_HELP_GROUP)
def list_(
    kind: Annotated[str | None, typer.Argument(autocompletion=_kinds)] = None, as_json: JsonOption = False
) -> None:
    """List the catalog: models, devices, links, systems, software, schedules, collectives and more.

    \b
    paleo list systems
    paleo list software --json

    Parameters
    ----------
    kind : [KIND]
        Kind of entries: models, devices, links, systems, … [all]
    """
    from paleo.report import catalog

    kinds = [kind] if kind is not None else list(catalog.DESCRIPTIONS_BY_KIND)
    entries = {name: catalog.catalog_descriptions(name) for name in kinds}
    counts = {name: f"{len(lines)}: {', '.join(list(lines)[:4])}, …" for name, lines in entries.items()}
    table = catalog.catalog_list_table("kinds of entries (paleo list KIND)", counts) if kind is None else None
    print_result(lambda: entries, lambda: table or catalog.catalog_list_table(str(kind), entries[str(kind)]), as_json)


@app.command(rich_help_panel=CATALOG_HELP_GROUP)
def show(
    words: Annotated[
        list[str],
        typer.Argument(
            autocompletion=catalog_name_completion("models", "devices", "links", "systems", "software", "calibrations")
        ),
    ],
    as_json: JsonOption = False,
    plot: PlotFileOption = None,
) -> None:
    """Show a catalog entry with its sources: a model, device, link, system, software profile, collective, …

    Where several kinds share a name, write the kind first: `paleo show software megatron-core`.

    \b
    paleo show dgx-h100 --plot links.png
    paleo show software megatron-core

    Parameters
    ----------
    words : [KIND] NAME
        Catalog name or YAML file, after its kind where names are ambiguous.
    """
    from rich.console import Group

    from paleo.report import catalog
    from paleo.specs.system import System

    *kind, name = words[-2:]
    if len(words) > 2:
        raise SpecError(f"show takes NAME or KIND NAME, not {len(words)} words")
    entries = catalog.find_entries(name, *kind)
    systems = [entry for _, entry in entries if isinstance(entry, System)]
    if plot is not None and not systems:
        raise SpecError(f"--plot: draws the links of a system, and {name!r} is a {entries[0][0]}")
    print_result(
        lambda: {kind: catalog.json_document(entry) for kind, entry in entries},
        lambda: Group(*(part for kind, entry in entries for part in catalog.entry_tables(f"{kind} {name}", entry))),
        as_json,
    )
    save_plot(plot, lambda collective: collective.plot_interconnect(systems[0]), "collective")
