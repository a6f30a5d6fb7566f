"""``paleo serve``: predicts how many users a service can answer within latency limits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from paleo.cli.application import (
    EXIT_NO,
    PREDICT,
    app,
    checked_page_path,
    checked_plot_path,
    save_plot,
    show_document,
    warn,
    write_page,
)
from paleo.cli.options import (
    AsJson,
    OptionalModel,
    Plot,
    TariffOptions,
    name_completion,
    packed_options,
    parse_whole_number,
    with_tariff_options,
    word_completion,
)
from paleo.errors import SpecError

if TYPE_CHECKING:
    from pathlib import Path

    from paleo.services import ServeResult

Gpus = Annotated[
    int | None,
    typer.Option("--gpus", parser=parse_whole_number, metavar="N", help="Number of GPUs, over all replicas. [1]"),
]
ServedSystems = Annotated[
    str,
    typer.Option(
        "--systems",
        "--system",
        metavar="S,…",
        autocompletion=name_completion("systems", "devices"),
        help="System or device (`paleo list systems`); several with commas are compared: a:8,b:4.",
    ),
]
Explore = Annotated[
    str | None, typer.Option(metavar="FILE", help="Also write a page of all plans (.html, works offline).")
]


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Options of the requests, their limits and the engine."""

    input: Annotated[str | None, typer.Option(metavar="TOKENS", help="Mean number of tokens in a prompt. [1000]")] = (
        None
    )
    output: Annotated[str | None, typer.Option(metavar="TOKENS", help="Mean number of tokens in an answer. [300]")] = (
        None
    )
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="CSV file with arrival times and lengths of requests, such as Azure's traces."
        ),
    ] = None
    rate: Annotated[str | None, typer.Option(metavar="R", help="Requests per second. [the most that are served]")] = (
        None
    )
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency", "--users", min=1, help="Number of users; each waits for an answer before the next request."
        ),
    ] = None
    think: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time from an answer to the user's next request. [0 s]")
    ] = None
    arrivals: Annotated[
        str,
        typer.Option(
            help="Arrival of requests: poisson, constant or 'at once'.",
            autocompletion=word_completion("poisson", "constant"),
        ),
    ] = "poisson"
    ttft: Annotated[str | None, typer.Option(metavar="TIME", help="Longest time to the first token: 2s.")] = None
    tpot: Annotated[str | None, typer.Option(metavar="TIME", help="Longest time per further token: 50ms.")] = None
    latency: Annotated[str | None, typer.Option(metavar="TIME", help="Longest time to a whole answer: 10s.")] = None
    percentile: Annotated[
        str, typer.Option(metavar="P", help="Percentile of requests that meet the limits: 50, 90, 95, 99 or mean.")
    ] = "99"
    engine: Annotated[
        str,
        typer.Option(
            metavar="E",
            help="Inference engine: vllm, sglang, tensorrt-llm, or auto for the best.",
            autocompletion=name_completion("engines"),
        ),
    ] = "vllm"
    strategy: Annotated[
        str | None, typer.Option(help="Parallelism of a replica: tp=4, tp=8,pp=2, tp=8,ep=8. [searched]")
    ] = None
    weights: Annotated[
        str | None,
        typer.Option(
            help="Number format of weights: bf16, fp8, nvfp4, int4, mxfp4, or with that of experts: fp8+mxfp4; several "
            "with commas are compared. [as released]"
        ),
    ] = None
    cache: Annotated[str | None, typer.Option(help="Number format of the KV cache: bf16, fp8. [bf16]")] = None
    prefix_hit: Annotated[float, typer.Option(help="Fraction of prompt tokens found in the prefix cache.")] = 0.0
    length_variation: Annotated[float, typer.Option(help="Coefficient of variation of prompt and answer lengths.")] = (
        0.0
    )
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Largest number of tokens per iteration of the engine. [the engine's]")
    ] = None
    sequences: Annotated[
        int | None, typer.Option(min=1, help="Largest number of sequences per iteration of the engine. [the engine's]")
    ] = None
    speculate: Annotated[
        int, typer.Option(min=0, help="Tokens drafted per iteration of speculative decoding (EAGLE, MTP). [0]")
    ] = 0
    acceptance: Annotated[float | None, typer.Option(help="Probability that a drafted token is accepted. [0.6]")] = None
    disaggregate: Annotated[
        bool, typer.Option("--disaggregate", help="Also try separate replicas for prefill and for decode.")
    ] = False
    command: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="COMMAND", help="Launch command of vLLM, SGLang or trtllm-serve, or a file that holds it."
        ),
    ] = None


@app.command(rich_help_panel=PREDICT)
@packed_options("service", ServiceOptions)
@with_tariff_options
def serve(
    *,
    model: OptionalModel = None,
    system: ServedSystems,
    gpus: Gpus = None,
    service: ServiceOptions,
    rates: TariffOptions,
    as_json: AsJson = False,
    plot: Plot = None,
    explore: Explore = None,
) -> None:
    """Predict how many requests a service answers a second, how fast, and at what price.

    \b
    paleo serve llama3-70b --system dgx-h100 --gpus 8 --weights fp8 --cache fp8 --ttft 2s --tpot 50ms
    paleo serve llama3-8b --system aws-g6e.48xlarge --gpus 4 --input 500 --output 200 --rate 20/s
    paleo serve qwen3-30b-a3b --system dgx-h100 --gpus 2 --users 100 --think 30s --engine auto
    paleo serve llama3-70b --systems dgx-h100:8,dgx-b200:4 --input 1k~0.8 --tpot 50ms
    """
    from paleo.services import SinglePassResult
    from paleo.services import serve as answered

    path, page = checked_plot_path(plot), checked_page_path(explore)
    count = 1 if gpus is None else gpus
    answer = answered(model, system, gpus=count, **asdict(service), **asdict(rates))
    if isinstance(answer, SinglePassResult):
        if path is not None or page is not None:
            raise SpecError(f"--plot and --explore: {answer.service.model.name} generates no tokens; see the table")
    else:
        _draw(answer, path, page)
    show_document(answer.document, answer.table, as_json)
    warn(answer.warnings)
    if not answer.possible:
        raise typer.Exit(EXIT_NO)


def _draw(answer: ServeResult, path: Path | None, page: Path | None) -> None:
    """Write the plot and the HTML page of a serving answer, if requested."""
    if path is not None and answer.possible:
        from paleo.report.serving import figure

        save_plot(path, lambda: figure(answer.service))
    write_page(page, lambda date: _page(answer, date))


def _page(answer: ServeResult, date: str) -> str:
    from paleo.report.answer import service_page

    return service_page(answer.service, answer.systems, date=date)
