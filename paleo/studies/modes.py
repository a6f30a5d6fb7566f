"""A search over layouts, consistency models and compressions together.

Speed alone always prefers the stalest model, so staleness has a price: a run whose gradients are stale by τ updates on
average needs 1 + k τ times the samples of a synchronous one. ``k`` is stated, or follows from the gradient noise
scale: a step that is τ updates stale is taken to learn no more than one of a batch τ + 1 times as large (the careful
end: with McCandlish et al., 2018, equation 2.11, k = B / (B + B_noise)). Workloads are arrays over all configurations
of a search.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.consistency.base import Workload, consistency
from paleo.errors import CapacityError, PlanError, SpecError
from paleo.parallel.placement import BATCH_AXES
from paleo.predict import predict
from paleo.search.plans import search
from paleo.step.step import waits
from paleo.step.waiting import Noise
from paleo.studies.consistency import has_servers, server_of, studied

if TYPE_CHECKING:
    from paleo.search.plans import Search
    from paleo.search.ranking import Part, PlanRow
    from paleo.search.space import Space
    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run
    from paleo.specs.system import System
    from paleo.step.batch import Batch
    from paleo.step.layouts import Layouts

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]
#: The consistency model of the steps that a search ranks.
SYNCHRONOUS = "bsp"
#: Plans of each pair of modes that are predicted one by one.
LEADING = 4
#: Why a consistency model has no plan.
UNTIED = "no plan fits whose workers hold all parameters and exchange apart from their passes"


@dataclass(frozen=True, slots=True)
class StalenessPrice:
    """What staleness costs: ``per_update`` times the samples more for each update of it, or the gradient's
    ``noise_scale`` [samples]."""

    per_update: float | None = None
    noise_scale: float | None = None

    def __post_init__(self) -> None:
        if (self.per_update is None) == (self.noise_scale is None):
            raise SpecError("a price of staleness: state --staleness-cost or --noise-scale, one of them")
        stated = self.per_update if self.per_update is not None else self.noise_scale
        if stated is None or not 0 <= stated < float("inf") or (self.noise_scale is not None and stated == 0):
            raise SpecError(f"a price of staleness: {stated} is not a number from 0 up")

    def samples_factor(self, staleness: Array | float, batch: int) -> Array:
        """Samples over those of a synchronous run, for updates that are ``staleness`` updates late.

        >>> float(StalenessPrice(noise_scale=300.0).samples_factor(4.0, 100))
        2.0
        """
        cost = batch / (batch + self.noise_scale) if self.noise_scale is not None else self.per_update or 0.0
        return np.asarray(1.0 + cost * np.asarray(staleness))


@dataclass(frozen=True, slots=True)
class ModePlan:
    """A plan under a consistency model and a compression. ``step_time``: seconds in which the global batch is seen
    once; ``samples_factor``: samples over those of a synchronous run."""

    consistency: str
    compress: str | None
    plan: PlanRow
    step_time: float
    staleness: float
    samples_factor: float

    @property
    def effective(self) -> float:
        """Seconds for what a synchronous run learns in a step: what plans are ranked by."""
        return self.step_time * self.samples_factor


@dataclass(frozen=True, slots=True)
class ModeSearch:
    """Plans of all modes, best first, and why modes without any were left out."""

    configurations: int
    seconds: float
    global_batch: int
    price: StalenessPrice
    plans: tuple[ModePlan, ...]
    refused: tuple[str, ...]


def mode_search(
    model: ModelSpec,
    system: System,
    run: Run,
    price: StalenessPrice,
    *,
    consistencies: Sequence[str] = ("bsp",),
    compressions: Sequence[str | None] = (None,),
    counts: Sequence[int] = (),
    space: Space | None = None,
    top: int = 10,
) -> ModeSearch:
    """The best plans over layouts x consistency models x compressions; CapacityError where none fits."""
    started = time.perf_counter()
    plans: list[ModePlan] = []
    refused: list[str] = []
    configurations = batch = 0
    for compress in dict.fromkeys(compressions):
        plain = run.model_copy(update={"compress": compress, "consistency": "bsp"})
        try:
            searched = search(model, system, plain, counts=counts, space=space)
        except PlanError as error:
            refused.append(f"{compress or 'dense'}: {error}")
            continue
        batch, names = searched.global_batch, dict.fromkeys(consistencies)
        works = _works(searched, system) if names.keys() - {SYNCHRONOUS} else []
        for name in names:
            scores = _scores(searched, works, name, price)
            configurations += int(np.isfinite(scores).sum())
            leading = list(_leading(model, system, searched, scores, name, price))
            refused += [] if leading else [f"{name}, {compress or 'dense'}: {UNTIED}"]
            plans += leading
    if not plans:
        raise CapacityError("no plan of these modes fits: " + ("; ".join(refused) or "memory is short in all of them"))
    ranked = sorted(plans, key=lambda plan: plan.effective)[:top]
    return ModeSearch(configurations, time.perf_counter() - started, batch, price, tuple(ranked), tuple(refused))


def _scores(searched: Search, works: Sequence[_Work], name: str, price: StalenessPrice) -> Array:
    """Seconds of all configurations for what a synchronous run learns in a step; infinite where a model does not suit
    them or they do not fit: (configurations,)."""
    ranking = searched.ranking
    if ranking is None:
        return np.zeros(0)
    if name == SYNCHRONOUS:
        return np.where(ranking.fits, ranking.step, np.inf)
    parts = [_effective(work, name, price, searched.global_batch) for work in works]
    return np.where(ranking.fits, np.concatenate(parts), np.inf)


def _leading(
    model: ModelSpec, system: System, searched: Search, scores: Array, name: str, price: StalenessPrice
) -> Iterator[ModePlan]:
    """The first plans of a mode, each predicted by itself."""
    seen: set[tuple[int, str, int]] = set()
    for index in np.argsort(scores, kind="stable").tolist():
        if len(seen) == LEADING or not np.isfinite(scores[index]) or searched.ranking is None:
            return
        row = searched.ranking.row(index)
        key = row.gpus, row.strategy, row.microbatch
        if key not in seen:
            seen.add(key)
            yield _predicted(model, system, row, name, price)


def _predicted(model: ModelSpec, system: System, row: PlanRow, name: str, price: StalenessPrice) -> ModePlan:
    """A plan with the figures of its own prediction."""
    plan = replace(row, run=row.run.model_copy(update={"consistency": name}))
    prediction = predict(model, system, plan.run)
    study, batch = studied(prediction), prediction.plan.global_batch
    if study is None:
        return ModePlan(name, plan.run.compress, plan, prediction.step_time, 0.0, 1.0)
    staleness = float(study.cycle.staleness_mean)
    factor = 1.0 if study.model.exact else float(price.samples_factor(staleness, batch))
    return ModePlan(name, plan.run.compress, plan, study.step_time, staleness, factor)


class _Work(NamedTuple):
    """Steps of all configurations of a part, and the workload of those ``rows`` whose workers may go on without one
    another: they hold all parameters and exchange apart from their passes. None where there are none. ``servers``: the
    parameter servers that the run states."""

    steps: Array
    rows: Index
    workload: Workload | None
    servers: int | None


def _works(searched: Search, system: System) -> list[_Work]:
    """The work of each part of a search, the same under all consistency models."""
    return [] if searched.ranking is None else [_work(part, system) for part in searched.ranking.parts]


def _work(part: Part, system: System) -> _Work:
    results = part.results
    order = np.argsort(results.choice, kind="stable")
    ends = np.searchsorted(results.choice[order], np.arange(len(results.batches) + 1))
    rows, workloads = [np.zeros(0, dtype=np.intp)], []
    for number, batch in enumerate(results.batches):
        chosen = order[ends[number] : ends[number + 1]]
        if batch.zero != 3 and not batch.overlapped and len(chosen):
            rows.append(chosen)
            places = results.rows(chosen)
            workloads.append(_workload(batch, places, results.step_time[chosen], system, part.run))
    workload = _joined(workloads) if workloads else None
    return _Work(results.step_time, np.concatenate(rows), workload, part.run.servers)


def _joined(workloads: Sequence[Workload]) -> Workload:
    """Workloads of one system and run side by side."""
    names = [each.name for each in fields(Workload) if isinstance(getattr(workloads[0], each.name), np.ndarray)]
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(workload, name) for workload in workloads]) for name in names
    }
    return replace(workloads[0], **arrays)


def _effective(work: _Work, name: str, price: StalenessPrice, batch: int) -> Array:
    """The scores of a part's configurations under a model that is not synchronous, whether they fit or not."""
    effective, model = np.full(len(work.steps), np.inf), consistency(name)
    if work.workload is not None:
        server = work.workload.server if has_servers(work.servers, name) else None
        cycle = model.cycle(replace(work.workload, server=server))
        factor = 1.0 if model.exact else price.samples_factor(cycle.staleness_mean, batch)
        alone = work.steps[work.rows]
        effective[work.rows] = np.where(np.asarray(work.workload.workers) > 1, cycle.step * factor, alone)
    return effective


