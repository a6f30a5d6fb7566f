"""Plans that recompute only some layers of each pipeline stage, as few as make the plan fit in memory.

Time and memory of a step are nearly linear in the number of recomputed layers. The two ends that a search has
evaluated, no layer and every layer, therefore tell which configurations are worth trying and with how many layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.lowering.stages_and_recompute import RECOMPUTE_POLICIES, max_recomputable_layers, recompute_description
from paleo.predict import Prediction, predict
from paleo.schedules.base import distinct_values
from paleo.specs.run import replace_fields
from paleo.specs.software import SoftwareProfile, load_software

if TYPE_CHECKING:
    from paleo.search.ranking import PlanRow, Ranking
    from paleo.specs.calibration import Calibration
    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run
    from paleo.specs.system import System

Array = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.intp]
#: Most configurations that are tried, and most runs near the expected number of layers before a bisection.
_TRIES, _NEAR = 8, 3


def fit_by_partial_recompute(
    prediction: Prediction,
    software: SoftwareProfile | None = None,
    calibration: Calibration | None = None,
    share: float | None = None,
) -> Prediction | None:
    """Find the smallest number of fully recomputed layers per stage with which a run fits in memory.

    Parameters
    ----------
    prediction : Prediction
        Prediction of a run that does not fit, or that recomputes every layer.
    software : SoftwareProfile, optional
        Profile to use instead of the run's.
    calibration : Calibration, optional
        Calibration to use instead of the run's.
    share : float, optional
        Estimated fraction of layers to recompute; this number is tried first.

    Returns
    -------
    Prediction, optional
        Prediction of the run that fits; None if recomputing all layers does not suffice.
    """

    def tried(layers: int | None) -> Prediction:
        changed: dict[str, object] = {"recompute": "full", "recompute_layers": layers}
        changed |= {"recompute.every": None, "recompute.by_layer": {}}
        return predict(
            prediction.model, prediction.system, replace_fields(prediction.run, changed), software, calibration
        )

    # recomputation may change the cut of a pipeline: keep the pieces of the run that recomputes every layer
    whole = prediction if prediction.run.recompute.policy == "full" else tried(None)
    most = max_recomputable_layers(whole.program, whole.model_chunks)
    return _fewest_that_fit(tried, most, None if share is None else min(max(1, math.ceil(share * most)), most))


def _fewest_that_fit(
    predicted: Callable[[int], Prediction], most: int, expected: int | None = None
) -> Prediction | None:
    """Return the prediction that fits with the fewest recomputed layers, or None if ``most`` layers do not suffice.

    Numbers near the ``expected`` one are tried first, then the interval is bisected.
    """
    low, high, smallest = 0, most + 1, None
    number, guesses = (most, 0) if expected is None else (expected, _NEAR)
    while high - low > 1:
        trial = predicted(number)
        if not trial.memory.fits and number == most:
            return None
        low, high, smallest = (low, number, trial) if trial.memory.fits else (number, high, smallest)
        guesses -= 1
        neighbour = high - 1 if trial.memory.fits else low + 1
        number = neighbour if guesses > 0 else (low + high) // 2
    return smallest


class _Candidate(NamedTuple):
    """Configuration that recomputes every layer, the fraction of layers that should suffice, and the expected score."""

    configuration_index: int
    recomputed_fraction: float
    expected_score: float


def partial_recompute_plans(model: ModelSpec, system: System, ranking: Ranking, best: float) -> list[PlanRow]:
    """Find plans that recompute only some layers of each stage and score better than the best plan so far.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    ranking : Ranking
        Configurations with their scores.
    best : float
        Score to beat: step time [s], or cost or energy of a step, whichever the ranking minimises.

    Returns
    -------
    list of PlanRow
        Plans found, each better than the one before.
    """
    rows: list[PlanRow] = []
    candidates = sorted(_candidates(ranking, best), key=lambda candidate: candidate.expected_score)
    for candidate in candidates[:_TRIES]:
        if candidate.expected_score >= best:
            break
        row = ranking.plan_row(candidate.configuration_index)
        prediction = fit_by_partial_recompute(predict(model, system, row.run), share=candidate.recomputed_fraction)
        if prediction is None or prediction.run.recompute.layers is None:
            continue
        score = ranking.rates[row.gpus] * prediction.step_time
        if score < best:
            best = score
            rows.append(_row(row, prediction))
    return rows


def _row(row: PlanRow, prediction: Prediction) -> PlanRow:
    return replace(
        row,
        recompute=recompute_description(prediction.run),
        step_time=prediction.step_time,
        memory=prediction.memory.total,
        fits=True,
        run=prediction.run,
    )


def _candidates(ranking: Ranking, best: float) -> Iterator[_Candidate]:
    """Yield the configurations of each GPU count for which partial recomputation promises the best scores.

    Time and memory are interpolated between recomputation of no layer and of every layer.
    """
    score = ranking.scores
    for number in range(len(ranking.parts)):
        unfitting, fitting = _fitting_pairs(ranking, number, score < best)
        over = ranking.memory[unfitting]
        under = _memory_before_update(ranking.memory[fitting], ranking.parts[number].run)
        shares = (over - ranking.capacity) / np.maximum(over - under, 1.0)
        expected = score[unfitting] + shares * (score[fitting] - score[unfitting])
        places = np.argsort(expected, kind="stable")[:_TRIES]
        columns = fitting[places].tolist(), shares[places].tolist(), expected[places].tolist()
        yield from (_Candidate(*each) for each in zip(*columns, strict=True))


#: Fraction that states have of the bytes of a parameter's states and update temporaries: 16 of 20 bytes (Adam).
_STATE_FRACTION = 0.8


def _memory_before_update(memory: Array, run: Run) -> Array:
    """Return a lower bound of the memory before the optimizer update, for interpolation over recomputed layers [byte].

    The largest memory may occur during the update, where it does not depend on recomputation. Memory is linear in the
    number of recomputed layers only down to this bound.
    """
    updates = load_software(run.software).gradients.listwise_updates
    return memory * _STATE_FRACTION if run.optimizer in updates else memory


def _fitting_pairs(ranking: Ranking, number: int, better: npt.NDArray[np.bool_]) -> tuple[IndexArray, IndexArray]:
    """Return the indices of pairs of configurations of one GPU count that differ only in recomputation.

    The first of a pair recomputes nothing and has a ``better`` score, but does not fit. The second recomputes every
    layer and fits.
    """
    results, first = ranking.parts[number].results, int(ranking.first[number])
    rows = slice(first, first + len(results))
    plain = np.flatnonzero(
        better[rows] & ~ranking.fits[rows] & (results.recompute_index == RECOMPUTE_POLICIES.index("none"))
    )
    cases = len(results.layout_microbatch_policy[0])
    keys = results.batch_index.astype(np.int64) * cases + results.case_index  # sorted by choice, then by case
    layout, *others = results.layout_microbatch_policy
    # a case may belong to several groups
    group = np.searchsorted(distinct_values(results.batch_case_offsets), np.arange(cases), side="right")
    grouped = layout.astype(np.int64) * (len(results.batch_case_offsets) + 1) + group
    twin = full_recompute_counterparts((grouped, *others))[results.case_index[plain]]
    twin_keys = results.batch_index[plain].astype(np.int64) * cases + twin
    places = np.minimum(np.searchsorted(keys, twin_keys), max(len(keys) - 1, 0))
    has_twin = (twin >= 0) & (keys[places] == twin_keys) if len(plain) else np.zeros(0, dtype=bool)
    plain, places = plain[has_twin] + first, places[has_twin] + first
    fitting = ranking.fits[places]
    return plain[fitting], places[fitting]


def full_recompute_counterparts(cases: tuple[npt.NDArray[np.integer], ...]) -> npt.NDArray[np.int64]:
    """Return the index of the otherwise equal case that recomputes every layer, for each case of a search.

    Parameters
    ----------
    cases : tuple[npt.NDArray[np.integer], ...]
        Indices of layouts, microbatches [samples], and indices of recompute policies, shape (cases,) each.

    Returns
    -------
    ndarray, shape (cases,)
        Indices; -1 if there is none.
    """
    layout, microbatch, policy = (column.astype(np.int64) for column in cases)
    point = layout * (int(microbatch.max(initial=0)) + 1) + microbatch
    full = np.flatnonzero(policy == RECOMPUTE_POLICIES.index("full"))
    full = full[np.argsort(point[full])]
    if not len(full):
        return np.full(len(point), -1)
    places = np.minimum(np.searchsorted(point[full], point), len(full) - 1)
    return np.where(point[full][places] == point, full[places], -1)
