"""``paleo plan``: searches for the best strategy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paleo.cli.application import (
    DECIDE_HELP_GROUP,
    app,
    check_launch_option,
    exit_unless,
    print_result,
    save_plot,
    write_launch_files,
)
from paleo.cli.options import (
    SYSTEMS_AND_DEVICES,
    JsonOption,
    LaunchFileOption,
    OptionalModel,
    PageFileOption,
    PlotFileOption,
    TargetTaskOption,
    TrainingOptions,
    word_completion,
)
from paleo.errors import SpecError

if TYPE_CHECKING:
    from paleo.answers import PlanResult, SearchResult
    from paleo.predict import Prediction
    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run


@app.command("plan", rich_help_panel=DECIDE_HELP_GROUP)
def plan_(
    *,
    model: OptionalModel = None,
    options: TrainingOptions,
    gpus: str | None = None,
    system: Annotated[str | None, typer.Option(autocompletion=SYSTEMS_AND_DEVICES)] = None,
    systems: Annotated[str | None, typer.Option(autocompletion=SYSTEMS_AND_DEVICES)] = None,
    objective: Annotated[str, typer.Option(autocompletion=word_completion("time", "cost", "energy", "gpus"))] = "time",
    target: TargetTaskOption = None,
    deadline: str | None = None,
    budget: str | None = None,
    top: Annotated[int, typer.Option(min=1)] = 10,
    explain: bool = False,
    exhaustive: bool = False,
    per_layer: bool = False,
    as_json: JsonOption = False,
    plot: PlotFileOption = None,
    explore: PageFileOption = None,
    launch: LaunchFileOption = None,
    staleness_cost: float | None = None,
    noise_scale: float | None = None,
) -> None:
    """Find the best training plan: parallelism degrees, microbatch, recomputation, ZeRO stage and schedule.

    Run options restrict the search: --strategy tp=8 searches only plans with tp=8.

    \b
    paleo plan llama3-70b --system dgx-h100 --gpus 512 --global-batch 1024 --explain
    paleo plan llama3-8b --systems dgx-a100-80gb,dgx-h100 --gpus 64,128 --tokens 1T --deadline 60d
    paleo plan llama3-70b --system dgx-h100 --tokens 1T --deadline 60d
    paleo plan llama3-70b --systems dgx-h100:1024,dgx-b200:512 --tokens 15T --objective cost --global-batch 2048

    Parameters
    ----------
    gpus : 1,2,4,…
        Numbers of GPUs: a list (8,16) or powers of two (8..64). [those in --systems, else the smallest order of
        whole nodes that meets --deadline and --budget]
    system : S
        System or device: a catalog name (`paleo list systems`) or a YAML file.
    systems : A,B
        Systems to choose from, separated by commas, optionally with GPU counts: A:64,B:32.
    objective
        Minimize time, cost, energy or gpus.
    deadline : TIME
        Longest time that the training may take: 60d, 12h.
    budget : USD
        Highest cost of the training in USD: 5M, 20000.
    top : K
        Number of plans to print.
    explain
        Explain why the first plan wins and by how much.
    exhaustive
        Evaluate every configuration, including those that bounds rule out.
    per_layer
        Choose a strategy for each layer (networks that are chains of layers only).
    explore : FILE
        Also write an interactive page of all plans (.html, works offline).
    staleness_cost : K
        Also search the models in --consistency and the methods in --compress; each update of staleness costs K
        times the samples.
    noise_scale : SAMPLES
        Like --staleness-cost, with the cost derived from this gradient noise scale (in samples).
    """
    from paleo import questions

    if options.from_ and gpus is not None:
        options = replace(options, gpus=questions.parse_gpu_counts(gpus)[0])
    names, run = _systems(system, systems), options.build_run(searched=True)
    stated = 0 if options.launch_file_job is None else options.launch_file_job.plan.gpus
    network, gpus = options.network(model), gpus or (str(stated) if stated else None)
    check_launch_option(launch, options.software)
    modes = staleness_cost is not None or noise_scale is not None
    # Raise SpecError if a page or a picture is requested for an answer that has none.
    machines = len(names)
    if explore is not None and (machines > 1 or per_layer):
        raise SpecError("--explore: the page holds the plans of one system; use --system, without --per-layer")
    if plot is not None and machines > 1:
        raise SpecError("--plot: the plot has the plans of one system; use --system")
    if per_layer and plot is not None:
        raise SpecError("--plot: there is no plot of --per-layer; omit one of them")
    if modes and (machines > 1 or explore is not None or plot is not None):
        raise SpecError("--staleness-cost: only for one system and as a table; omit --systems, --plot and --explore")
    if gpus is None and (modes or per_layer):
        raise SpecError("--gpus is missing; expected GPU counts such as 64 or 8..64")
    if per_layer or modes:
        price = staleness_cost, noise_scale
        _print_special_search(network, names[0], gpus, run, None if per_layer else price, top, as_json)
        return
    size: dict[str, Any] = {"objective": objective, "top": top, "run": run}
    goal = {**options.amount_keywords(), "target": target, "deadline": deadline, "budget": budget}
    terms, plain = options.price_and_failure_keywords(), TrainingOptions().price_and_failure_keywords()
    answer: PlanResult | SearchResult
    if gpus is None or systems is not None or terms != plain or any(value is not None for value in goal.values()):
        answer = questions.plan(network, names, gpus, **goal, **terms, **size)
    else:
        whole = exhaustive or plot is not None or explore is not None  # pictures show all configurations
        answer = questions.search(network, names[0], gpus or "", explain=explain, exhaustive=whole, **size)
    _draw(answer, plot, explore)
    print_result(answer.json_document, answer.table, as_json, options.warnings())
    write_launch_files(launch, lambda: _first_prediction(answer))
    exit_unless(answer.best is not None)


def _print_special_search(
    model: str | ModelSpec,
    system: str,
    gpus: str | None,
    stated_run: Run,
    price: tuple[float | None, float | None] | None,
    top: int,
    as_json: bool,
) -> None:
    """Print the result of a per-layer search, or of a search over consistency models and compression.

    The latter needs a price of stale updates in samples: per update, or one that follows from the noise scale.
    """
    from paleo.questions import parse_gpu_counts, search_space_of_unset_fields
    from paleo.report import plan as reports
    from paleo.specs.model import load_model
    from paleo.specs.system import load_system

    network = load_model(model) if isinstance(model, str) else model
    machine, counts = load_system(system), parse_gpu_counts(gpus or "")
    run, names = stated_run.model_copy(update={"gpus": counts[0], "strategy": "dp"}), (network.name, machine.name)
    if price is None:
        from paleo.search.layer_splits import search_layer_splits

        split = search_layer_splits(network, machine, run)
        layers_report = (*names, split)
        print_result(
            lambda: reports.layers_document(*layers_report), lambda: reports.layers_table(*layers_report), as_json
        )
        return
    from paleo.studies.gradient_exchange import StalenessPenalty, exchange_search

    consistencies = _comma_separated(run.exchange.consistency, "--consistency")
    stated = _comma_separated(run.exchange.compress, "--compress") if run.exchange.compress is not None else ["none"]
    compressions = [None if name in ("none", "dense") else name for name in stated]
    searched = exchange_search(
        network, machine, run, StalenessPenalty(*price), counts=counts, space=search_space_of_unset_fields(stated_run),
        top=top, consistencies=consistencies, compressions=compressions,
    )  # fmt: skip
    exchange_report = (*names, searched)
    print_result(
        lambda: reports.exchange_search_json(*exchange_report),
        lambda: reports.exchange_search_table(*exchange_report),
        as_json,
    )


def _comma_separated(text: str, option: str) -> list[str]:
    """Return the names in a text that are separated by commas; ``option`` is named in errors."""
    from paleo.units import comma_separated

    names = comma_separated(text)
    if not names:
        raise SpecError(f"{option} {text!r}: expected names with commas between them")
    return names


def _first_prediction(answer: PlanResult | SearchResult) -> Prediction:
    """Return the prediction of the first plan of an answer."""
    from paleo.answers import SearchResult
    from paleo.predict import predict

    if isinstance(answer, SearchResult):
        return answer.best_prediction
    first = answer.purchase.plans[0]
    return predict(answer.model, first.system, first.row.run)


def _draw(answer: PlanResult | SearchResult, plot: str | None, page: str | None) -> None:
    """Write the plot and the HTML page of all plans on the answer's system, if requested."""
    names, capacity = (answer.model.name, answer.system.name), answer.system.device.memory.usable_bytes
    save_plot(plot, lambda plots: plots.plot_plans(*names, answer.found_plans, capacity))
    if page is not None:
        from paleo.files import write_text
        from paleo.report.html_pages import plan_search_page

        write_text(page, plan_search_page(answer.model, answer.system, answer.found_plans, answer.requirements))


def _systems(system: str | None, systems: str | None) -> list[str]:
    """Return the names that --system or --systems state."""
    from paleo.units import comma_separated

    if (system is None) == (systems is None):
        raise SpecError("expected either --system S or --systems A,B")
    names = comma_separated(system or systems or "")
    if not names:
        raise SpecError(f"--systems {systems!r}: expected names such as dgx-a100-80gb,dgx-h100")
    return names