def _neighbour_seconds(layouts: Layouts, payload: Array) -> Array:
    """Seconds in which each layout's worker sends its payload to one other worker: (layouts,)."""
    groups = layouts.groups(range(len(layouts)), [BATCH_AXES] * len(layouts))
    return layouts.collective("send_recv", groups, payload)


def _tensors(layouts: Layouts) -> Array:
    """Tensors of each layout's parameters, all stages together: (layouts,)."""
    return np.array(
        [float(sum(section.tensors * section.repeat for section in each.sections)) for each in layouts.programs]
    )


def _workload(batch: Batch, rows: Index, steps: Array, system: System, run: Run) -> Workload:
    """Some configurations of a batch, whose exchange follows their passes, as the workloads of like workers."""
    layouts, layout = batch.layouts, batch.cases.layout[rows]
    elements = layouts.elements(batch.assignment.kinds.stages, trained=True).max(axis=0)
    payload = elements * batch.backend.formats.summed
    exchange = layouts.exchange(batch.assignment, batch.zero, chunks=False)[0].sum(axis=1).max(axis=0)
    neighbour = layouts.shared.once("neighbour", lambda: _neighbour_seconds(layouts, payload))
    tensors = layouts.shared.once("tensors of all stages", lambda: _tensors(layouts))
    noise = Noise.of(run, batch.backend.software, np.array(layouts.local_batches, dtype=np.float64))
    worked = steps - waits(batch)[rows]
    exposed = np.minimum(exchange[layout], worked)
    return Workload(
        workers=layouts.replicas[layout],
        compute=worked - exposed,
        all_reduce=exchange[layout],
        hidden=np.zeros(len(rows)),
        neighbour=neighbour[layout],
        payload=payload[layout],
        parameters=elements[layout],
        tensors=tensors[layout] / batch.assignment.stages,
        jitter=noise.independent[layout],
        persistent=noise.persistent,
        server=server_of(run, system, batch.backend.software),
    )
