"""``paleo collective``: compares the algorithms of a collective operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from paleo.cli.application import PREDICT_HELP_GROUP, app, print_result, save_plot
from paleo.cli.options import COLLECTIVE_OPERATIONS, JsonOption, PlotFileOption, SystemName, word_completion
from paleo.errors import SpecError

if TYPE_CHECKING:
    from paleo.studies.collective import CollectiveStudy


@app.command(rich_help_panel=PREDICT_HELP_GROUP)
def collective(
    operation: Annotated[str, typer.Argument(autocompletion=word_completion(*COLLECTIVE_OPERATIONS))],
    system: SystemName,
    bytes_: str,
    ranks: int,
    calibration: str = "auto",
    dtype: str = "bf16",
    compress: str | None = None,
    tensors: int = 1,
    as_json: JsonOption = False,
    plot: PlotFileOption = None,
) -> None:
    """Price every algorithm of a collective: time, bandwidth, ratio to the lower bound, and crossovers.

    \b
    paleo collective all_reduce --bytes 100MB --ranks 64 --system dgx-h100
    paleo collective all_to_all --bytes 1GB --ranks 16 --system dgx-a100-80gb --plot a2a.png

    Parameters
    ----------
    operation : OP
        Collective operation: all_reduce, all_gather, reduce_scatter, …
    bytes_ : SIZE
        Payload: the size of the whole tensor, such as 100MB or 64KiB.
    ranks
        Number of ranks, on neighbouring GPUs.
    calibration
        Source of efficiencies: auto (measured), ideal (roofline), ppp=0.6 (60 % of peak), or a file.
    dtype
        Number format of the elements (in-network reduction cannot add int8).
    compress : A,B
        Also price these gradient compressions: topk:0.001,onebit,fp8.
    tensors : N
        With --compress: number of square matrices that the gradient consists of.
    """
    from paleo.report import collective as reports
    from paleo.specs.system import load_system
    from paleo.studies import collective as studies
    from paleo.units import Quantity

    try:
        payload = Quantity("bytes", positive=True).parse_text(bytes_)
    except SpecError as error:
        raise SpecError(f"--bytes: {error}") from None
    machine = load_system(system)
    study = studies.compare_algorithms(operation, payload, ranks, machine, calibration=calibration, dtype=dtype)
    save_plot(plot, lambda plots: plots.plot_collective_times(study))
    if compress is None:
        print_result(lambda: reports.json_document(study), lambda: reports.table(study), as_json)
        return
    _show_compressed(study, compress, dtype, tensors, calibration, as_json)


def _show_compressed(
    study: CollectiveStudy, compress: str, dtype: str, tensors: int, calibration: str, as_json: bool
) -> None:
    """Print the answer of ``paleo collective`` with compressed all-reduces below it."""
    from rich.console import Group

    from paleo.report import collective as reports
    from paleo.studies.gradient_exchange import compare_compressions
    from paleo.units import comma_separated

    methods = comma_separated(compress)
    if not methods:
        raise SpecError(f"--compress {compress!r}: expected methods such as topk:0.001,onebit")
    coded = compare_compressions(study, methods, dtype=dtype, tensors=tensors, calibration=calibration)
    print_result(
        lambda: {**reports.json_document(study), "compression": reports.compression_json_document(coded)},
        lambda: Group(reports.table(study), reports.compression_table(coded)),
        as_json,
    )
