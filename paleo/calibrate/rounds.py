"""How well tasks foretell submissions of a round that they were not fitted to: every round left out in turn.

A row is predicted by its task as fitted to all other rounds of that task; errors come by benchmark, apart for steps,
samples and minutes, beside the best of three baselines (`paleo.validate.baselines`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from paleo.calibrate.tasks import LEAST_ROWS, by_platform, fitted_task, retimed, rows_of, step_residual
from paleo.specs.task import Platform, load_task
from paleo.validate.baselines import left_out_baselines

if TYPE_CHECKING:
    from paleo.calibrate.tasks import Row
    from paleo.specs.task import Code, TrainingTask
    from paleo.studies.target import TargetTime

#: Two runs whose minutes differ by less than this share are not put in an order.
SAME = 0.05
#: Columns of `round_errors` that are shares.
SHARES = ("step", "samples", "minutes", "baseline", "inside")
#: Headings of `error_lines`.
HEADINGS = ("benchmark", "rows", "step", "samples", "minutes", "best baseline", "in 90 % interval")


def left_out(rows: list[Row], rounds: list[str]) -> Iterator[tuple[Row, TargetTime]]:
    """Each row as predicted by its task fitted to all other rounds; rows of tasks with a single round are predicted by
    the task without any fit."""
    for name in sorted({row.task for row in rows}):
        task_rows = [row for row in rows if row.task == name]
        for towards in sorted({row.round_name for row in task_rows}):
            other_rounds = [row for row in task_rows if row.round_name != towards]
            task = _plain(load_task(name))
            task = fitted_task(task, other_rounds, rounds, towards) if len(other_rounds) >= LEAST_ROWS else task
            task = by_platform(task, other_rounds, lambda known, kind_rows: _with_residual(known, kind_rows, rounds))
            for row in task_rows:
                if row.round_name == towards:
                    yield row, retimed(row, task)


def _plain(task: TrainingTask) -> TrainingTask:
    """The task before anything was fitted to submissions."""
    platforms = {kind: Platform(code=_unfitted(platform.code)) for kind, platform in task.platforms.items()}
    return task.model_copy(update={"code": _unfitted(task.code), "submissions": None, "platforms": platforms})


def _unfitted(code: Code) -> Code:
    return code.model_copy(
        update={"ratio": {}, "per_doubling": 0.0, "several_nodes": 0.0, "residual": 0.0, "per_round": 0.0}
    )


def _with_residual(task: TrainingTask, rows: list[Row], rounds: list[str]) -> TrainingTask:
    """The task with the residual of its step: rms of the logarithm over rows, each round left out in turn."""
    residual = step_residual(rows, rounds)
    return task.model_copy(update={"code": task.code.model_copy(update={"residual": residual})})


def submissions_left_out(table: pd.DataFrame) -> pd.DataFrame:
    """Each submission of a table beside what the other rounds foretell, times in seconds: ``benchmark``, ``round``,
    ``kind`` and name of the
    ``device``, ``gpus``; relative errors ``step``, ``samples`` and ``minutes`` (nan where not measured);
    ``measured``, ``predicted``, ``inside`` (the 90 % interval), and the three baselines' errors."""
    rows = rows_of(table)
    baselines = left_out_baselines(table)
    lines = []
    for row, point in left_out(rows, sorted(set(table["round"].astype(str)))):
        cells = table.iloc[row.index]
        low, high = point.interval
        minutes = float(cells["minutes_to_target"])
        lines.append(
            {
                "benchmark": cells["benchmark"],
                "round": row.round_name,
                "kind": point.prediction.system.device.kind,
                "device": point.prediction.system.device.name,
                "gpus": int(cells["n_gpus"]),
                "step": abs(point.step_time / row.step - 1.0),
                "samples": abs(point.samples / row.samples - 1.0),
                "minutes": abs(point.seconds / row.seconds - 1.0),
                "measured": row.seconds,
                "predicted": point.seconds,
                "inside": float(low <= row.seconds <= high),
            }
            | {name: abs(value / minutes - 1.0) for name, value in baselines.iloc[row.index].items()}
        )
    return pd.DataFrame(lines)


def round_errors(submissions: pd.DataFrame) -> pd.DataFrame:
    """Mean relative errors by benchmark (GPUs), of all GPUs and of each other kind of device: ``rows``, ``step``,
    ``samples``, ``minutes``, ``baseline`` (the least mean of the three, of rows that have one), ``inside``."""
    on_gpus = submissions["kind"] == "gpu"
    groups = [(str(name), rows) for name, rows in submissions[on_gpus].groupby("benchmark")]
    groups.sort(key=lambda group: -len(group[1]))
    groups.append(("all on GPUs", submissions[on_gpus]))
    groups += [(f"all on {str(kind).upper()}s", rows) for kind, rows in submissions[~on_gpus].groupby("kind")]
    names = ["scaled_best", "one_utilisation", "nearest"]
    lines = [
        {
            "benchmark": name,
            "rows": len(rows),
            **rows[["step", "samples", "minutes"]].mean(),
            "baseline": rows[names].mean().min(),
            "inside": rows["inside"].mean(),
        }
        for name, rows in groups
    ]
    return pd.DataFrame(lines).set_index("benchmark")


def error_lines(submissions: pd.DataFrame) -> list[tuple[str, ...]]:
    """The lines of `round_errors` for people, below `HEADINGS`."""
    return [
        (str(name), f"{errors['rows']:,.0f}", *map(percent, errors[list(SHARES)]))
        for name, errors in round_errors(submissions).iterrows()
    ]


def right_order(submissions: pd.DataFrame) -> tuple[float, int]:
    """The share of pairs of submissions on two kinds of GPUs, of one benchmark, round and count, that are predicted in
    the order of their minutes, and how many pairs differ enough to have one (by `SAME`)."""
    right = pairs = 0
    on_gpus = submissions[submissions["kind"] == "gpu"]
    for _, rows in on_gpus.groupby(["benchmark", "round", "gpus"]):
        measured, predicted = rows["measured"].to_numpy(), rows["predicted"].to_numpy()
        devices = rows["device"].to_numpy()
        slower = (measured[:, None] > (1.0 + SAME) * measured[None, :]) & (devices[:, None] != devices[None, :])
        pairs += int(slower.sum())
        right += int((slower & (predicted[:, None] > predicted[None, :])).sum())
    return (right / pairs if pairs else float("nan")), pairs


def percent(share: float) -> str:
    """A share for people; a dash where there is none.

    >>> percent(0.0527), percent(float("nan"))
    ('5.3 %', '–')
    """
    return f"{100.0 * share:.1f} %" if np.isfinite(share) else "–"
