"""Steps of reinforcement learning, as a document and as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from paleo.report.columns import AnswerColumn, answer_group, empty_table, percent, row_json, rows_table, wrapped_text
from paleo.serving.reinforcement import STEP_TIME_INTERVAL_FACTORS, UNMODELLED_EFFECTS, ReinforcementStep
from paleo.units import format_duration

if TYPE_CHECKING:
    from paleo.studies.reinforcement import ReinforcementStudy

#: Plans that a table shows.
_MAX_TABLE_ROWS = 8


def json_document(study: ReinforcementStudy) -> dict[str, Any]:
    """Return the answer of ``paleo rl`` as a JSON document.

    Parameters
    ----------
    study : ReinforcementStudy
        Steps of reinforcement learning, the shortest first.

    Returns
    -------
    dict of str to Any
        The document.
    """
    best, question, interval = study.steps[0] if study.steps else None, study.question, None
    if best is not None:
        interval = [factor * best.step_time for factor in STEP_TIME_INTERVAL_FACTORS]
    return {
        "verdict": study.verdict,
        "model": question.model.name,
        "system": question.system.name,
        "gpus": question.gpus,
        "algorithm": question.algorithm,
        "staleness": question.staleness,
        "possible": best is not None and best.trainer_fits,
        "step_time_s": None if best is None else best.step_time,
        "step_time_interval_s": interval,
        "parts": None if best is None else dict(best.parts),
        "plans": [row_json(LAYOUT_COLUMNS, step) for step in study.steps],
        "steps": study.step_count,
        "days": study.days,
        "usd": study.usd,
        "refusals": list(study.refusals),
        "unmodelled": list(UNMODELLED_EFFECTS),
    }


#: Columns of layouts, whose rows are steps.
LAYOUT_COLUMNS = (
    AnswerColumn("engine", lambda step: step.layout, "engine"),
    AnswerColumn("strategy", lambda step: step.strategy, "trainer"),
    AnswerColumn("generators", lambda step: step.generator_gpus, "generate", "count"),
    AnswerColumn("trainers", lambda step: step.trainer_gpus, "train", "count"),
    AnswerColumn("step_time_s", lambda step: step.step_time, "step", "s"),
    AnswerColumn("parts", lambda step: dict(step.parts)),
    AnswerColumn("fits", lambda step: step.trainer_fits, "fits", "yes or no"),
)


def nonzero_step_parts(step: ReinforcementStep) -> dict[str, float]:
    """Return the parts of a step that take time, with their times.

    Parameters
    ----------
    step : ReinforcementStep
        The step.

    Returns
    -------
    dict of str to float
        Seconds by name.
    """
    return {name.replace("_", " "): seconds for name, seconds in step.parts.items() if seconds > 0.0}


def accuracy_notes(study: ReinforcementStudy) -> list[str]:
    """Return notes on overlap and accuracy of a reinforcement-learning prediction, one sentence each.

    Parameters
    ----------
    study : ReinforcementStudy
        Steps of reinforcement learning.

    Returns
    -------
    list of str
        Sentences.
    """
    low, high = STEP_TIME_INTERVAL_FACTORS
    texts = ["Parts overlap: the engine generates while the trainer works."] if study.question.staleness else []
    return [*texts, f"Eight of nine measured steps of NeMo RL lie between {low:g} and {high:g} times the prediction."]


def table(study: ReinforcementStudy) -> RenderableType:
    """Return the answer of ``paleo rl`` as tables: verdict, parts of the shortest step, other layouts.

    Parameters
    ----------
    study : ReinforcementStudy
        Steps of reinforcement learning, the shortest first.

    Returns
    -------
    RenderableType
        Tables for the console.
    """
    if not study.steps:
        return wrapped_text(Text(study.verdict, style="bold"))
    best = study.steps[0]
    parts = empty_table("A step by part", ["part", "time", "share"])
    for name, seconds in nonzero_step_parts(best).items():
        parts.add_row(name, format_duration(seconds), percent(seconds / best.step_time))
    plans = rows_table("Layouts", LAYOUT_COLUMNS, study.steps[:_MAX_TABLE_ROWS])
    notes = [*accuracy_notes(study), f"Not modelled: {'; '.join(UNMODELLED_EFFECTS)}."]
    return answer_group(study.verdict, (parts, plans), notes)
