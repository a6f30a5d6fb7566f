"""``paleo calibrate``: measure a device, or fit measured tables."""

from __future__ import annotations

from typing import Annotated

import typer

from paleo.cli.application import MEASURE, app, finish
from paleo.errors import SpecError


@app.command(rich_help_panel=MEASURE)
def calibrate(
    files: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE…]", help="Measured tables, or folders, with --fit.")
    ] = None,
    fit: Annotated[bool, typer.Option("--fit", help="Fit measured tables instead of measuring a device.")] = False,
    device: Annotated[
        str, typer.Option(help="Device to measure: cuda:0, …; cpu (with --name) only tests the procedure.")
    ] = "cuda:0",
    name: Annotated[str | None, typer.Option(help="Catalog name of the device. [the name that CUDA reports]")] = None,
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="F.yaml", help="Calibration file to write, for one device.")
    ] = None,
    output_dir: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder to write calibration files (one per device) and measured tables to."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="With --fit: fit only this device, system or software profile; also fabric, arithmetic, intervals, "
            "ledger (each source without a fit on it), or waiting (hosts that wait for token counts of experts)."
        ),
    ] = None,
    free: Annotated[
        str | None,
        typer.Option(
            help="With --fit: parameters to fit, such as host_forward,contention (steps) or inside_share (links). "
            "[those that the rows determine]"
        ),
    ] = None,
    hold_out: Annotated[
        list[str] | None,
        typer.Option(metavar="SOURCE", help="With --fit --only waiting: do not fit rows of this source, test on them."),
    ] = None,
    budget: Annotated[float, typer.Option(help="Time limit in seconds; a later run continues.")] = 420.0,
    suites: Annotated[
        str | None, typer.Option(help="Kernels to measure: gemm,elementwise,attention,…,deepbench. [all]")
    ] = None,
    dtypes: Annotated[
        str | None, typer.Option(help="Number formats to measure: fp32,tf32,fp16,bf16. [all of the device]")
    ] = None,
    largest: Annotated[int, typer.Option(help="Largest matrix dimension to measure.")] = 16384,
) -> None:
    """Write a calibration file: measure the GPU of this machine, or fit measured tables.

    \b
    paleo calibrate --device cuda:0 -o my-gpu.yaml
    paleo calibrate --fit gemm.csv -o my-gpu.yaml
    """
    from paleo.calibrate import command

    if fit:
        finish(
            command.fit(
                files or [], output=output, output_dir=output_dir, only=only or [], free=_comma_separated(free),
                hold_out=hold_out or [],
            )
        )  # fmt: skip
        return
    if files:
        raise SpecError(
            f"{files[0]}: measured tables need --fit; without it `paleo calibrate` measures the device {device}"
        )
    if command.world_size() > 1:
        finish(command.collectives(device=device, system=name, output_dir=output_dir or "."))
        return
    finish(
        command.calibrate_device(
            device=device, name=name, output=output, output_dir=output_dir or ".", budget=budget, largest=largest,
            suites=_comma_separated(suites), dtypes=_comma_separated(dtypes),
        )
    )  # fmt: skip


def _comma_separated(text: str | None) -> tuple[str, ...]:
    from paleo.units import comma_separated

    return tuple(comma_separated(text or ""))
