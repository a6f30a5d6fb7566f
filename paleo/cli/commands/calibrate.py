"""``paleo calibrate``: measure a device, or fit measured tables."""

from __future__ import annotations

from typing import Annotated

import typer

from paleo.cli.application import MEASURE, app, finish
from paleo.errors import SpecError


@app.command(rich_help_panel=MEASURE)
def calibrate(
    files: Annotated[list[str] | None, typer.Argument(metavar="[FILE…]", help="With --fit: measured tables.")] = None,
    fit: Annotated[bool, typer.Option("--fit", help="Fit the tables FILE…, instead of measuring a device.")] = False,
    device: Annotated[
        str, typer.Option(help="What to measure: cuda:0, …; cpu, with --name, only to test the path.")
    ] = "cuda:0",
    name: Annotated[
        str | None,
        typer.Option(help="Catalog name of the device, where it is not known by what CUDA calls it; needed for cpu."),
    ] = None,
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="F.yaml", help="The calibration file, for one device.")
    ] = None,
    output_dir: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder of one calibration file a device, and of measured tables."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="With --fit: this device, system or profile alone; on steps, links (fabric or a system), intervals, "
            "or waiting (hosts that wait for counts of tokens)."
        ),
    ] = None,
    free: Annotated[
        str | None,
        typer.Option(
            help="With --fit, on steps: host_forward,contention,attention_slowdown; of links: inside_share,… "
            "[what rows settle]"
        ),
    ] = None,
    hold_out: Annotated[
        list[str] | None,
        typer.Option(metavar="SOURCE", help="With --fit --only waiting: keep this source's rows back."),
    ] = None,
    budget: Annotated[float, typer.Option(help="Seconds to measure for; a later run goes on.")] = 300.0,
    suites: Annotated[str | None, typer.Option(help="What to measure: gemm,elementwise,attention,…,deepbench.")] = None,
    dtypes: Annotated[str | None, typer.Option(help="In which formats: fp32,tf32,fp16,bf16. [all it has]")] = None,
    largest: Annotated[int, typer.Option(help="Bound of the sizes.")] = 16384,
) -> None:
    """Measure this machine's GPU, or fit measured tables: a calibration file.

    \b
    paleo calibrate --device cuda:0 -o my-gpu.yaml
    paleo calibrate --fit gemm.csv -o my-gpu.yaml
    """
    from paleo.calibrate import command

    if fit:
        finish(
            command.fit(
                files or [], output=output, output_dir=output_dir, only=only or [], free=_names(free),
                hold_out=hold_out or [],
            )
        )  # fmt: skip
        return
    if files:
        raise SpecError(f"{files[0]}: tables are for --fit; without it `paleo calibrate` measures --device {device}")
    if command.world_size() > 1:
        finish(command.collectives(device=device, system=name, output_dir=output_dir or "."))
        return
    finish(
        command.measure(
            device=device, name=name, output=output, output_dir=output_dir or ".", budget=budget, largest=largest,
            suites=_names(suites), dtypes=_names(dtypes),
        )
    )  # fmt: skip


def _names(text: str | None) -> tuple[str, ...]:
    from paleo.units import listed

    return tuple(listed(text or ""))
