"""``paleo plan``: the best strategies of all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from paleo.cli.application import DECIDE, NO, app
from paleo.cli.goal_options import Target
from paleo.cli.long_run_options import LongRunFlags, takes_long_run
from paleo.cli.options import AsJson, Counts, ModelName, Plot, RunOptions, completes, gpu_counts, takes_run, words
from paleo.cli.output import draw, picture_path, show_document
from paleo.cli.training_options import Epochs, Samples, TariffOptions, Tokens, takes_tariff
from paleo.errors import SpecError

if TYPE_CHECKING:
    from pathlib import Path

    from paleo.search.plans import Search
    from paleo.search.space import Space
    from paleo.specs.hardware import System
    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run
    from paleo.studies.buying import Wish
    from paleo.studies.cost import Tariff
    from paleo.studies.long_run import LongRunOptions

OneSystem = Annotated[
    str | None,
    typer.Option(
        "--system",
        metavar="S",
        help="A system or device of the catalog, or a YAML file.",
        autocompletion=completes("systems", "devices"),
    ),
]
SeveralSystems = Annotated[
    str | None,
    typer.Option(
        "--systems",
        metavar="A,B",
        help="Several of them: the best is found.",
        autocompletion=completes("systems", "devices"),
    ),
]
Explore = Annotated[
    str | None, typer.Option(metavar="FILE", help="Every plan as one page with sliders: .html, no network needed.")
]
Deadline = Annotated[str | None, typer.Option(metavar="TIME", help="When the training has to be done: 60d, 12h.")]
Budget = Annotated[str | None, typer.Option(metavar="USD", help="What it may cost: 5M, 20000.")]
Goal = Annotated[
    str,
    typer.Option(
        help="What is made small: time, cost, energy, or gpus.",
        autocompletion=words("time", "cost", "energy", "gpus"),
    ),
]
Top = Annotated[int, typer.Option(min=1, metavar="K", help="So many plans.")]
Explain = Annotated[bool, typer.Option("--explain", help="Why the winner wins, and how near the next one is.")]
StalenessCost = Annotated[
    float | None,
    typer.Option(
        metavar="K",
        help="Search --consistency bsp,async,… and --compress none,onebit,… too: each update of staleness asks for K "
        "times the samples more.",
    ),
]
StaleNoise = Annotated[
    float | None,
    typer.Option("--noise-scale", metavar="SAMPLES", help="The same with a price from the gradient's noise scale."),
]
PerLayer = Annotated[bool, typer.Option("--per-layer", help="Choose the split of each layer, for chains of layers.")]


@app.command("plan", rich_help_panel=DECIDE)
@takes_run
@takes_tariff
@takes_long_run
def plan_(
    model: ModelName,
    gpus: Counts,
    options: RunOptions,
    rates: TariffOptions,
    long_run: LongRunFlags,
    system: OneSystem = None,
    systems: SeveralSystems = None,
    objective: Goal = "time",
    tokens: Tokens = None,
    epochs: Epochs = None,
    samples: Samples = None,
    target: Target = None,
    deadline: Deadline = None,
    budget: Budget = None,
    top: Top = 10,
    explain: Explain = False,
    per_layer: PerLayer = False,
    as_json: AsJson = False,
    plot: Plot = None,
    explore: Explore = None,
    staleness_cost: StalenessCost = None,
    noise_scale: StaleNoise = None,
) -> None:
    """The fastest (or cheapest) strategies of all: degrees, microbatch, recomputation, ZeRO, schedule.

    Options of a run that are given narrow the search: --strategy tp=8 tries tp=8 alone.

    \b
    paleo plan llama3-70b --system dgx-h100 --gpus 512 --global-batch 1024 --explain
    paleo plan llama3-8b --systems dgx-a100-80gb,dgx-h100 --gpus 64,128 --tokens 1T --deadline 60d
    """
    from paleo.files import checked_output
    from paleo.questions import narrowed
    from paleo.report import search as shown
    from paleo.search import plans
    from paleo.specs.hardware import load_system
    from paleo.specs.model import load_model
    from paleo.studies import buying

    path = picture_path(plot)
    machines = [load_system(name) for name in _systems(system, systems)]
    counts, network, machine = gpu_counts(gpus), load_model(model), machines[0]
    run = options.run(gpus=counts[0], strategy="dp")
    page = None if explore is None else checked_output(explore, (".html",), option="--explore")
    priced = staleness_cost is not None or noise_scale is not None
    _check_outputs(page, path, len(machines), per_layer, priced)
    if per_layer:
        _split_layers(network, machine, run, as_json)
        return
    space = narrowed(run, options.narrowing())
    if priced:
        _modes(network, machine, run, counts, space, staleness_cost, noise_scale, top, as_json)
        return
    stated, failing = (tokens, epochs, samples, target, deadline, budget), long_run.stated()
    if systems is not None or failing or any(value is not None for value in stated):
        run, wish = _wish(network, run, *stated, objective, rates.tariff(), failing)
        _purchase(network, machines, counts, run, wish, space, top, page, as_json)
        return
    ranking = plans.search(network, machine, run, counts=counts, space=space, objective=objective, top=top)
    best = plans.explain(network, machine, ranking) if explain else None
    if page is not None:
        _explored(page, ranking, network, machine, buying.Wish(objective=objective))
    names = network.name, machine.name
    if path is not None:
        from paleo.report import plots

        draw(path, lambda: plots.plan(*names, ranking, machine.device.memory.capacity))
    show_document(lambda: shown.document(*names, ranking, best), lambda: shown.table(*names, ranking, best), as_json)
    if not ranking.fitting:
        raise typer.Exit(NO)


def _purchase(
    network: ModelSpec,
    machines: list[System],
    counts: list[int],
    run: Run,
    wish: Wish,
    space: Space,
    top: int,
    page: Path | None,
    as_json: bool,
) -> None:
    """The answer to a purchase, and the page of all plans where there is one system."""
    from paleo.report import buying as shown
    from paleo.search import plans
    from paleo.studies import buying

    reply, goal = buying.answer(network, machines, counts, run, wish, space=space, top=top), wish.objective
    if page is not None:
        alone = reply.searches[0][1] if len(counts) == 1 else None
        ranking = alone or plans.search(network, machines[0], run, counts=counts, space=space, objective=goal)
        _explored(page, ranking, network, machines[0], wish)
    show_document(
        lambda: {"model": network.name, "objective": goal, **shown.document(reply)},
        lambda: shown.table(reply),
        as_json,
    )
    if reply.best is None:
        raise typer.Exit(NO)


def _check_outputs(page: Path | None, path: Path | None, machines: int, per_layer: bool, priced: bool) -> None:
    """SpecError for a page or a picture of what has none."""
    if page is not None and (machines > 1 or per_layer):
        raise SpecError("--explore shows the plans of one system; state --system, without --per-layer")
    if per_layer and path is not None:
        raise SpecError("--plot draws plans of whole networks; leave out --per-layer")
    if priced and (machines > 1 or page is not None or path is not None):
        raise SpecError("--staleness-cost: plans of one system as a table; leave out --systems, --plot, --explore")


def _modes(
    network: ModelSpec,
    machine: System,
    run: Run,
    counts: list[int],
    space: Space,
    each: float | None,
    noise_scale: float | None,
    top: int,
    as_json: bool,
) -> None:
    """Plans over the listed consistency models and compressions, stale updates priced."""
    from paleo.report import search as shown
    from paleo.studies.modes import StalenessPrice, mode_search

    consistencies = _listed(run.consistency, "--consistency")
    stated = _listed(run.compress, "--compress") if run.compress is not None else ["none"]
    compressions = [None if name in ("none", "dense") else name for name in stated]
    searched = mode_search(
        network, machine, run, StalenessPrice(each, noise_scale), counts=counts, space=space, top=top,
        consistencies=consistencies, compressions=compressions,
    )  # fmt: skip
    names = network.name, machine.name
    show_document(lambda: shown.modes_document(*names, searched), lambda: shown.modes_table(*names, searched), as_json)


def _listed(text: str, option: str) -> list[str]:
    """Names with commas between them."""
    from paleo.units import listed

    names = listed(text)
    if not names:
        raise SpecError(f"{option} {text!r}: expected names with commas between them")
    return names


def _split_layers(network: ModelSpec, machine: System, run: Run, as_json: bool) -> None:
    """The split of each layer of a chain."""
    from paleo.report import search as shown
    from paleo.search import hybrid

    split, names = hybrid.hybrid(network, machine, run), (network.name, machine.name)
    show_document(lambda: shown.hybrid_document(*names, split), lambda: shown.hybrid_table(*names, split), as_json)


def _explored(path: Path, searched: Search, network: ModelSpec, machine: System, wish: Wish) -> None:
    """Writes the page of all plans."""
    from paleo.files import write_text
    from paleo.predict import predict
    from paleo.report.explorer import MOST_PLANS, explorer
    from paleo.search.columns import columns
    from paleo.studies.training import training

    if searched.ranking is None or not searched.plans:
        raise SpecError("--explore: the search has no plans to show")
    best = predict(network, machine, searched.plans[0].run)
    whole = None if wish.amount is None else training(best, wish.amount, wish.tariff)
    table = columns(searched.ranking, MOST_PLANS)
    batch = searched.global_batch
    write_text(path, explorer(table, best, whole, objective=wish.objective, global_batch=batch))


def _systems(system: str | None, systems: str | None) -> list[str]:
    """Names that --system or --systems state."""
    from paleo.units import listed

    if (system is None) == (systems is None):
        raise SpecError("expected --system S or --systems A,B, one of them")
    names = listed(system or systems or "")
    if not names:
        raise SpecError(f"--systems {systems!r}: expected names such as dgx-a100-80gb,dgx-h100")
    return names


def _wish(
    network: ModelSpec,
    run: Run,
    tokens: float | None,
    epochs: float | None,
    samples: float | None,
    target: str | None,
    deadline: str | None,
    budget: str | None,
    objective: str,
    rates: Tariff,
    failing: LongRunOptions | None,
) -> tuple[Run, Wish]:
    """The run, and what is asked of a purchase."""
    from paleo.studies.buying import stated_wish
    from paleo.studies.learning import aimed
    from paleo.studies.training import stated_amount, with_length

    stated = stated_amount(network, run, epochs=epochs, samples=samples, tokens=tokens)
    run, wanted = aimed(network, run, target, stated)
    wish = stated_wish(wanted, deadline, budget, objective, rates)
    return run, replace(wish, long_run=with_length(failing, wanted))
