"""Public functions that answer like the commands of the same names; `paleo.answers` defines their results.

    import paleo

    paleo.compare("bert_large", ["dgx-a100-80gb", "dgx-h100"], gpus=8, batch=16)   # a table, in a notebook
    paleo.scale("resnet50", "dgx-a100-80gb", [1, 8, 64], global_batch=1024).to_frame()

Networks, systems and tasks are names of the catalog, paths, or loaded objects. `compare` takes ``dgx-h100:4`` and
``("dgx-h100", 4)`` for four GPUs of a system.

Further keywords are fields of `paleo.specs.run.Run` (``seq`` too). Where a training is priced, they may be those of the
tariff: ``price``, ``term``, ``buy``, ``electricity``, ``pue``, ``host_power``. Where failures are counted, they may be
``goodput`` and the options of a long run (`paleo.studies.goodput.LongRunOptions`), spelt as on the command line. Any
other keyword raises SpecError.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paleo.answers import (
    AuditResult,
    CompareResult,
    Estimate,
    FleetResult,
    JsonDocument,
    PlanResult,
    ScalingCurves,
    SearchResult,
    TimeToTarget,
    TuneResult,
    ValidateResult,
)
from paleo.errors import SpecError, suggest_names
from paleo.network.graph import build_graph
from paleo.parallel.framework_checks import framework_abilities
from paleo.predict import Prediction, predict
from paleo.report.estimate import RunStudies
from paleo.specs.loading import convert_numpy_arguments, to_python_numbers
from paleo.specs.loading import validate_mapping as validated_spec
from paleo.specs.model import ModelSpec, load_model
from paleo.specs.run import FORMER_FIELD_NAMES, Run, user_set_fields
from paleo.specs.system import System, resolve_system
from paleo.studies.advice import suggest_memory_savings
from paleo.studies.cost import (
    MAX_TRAINING_AMOUNT,
    CountOrText,
    Tariff,
    convert_training_amount,
    default_samples_to_train,
    estimate_training,
    parse_tariff,
    parse_training_amount,
    require_training_amount,
)
from paleo.studies.defaults import (
    AUTO,
    RunWithDefaults,
    leaves_software_and_plan_open,
    plan_for_scaling_curve,
    rescaled_run,
    software_for,
    suitable_global_batch,
    with_common_software,
    with_defaults,
)
from paleo.studies.goodput import LongRunOptions, parse_long_run
from paleo.studies.target import TrainingGoal, amount_for_goal, run_and_amount_for_target
from paleo.units import Quantity, checked_count, comma_separated, parse_quantity, parse_whole_number

if TYPE_CHECKING:
    import pandas as pd

    from paleo.search.space import SearchSpace
    from paleo.specs.task import TrainingTask
    from paleo.studies.purchase import PlanSearch
    from paleo.studies.sweep import SweepStudy

#: A system by name, by path or as an object, with or without its number of GPUs: ``dgx-h100:4``, ``("dgx-h100", 4)``.
SystemChoice = str | Path | System | tuple[str | Path | System, int]
#: GPU counts: one, several, or a text such as ``8,16`` or ``8..64``.
GpuCounts = int | str | Sequence[int]
#: Largest number of GPUs, and most numbers in a list.
_MAX_GPU_COUNT, _MAX_LISTED_GPU_COUNTS = 10**7, 200
#: Keywords of a tariff, and those of a long run.
_TARIFF_KEYWORDS = frozenset(inspect.signature(parse_tariff).parameters)
_LONG_RUN_KEYWORDS = frozenset({"goodput", *(field.name for field in fields(LongRunOptions))})


@convert_numpy_arguments
def estimate(
    model: str | Path | ModelSpec,
    system: str | Path | System,
    *,
    run: Run | None = None,
    epochs: CountOrText | None = None,
    samples: CountOrText | None = None,
    tokens: CountOrText | None = None,
    loss: float | None = None,
    target: str | None = None,
    noise_scale: float | None = None,
    **options: Any,
) -> Estimate:
    """Predict one configuration: step time, memory and throughput; time, cost and energy of a training.

    Parameters
    ----------
    model : str, Path or ModelSpec
        Catalog name, path of a model file, or what `load_model` or `from_torch` returned.
    system : str, Path or System
        Catalog name, path of a system file, or what `load_system` returned.
    run : Run, optional
        The run, unless its fields are given as keywords.
    **options
        Fields of `paleo.Run` (``gpus``, ``batch``, ``strategy``, …), of a tariff (``price="2 USD/h"``, …) and of a
        long run (``failures="4/knodeday"``, …), as on the command line.
    epochs, samples, tokens : number or str, optional
        Amount of training, one of them; ``tokens="15T"`` works, too.
    loss : float, optional
        Train a language model to this loss [nats per token] by Chinchilla's scaling law.
    target : str, optional
        Train to the quality target of a task, such as ``mlperf:bert``.
    noise_scale : float, optional
        Gradient noise scale [samples].

    Returns
    -------
    Estimate
        In SI units: seconds, bytes, samples per second.

    Raises
    ------
    SpecError
        For unknown keywords and values that are out of range.
    """
    question = _Question.from_keywords("estimate", run, options)
    _check_number("loss", loss)
    _check_number("noise_scale", noise_scale)
    network, machine = _model(model), resolve_system(system)
    choice = RunWithDefaults(question.run) if target is not None else with_defaults(network, machine, question.run)
    run_of_task, _ = run_and_amount_for_target(network, choice.run, target, None, [machine])
    step = predict(network, machine, run_of_task)
    amounts = {"epochs": epochs, "samples": samples, "tokens": tokens}
    stated = convert_training_amount(network, **amounts, tokens_per_sample=step.graph.tokens_per_sample)
    training_amount, notes = amount_for_goal(step, TrainingGoal(loss, target, noise_scale), stated)
    failing = require_training_amount(question.long_run, training_amount)
    cost = None
    if training_amount is not None:
        cost = estimate_training(step, training_amount, question.tariff, long_run=failing)
    return Estimate(step, cost, suggest_memory_savings(step), RunStudies(step), notes, choice)


@convert_numpy_arguments
def scale(
    model: str | Path | ModelSpec,
    system: str | Path | System,
    gpus: GpuCounts,
    *,
    mode: str | None = None,
    epochs: CountOrText | None = None,
    samples: CountOrText | None = None,
    tokens: CountOrText | None = None,
    run: Run | None = None,
    **options: Any,
) -> ScalingCurves:
    """Predict how a network scales with the number of GPUs.

    Parameters
    ----------
    model : str, Path or ModelSpec
        Catalog name, path of a model file, or what `load_model` or `from_torch` returned.
    system : str, Path or System
        Machine: catalog name, path of a system file, or what `load_system` returned.
    gpus : int, str or sequence of int
        Numbers of GPUs, such as ``[1, 8]`` or ``"8..64"``.
    mode : str, optional
        ``strong`` (default with ``global_batch``), ``weak`` or ``both``.
    epochs, samples, tokens : number or str, optional
        Amount of training, one of them; ``tokens="15T"`` works, too.
    run : Run, optional
        The run, unless its fields are given as keywords.
    **options
        Fields of `paleo.Run` (``gpus``, ``batch``, ``strategy``, …), of a tariff (``price="2 USD/h"``, …) and of a
        long run (``failures="4/knodeday"``, …), as on the command line.
        ``consistency`` and ``nodes`` may list several, with a curve for each.

    Returns
    -------
    ScalingCurves
        Step time and throughput at each number of GPUs, one curve for each kind of scaling.
    """
    from paleo.studies import scale as target_scaling

    question = _Question.from_keywords("scale", run, options)
    kinds = target_scaling.parse_scalings(mode or ("weak" if question.run.global_batch is None else "strong"))
    network, machine = _model(model), resolve_system(system)
    counts = parse_gpu_counts(gpus)
    stated = parse_training_amount(network, question.run, epochs=epochs, samples=samples, tokens=tokens)
    training_amount = stated or default_samples_to_train(network)
    terms = question.long_run, training_amount, question.tariff
    choice = plan_for_scaling_curve(network, machine, question.run, counts)
    curves = (
        target_scaling.predict_scale_curve(network, machine, variant, counts, kind, *terms)
        for kind in kinds
        for variant in target_scaling.split_into_curve_runs(choice.run)
    )
    return ScalingCurves(network, machine, tuple(curves), choice)


@convert_numpy_arguments
def compare(
    model: str | Path | ModelSpec,
    systems: SystemChoice | Sequence[SystemChoice],
    *,
    run: Run | None = None,
    epochs: CountOrText | None = None,
    samples: CountOrText | None = None,
    tokens: CountOrText | None = None,
    target: str | None = None,
    objective: str | None = None,
    **options: Any,
) -> CompareResult:
    """Predict the same training run on several systems, and compare time, cost and energy.

    Parameters
    ----------
    model : str, Path or ModelSpec
        Catalog name, path of a model file, or what `load_model` or `from_torch` returned.
    systems : str, Path, System, tuple or sequence of these
        ``"dgx-h100:4"`` and ``("dgx-h100", 4)`` are four GPUs of a system; others have ``gpus``.
    run : Run, optional
        The run, unless its fields are given as keywords.
    **options
        Fields of `paleo.Run` (``gpus``, ``batch``, ``strategy``, …), of a tariff (``price="2 USD/h"``, …) and of a
        long run (``failures="4/knodeday"``, …), as on the command line.
        ``strategy="auto"`` gives each system the best plan of a search.
    epochs, samples, tokens : number or str, optional
        Amount of training, one of them; ``tokens="15T"`` works, too.
    target : str, optional
        Train to the quality target of a task.
    objective : str, optional
        Sort by ``time``, ``cost`` or ``energy``; by default in the order given.

    Returns
    -------
    CompareResult
        Predictions of each system, ordered by the objective.
    """
    from paleo.studies import purchase

    question = _Question.from_keywords("compare", run, options)
    network = _model(model)
    stated = parse_training_amount(network, question.run, epochs=epochs, samples=samples, tokens=tokens)
    offers = parse_systems_with_gpu_counts(systems, question.run.gpus)
    machines, counts = [system for system, _ in offers], [count for _, count in offers]
    aimed_run, training_amount = run_and_amount_for_target(network, question.run, target, stated, machines)
    terms = (training_amount, question.tariff, question.long_run)
    planner, choices = None, dict[str, RunWithDefaults]()
    if aimed_run.strategy == AUTO:
        planner = plan_search_function(question.run, None if target is None else aimed_run.software)
    elif target is None and leaves_software_and_plan_open(network, rescaled_run(question.run, max(counts))):
        aimed_run = aimed_run.model_copy(update={"strategy": AUTO})

        def planner(model: ModelSpec, system: System, run: Run) -> tuple[list[Prediction], int, int]:
            stated = user_set_fields(question.run) | {"gpus": run.gpus, "global_batch": run.global_batch}
            stated.pop("strategy", None)
            choice = with_defaults(model, system, Run(**stated))
            choices[f"{system.name}:{run.gpus}"] = choice
            step = predict(model, system, choice.run)
            return [step], 1, int(step.memory.fits)

    study = purchase.compare_systems(network, machines, aimed_run, *terms, gpus=counts, planner=planner)
    study = study if objective is None else study.ranked(purchase.parse_objective(objective))
    return CompareResult(study, choices)


@convert_numpy_arguments
def search(
    model: str | Path | ModelSpec,
    system: str | Path | System,
    gpus: GpuCounts,
    *,
    objective: str = "time",
    top: int = 10,
    explain: bool = False,
    exhaustive: bool = False,
    run: Run | None = None,
    **options: Any,
) -> SearchResult:
    """Search the fastest, cheapest or smallest training plans of a network on one system.

    Parameters
    ----------
    model : str, Path or ModelSpec
        Catalog name, path of a model file, or what `load_model` or `from_torch` returned.
    system : str, Path or System
        Machine: catalog name, path of a system file, or what `load_system` returned.
    gpus : int, str or sequence of int
        Numbers of GPUs.
    objective : str
        ``time``, ``cost``, ``energy`` or ``gpus``.
    top : int
        Number of plans to return.
    explain : bool
        Say why the first plan wins.
    exhaustive : bool
        Evaluate every configuration, also those whose bounds show that they are none of the answers.
    run : Run, optional
        The run; ``strategy``, ``microbatch``, ``recompute`` and ``schedule`` restrict the search where they are set.
    **options
        Fields of `paleo.Run`.

    Returns
    -------
    SearchResult
        Plans, best first; those that leave less than 5 % of the memory free are last.
    """
    from paleo.search.gpu_counts import search_gpu_counts
    from paleo.search.plans import explain_best_plan as explained

    network, machine = _model(model), resolve_system(system)
    counts = parse_gpu_counts(gpus)
    question = _Question.from_keywords("search", run, options, priced=False, long_run=False)
    _check_top(top)
    software, why = software_for(network, machine, rescaled_run(question.run, max(counts)))
    plain = question.run.model_copy(update={"gpus": max(counts), "strategy": "dp", "software": software})
    wish: dict[str, Any] = {"objective": objective, "top": top, "exhaustive": exhaustive}
    space = search_space_of_unset_fields(question.run, software)
    ranking = search_gpu_counts(network, machine, plain, counts, space=space, **wish)
    explanation = explained(network, machine, ranking) if explain else None
    return SearchResult(network, machine, ranking, explanation, {f"software {software}": why} if why else {})


def search_space_of_unset_fields(run: Run, software: str | None = None) -> SearchSpace:
    """Return the space of plans that a search varies: all choices that the run leaves unset.

    Parameters
    ----------
    run : Run
        Its ``strategy``, ``microbatch``, ``recompute`` and ``schedule`` restrict the search where they are set.
    software : str, optional
        Framework profile; its limits hold unless the run sets a schedule. By default that of the run.

    Returns
    -------
    SearchSpace
        Choices that the search varies.
    """
    from paleo.launch.jobs import supported_search_space
    from paleo.search.space import search_space_from_options

    stated = user_set_fields(run)
    strategy = None if stated.get("strategy") == AUTO else stated.get("strategy")
    lists = {"microbatches": "microbatch", "recompute": "recompute.policy", "schedules": "pipeline.schedule"}
    space = search_space_from_options(strategy, **{choices: stated.get(name) for choices, name in lists.items()})
    limited = stated.get("pipeline.schedule") is None or framework_abilities(software or run.software) is not None
    return supported_search_space(space, software or run.software) if limited else space


def plan_search_function(run: Run, software: str | None = None) -> PlanSearch:
    """Return a function that searches the best plan of a network; fields set in the run restrict the search.

    Parameters
    ----------
    run : Run
        Run whose explicitly set fields restrict the search.
    software : str, optional
        Software profile; by default the one that suits network and system.

    Returns
    -------
    PlanSearch
        Function that finds the plan of a run.
    """
    from paleo.search.gpu_counts import recommended_plans

    def planner(model: ModelSpec, system: System, searched: Run) -> tuple[list[Prediction], int, int]:
        profile = software or software_for(model, system, rescaled_run(run, searched.gpus))[0]
        plain = searched.model_copy(update={"software": profile})
        return recommended_plans(model, system, plain, space=search_space_of_unset_fields(run, profile))

    return planner


@convert_numpy_arguments
def plan(
    model: str | Path | ModelSpec,
    systems: SystemChoice | Sequence[SystemChoice],
    gpus: GpuCounts | None = None,
    *,
    epochs: CountOrText | None = None,
    samples: CountOrText | None = None,
    tokens: CountOrText | None = None,
    target: str | None = None,
    deadline: str | None = None,
    budget: str | float | None = None,
    objective: str = "time",
    top: int = 10,
    run: Run | None = None,
    **options: Any,
) -> PlanResult:
    """Find which system, how many GPUs and which plan complete a training in time and within a budget.

    Parameters
    ----------
    model : str, Path or ModelSpec
        Catalog name, path of a model file, or what `load_model` or `from_torch` returned.
    systems : str, Path, System, tuple or sequence of these
        ``"dgx-h100:64"`` is a system with its number of GPUs.
    gpus : int, str or sequence of int, optional
        Numbers of GPUs of systems without one. If neither is given, the smallest order that meets deadline and budget
        is searched, in whole nodes, trays or slices.
    epochs, samples, tokens : number or str, optional
        Amount of training, one of them; ``tokens="15T"`` works, too.
    target : str, optional
        Train to the quality target of a task.
    deadline : str, optional
        Longest time, such as ``"60d"``.
    budget : str or float, optional
        Highest cost in USD, such as ``"5M"``.
    objective : str
        ``time``, ``cost``, ``energy`` or ``gpus``.
    top : int
        Number of plans to return.
    run : Run, optional
        The run, unless its fields are given as keywords.
    **options
        Fields of `paleo.Run` (``gpus``, ``batch``, ``strategy``, …), of a tariff (``price="2 USD/h"``, …) and of a
        long run (``failures="4/knodeday"``, …), as on the command line.

    Returns
    -------
    PlanResult
        Plans on all systems and GPU counts; those that meet the requirements come first.
    """
    from paleo.studies import purchase

    network = _model(model)
    common = [] if gpus is None else parse_gpu_counts(gpus)
    offers = [(system, [count] if count else common) for system, count in parse_systems_with_gpu_counts(systems, 0)]
    question = _Question.from_keywords("plan", run, options)
    _check_top(top)
    stated = parse_training_amount(network, question.run, epochs=epochs, samples=samples, tokens=tokens)
    machines = [system for system, _ in offers]
    aimed_run, training_amount = run_and_amount_for_target(network, question.run, target, stated, machines)
    failing = require_training_amount(question.long_run, training_amount)
    if deadline is None and budget is None and (question.tariff != Tariff() or objective in ("cost", "energy")):
        training_amount = training_amount or default_samples_to_train(network)
    sought = not all(counts for _, counts in offers)
    objective = "gpus" if sought else objective
    wish = purchase.parse_purchase_requirements(training_amount, deadline, budget, objective, question.tariff)
    wish = replace(wish, long_run=failing)
    plain, choices = aimed_run.model_copy(update={"strategy": "dp"}), dict[str, str]()
    choices |= {"GPUs": "the smallest order that replicas and even stages share"} if sought else {}
    free = objective == "gpus" and tokens is not None and plain.batch is None and plain.global_batch is None
    if free and training_amount is not None:
        length = build_graph(network, batch=1, overrides=plain.model).tokens_per_sample or 1.0
        batch, choices["global batch"] = suitable_global_batch(network, plain, training_amount.samples * length)
        plain = plain.model_copy(update={"global_batch": batch})

    def settle(machine: System, count: int) -> tuple[str, SearchSpace]:
        software = aimed_run.software
        if target is None:
            software, why = software_for(network, machine, rescaled_run(question.run, count))
            choices.update({f"software {software}": why} if why else {})
        return software, search_space_of_unset_fields(question.run, software)

    reply = purchase.plan_purchase(network, offers, plain, wish, top=top, settle=settle)
    software = f"software {reply.plans[0].row.run.software}"
    kept = {choice: why for choice, why in choices.items() if choice == software or not choice.startswith("software")}
    return PlanResult(replace(reply, choices=kept))


@convert_numpy_arguments
def target(
    task: str | Path | TrainingTask,
    system: str | Path | System,
    gpus: GpuCounts,
    *,
    batch: int | str = "auto",
    loss: float | None = None,
    noise_scale: float | None = None,
    **options: Any,
) -> TimeToTarget:
    """Predict the time of a task to its quality target.

    Parameters
    ----------
    task : str, Path or TrainingTask
        Such as ``mlperf:bert``; with ``loss`` a language model.
    system : str, Path or System
        Machine: catalog name, path of a system file, or what `load_system` returned.
    gpus : int, str or sequence of int
        Numbers of GPUs.
    batch : int or str
        Global batch size [samples]; ``auto`` chooses the one with the shortest time.
    loss : float, optional
        Loss to train a language model to [nats per token].
    noise_scale : float, optional
        Gradient noise scale [samples], in place of the critical batch of the task.
    **options
        Fields of `paleo.Run` and of a tariff.

    Returns
    -------
    TimeToTarget
        Time to the quality target [s] for each number of GPUs.
    """
    from paleo.specs.task import TrainingTask
    from paleo.studies.target import load_or_make_task, target_scaling, times_over_gpus

    question = _Question.from_keywords("target", None, options, long_run=False)
    if not isinstance(task, str | Path | TrainingTask):
        raise SpecError(f"task {task!r:.80}: expected a name, a path, or a result of load_task")
    _check_number("loss", loss)
    _check_number("noise_scale", noise_scale)
    goal = load_or_make_task(task, loss, noise_scale)
    machine, counts = resolve_system(system), parse_gpu_counts(gpus)
    run, why = question.run, "its submissions run it"
    if loss is not None:
        run, why = with_common_software(load_model(goal.model), machine, run, max(counts))
    curve = target_scaling(*times_over_gpus(goal, machine, counts, str(batch), **user_set_fields(run)))
    stated = question.run.model_fields_set
    choices = {} if "software" in stated or not why else {f"software {curve.points[0].prediction.run.software}": why}
    if "strategy" not in stated:
        choices["the plan" if batch != "auto" else "batch and plan"] = "the soonest of a bounded search"
    return TimeToTarget(goal, machine, curve, question.tariff, choices)


@convert_numpy_arguments
def tune(
    model: str | Path | ModelSpec,
    system: str | Path | System,
    gpus: int,
    *,
    trials: int,
    method: str = "asha",
    max_tokens: CountOrText | None = None,
    max_samples: CountOrText | None = None,
    max_epochs: CountOrText | None = None,
    min_tokens: CountOrText | None = None,
    min_samples: CountOrText | None = None,
    min_epochs: CountOrText | None = None,
    eta: int = 4,
    gpus_per_trial: int | str = "auto",
    population: int = 20,
    vary: Sequence[str] = (),
    evaluation_samples: CountOrText | None = None,
    from_scratch: bool = False,
    deadline: str | None = None,
    rank_correlation: float | None = None,
    seed: int = 0,
    run: Run | None = None,
    **options: Any,
) -> TuneResult:
    """Predict how long a search over many trials takes, and on how many GPUs each trial should train.

    Parameters
    ----------
    model : str, Path or ModelSpec
        Catalog name, path of a model file, or what `load_model` or `from_torch` returned.
    system : str, Path or System
        Machine: catalog name, path of a system file, or what `load_system` returned.
    gpus : int
        Total number of GPUs.
    trials : int
        Configurations to sample.
    method : str
        A name of `paleo.tuning.base.TUNING_METHODS`: asha, hyperband, random, pbt, …
    max_tokens, max_samples, max_epochs : number or str
        Training of a trial at the last rung, one of them.
    min_tokens, min_samples, min_epochs : number or str, optional
        Training at the first rung; a 64th of the most by default.
    eta : int
        Reduction factor of rungs.
    gpus_per_trial : int or "auto"
        GPUs of one trial; ``auto`` takes the fastest.
    population : int
        Members that evolution keeps alive.
    vary : sequence of str
        Settings of the network that trials differ in: ``["layers=12,24"]``.
    evaluation_samples : number or str, optional
        Samples of one evaluation; none by default.
    from_scratch : bool
        Train promoted trials from the beginning instead of from their checkpoints.
    deadline : str, optional
        Wall time that the search should end in, such as ``"24h"``.
    rank_correlation : float, optional
        Assumed correlation of scores between rungs; adds an interval on the regret.
    seed : int
        Random seed of the scores.
    run : Run, optional
        Run of every trial; or its fields as keywords.
    **options
        Fields of `paleo.Run`, of a tariff and of a long run.

    Returns
    -------
    TuneResult
        Wall time [s] of the search for each number of GPUs per trial and in all.

    Raises
    ------
    SpecError
        For values that are out of range.
    PlanError
        If a trial fits on no number of GPUs.
    """
    from paleo.tuning import study

    question = _Question.from_keywords("tune", run, options)
    network, machine = _model(model), resolve_system(system)
    parse_gpu_counts(gpus)
    if machine.max_devices is not None and gpus > machine.max_devices:
        raise SpecError(f"--gpus {gpus}: system {machine.name} has {machine.max_devices}")
    longest = {"epochs": max_epochs, "samples": max_samples, "tokens": max_tokens}
    most = study.parse_trial_samples(network, question.run, "max", **longest)
    least = {"epochs": min_epochs, "samples": min_samples, "tokens": min_tokens}
    first = most / study.DEFAULT_RUNG_SPAN
    if any(value is not None for value in least.values()):
        first = study.parse_trial_samples(network, question.run, "min", **least)
    evaluated = 0.0 if evaluation_samples is None else _parse_count("evaluation-samples", evaluation_samples)
    settings = study.TuningSettings(
        trials, method, first, most, eta, population, not from_scratch, evaluated, study.parse_network_sizes(vary),
        rank_correlation, seed,
    )  # fmt: skip
    settings = study.validate_tuning_settings(settings)
    width = None if gpus_per_trial in ("auto", None) else parse_gpu_counts(gpus_per_trial)[0]
    if width is not None and width > gpus:
        raise SpecError(f"--gpus-per-trial {width}: expected at most the {gpus} GPUs of --gpus")
    limit = None if deadline is None else _parse_time("deadline", deadline)
    answer = study.tuning_study(
        network, machine, question.run, settings, gpus=gpus, per_trial=width, deadline=limit, tariff=question.tariff,
        long_run=question.long_run,
    )  # fmt: skip
    return TuneResult(answer)


@convert_numpy_arguments
def fleet(
    jobs: str | Path | Sequence[Mapping[str, Any]],
    systems: SystemChoice | Sequence[SystemChoice],
    nodes: int | str | Sequence[int] = "auto",
    *,
    policy: str = "backfill",
    placement: str = "packed",
    wait: str | float | None = None,
    measure: str = "p95",
    samples: int | None = None,
    seed: int = 0,
    **tariff: Any,
) -> FleetResult:
    """Predict when the jobs of a team end on a cluster, or find the smallest order of machines for them.

    Parameters
    ----------
    jobs : str, Path or sequence of mapping
        YAML file of jobs, a trace (CSV with arrival, gpus and duration), or the jobs themselves.
    systems : str, Path, System or sequence of these
        Kinds of machines; a job runs on nodes of one kind.
    nodes : int, str or sequence of int
        Nodes of each system, or ``auto``: the smallest order that keeps deadlines and ``wait``.
    policy : str
        A name of `paleo.cluster.nodes.SCHEDULING_POLICIES`: backfill, elastic, fair, fifo, las, priority, srtf.
    placement : str
        ``packed`` on few racks, or ``spread`` over all.
    wait : str or float, optional
        Limit of the waiting time, ``"4h"`` or in seconds.
    measure : str
        Statistic that the limit applies to: ``p95`` or ``mean``.
    samples : int, optional
        Simulations for intervals; 20 by default, none for more than a thousand jobs.
    seed : int
        Random seed of the samples.
    **tariff
        ``price``, ``term``, ``buy``, ``electricity``, ``pue``, ``host_power``.

    Returns
    -------
    FleetResult
        Start and end of every job on the cluster.

    Raises
    ------
    SpecError
        For jobs that contradict themselves or can never run, and if no order meets the requirements.
    """
    from paleo.cluster import study
    from paleo.cluster.jobs import jobs_from_mappings, read_jobs

    _check_keywords("fleet", tariff, set(_TARIFF_KEYWORDS))
    machines = [system for system, _ in parse_systems_with_gpu_counts(systems, 0)]
    specs = read_jobs(jobs) if isinstance(jobs, str | Path) else jobs_from_mappings(jobs)
    order = None if nodes == "auto" else study.parse_node_counts(nodes, machines)
    limit = None if wait is None else _parse_time("wait", wait) if isinstance(wait, str) else float(wait)
    wishes = study.check_requirements(study.ClusterRequirements(limit, measure))
    terms = parse_tariff(**tariff)
    priced = study.predict_fleet(specs, machines, policy, nodes=order, placement=placement, tariff=terms)
    return FleetResult(study.simulate_or_size_cluster(priced, order, wishes, samples=samples, seed=seed))


def _parse_count(option: str, value: CountOrText) -> float:
    """Parse the positive number of a command-line option, such as an amount of training.

    Parameters
    ----------
    option : str
        Name of the option, for messages.
    value : CountOrText
        Number, or text with a prefix such as ``15T``.

    Returns
    -------
    float
        The number.

    Raises
    ------
    SpecError
        If it is no such number.
    """
    try:
        number = parse_quantity(value, "count") if isinstance(value, str) else float(to_python_numbers(value))
    except (SpecError, TypeError, ValueError):
        number = math.nan
    if not 0 < number <= MAX_TRAINING_AMOUNT:
        raise SpecError(f"--{option} {value!r:.60}: expected a number above zero, such as 5000 or 50k")
    return number


def _parse_time(option: str, value: str | float) -> float:
    """Parse the positive time of a command-line option, such as ``24h``.

    Parameters
    ----------
    option : str
        Name of the option, for messages.
    value : str | float
        Text with a unit.

    Returns
    -------
    float
        Time [s].

    Raises
    ------
    SpecError
        If it is no such time.
    """
    try:
        return Quantity("time", positive=True).parse_text(value)
    except SpecError as error:
        raise SpecError(f"--{option} {error}") from None


@convert_numpy_arguments
def sweep(study: str | Path | Mapping[str, Any] | SweepStudy, *, jobs: int = 1) -> pd.DataFrame:
    """Predict every combination of models, systems, run options, changed hardware and prices.

    Parameters
    ----------
    study : str, Path, mapping or SweepStudy
        A study file, or its content: ``{"models": ["resnet50"], "systems": ["dgx-h100"], "axes": {"gpus": [8, 16]}}``.
    jobs : int
        Number of processes; 0 chooses it.

    Returns
    -------
    DataFrame
        In SI units; the last axis changes fastest. A row that cannot be planned has its reason in ``problem``.
    """
    from paleo.cluster.study import FleetSweep, load_run_or_fleet_sweep
    from paleo.studies.sweep import MAX_PROCESSES, SweepStudy, check_sweep_study, local_evaluator, sweep_table

    if isinstance(study, str | Path):
        whole = load_run_or_fleet_sweep(study)
    else:
        if not isinstance(study, SweepStudy | FleetSweep | Mapping):
            raise SpecError(f"paleo.sweep: study: {study!r:.80}: expected a study file, or its content as a mapping")
        kind = FleetSweep if isinstance(study, Mapping) and "jobs" in study else SweepStudy
        whole = validated_spec(kind, study, "paleo.sweep") if isinstance(study, Mapping) else study
        check_sweep_study(whole)
    return sweep_table(whole, local_evaluator(whole, checked_count("jobs", jobs, 0, MAX_PROCESSES)))


@convert_numpy_arguments
def audit(
    log: str | Path,
    system: str | Path | System,
    model: str | Path | ModelSpec | None = None,
    *,
    operation: str | None = None,
    run: Run | None = None,
    **options: Any,
) -> AuditResult:
    """Compare a log of a training or of nccl-tests with its prediction, and name faults that explain the difference.

    Parameters
    ----------
    log : str or Path
        Log of a training, or output of nccl-tests.
    system : str, Path or System
        Machine: catalog name, path of a system file, or what `load_system` returned.
    model : str, Path or ModelSpec, optional
        The network; required for the log of a training.
    operation : str, optional
        Collective of nccl-tests, by default the one that the log names.
    run : Run, optional
        The run, unless its fields are given as keywords.
    **options
        Fields of `paleo.Run`; ``gpus`` of nccl-tests are by default those that the log lists.

    Returns
    -------
    AuditResult
        The log, its prediction, and the faults that explain the difference.

    Raises
    ------
    SpecError
        For a log that cannot be read.
    """
    from paleo.logs.base import logged_collective, read_log, read_nccl_tests_log
    from paleo.studies import audit as audits

    stated = _Question.from_keywords("audit", run, options, priced=False, long_run=False).run
    machine, timed = resolve_system(system), read_nccl_tests_log(str(log))
    if timed is not None:
        ranks = stated.gpus if "gpus" in stated.model_fields_set else timed.ranks or 1
        return AuditResult(audits.audit_collectives(timed, logged_collective(timed, operation), ranks, machine))
    training_log = read_log(str(log))
    if model is None:
        raise SpecError(f"model: {log} is a log of a training ({training_log.kind}); name the network that was trained")
    return AuditResult(audits.audit_training_log(training_log, predict(_model(model), machine, stated)))


@convert_numpy_arguments
def validate(files: str | Path | Sequence[str | Path], *, calibration: str | Path | None = None) -> ValidateResult:
    """Compare predictions with measured tables.

    Parameters
    ----------
    files : str, Path or sequence of these
        Measured tables, CSV or CSV.gz.
    calibration : str or Path, optional
        Calibration to use for rows of its device or system, in place of the catalog's.

    Returns
    -------
    ValidateResult
        Predictions, measurements and errors of each table.

    Raises
    ------
    SpecError
        For a file that cannot be read.
    """
    from paleo.specs.calibration import load_calibration
    from paleo.tables.validation import validate_file

    prices = None if str(calibration) in ("None", "auto") else load_calibration(str(calibration))
    tables = list(files) if isinstance(files, Sequence) and not isinstance(files, str) else [files]
    if not all(isinstance(file, str | Path) for file in tables):
        raise SpecError(f"validate: {files!r:.80}: expected the path of a measured table, or a list of paths")
    if not tables:
        raise SpecError("no file is named; expected measured tables, such as measurements/gemm.csv.gz")
    return ValidateResult(tuple(validate_file(file, prices) for file in tables))


# options that are common to several questions


@dataclass(frozen=True)
class _Question:
    """Run, tariff and options of a long run, as given by the keywords of a public function."""

    run: Run
    tariff: Tariff
    long_run: LongRunOptions | None

    @classmethod
    def from_keywords(
        cls, name: str, run: Run | None, options: JsonDocument, *, priced: bool = True, long_run: bool = True
    ) -> _Question:
        """Sort the keywords of a public function into the run, the tariff and the options of a long run.

        Parameters
        ----------
        name : str
            Name of the public function that is called, for error messages.
        run : Run or None
            Run of the question. None: the keywords state its fields.
        options : JsonDocument
            Keywords of the call, by name.
        priced : bool, optional
            True if the function takes the keywords of a tariff.
        long_run : bool, optional
            True if the function takes the keywords of a long run.

        Returns
        -------
        _Question
            Checked run, tariff and options of a long run.

        Raises
        ------
        SpecError
            If a keyword is unknown or has a bad value, or if fields of the run are given besides ``run``.
        """
        of_run = {*Run.model_fields, *Run.extra_keys()}
        of_tariff, of_long_run = _TARIFF_KEYWORDS if priced else set(), _LONG_RUN_KEYWORDS if long_run else set()
        new = {key: value for key, value in options.items() if key not in FORMER_FIELD_NAMES}
        _check_keywords(name, new, {*of_run, *of_tariff, *of_long_run})
        if run is not None and not isinstance(run, Run):
            raise SpecError(f"paleo.{name}: run: {run!r:.80}: expected paleo.Run(…), or its fields as keywords")
        stated = {key: value for key, value in options.items() if key in of_run or key in FORMER_FIELD_NAMES}
        if run is not None and stated:
            raise SpecError(f"paleo.{name}: {', '.join(stated)} are fields of run=…, too; use one of them")
        tariff = parse_tariff(**{key: value for key, value in options.items() if key in of_tariff})
        long = {key: value for key, value in options.items() if key in of_long_run}
        whole = run or validated_spec(Run, stated, f"paleo.{name}")
        whole = replace_any_software(whole) if name in (*_SEARCH_FUNCTION_NAMES, "estimate") else whole
        return cls(whole, tariff, parse_long_run(**long))


#: Questions that are answered by a search, and the word for software without the limits of a framework.
_SEARCH_FUNCTION_NAMES, _ANY_SOFTWARE = ("plan", "search"), "any"


def replace_any_software(run: Run) -> Run:
    """Replace the software ``"any"`` of a run by the default profile, which sets no limits on schedules.

    Runs with other software are returned unchanged.

    Parameters
    ----------
    run : Run
        Options of the run.

    Returns
    -------
    Run
        The run under the default profile.
    """
    if run.software != _ANY_SOFTWARE:
        return run
    return run.model_copy(update={"software": Run.model_fields["software"].default})


def _check_keywords(name: str, options: Mapping[str, Any], known: set[str]) -> None:
    """Raise SpecError for a keyword that a public function does not take; the message names the nearest known one."""
    keywords = set(inspect.signature(globals()[name]).parameters) - {"options"}
    for keyword in options:
        if keyword not in known:
            raise SpecError(f"paleo.{name}: unknown keyword {keyword!r}; {suggest_names(keyword, known | keywords)}")


def _check_top(top: int) -> None:
    """Raise SpecError unless at least one plan is requested."""
    if not isinstance(top, int) or top < 1:
        raise SpecError(f"top: {top!r:.80}: expected a number of plans, 1 or more")


def _check_number(name: str, value: float | None) -> None:
    """Raise SpecError unless a value is None or a finite number."""
    if value is not None and not (isinstance(value, Real) and math.isfinite(value)):
        raise SpecError(f"{name}: {value!r:.80}: expected a number")


def parse_gpu_counts(gpus: GpuCounts) -> list[int]:
    """Parse GPU counts given as a number, a list or a text such as ``1,8..64``.

    Parameters
    ----------
    gpus : int, str or sequence of int
        A text lists numbers (``8,16``) or powers of two (``8..64``).

    Returns
    -------
    list of int
        Numbers of GPUs.

    Raises
    ------
    SpecError
        If a count is not a whole number from 1 to `MAX_GPUS_PER_JOB`.

    Examples
    --------
    >>> parse_gpu_counts("1,8..64")
    [1, 8, 16, 32, 64]
    """
    numbers = to_python_numbers(gpus)
    numbers = comma_separated(numbers) if isinstance(numbers, str) else numbers
    parts = list(numbers) if isinstance(numbers, Iterable) else [numbers]
    counts = [count for part in parts for count in _one_or_doublings(part)]
    if not counts or not all(counts):
        expected = f"expected GPU counts from 1 to {_MAX_GPU_COUNT:,}, such as 1,2,4,1024 or 8..64"
        raise SpecError(f"gpus {str(gpus)[:80]!r}: {expected}")
    if len(counts) > _MAX_LISTED_GPU_COUNTS:
        raise SpecError(f"gpus: {len(counts)} counts; {_MAX_LISTED_GPU_COUNTS} are enough for a curve")
    return list(dict.fromkeys(counts))


def _one_or_doublings(part: object) -> list[int]:
    """Parse a number of GPUs, or the doublings from ``8..64``; 0 stands for an invalid number."""
    if isinstance(part, int):
        return [part if 0 < part <= _MAX_GPU_COUNT else 0]
    first, dots, last = str(part).partition("..")
    low = _count_in_digits(first)
    high = _count_in_digits(last) if dots else low
    doublings = [low * 2**power for power in range(_MAX_GPU_COUNT.bit_length()) if 0 < low * 2**power <= high]
    return [*doublings, *([high] if doublings and doublings[-1] < high else [])] or [0]


def _count_in_digits(text: str) -> int:
    """Parse a number of GPUs; return 0 if it is none, such as the 024 of ``1,024``, which is no list."""
    return 0 if text.strip().startswith("0") else parse_whole_number(text, _MAX_GPU_COUNT) or 0


def parse_systems_with_gpu_counts(
    systems: SystemChoice | Sequence[SystemChoice], gpus: int
) -> tuple[tuple[System, int], ...]:
    """Load systems and parse the number of GPUs that each is given with, such as ``dgx-h100:4``.

    Parameters
    ----------
    systems : str, Path, System, tuple or sequence of these
        ``"dgx-h100:4"`` and ``("dgx-h100", 4)`` are four GPUs (not nodes).
    gpus : int
        GPUs of systems without a number.

    Returns
    -------
    tuple of (System, int)
        Each system with its number of GPUs.

    Raises
    ------
    SpecError
        If there is no system, or a number of GPUs is invalid.
    """
    offers = tuple(_system_with_count(each, gpus) for each in _separate(systems))
    if not offers:
        raise SpecError(f"systems {systems!r}: expected names such as dgx-a100-80gb:16,dgx-h100:8")
    return offers


def _separate(systems: SystemChoice | Sequence[SystemChoice]) -> Iterable[SystemChoice]:
    """Split a choice of systems (a text with commas, one object, or a list) into single systems."""
    if not isinstance(systems, str | Path | System | Iterable) or getattr(systems, "ndim", 1) == 0:
        raise SpecError(f"systems {systems!r:.80}: expected names, paths, or results of load_system")
    if isinstance(systems, Path | System) or _is_pair(systems):
        return (systems,)  # type: ignore[return-value]
    return comma_separated(systems) if isinstance(systems, str) else systems  # type: ignore[return-value]


def _is_pair(offered: object) -> bool:
    return isinstance(offered, tuple) and len(offered) == 2 and isinstance(offered[1], int)


def _system_with_count(offered: SystemChoice, gpus: int) -> tuple[System, int]:
    """Load one system and return it with its number of GPUs, which is ``gpus`` if the choice gives none."""
    if isinstance(offered, tuple):
        return resolve_system(offered[0]), parse_gpu_counts(offered[1])[0]
    name, colon, count = offered.rpartition(":") if isinstance(offered, str) else ("", "", "")
    if isinstance(offered, str) and colon and count.strip().isdecimal():
        return resolve_system(name.strip()), parse_gpu_counts(count)[0]
    return resolve_system(offered), gpus


def _model(model: str | Path | ModelSpec) -> ModelSpec:
    if isinstance(model, ModelSpec):
        return model
    if isinstance(model, str | Path):
        return load_model(model)
    raise SpecError(f"model {model!r:.80}: expected a name, a path, or a result of load_model or from_torch")
