"""``paleo calibrate``: measure a device, or fit measured tables."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from paleo.cli.application import MEASURE_HELP_GROUP, app, exit_with_code
from paleo.errors import SpecError


@app.command(rich_help_panel=MEASURE_HELP_GROUP)
def calibrate(
    files: Annotated[list[str] | None, typer.Argument()] = None,
    fit: bool = False,
    device: str = "cuda:0",
    name: str | None = None,
    output: Annotated[str | None, typer.Option("-o", "--output")] = None,
    output_dir: str | None = None,
    only: list[str] | None = None,
    free: str | None = None,
    hold_out: list[str] | None = None,
    budget: float = 420.0,
    suites: str | None = None,
    dtypes: str | None = None,
    largest: int = 16384,
) -> None:
    """Write a calibration file: measure the GPU of this machine, or fit measured tables.

    \b
    paleo calibrate --device cuda:0 -o my-gpu.yaml
    paleo calibrate --fit gemm.csv -o my-gpu.yaml

    Parameters
    ----------
    files : [FILE…]
        Measured tables, or folders, with --fit.
    fit
        Fit measured tables instead of measuring a device.
    device
        Device to measure: cuda:0, …; cpu (with --name) only tests the procedure.
    name
        Catalog name of the device. [the name that CUDA reports]
    output : F.yaml
        Calibration file to write, for one device.
    output_dir : DIR
        Folder to write calibration files (one per device) and measured tables to.
    only
        With --fit: fit only this device, system or software profile; also fabric, arithmetic, intervals, ledger
        (each source without a fit on it), or waiting (hosts that wait for token counts of experts).
    free
        With --fit: parameters to fit, such as host_forward,contention (steps) or inside_share (links). [those that
        the rows determine]
    hold_out : SOURCE
        With --fit --only waiting: do not fit rows of this source, test on them.
    budget
        Time limit in seconds; a later run continues.
    suites
        Kernels to measure: gemm,elementwise,attention,…,deepbench. [all]
    dtypes
        Number formats to measure: fp32,tf32,fp16,bf16. [all of the device]
    largest
        Largest matrix dimension to measure.
    """
    from paleo.calibrate import command

    if fit:
        lists: dict[str, Any] = {"only": only or [], "hold_out": hold_out or [], "free": _comma_separated(free)}
        exit_with_code(command.fit_tables(files or [], output=output, output_dir=output_dir, **lists))
        return
    if files:
        without = f"without it `paleo calibrate` measures the device {device}"
        raise SpecError(f"{files[0]}: measured tables need --fit; {without}")
    if command.world_size() > 1:
        exit_with_code(command.benchmark_collectives(device=device, system=name, output_dir=output_dir or "."))
        return
    exit_with_code(
        command.calibrate_device(
            device=device, name=name, output=output, output_dir=output_dir or ".", budget=budget, largest=largest,
            suites=_comma_separated(suites), dtypes=_comma_separated(dtypes),
        )
    )  # fmt: skip


def _comma_separated(text: str | None) -> tuple[str, ...]:
    from paleo.units import comma_separated

    return tuple(comma_separated(text or ""))
