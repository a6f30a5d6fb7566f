"""The questions of the command line as functions; `paleo.answers` defines their results.

    import paleo

    paleo.compare("bert_large", ["dgx-a100-80gb", "dgx-h100"], gpus=8, batch=16)   # a table, in a notebook
    paleo.scale("resnet50", "dgx-a100-80gb", [1, 8, 64], global_batch=1024).to_frame()

Networks, systems and tasks are names of the catalog, paths, or what was loaded; `compare` takes ``dgx-h100:4`` and
``("dgx-h100", 4)`` for four GPUs of a system. Keywords beside those of a function are
fields of `paleo.specs.run.Run` (``seq`` too) and, where a training is priced, of the tariff: ``price``, ``term``,
``buy``, ``electricity``, ``pue``, ``host_power``, and where failures are counted ``goodput`` and the options of a long
run (`paleo.studies.long_run.LongRunOptions`), as the command line spells them; any other one is a SpecError.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paleo.answers import Audited, Compared, Estimate, Planned, ScalingCurves, Searched, TimeToTarget, Validated
from paleo.errors import SpecError, near
from paleo.predict import predict
from paleo.report.blocks import Blocks
from paleo.specs.loading import plain_numbers
from paleo.specs.loading import validate as validated_spec
from paleo.specs.model import ModelSpec, load_model
from paleo.specs.run import SEQUENCE, Run
from paleo.specs.system import System, loaded_system
from paleo.studies.advice import advise
from paleo.studies.cost import Tariff, stated_tariff
from paleo.studies.learning import Goal, aimed, amount_for
from paleo.studies.long_run import LongRunOptions, stated_long_run
from paleo.studies.training import amount, stated_amount, training, usual_amount, with_length
from paleo.units import listed, whole_number

if TYPE_CHECKING:
    import pandas as pd

    from paleo.answers import Document
    from paleo.search.space import Space
    from paleo.specs.task import TrainingTask
    from paleo.studies.comparison import Planner
    from paleo.studies.study_file import Study
    from paleo.studies.training import HowMany

#: A system by name, path or as loaded, perhaps with its GPUs: ``dgx-h100:4``, ``("dgx-h100", 4)``.
Offered = str | Path | System | tuple[str | Path | System, int]
#: GPU counts: one, several, or a text such as ``8,16`` or ``8..64``.
Counts = int | str | Sequence[int]
#: The largest count of GPUs, and the most counts.
MOST_GPUS, MOST_COUNTS = 10**7, 200
#: Keywords of a tariff, and those of a long run.
TARIFF_WORDS = frozenset(inspect.signature(stated_tariff).parameters)
LONG_RUN_WORDS = frozenset({"goodput", *(field.name for field in fields(LongRunOptions))})


def estimate(
    model: str | Path | ModelSpec,
    system: str | Path | System,
    *,
    run: Run | None = None,
    epochs: HowMany | None = None,
    samples: HowMany | None = None,
    tokens: HowMany | None = None,
    loss: float | None = None,
    target: str | None = None,
    noise_scale: float | None = None,
    **options: Any,
) -> Estimate:
    """One configuration: its step, memory, throughput; time, rent and energy of a training.

    ``options`` are fields of `paleo.Run` (``gpus``, ``batch``, ``strategy``, …), of a tariff (``price="2 USD/h"``, …)
    and of a long run (``failures="4/knodeday"``, …), as on the command line; SpecError for any other. Parameters of
    the network other than ``seq`` stand in ``run=paleo.Run(model={"layers": 6})``. ``loss`` in nats a token. The
    answer is in SI: seconds, bytes, samples a second.
    """
    question = _Question.of("estimate", run, options)
    _check_number("loss", loss)
    _check_number("noise_scale", noise_scale)
    network, machine = _model(model), loaded_system(system)
    run_of_task, _ = aimed(network, question.run, target, None, [machine])
    step = predict(network, machine, run_of_task)
    tokens_of_sample = step.graph.tokens_per_sample
    stated = amount(network, epochs=epochs, samples=samples, tokens=tokens, tokens_per_sample=tokens_of_sample)
    training_amount, notes = amount_for(step, Goal(loss, target, noise_scale), stated)
    failing = with_length(question.long_run, training_amount)
    cost = None if training_amount is None else training(step, training_amount, question.tariff, long_run=failing)
    return Estimate(step, cost, advise(step), Blocks(step), notes)


def scale(
    model: str | Path | ModelSpec,
    system: str | Path | System,
    gpus: Counts,
    *,
    mode: str | None = None,
    epochs: HowMany | None = None,
    samples: HowMany | None = None,
    tokens: HowMany | None = None,
    run: Run | None = None,
    **options: Any,
) -> ScalingCurves:
    """The same network on more and more GPUs; ``mode``: strong (with ``global_batch``), weak (else) or both. Every
    count is priced for so many epochs, samples or tokens. ``consistency`` and ``nodes`` may list several, with a curve
    for each. ``gpus`` are counts, such as ``[1, 8]`` or ``"8..64"``; ``options`` as of `estimate`."""
    from paleo.studies import scaling

    question = _Question.of("scale", run, options)
    kinds = scaling.scalings(mode or ("weak" if question.run.global_batch is None else "strong"))
    network, machine = _model(model), loaded_system(system)
    counts = gpu_counts(gpus)
    stated = stated_amount(network, question.run, epochs=epochs, samples=samples, tokens=tokens)
    training_amount = stated or usual_amount(network)
    terms = question.long_run, training_amount, question.tariff
    curves = (
        scaling.scale(network, machine, variant, counts, kind, *terms)
        for kind in kinds
        for variant in scaling.variants(question.run)
    )
    return ScalingCurves(network, machine, tuple(curves))


def compare(
    model: str | Path | ModelSpec,
    systems: Offered | Sequence[Offered],
    *,
    run: Run | None = None,
    epochs: HowMany | None = None,
    samples: HowMany | None = None,
    tokens: HowMany | None = None,
    target: str | None = None,
    objective: str | None = None,
    **options: Any,
) -> Compared:
    """The same run on several systems, in the order given or best first by ``objective``: time, cost or energy; with
    ``strategy="auto"`` each has the best plan of a search. ``gpus`` are those of every system that states none;
    ``options`` as of `estimate`."""
    from paleo.studies import comparison

    question = _Question.of("compare", run, options)
    network = _model(model)
    stated = stated_amount(network, question.run, epochs=epochs, samples=samples, tokens=tokens)
    offers = systems_with_counts(systems, question.run.gpus)
    machines, counts = [system for system, _ in offers], [count for _, count in offers]
    aimed_run, training_amount = aimed(network, question.run, target, stated, machines)
    terms = (training_amount, question.tariff, question.long_run)
    planner = planner_of(question.run, aimed_run.software) if aimed_run.strategy == comparison.AUTO else None
    study = comparison.compare(network, machines, aimed_run, *terms, gpus=counts, planner=planner)
    return Compared(study if objective is None else study.ranked(comparison.objective_named(objective)))


def search(
    model: str | Path | ModelSpec,
    system: str | Path | System,
    gpus: Counts,
    *,
    objective: str = "time",
    top: int = 10,
    explain: bool = False,
    run: Run | None = None,
    **options: Any,
) -> Searched:
    """The best strategies of all on one system; ``strategy``, ``microbatch``, ``recompute`` and ``schedule`` narrow the
    search where they are given; plans that leave less than 5 % of the memory free stand behind all others.
    ``options`` are fields of `paleo.Run`; ``explain`` adds why the first plan wins."""
    from paleo.search import plans

    network, machine = _model(model), loaded_system(system)
    counts = gpu_counts(gpus)
    stated = _Question.of("search", run, options, priced=False, long_run=False).run
    _check_top(top)
    space, sized = narrowed(stated), stated.model_copy(update={"gpus": counts[0], "strategy": "dp"})
    ranking = plans.search(network, machine, sized, counts=counts, space=space, objective=objective, top=top)
    ranking = plans.leaving_room(ranking, machine, top)
    return Searched(network, machine, ranking, plans.explain(network, machine, ranking) if explain else None)


def narrowed(run: Run, software: str | None = None) -> Space:
    """What the stated fields of a run (strategy, microbatch, recompute, schedule) leave to be searched; schedules that
    the ``software`` (by default the run's) is not known to run are left out unless one is stated."""
    from paleo.search.space import within
    from paleo.studies.comparison import AUTO
    from paleo.studies.launch import runnable

    stated = _stated(run)
    strategy = None if stated.get("strategy") == AUTO else stated.get("strategy")
    lists = {"microbatches": "microbatch", "recompute": "recompute", "schedules": "schedule"}
    space = within(strategy, **{choices: stated.get(name) for choices, name in lists.items()})
    return runnable(space, software or run.software) if stated.get("schedule") is None else space


def _stated(run: Run) -> Document:
    """The fields of a run that were stated, by their names."""
    return {name: getattr(run, name) for name in run.model_fields_set}


def planner_of(run: Run, software: str | None = None) -> Planner:
    """The search of a plan, narrowed by the stated fields of a run."""
    from paleo.search.plans import recommended

    return functools.partial(recommended, space=narrowed(run, software))


def plan(
    model: str | Path | ModelSpec,
    systems: Offered | Sequence[Offered],
    gpus: Counts | None = None,
    *,
    epochs: HowMany | None = None,
    samples: HowMany | None = None,
    tokens: HowMany | None = None,
    target: str | None = None,
    deadline: str | None = None,
    budget: str | float | None = None,
    objective: str = "time",
    top: int = 10,
    run: Run | None = None,
    **options: Any,
) -> Planned:
    """Which system, how many of its GPUs and which strategy train so much within ``deadline`` (``60d``) and ``budget``
    (``5M``, USD), best by time, cost, energy or gpus; ``gpus`` are the counts of every system that states none;
    ``options`` as of `estimate`."""
    from paleo.studies import buying

    network = _model(model)
    offers = systems_to_search(systems, gpus)
    question = _Question.of("plan", run, options)
    _check_top(top)
    stated = stated_amount(network, question.run, epochs=epochs, samples=samples, tokens=tokens)
    aimed_run, training_amount = aimed(network, question.run, target, stated, [system for system, _ in offers])
    failing = with_length(question.long_run, training_amount)
    if deadline is None and budget is None and (question.tariff != Tariff() or objective in ("cost", "energy")):
        training_amount = training_amount or usual_amount(network)
    wish = replace(buying.stated_wish(training_amount, deadline, budget, objective, question.tariff), long_run=failing)
    sized = aimed_run.model_copy(update={"gpus": offers[0][1][0], "strategy": "dp"})
    space = narrowed(question.run, aimed_run.software)
    return Planned(buying.answer(network, offers, sized, wish, space=space, top=top))


def target(
    task: str | Path | TrainingTask,
    system: str | Path | System,
    gpus: Counts,
    *,
    batch: int | str = "auto",
    loss: float | None = None,
    noise_scale: float | None = None,
    **options: Any,
) -> TimeToTarget:
    """How long a task such as ``mlperf:bert`` takes to its target; ``batch`` in samples of all GPUs, or the best;
    ``noise_scale`` stands in for the critical batch of its law. With a ``loss`` in nats a token, ``task`` is a language
    model that is trained to it. ``options`` are fields of `paleo.Run` and of a tariff."""
    from paleo.specs.task import TrainingTask
    from paleo.studies.learning import task_named
    from paleo.studies.target import over_counts, scaling

    question = _Question.of("target", None, options, long_run=False)
    if not isinstance(task, str | Path | TrainingTask):
        raise SpecError(f"task {task!r:.80}: expected a name, a path, or what load_task gave")
    _check_number("loss", loss)
    _check_number("noise_scale", noise_scale)
    goal = task_named(task, loss, noise_scale)
    machine, counts = loaded_system(system), gpu_counts(gpus)
    points = over_counts(goal, machine, counts, str(batch), **_stated(question.run))
    return TimeToTarget(goal, machine, scaling(points), question.tariff)


def sweep(study: str | Path | Mapping[str, Any] | Study, *, jobs: int = 1) -> pd.DataFrame:
    """The product of models, systems, runs, changed hardware and prices as a data frame, in SI.

    ``study`` is a study file or what one states: ``{"models": ["resnet50"], "systems": ["dgx-h100"], "axes": {"gpus":
    [8, 16], "batch": [32, 64]}}``. The last axis changes fastest; a row that cannot be planned has its reason in
    ``problem``. ``jobs`` processes share the work (0: as many as pay).
    """
    from paleo.studies import study_file
    from paleo.studies.sweep import frame
    from paleo.studies.sweep_points import local

    if isinstance(study, str | Path):
        whole = study_file.load_study(study)
    else:
        whole = study if isinstance(study, study_file.Study) else study_file.Study(**study)
        study_file.check(whole)
    return frame(whole, local(whole, jobs))


def audit(
    log: str | Path,
    system: str | Path | System,
    model: str | Path | ModelSpec | None = None,
    *,
    operation: str | None = None,
    run: Run | None = None,
    **options: Any,
) -> Audited:
    """What is off in a run, by its log: of a training, which needs the ``model``, or of nccl-tests, whose ``operation``
    is the one that the log names unless stated. ``options`` are fields of `paleo.Run`; ``gpus`` of a log of nccl-tests
    are those that it lists unless stated. SpecError for a log that cannot be read."""
    from paleo.logs.base import read_log
    from paleo.logs.nccl_tests import operation_of, read_collectives
    from paleo.studies import audit as audits

    stated = _Question.of("audit", run, options, priced=False, long_run=False).run
    machine, timed = loaded_system(system), read_collectives(str(log))
    if timed is not None:
        ranks = stated.gpus if "gpus" in stated.model_fields_set else timed.ranks or 1
        return Audited(audits.audit_collectives(timed, operation_of(timed, operation), ranks, machine))
    training_log = read_log(str(log))
    if model is None:
        raise SpecError(f"model: {log} is a log of a training ({training_log.kind}); state the network that it trains")
    return Audited(audits.audit(training_log, predict(_model(model), machine, stated)))


def validate(files: str | Path | Sequence[str | Path], *, calibration: str | Path | None = None) -> Validated:
    """Predictions of every row of measured tables beside what was measured; the headers are those of
    ``measurements/README.md``. ``calibration``: a calibration by name or path in place of the catalog's, for the rows
    of its device or system. SpecError for a file that cannot be read."""
    from paleo.specs.calibration import load_calibration
    from paleo.validate.runner import validate_file

    prices = None if calibration in (None, "auto") else load_calibration(str(calibration))
    tables = list(files) if isinstance(files, Sequence) and not isinstance(files, str) else [files]
    if not all(isinstance(file, str | Path) for file in tables):
        raise SpecError(f"validate: {files!r:.80}: expected a measured table's name, or a list of such")
    if not tables:
        raise SpecError("no file is named; expected measured tables, such as measurements/gemm.csv.gz")
    return Validated(tuple(validate_file(file, prices) for file in tables))


# what is asked


@dataclass(frozen=True)
class _Question:
    """The run, the tariff and the options of a long run that keywords state."""

    run: Run
    tariff: Tariff
    long_run: LongRunOptions | None

    @classmethod
    def of(
        cls, name: str, run: Run | None, options: Document, *, priced: bool = True, long_run: bool = True
    ) -> _Question:
        of_run = {*Run.model_fields, SEQUENCE}
        of_tariff, of_long_run = TARIFF_WORDS if priced else set(), LONG_RUN_WORDS if long_run else set()
        _check_keywords(name, options, {*of_run, *of_tariff, *of_long_run})
        if run is not None and not isinstance(run, Run):
            raise SpecError(f"paleo.{name}: run: {run!r:.80}: expected paleo.Run(…), or its fields as keywords")
        stated = plain_numbers({key: value for key, value in options.items() if key in of_run})
        if run is not None and stated:
            raise SpecError(f"paleo.{name}: {', '.join(stated)} beside run=…; state the run in one way")
        tariff = stated_tariff(**{key: value for key, value in options.items() if key in of_tariff})
        long = {key: value for key, value in options.items() if key in of_long_run}
        whole = run or validated_spec(Run, stated, f"paleo.{name}")
        return cls(of_any_software(whole) if name in SEARCHES else whole, tariff, stated_long_run(**long))


#: Questions that are answered by a search, and the software of those that ask for whatever any framework runs.
SEARCHES, ANY = ("plan", "search"), "any"


def of_any_software(run: Run) -> Run:
    """A run whose ``software`` is ``any`` under the default profile, which leaves no schedule out of a search."""
    if run.software != ANY:
        return run
    return run.model_copy(update={"software": Run.model_fields["software"].default})


def _check_keywords(name: str, options: Mapping[str, Any], known: set[str]) -> None:
    """SpecError for a keyword that a function does not take, with the nearest that it does."""
    keywords = set(inspect.signature(globals()[name]).parameters) - {"options"}
    for keyword in options:
        if keyword not in known:
            raise SpecError(f"paleo.{name}: unknown keyword {keyword!r}; {near(keyword, known | keywords)}")


def _check_top(top: int) -> None:
    """SpecError unless at least one plan is asked for."""
    if not isinstance(top, int) or top < 1:
        raise SpecError(f"top: {top!r:.80}: expected how many plans to show, 1 or more")


def _check_number(name: str, value: float | None) -> None:
    """SpecError for what is no finite number, where anything is stated."""
    if value is not None and not (isinstance(value, Real) and math.isfinite(value)):
        raise SpecError(f"{name}: {value!r:.80}: expected a number")


def gpu_counts(gpus: Counts) -> list[int]:
    """GPU counts from a number, several, or a text such as ``8,16`` and ``8..64`` (8, 16, 32, 64); SpecError where one
    is none.

    >>> gpu_counts("1,8..64")
    [1, 8, 16, 32, 64]
    """
    numbers = plain_numbers(gpus)
    parts = listed(numbers) if isinstance(numbers, str) else [numbers] if isinstance(numbers, int) else list(numbers)
    counts = [count for part in parts for count in _one_or_doublings(part)]
    if not counts or not all(counts):
        expected = f"expected GPU counts from 1 to {MOST_GPUS:,}, such as 1,2,4,1024 or 8..64"
        raise SpecError(f"gpus {str(gpus)[:80]!r}: {expected}")
    if len(counts) > MOST_COUNTS:
        raise SpecError(f"gpus: {len(counts)} counts; {MOST_COUNTS} are enough for a curve")
    return list(dict.fromkeys(counts))


def _one_or_doublings(part: object) -> list[int]:
    """A count, or the doublings from ``8..64``; 0 stands for what is no count."""
    if isinstance(part, int):
        return [part if 0 < part <= MOST_GPUS else 0]
    first, dots, last = str(part).partition("..")
    low = _count_in_digits(first)
    high = _count_in_digits(last) if dots else low
    doublings = [low * 2**power for power in range(MOST_GPUS.bit_length()) if 0 < low * 2**power <= high]
    return [*doublings, *([high] if doublings and doublings[-1] < high else [])] or [0]


def _count_in_digits(text: str) -> int:
    """A count; 0 for what is none, such as the 024 of ``1,024``, which is no list of counts."""
    return 0 if text.strip().startswith("0") else whole_number(text, MOST_GPUS) or 0


def systems_with_counts(systems: Offered | Sequence[Offered], gpus: int) -> tuple[tuple[System, int], ...]:
    """Systems, each with its GPUs: ``dgx-h100:4`` and ``("dgx-h100", 4)`` are four GPUs (not nodes), one without a
    count has ``gpus``. SpecError where there is no system, or a count is none."""
    offers = tuple(_offer(each, gpus) for each in _separate(systems))
    if not offers:
        raise SpecError(f"systems {systems!r}: expected names such as dgx-a100-80gb:16,dgx-h100:8")
    return offers


def _separate(systems: Offered | Sequence[Offered]) -> Iterable[Offered]:
    """The systems of a list, of which each text may hold several separated by commas."""
    if not isinstance(systems, str | Path | System | Iterable):
        raise SpecError(f"systems {systems!r:.80}: expected names, paths, or what load_system gave")
    if isinstance(systems, Path | System) or _is_pair(systems):
        return (systems,)  # type: ignore[return-value]
    return listed(systems) if isinstance(systems, str) else systems  # type: ignore[return-value]


def _is_pair(offered: object) -> bool:
    return isinstance(offered, tuple) and len(offered) == 2 and isinstance(offered[1], int)


def _offer(offered: Offered, gpus: int) -> tuple[System, int]:
    """A system and its GPUs."""
    if isinstance(offered, tuple):
        return loaded_system(offered[0]), gpu_counts(offered[1])[0]
    name, colon, count = offered.rpartition(":") if isinstance(offered, str) else ("", "", "")
    if isinstance(offered, str) and colon and count.strip().isdecimal():
        return loaded_system(name.strip()), gpu_counts(count)[0]
    return loaded_system(offered), gpus


def systems_to_search(systems: Offered | Sequence[Offered], gpus: Counts | None) -> list[tuple[System, list[int]]]:
    """The systems, each with the numbers of GPUs to search: its own (``dgx-h100:64``), else ``gpus``. SpecError without
    a system, or for a system without a number."""
    common = [] if gpus is None else gpu_counts(gpus)
    offers = [(system, [count] if count else common) for system, count in systems_with_counts(systems, 0)]
    for system, counts in offers:
        if not counts:
            raise SpecError(f"gpus: none are stated for {system.name}; write {system.name}:64, or state gpus")
    return offers


def _model(model: str | Path | ModelSpec) -> ModelSpec:
    if isinstance(model, ModelSpec):
        return model
    if isinstance(model, str | Path):
        return load_model(model)
    raise SpecError(f"model {model!r:.80}: expected a name, a path, or what load_model or from_torch gave")
