"""``paleo serve``: predicts how many users a service can answer within latency limits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from paleo.cli.application import PREDICT_HELP_GROUP, app, exit_unless, print_result, save_plot, write_page
from paleo.cli.options import (
    SYSTEMS_AND_DEVICES,
    JsonOption,
    OptionalModel,
    OptionalWholeNumber,
    PageFileOption,
    PlotFileOption,
    TariffOptions,
    catalog_name_completion,
    word_completion,
)
from paleo.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Options of the requests, their limits and the engine.

    Parameters
    ----------
    input : TOKENS
        Mean number of tokens in a prompt. [1000]
    output : TOKENS
        Mean number of tokens in an answer. [300]
    trace : FILE
        CSV file with arrival times and lengths of requests, such as Azure's traces.
    rate : R
        Requests per second. [the most that are served]
    concurrency
        Number of users; each waits for an answer before the next request.
    think : TIME
        Time from an answer to the user's next request. [0 s]
    arrivals
        Arrival of requests: poisson, constant or 'at once'.
    ttft : TIME
        Longest time to the first token: 2s.
    tpot : TIME
        Longest time per further token: 50ms.
    latency : TIME
        Longest time to a whole answer: 10s.
    percentile : P
        Percentile of requests that meet the limits: 50, 90, 95, 99 or mean.
    engine : E
        Inference engine: vllm, sglang, tensorrt-llm, or auto for the best.
    strategy
        Parallelism of a replica: tp=4, tp=8,pp=2, tp=8,ep=8. [searched]
    weights
        Number format of weights: bf16, fp8, nvfp4, int4, mxfp4, or with that of experts: fp8+mxfp4; several with
        commas are compared. [as released]
    cache
        Number format of the KV cache: bf16, fp8. [bf16]
    prefix_hit
        Fraction of prompt tokens found in the prefix cache.
    length_variation
        Coefficient of variation of prompt and answer lengths.
    batch_tokens
        Largest number of tokens per iteration of the engine. [the engine's]
    sequences
        Largest number of sequences per iteration of the engine. [the engine's]
    speculate
        Tokens drafted per iteration of speculative decoding (EAGLE, MTP). [0]
    acceptance
        Probability that a drafted token is accepted. [0.6]
    disaggregate
        Also try separate replicas for prefill and for decode.
    command : COMMAND
        Launch command of vLLM, SGLang or trtllm-serve, or a file that holds it.
    """

    input: str | None = None
    output: str | None = None
    trace: str | None = None
    rate: str | None = None
    concurrency: Annotated[int | None, typer.Option("--concurrency", "--users", min=1)] = None
    think: str | None = None
    arrivals: Annotated[str, typer.Option(autocompletion=word_completion("poisson", "constant", "at once"))] = "poisson"
    ttft: str | None = None
    tpot: str | None = None
    latency: str | None = None
    percentile: str = "99"
    engine: Annotated[str, typer.Option(autocompletion=catalog_name_completion("engines"))] = "vllm"
    strategy: str | None = None
    weights: str | None = None
    cache: str | None = None
    prefix_hit: float = 0.0
    length_variation: float = 0.0
    batch_tokens: Annotated[int | None, typer.Option(min=1)] = None
    sequences: Annotated[int | None, typer.Option(min=1)] = None
    speculate: Annotated[int, typer.Option(min=0)] = 0
    acceptance: float | None = None
    disaggregate: bool = False
    command: Annotated[str | None, typer.Option("--from")] = None


@app.command(rich_help_panel=PREDICT_HELP_GROUP)
def serve(
    *,
    model: OptionalModel = None,
    system: Annotated[str, typer.Option("--systems", "--system", autocompletion=SYSTEMS_AND_DEVICES)],
    gpus: OptionalWholeNumber = None,
    service: ServiceOptions,
    rates: TariffOptions,
    as_json: JsonOption = False,
    plot: PlotFileOption = None,
    explore: PageFileOption = None,
) -> None:
    """Predict how many requests a service answers a second, how fast, and at what price.

    \b
    paleo serve llama3-70b --system dgx-h100 --gpus 8 --weights fp8 --cache fp8 --ttft 2s --tpot 50ms
    paleo serve llama3-8b --system aws-g6e.48xlarge --gpus 4 --input 500 --output 200 --rate 20/s
    paleo serve qwen3-30b-a3b --system dgx-h100 --gpus 2 --users 100 --think 30s --engine auto
    paleo serve llama3-70b --systems dgx-h100:8,dgx-b200:4 --input 1k~0.8 --tpot 50ms

    Parameters
    ----------
    system : S,…
        System or device (`paleo list systems`); several with commas are compared: a:8,b:4.
    gpus
        Number of GPUs, over all replicas. [1]
    explore : FILE
        Also write a page of all plans (.html, works offline).
    """
    from paleo.services import SinglePassResult
    from paleo.services import serve as answered

    count = 1 if gpus is None else gpus
    answer = answered(model, system, gpus=count, **asdict(service), **asdict(rates))
    if not isinstance(answer, SinglePassResult):
        service_plans, compared = answer.service, answer.compared_services
        save_plot(plot if answer.limits_met else None, lambda reports: reports.plot_service(service_plans), "serving")
        write_page(explore, lambda pages, date: pages.service_page(service_plans, compared, date=date))
    elif plot is not None or explore is not None:
        raise SpecError(f"--plot and --explore: {answer.service.model.name} generates no tokens; see the table")
    print_result(answer.json_document, answer.table, as_json, answer.warnings)
    exit_unless(answer.limits_met)
