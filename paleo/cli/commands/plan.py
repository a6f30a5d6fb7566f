"""``paleo plan``: the best strategies of all."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paleo.cli.application import DECIDE, NO, app, draw, picture_path, show_document
from paleo.cli.options import (
    AsJson,
    Epochs,
    LongRunFlags,
    ModelName,
    Plot,
    RunOptions,
    Samples,
    Target,
    TariffOptions,
    Tokens,
    completes,
    takes_long_run,
    takes_run,
    takes_tariff,
    words,
)
from paleo.errors import SpecError

if TYPE_CHECKING:
    from pathlib import Path

    from paleo.answers import Planned, Searched
    from paleo.specs.run import Run

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
        help="Several of them, each perhaps with its GPUs (A:64,B:32): the best is found.",
        autocompletion=completes("systems", "devices"),
    ),
]
SearchedCounts = Annotated[
    str | None,
    typer.Option(
        "--gpus", metavar="1,2,4,…", help="GPU counts: 8,16 or 8..64, by doublings. [those behind the systems]"
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
    options: RunOptions,
    rates: TariffOptions,
    long_run: LongRunFlags,
    gpus: SearchedCounts = None,
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
    paleo plan llama3-70b --systems dgx-h100:1024,dgx-b200:512 --tokens 15T --objective cost --global-batch 2048
    """
    from paleo import questions
    from paleo.files import checked_output

    path, names, run = picture_path(plot), _systems(system, systems), options.run()
    page = None if explore is None else checked_output(explore, (".html",), option="--explore")
    modes = staleness_cost is not None or noise_scale is not None
    _check_outputs(page, path, len(names), per_layer, modes)
    if gpus is None and (systems is None or modes or per_layer):
        raise SpecError("state --gpus, such as 64 or 8..64; behind --systems each may have its own: A:64,B:32")
    if per_layer or modes:
        price = staleness_cost, noise_scale
        _other_search(model, names[0], gpus, run, None if per_layer else price, top, as_json)
        return
    size: dict[str, Any] = {"objective": objective, "top": top, "run": run}
    goal: dict[str, Any] = {"tokens": tokens, "epochs": epochs, "samples": samples, "target": target}
    goal |= {"deadline": deadline, "budget": budget}
    terms = {**asdict(rates), **long_run.keywords()}
    plain = {**asdict(TariffOptions()), **LongRunFlags().keywords()}
    answer: Planned | Searched
    if systems is not None or terms != plain or any(value is not None for value in goal.values()):
        answer = questions.plan(model, names, gpus, **goal, **terms, **size)
    else:
        answer = questions.search(model, names[0], gpus or "", explain=explain, **size)
    _draw(answer, path, page)
    show_document(answer.document, answer.table, as_json)
    if answer.best is None:
        raise typer.Exit(NO)


def _check_outputs(page: Path | None, path: Path | None, machines: int, per_layer: bool, priced: bool) -> None:
    """SpecError for a page or a picture of what has none."""
    if page is not None and (machines > 1 or per_layer):
        raise SpecError("--explore shows the plans of one system; state --system, without --per-layer")
    if path is not None and machines > 1:
        raise SpecError("--plot draws the plans of one system; state --system")
    if per_layer and path is not None:
        raise SpecError("--plot draws plans of whole networks; leave out --per-layer")
    if priced and (machines > 1 or page is not None or path is not None):
        raise SpecError("--staleness-cost: plans of one system as a table; leave out --systems, --plot, --explore")


def _other_search(
    model: str,
    system: str,
    gpus: str | None,
    stated_run: Run,
    price: tuple[float | None, float | None] | None,
    top: int,
    as_json: bool,
) -> None:
    """The split of each layer of a chain; or, where stale updates have a price (each, by noise scale), plans over the
    listed consistency models and compressions."""
    from paleo.questions import gpu_counts, narrowed
    from paleo.report import search as shown
    from paleo.specs.model import load_model
    from paleo.specs.system import load_system

    network, machine, counts = load_model(model), load_system(system), gpu_counts(gpus or "")
    run, names = stated_run.model_copy(update={"gpus": counts[0], "strategy": "dp"}), (network.name, machine.name)
    if price is None:
        from paleo.search.hybrid import hybrid

        split = hybrid(network, machine, run)
        show_document(lambda: shown.hybrid_document(*names, split), lambda: shown.hybrid_table(*names, split), as_json)
        return
    from paleo.studies.modes import StalenessPrice, mode_search

    consistencies = _listed(run.consistency, "--consistency")
    stated = _listed(run.compress, "--compress") if run.compress is not None else ["none"]
    compressions = [None if name in ("none", "dense") else name for name in stated]
    searched = mode_search(
        network, machine, run, StalenessPrice(*price), counts=counts, space=narrowed(stated_run), top=top,
        consistencies=consistencies, compressions=compressions,
    )  # fmt: skip
    show_document(lambda: shown.modes_document(*names, searched), lambda: shown.modes_table(*names, searched), as_json)


def _listed(text: str, option: str) -> list[str]:
    """Names with commas between them."""
    from paleo.units import listed

    names = listed(text)
    if not names:
        raise SpecError(f"{option} {text!r}: expected names with commas between them")
    return names


def _draw(answer: Planned | Searched, path: Path | None, page: Path | None) -> None:
    """The picture and the page of all plans on the answer's system, where they are asked for."""
    if path is not None:
        from paleo.report import plots

        names, capacity = (answer.model.name, answer.system.name), answer.system.device.memory.usable
        draw(path, lambda: plots.plan(*names, answer.search, capacity))
    if page is not None:
        from paleo.files import write_text
        from paleo.report.explorer import explored

        write_text(page, explored(answer.model, answer.system, answer.search, answer.wish))


def _systems(system: str | None, systems: str | None) -> list[str]:
    """Names that --system or --systems state."""
    from paleo.units import listed

    if (system is None) == (systems is None):
        raise SpecError("expected --system S or --systems A,B, one of them")
    names = listed(system or systems or "")
    if not names:
        raise SpecError(f"--systems {systems!r}: expected names such as dgx-a100-80gb,dgx-h100")
    return names
