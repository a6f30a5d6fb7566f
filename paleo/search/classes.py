"""Plans whose step times a prediction cannot tell apart, as classes; the simplest plan of a class comes first."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from paleo.parallel.placement import parse_strategy
from paleo.predict import HEADROOM, predict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paleo.search.plans import Search
    from paleo.search.ranking import PlanRow
    from paleo.specs.model import ModelSpec
    from paleo.specs.system import System

#: Share of the way from a step to the upper end of its 90 % interval (in logarithms) within which plans on one machine
#: count as equally fast: the errors of such plans are alike, so less than the whole interval. Of 404 pairs of measured
#: plans that close (same network, machine and batch; eleven sources) the order is predicted right in 53 %; beyond the
#: whole way it is in 97 % of 1,610 pairs.
NOISE = 0.5
#: Steps of a class over its shortest, where no interval is at hand: half of the usual one.
_ABOUT = 1.05
#: Plans with strategies of their own that are compared.
_VARIED = 40
#: Schedules that frameworks run by default.
_USUAL = ("none", "1f1b", "interleaved")
#: Share of the memory below which a plan has room for what a prediction may miss.
_COMFORTABLE = 0.85


def simplicity(row: PlanRow, capacity: float) -> tuple[float, ...]:
    """Return a key that sorts plans by what they ask of a person.

    Parameters
    ----------
    row : PlanRow
    capacity : float
        Memory of a device [bytes].

    Returns
    -------
    tuple
        Number of axes, whether stages are uneven, whether the schedule is unusual, whether there are virtual stages,
        whether memory is short, step time [s].
    """
    axes = sum(degree > 1 for degree in parse_strategy(row.strategy).degrees.values())
    uneven = isinstance(row.run.pipeline.cut, tuple) and len(set(row.run.pipeline.cut)) > 1
    return (
        axes,
        uneven,
        row.schedule not in _USUAL,
        "vp=" in row.strategy,
        row.memory > _COMFORTABLE * capacity,
        row.step_time,
    )


def classed(model: ModelSpec, system: System, result: Search, top: int) -> Search:
    """Group the plans of a search on one count of GPUs into classes of equally fast ones.

    Parameters
    ----------
    model : ModelSpec
    system : System
    result : Search
        Its plans, the fastest first.
    top : int
        Number of plans to return.

    Returns
    -------
    Search
        Plans by class, the simplest first; ``class_step`` of each is the shortest step of its class [s]. Plans that
        leave less than `HEADROOM` of the memory free come last; those that do not fit are not grouped.
    """
    first = predict(model, system, result.plans[0].run)
    width = (first.interval[1] / first.step_time) ** NOISE
    varied = () if result.ranking is None else result.ranking.varied(_VARIED)
    rows = list(result.plans) + [row for row in varied if row not in result.plans]
    capacity = system.device.memory.usable
    roomy = (1.0 - HEADROOM) * capacity
    rows.sort(key=lambda row: (not row.fits, row.memory > roomy, row.step_time))
    parts = groupby(rows, key=lambda row: (row.fits, row.memory > roomy))
    grouped = [row for (fits, _), part in parts for row in _grouped(part, width if fits else 1.0, capacity)]
    return replace(result, plans=tuple(_selected(grouped, top)))


def simplest(rows: Sequence[PlanRow], capacity: float) -> PlanRow:
    """Return the simplest of those plans that are about as fast as the first, where that fits.

    Parameters
    ----------
    rows : sequence of PlanRow
        Plans of a search, the first with room in memory where any has.
    capacity : float
        Memory of a device [bytes].
    """
    first, roomy = rows[0], (1.0 - HEADROOM) * capacity
    equals = (row for row in rows if row.step_time <= _ABOUT * first.step_time and row.memory <= roomy)
    return min(equals, key=lambda row: simplicity(row, capacity), default=first)


def _grouped(rows: Iterable[PlanRow], width: float, capacity: float) -> Iterable[PlanRow]:
    """Rows, the fastest first, with the shortest step of their class; by class, the simplest first."""
    lead, classes = 0.0, list["PlanRow"]()
    for row in rows:
        lead = lead if row.step_time <= lead * width else row.step_time
        classes.append(replace(row, class_step=lead))
    return sorted(classes, key=lambda row: (row.class_step, *(simplicity(row, capacity) if row.fits else ())))


def _selected(rows: Sequence[PlanRow], top: int) -> Iterable[PlanRow]:
    """The simplest and the fastest plan of each class, then others, up to ``top`` in all, in their order."""
    first = list[int]()
    for _, members in groupby(range(len(rows)), key=lambda number: (rows[number].fits, rows[number].class_step)):
        simplest, *others = members
        first += dict.fromkeys((simplest, min((simplest, *others), key=lambda number: rows[number].step_time)))
    others_of_all = (number for number in range(len(rows)) if number not in first)
    return [rows[number] for number in sorted([*first, *others_of_all][:top])]


def class_numbers(rows: Sequence[PlanRow]) -> list[int]:
    """Return the number of each plan's class, counted from 1 in the order of the plans.

    Parameters
    ----------
    rows : sequence of PlanRow
        Plans of one system.
    """
    keys = [(row.gpus, row.fits, row.class_step or row.step_time) for row in rows]
    known = list(dict.fromkeys(keys))
    return [known.index(key) + 1 for key in keys]
