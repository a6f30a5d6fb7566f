"""``paleo import``: converts a network from another format to a model file."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from paleo.cli.application import CATALOG_HELP_GROUP, app, print_warnings
from paleo.cli.options import JsonOption
from paleo.files import check_output_path, write_text


@app.command("import", rich_help_panel=CATALOG_HELP_GROUP)
def import_(
    kind: Annotated[str, typer.Argument()],
    source: Annotated[str, typer.Argument()],
    inputs: Annotated[list[str] | None, typer.Option("--input")] = None,
    sizes: Annotated[list[str] | None, typer.Option("--size")] = None,
    loss: str = "auto",
    output: Annotated[str | None, typer.Option("-o", "--output")] = None,
    as_json: JsonOption = False,
) -> None:
    """Convert a torch module, an ONNX file or a Hugging Face configuration to a model file.

    \b
    paleo import hf config.json -o model.yaml
    paleo import torch mynet:build --input 32x3x224x224 -o model.yaml

    Parameters
    ----------
    kind : torch|onnx|hf
        Format of the source: a torch module, an ONNX file, or a Hugging Face configuration.
    source : SOURCE
        Network to import: module:factory, file.onnx or config.json.
    inputs : SHAPE
        torch: shape of an input, such as 32x3x224x224 or name=8x512:int64; repeat for each input.
    sizes : DIM=N
        onnx, hf: value of a named dimension, such as seq=2048.
    loss
        auto appends the loss to a classifier; none appends nothing.
    output : FILE
        Model file to write. [stdout]
    """
    from paleo.importers import import_sources
    from paleo.importers.torch import check_factory_text

    path = None if output is None else check_output_path(output, (".yaml", ".yml"))
    if kind == "torch":
        import_sources.parse_inputs(inputs or ())
        check_factory_text(source)
        print_warnings([f"import torch runs the code of {source.rpartition(':')[0] or source}"])
    network = import_sources.import_network(
        kind, source, inputs=inputs or (), sizes=import_sources.parse_dim_sizes(sizes or ()), loss=loss
    )
    if path is not None:
        write_text(path, network.text)
    if as_json:
        from paleo.report.columns import json_text, with_schema

        sys.stdout.write(json_text(with_schema("import", network.document(output))) + "\n")
    elif output is None:
        sys.stdout.write(network.text)
    else:
        sys.stdout.write(f"wrote {output}: {network.summary_line}\n")
    if network.unknown_functions:
        print_warnings([f"not recognised, counted as passes over memory: {', '.join(network.unknown_functions)}"])
    if network.assumptions:
        print_warnings([network.assumptions])
