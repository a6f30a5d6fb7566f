"""``paleo init`` and ``paleo schema``: templates of the user's files, and the JSON Schema of each kind."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from paleo.cli.application import CATALOG_HELP_GROUP, app
from paleo.cli.options import word_completion
from paleo.files import is_file

TEMPLATE_KINDS = ("device", "link", "system", "model", "run")


def _schemas(incomplete: str) -> list[str]:
    from paleo.report.json_schemas import SPEC_BY_FILE_KIND, commands_with_json_document

    return [kind for kind in (*SPEC_BY_FILE_KIND, *commands_with_json_document()) if kind.startswith(incomplete)]


@app.command(rich_help_panel=CATALOG_HELP_GROUP)
def init(
    kind: Annotated[str, typer.Argument(autocompletion=word_completion(*TEMPLATE_KINDS))],
    output: Annotated[str | None, typer.Option("-o", "--output")] = None,
) -> None:
    """Print a commented template for a device, link, system, model or run file.

    \b
    paleo init system -o my-box.yaml
    paleo init device

    Parameters
    ----------
    kind : KIND
        Kind of file: device, link, system, model or run.
    output : FILE
        File to write. [stdout]
    """
    from paleo.errors import SpecError
    from paleo.files import check_output_path, write_text
    from paleo.specs.catalog import spec_template

    text = spec_template(kind.strip().lower())
    if output is None:
        sys.stdout.write(text)
        return
    place = check_output_path(output, (".yaml", ".yml"))
    if is_file(place) and place.stat().st_size:
        raise SpecError(f"-o {output}: exists already; expected a new name")
    write_text(place, text)
    sys.stderr.write(f"wrote {output}\n")


@app.command(rich_help_panel=CATALOG_HELP_GROUP)
def schema(kind: Annotated[str, typer.Argument(autocompletion=_schemas)]) -> None:
    """Print the JSON Schema of a kind of file, or of the --json output of a command.

    \b
    paleo schema estimate
    paleo schema system

    Parameters
    ----------
    kind : KIND
        Kind of file (device, model, …) or command (estimate, scale, …).
    """
    from paleo.report.json_schemas import json_schema

    sys.stdout.write(json.dumps(json_schema(kind.strip().lower()), indent=2) + "\n")
