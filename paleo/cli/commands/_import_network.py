"""``paleo import``: converts a network from another format to a model file."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from paleo.cli.application import CATALOG, app, warn
from paleo.cli.options import AsJson
from paleo.files import checked_output, write_text

Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="SHAPE",
        help="torch: shape of an input, such as 32x3x224x224 or name=8x512:int64; repeat for each input.",
    ),
]
Sizes = Annotated[
    list[str] | None,
    typer.Option("--size", metavar="DIM=N", help="onnx, hf: value of a named dimension, such as seq=2048."),
]
ModelFile = Annotated[str | None, typer.Option("-o", "--output", metavar="FILE", help="Model file to write. [stdout]")]


@app.command("import", rich_help_panel=CATALOG)
def import_(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="torch|onnx|hf",
            help="Format of the source: a torch module, an ONNX file, or a Hugging Face configuration.",
        ),
    ],
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Network to import: module:factory, file.onnx or config.json.")
    ],
    inputs: Shapes = None,
    sizes: Sizes = None,
    loss: Annotated[str, typer.Option(help="auto appends the loss to a classifier; none appends nothing.")] = "auto",
    output: ModelFile = None,
    as_json: AsJson = False,
) -> None:
    """Convert a torch module, an ONNX file or a Hugging Face configuration to a model file.

    \b
    paleo import hf config.json -o model.yaml
    paleo import torch mynet:build --input 32x3x224x224 -o model.yaml
    """
    from paleo.importers import sources
    from paleo.importers.torch_modules import check_factory

    path = None if output is None else checked_output(output, (".yaml", ".yml"))
    if kind == "torch":
        sources.inputs_of(inputs or ())
        check_factory(source)
        warn([f"import torch runs the code of {source.rpartition(':')[0] or source}"])
    network = sources.import_network(kind, source, inputs=inputs or (), sizes=sources.sizes_of(sizes or ()), loss=loss)
    if path is not None:
        write_text(path, network.text)
    if as_json:
        from paleo.report.columns import json_text, with_schema

        sys.stdout.write(json_text(with_schema("import", network.document(output))) + "\n")
    elif output is None:
        sys.stdout.write(network.text)
    else:
        sys.stdout.write(f"wrote {output}: {network.line}\n")
    if network.unknown:
        warn([f"not recognised, counted as passes over memory: {', '.join(network.unknown)}"])
    if network.assumptions:
        warn([network.assumptions])
