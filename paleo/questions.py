"""The questions of the command line as functions; `paleo.answers` has what they return.

    import paleo

    paleo.compare("bert_large", ["dgx-a100-80gb", "dgx-h100"], gpus=8, batch=16)   # a table, in a notebook
    paleo.scale("resnet50", "dgx-a100-80gb", [1, 8, 64], global_batch=1024).to_frame()

Networks, systems and tasks are names of the catalog, paths, or what was loaded. Keywords beside those of a function are
fields of `paleo.specs.run.Run` (``seq`` too) and, where a training is priced, of the tariff: ``price``, ``term``,
``buy``, ``electricity``, ``pue``, ``host_power``, and where failures are counted ``goodput`` and the options of a long
run (`paleo.studies.long_run.LongRunOptions`), as the command line spells them; any other one is a SpecError.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paleo.answers import Compared, Document, Estimate, Planned, ScalingCurves, Searched, TimeToTarget
from paleo.errors import SpecError, near
from paleo.predict import predict
from paleo.report.blocks import Blocks
from paleo.specs.hardware import System, load_system
from paleo.specs.loading import validate
from paleo.specs.model import ModelSpec, load_model
from paleo.specs.run import SEQUENCE, Run
from paleo.specs.task import TrainingTask, load_task
from paleo.studies.advice import advise
from paleo.studies.cost import Tariff, stated_tariff
from paleo.studies.learning import Goal, aimed, amount_for
from paleo.studies.long_run import LongRunOptions, stated_long_run
from paleo.studies.training import amount, stated_amount, training, usual_amount, with_length

if TYPE_CHECKING:
    from paleo.search.space import Space
    from paleo.studies.comparison import Objective, Planner

#: Keywords of a tariff, and those of a long run.
TARIFF_WORDS = frozenset(inspect.signature(stated_tariff).parameters)
LONG_RUN_WORDS = frozenset({"goodput", *(field.name for field in fields(LongRunOptions))})


def estimate(
    model: str | Path | ModelSpec,
    system: str | Path | System,
    *,
    run: Run | None = None,
    epochs: float | None = None,
    samples: float | None = None,
    tokens: float | None = None,
    loss: float | None = None,
    target: str | None = None,
    noise_scale: float | None = None,
    **options: Any,
) -> Estimate:
    """One configuration: its step, memory, throughput; time, rent and energy of a training."""
    asked = _Asked.of("estimate", run, options)
    network = _model(model)
    run_of_task, _ = aimed(network, asked.run, target, None)
    step = predict(network, _system(system), run_of_task)
    each = step.graph.tokens_per_sample
    stated = amount(network, epochs=epochs, samples=samples, tokens=tokens, tokens_per_sample=each)
    wanted, notes = amount_for(step, Goal(loss, target, noise_scale), stated)
    failing = with_length(asked.long_run, wanted)
    cost = None if wanted is None else training(step, wanted, asked.tariff, long_run=failing)
    return Estimate(step, cost, advise(step), Blocks(step), notes)


def scale(
    model: str | Path | ModelSpec,
    system: str | Path | System,
    gpus: int | Sequence[int],
    *,
    mode: str | None = None,
    epochs: float | None = None,
    samples: float | None = None,
    tokens: float | None = None,
    run: Run | None = None,
    **options: Any,
) -> ScalingCurves:
    """The same network on more and more GPUs; ``mode``: strong (with ``global_batch``), weak (else) or both. Every
    count is priced for so many epochs, samples or tokens. ``consistency`` and ``nodes`` may list several, with a curve
    for each."""
    from paleo.studies import scaling

    asked = _Asked.of("scale", run, options)
    kinds = scaling.scalings(mode or ("weak" if asked.run.global_batch is None else "strong"))
    network, machine = _model(model), _system(system)
    counts = _counts("scale", gpus)
    stated = stated_amount(network, asked.run, epochs=epochs, samples=samples, tokens=tokens)
    wanted = stated or usual_amount(network)
    terms = asked.long_run, wanted, asked.tariff
    curves = (
        scaling.scale(network, machine, variant, counts, kind, *terms)
        for kind in kinds
        for variant in scaling.variants(asked.run)
    )
    return ScalingCurves(network, machine, tuple(curves))


def compare(
    model: str | Path | ModelSpec,
    systems: str | Path | System | Sequence[str | Path | System],
    *,
    run: Run | None = None,
    epochs: float | None = None,
    samples: float | None = None,
    tokens: float | None = None,
    target: str | None = None,
    objective: Objective | None = None,
    **options: Any,
) -> Compared:
    """The same run on several systems, in the order given or best first by ``objective``: time, cost or energy; with
    ``strategy="auto"`` each has the best plan of a search."""
    from paleo.studies import comparison

    asked = _Asked.of("compare", run, options)
    network = _model(model)
    stated = stated_amount(network, asked.run, epochs=epochs, samples=samples, tokens=tokens)
    aimed_run, wanted = aimed(network, asked.run, target, stated)
    machines, search_plans = _machines("compare", systems), planner_of(asked.run, _given(asked.run))
    terms = wanted, asked.tariff, asked.long_run
    study = comparison.compare(network, machines, aimed_run, *terms, planner=search_plans)
    return Compared(study if objective is None else study.ranked(comparison.objective_named(objective)))


def search(
    model: str | Path | ModelSpec,
    system: str | Path | System,
    gpus: int | Sequence[int],
    *,
    objective: str = "time",
    top: int = 10,
    explain: bool = False,
    run: Run | None = None,
    **options: Any,
) -> Searched:
    """The best strategies of all on one system; ``strategy``, ``microbatch``, ``recompute`` and ``schedule`` narrow the
    search where they are given."""
    from paleo.search import plans

    network, machine = _model(model), _system(system)
    counts = _counts("search", gpus)
    stated = _Asked.of("search", run, options, priced=False, long_run=False).run
    space, sized = narrowed(stated, _given(stated)), stated.model_copy(update={"gpus": counts[0], "strategy": "dp"})
    ranking = plans.search(network, machine, sized, counts=counts, space=space, objective=objective, top=top)
    return Searched(network, machine, ranking, plans.explain(network, machine, ranking) if explain else None)


def _given(run: Run) -> Document:
    """Fields of a run that were stated."""
    return {name: getattr(run, name) for name in run.model_fields_set}


#: Fields of a run that narrow a search.
NARROWING = ("strategy", "microbatch", "recompute", "schedule")


def narrowed(run: Run, stated: Mapping[str, Any]) -> Space:
    """What the stated fields of a run leave to be searched; schedules that the run's software is not known to run are
    left out unless one is stated."""
    from paleo.search.space import within
    from paleo.studies.comparison import AUTO
    from paleo.studies.launch import runnable

    fields_of = {"microbatches": "microbatch", "recompute": "recompute", "schedules": "schedule"}
    strategy = stated.get("strategy")
    space = within(
        None if strategy == AUTO else strategy, **{listed: stated.get(name) for listed, name in fields_of.items()}
    )
    return runnable(space, run.software) if stated.get("schedule") is None else space


def planner_of(run: Run, stated: Mapping[str, Any]) -> Planner:
    """The search of a plan, narrowed by the stated fields of a run."""
    from paleo.search.recommended import recommended

    return functools.partial(recommended, space=narrowed(run, stated))


def plan(
    model: str | Path | ModelSpec,
    systems: str | Path | System | Sequence[str | Path | System],
    gpus: int | Sequence[int],
    *,
    epochs: float | None = None,
    samples: float | None = None,
    tokens: float | None = None,
    target: str | None = None,
    deadline: str | None = None,
    budget: str | float | None = None,
    objective: str = "time",
    top: int = 10,
    run: Run | None = None,
    **options: Any,
) -> Planned:
    """Which system, how many of its GPUs and which strategy train so much within ``deadline`` (``60d``) and ``budget``
    (``5M``, USD), best by time, cost, energy or gpus."""
    from paleo.studies import buying

    network = _model(model)
    machines = _machines("plan", systems)
    counts = _counts("plan", gpus)
    asked = _Asked.of("plan", run, options)
    stated = stated_amount(network, asked.run, epochs=epochs, samples=samples, tokens=tokens)
    aimed_run, wanted = aimed(network, asked.run, target, stated)
    failing = with_length(asked.long_run, wanted)
    wish = replace(buying.stated_wish(wanted, deadline, budget, objective, asked.tariff), long_run=failing)
    sized = aimed_run.model_copy(update={"gpus": counts[0], "strategy": "dp"})
    space = narrowed(aimed_run, _given(asked.run))
    return Planned(buying.answer(network, machines, counts, sized, wish, space=space, top=top))


def target(
    task: str | Path | TrainingTask,
    system: str | Path | System,
    gpus: int | Sequence[int],
    *,
    batch: int | str = "auto",
    noise_scale: float | None = None,
    **options: Any,
) -> TimeToTarget:
    """How long a task such as ``mlperf:bert`` takes to its target; ``batch`` in samples of all GPUs, or the best;
    ``noise_scale`` stands in for the critical batch of its law."""
    from paleo.studies.target import over_counts, scaling, with_noise_scale

    asked = _Asked.of("target", None, options, long_run=False)
    goal = with_noise_scale(load_task(task) if isinstance(task, str | Path) else task, noise_scale)
    machine, counts = _system(system), _counts("target", gpus)
    points = over_counts(goal, machine, counts, str(batch), **_given(asked.run))
    return TimeToTarget(goal, machine, scaling(points), asked.tariff)


# what is asked


@dataclass(frozen=True)
class _Asked:
    """The run, the tariff and the options of a long run that keywords state."""

    run: Run
    tariff: Tariff
    long_run: LongRunOptions | None

    @classmethod
    def of(cls, name: str, run: Run | None, options: Document, *, priced: bool = True, long_run: bool = True) -> _Asked:
        of_run = {*Run.model_fields, SEQUENCE}
        of_tariff, of_long_run = TARIFF_WORDS if priced else set(), LONG_RUN_WORDS if long_run else set()
        _check_keywords(name, options, {*of_run, *of_tariff, *of_long_run})
        stated = {key: value for key, value in options.items() if key in of_run}
        if run is not None and stated:
            raise SpecError(f"paleo.{name}: {', '.join(stated)} beside run=…; state the run in one way")
        tariff = stated_tariff(**{key: value for key, value in options.items() if key in of_tariff})
        long = {key: value for key, value in options.items() if key in of_long_run}
        return cls(run or validate(Run, stated, f"paleo.{name}"), tariff, stated_long_run(**long))


def _check_keywords(name: str, options: Mapping[str, Any], known: set[str]) -> None:
    """SpecError for a keyword that a function does not take, with the nearest that it does."""
    keywords = set(inspect.signature(globals()[name]).parameters) - {"options"}
    for keyword in options:
        if keyword not in known:
            raise SpecError(f"paleo.{name}: unknown keyword {keyword!r}; {near(keyword, known | keywords)}")


def _counts(name: str, gpus: int | Sequence[int]) -> list[int]:
    """Counts of GPUs, one or several; SpecError where one is none."""
    counts = [gpus] if isinstance(gpus, int) else list(gpus)
    if not counts or not all(isinstance(count, int) and count > 0 for count in counts):
        raise SpecError(f"paleo.{name}: gpus={gpus!r}: expected a count of 1 or more, or several such as [8, 16]")
    return counts


def _machines(name: str, systems: str | Path | System | Sequence[str | Path | System]) -> list[System]:
    """Systems, one or several; SpecError where there is none."""
    listed = [systems] if isinstance(systems, str | Path | System) else list(systems)
    if not listed:
        raise SpecError(f"paleo.{name}: systems={systems!r}: expected names such as ['dgx-a100-80gb', 'dgx-h100']")
    return [_system(system) for system in listed]


def _model(model: str | Path | ModelSpec) -> ModelSpec:
    return load_model(model) if isinstance(model, str | Path) else model


def _system(system: str | Path | System) -> System:
    return load_system(system) if isinstance(system, str | Path) else system
