"""Grouping of plans that are equally fast within the error of a prediction, the simplest plan first."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from paleo.parallel.placement import parse_strategy
from paleo.predict import MEMORY_HEADROOM_SHARE, predict
from paleo.search.ranking import MAX_COMPARED_STRATEGIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paleo.search.plans import FoundPlans
    from paleo.search.ranking import PlanRow
    from paleo.specs.model import ModelSpec
    from paleo.specs.system import System

#: Plans on one machine count as equally fast within this fraction of the (logarithmic) distance from a step to the
#: upper end of its 90 % interval. It is less than 1 because the errors of such plans are alike. For 404 pairs of
#: measured plans within this distance (same network, machine and batch; eleven sources) the predicted order is right in
#: 53 %; for 1,610 pairs farther apart than the whole interval it is right in 97 %.
TIE_INTERVAL_FRACTION = 0.5
#: Longest over shortest step of a class where no interval is known: about half the usual interval.
_DEFAULT_TIE_RATIO = 1.05
#: Schedules that frameworks run by default.
_USUAL = ("none", "1f1b", "interleaved")
#: Fraction of the memory up to which a plan leaves room for errors of the predicted memory.
_COMFORTABLE = 0.85


def simplicity_key(row: PlanRow, capacity: float) -> tuple[float, ...]:
    """Return a sort key that puts plans first that are simpler to set up and to run.

    Parameters
    ----------
    row : PlanRow
        Plan of a search.
    capacity : float
        Memory of a device [bytes].

    Returns
    -------
    tuple
        Number of mesh axes in use, whether stages are uneven, whether the schedule is unusual, whether there are
        virtual stages, whether little memory is left, step time [s].
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


def group_tied_plans(model: ModelSpec, system: System, result: FoundPlans, top: int) -> FoundPlans:
    """Group plans of one GPU count that are equally fast within the prediction's error.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    result : FoundPlans
        Result of the search, with the fastest plans first.
    top : int
        Number of plans to return.

    Returns
    -------
    FoundPlans
        Result with its plans group by group, the simplest first; ``class_step_time`` is the shortest step of a group
        [s]. Plans that leave less than `MEMORY_HEADROOM_SHARE` of the memory free come last; those that do not fit are
        not grouped.
    """
    first = predict(model, system, result.plans[0].run)
    width = (first.interval[1] / first.step_time) ** TIE_INTERVAL_FRACTION
    varied = () if result.ranking is None else result.ranking.best_of_each_strategy(MAX_COMPARED_STRATEGIES)
    rows = list(result.plans) + [row for row in varied if row not in result.plans]
    capacity = system.device.memory.usable_bytes
    roomy = (1.0 - MEMORY_HEADROOM_SHARE) * capacity
    rows.sort(key=lambda row: (not row.fits, row.memory > roomy, row.step_time))
    parts = groupby(rows, key=lambda row: (row.fits, row.memory > roomy))
    grouped = [row for (fits, _), part in parts for row in _grouped(part, width if fits else 1.0, capacity)]
    return replace(result, plans=tuple(_selected(grouped, top)))


def simplest_plan(rows: Sequence[PlanRow], capacity: float) -> PlanRow:
    """Return the simplest plan among those about as fast as the first plan.

    Parameters
    ----------
    rows : sequence of PlanRow
        Plans of a search, the best first.
    capacity : float
        Memory of a device [bytes].

    Returns
    -------
    PlanRow
        The simplest plan; the first one if no simpler plan is about as fast and fits.
    """
    first, roomy = rows[0], (1.0 - MEMORY_HEADROOM_SHARE) * capacity
    equals = (row for row in rows if row.step_time <= _DEFAULT_TIE_RATIO * first.step_time and row.memory <= roomy)
    return min(equals, key=lambda row: simplicity_key(row, capacity), default=first)


def _grouped(rows: Iterable[PlanRow], width: float, capacity: float) -> Iterable[PlanRow]:
    """Sort plans by groups of about equal step time, the simplest plan of each first, and set ``class_step_time``.

    ``rows`` are sorted by step time. ``width`` is the largest ratio of step times within a group, ``capacity`` the
    memory of a device [byte].
    """
    lead, classes = 0.0, list["PlanRow"]()
    for row in rows:
        lead = lead if row.step_time <= lead * width else row.step_time
        classes.append(replace(row, tie_group_step_time=lead))
    return sorted(
        classes, key=lambda row: (row.tie_group_step_time, *(simplicity_key(row, capacity) if row.fits else ()))
    )


def _selected(rows: Sequence[PlanRow], top: int) -> Iterable[PlanRow]:
    """Return the simplest and the fastest plan of each group, then others up to ``top`` plans, in the given order."""
    first = list[int]()
    for _, members in groupby(
        range(len(rows)), key=lambda number: (rows[number].fits, rows[number].tie_group_step_time)
    ):
        simplest, *others = members
        first += dict.fromkeys((simplest, min((simplest, *others), key=lambda number: rows[number].step_time)))
    others_of_all = (number for number in range(len(rows)) if number not in first)
    return [rows[number] for number in sorted([*first, *others_of_all][:top])]


def tie_group_numbers(rows: Sequence[PlanRow]) -> list[int]:
    """Return the group of each plan (plans with about the same step time), numbered from 1 in the order of the plans.

    Parameters
    ----------
    rows : sequence of PlanRow
        Plans of one system.

    Returns
    -------
    list of int
        Number of the class of each plan.
    """
    keys = [(row.gpus, row.fits, row.tie_group_step_time or row.step_time) for row in rows]
    known = list(dict.fromkeys(keys))
    return [known.index(key) + 1 for key in keys]
