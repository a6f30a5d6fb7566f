"""Laws of samples from tables of reference convergence points: ``paleo calibrate --fit convergence.csv``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from paleo.learning.reference_points import fitted
from paleo.specs.catalog import entries
from paleo.specs.task import load_task

if TYPE_CHECKING:
    from paleo.learning.reference_points import ReferencePoints
    from paleo.specs.task import TrainingTask

#: Columns that tell a table of reference points.
HEADER = frozenset({"benchmark", "round", "global_batch_size", "samples_mean", "samples_std", "n"})
SOURCE = "reference convergence points of MLPerf Training (mlcommons/logging, rcp_checker) as of {rounds}"


def is_convergence(columns: Iterable[str]) -> bool:
    """Whether a table holds reference convergence points."""
    return set(columns) >= HEADER


def points_of(task: TrainingTask, table: pd.DataFrame) -> pd.DataFrame:
    """The reference points of a task: of its benchmarks and rounds, the latest of each batch. Rounds from before there
    were reference points have those of the first round with any."""
    task_points = table[table["benchmark"].isin(task.benchmarks)]
    chosen = (
        task_points[task_points["round"].isin(task.rounds)]
        if task.rounds
        else task_points[~_in_listed_rounds(task_points)]
    )
    if task.rounds and chosen.empty and not task_points.empty:
        chosen = task_points[task_points["round"] == task_points["round"].min()]
    return chosen.sort_values(["round", "samples_mean"]).drop_duplicates("global_batch_size", keep="last")


def _in_listed_rounds(points: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Which points belong to rounds that a task lists as its own."""
    tasks = [load_task(name) for name in entries("tasks")]
    listed = {(benchmark, name) for task in tasks for benchmark in task.benchmarks for name in task.rounds}
    pairs = zip(points["benchmark"], points["round"], strict=True)
    return np.fromiter((pair in listed for pair in pairs), dtype=np.bool_, count=len(points))


def law_of_points(points: pd.DataFrame) -> ReferencePoints:
    """The law of reference points; its seed noise is the median of their relative deviations."""
    noise = (points["samples_std"] / points["samples_mean"]).to_numpy(dtype=np.float64)
    pairs = list(zip(points["global_batch_size"].astype(float), points["samples_mean"].astype(float), strict=True))
    source = SOURCE.format(rounds=points["round"].astype(str).max())
    return fitted(pairs, source=source, seed_noise=float(np.median(noise)))


def law_text(law: ReferencePoints) -> str:
    """The ``law:`` block of a task file."""
    pairs = ", ".join(f"[{batch:g}, {samples:.0f}]" for batch, samples in sorted(law.points))
    critical = [] if law.critical_batch is None else [f"    critical_batch: {law.critical_batch:.1f}"]
    low, high = law.batches or (0.0, 0.0)
    lines = [
        "law:",
        "  reference_points:",
        f"    samples_min: {law.samples_min:.0f}",
        *critical,
        f"    points: [{pairs}]",
        f"    batches: [{low:g}, {high:g}]",
        f"    residual: {law.residual:.4f}",
        f"    seed_noise: {law.seed_noise:.4f}",
        f'    source: "{law.source}"',
    ]
    return "\n".join(lines) + "\n"


def with_law(text: str, block: str) -> str:
    """The text of a task file with its ``law:`` block replaced; all else as it is."""
    return re.sub(r"(?m)^law:\n(?:[ \t].*\n)+", lambda _: block, text, count=1)


def fit_laws(table: pd.DataFrame) -> Iterator[tuple[TrainingTask, ReferencePoints]]:
    """Each task of the catalog with reference points in the table, and their law."""
    for name in entries("tasks"):
        task = load_task(name)
        points = points_of(task, table)
        if len(points) > 1:
            yield task, law_of_points(points)


def write_laws(table: pd.DataFrame, folder: Path) -> list[Path]:
    """Write every fitted law into the task files of a folder; the files that were written."""
    written = []
    for task, law in fit_laws(table):
        path = folder / f"{task.name}.yaml"
        path.write_text(with_law(entries("tasks")[task.name].read_text(encoding="utf-8"), law_text(law)))
        written.append(path)
    return written
