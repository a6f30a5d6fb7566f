"""Steps of reinforcement learning, as a document and as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from paleo.report.columns import grid, percent, wrapped_text
from paleo.serving.reinforcement import INTERVAL, UNMODELLED
from paleo.units import duration

if TYPE_CHECKING:
    from paleo.serving.reinforcement import LearningStep, LearningStudy

#: Plans that a table shows.
SHOWN = 8


def document(study: LearningStudy) -> dict[str, Any]:
    """Return the answer of ``paleo rl`` as a JSON document.

    Parameters
    ----------
    study : LearningStudy
        Steps of reinforcement learning, the shortest first.

    Returns
    -------
    dict of str to Any
        The document.
    """
    best = study.steps[0] if study.steps else None
    return {
        "verdict": study.verdict,
        "model": study.model.name,
        "system": study.system.name,
        "gpus": study.gpus,
        "algorithm": study.algorithm,
        "staleness": study.staleness,
        "possible": best is not None and best.fits,
        "step_time_s": None if best is None else best.step,
        "step_time_interval_s": None if best is None else [factor * best.step for factor in INTERVAL],
        "parts": None if best is None else dict(best.parts),
        "plans": [_plan(step) for step in study.steps],
        "steps": study.count,
        "days": study.days,
        "usd": study.usd,
        "refusals": list(study.refusals),
        "unmodelled": list(UNMODELLED),
    }


def _plan(step: LearningStep) -> dict[str, Any]:
    return {
        "engine": step.layout,
        "strategy": step.strategy,
        "generators": step.generators,
        "trainers": step.trainers,
        "step_time_s": step.step,
        "parts": dict(step.parts),
        "fits": step.fits,
    }


def table(study: LearningStudy) -> RenderableType:
    """Return the answer of ``paleo rl`` as tables: verdict, parts of the shortest step, other layouts.

    Parameters
    ----------
    study : LearningStudy
        Steps of reinforcement learning, the shortest first.

    Returns
    -------
    RenderableType
        Tables for the console.
    """
    head = wrapped_text(Text(study.verdict, style="bold"))
    if not study.steps:
        return Group(head)
    best = study.steps[0]
    parts = grid("A step by part", ["part", "time", "share"])
    for name, seconds in ((name, seconds) for name, seconds in best.parts.items() if seconds):
        parts.add_row(name.replace("_", " "), duration(seconds), percent(seconds / best.step))
    plans = grid("Layouts", ["engine", "trainer", "generate", "train", "step", "fits"], left=2)
    for step in study.steps[:SHOWN]:
        fits = "yes" if step.fits else "no"
        plans.add_row(step.layout, step.strategy, str(step.generators), str(step.trainers), duration(step.step), fits)
    low, high = INTERVAL
    notes = [
        f"Nine measured steps of NeMo RL lie between {low:g} and {high:g} times the prediction.",
        f"Not modelled: {'; '.join(UNMODELLED)}.",
    ]
    return Group(head, Text(), parts, Text(), plans, Text(), *(wrapped_text(note) for note in notes))
