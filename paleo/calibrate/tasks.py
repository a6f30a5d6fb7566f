"""``paleo calibrate --fit`` on tables of reference points and of submissions: writes them into task files."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from paleo.calibrate.convergence import is_convergence, write_laws
from paleo.calibrate.submissions import LEAST_ROWS, fitted_task, rows_of, step_residual
from paleo.errors import SpecError
from paleo.specs.catalog import FOLDERS, catalog_root, entries
from paleo.specs.task import load_task
from paleo.validate.kinds.base import read_table
from paleo.validate.steps.training_runs import TrainingRuns

if TYPE_CHECKING:
    from paleo.specs.task import TrainingTask

#: Fields of a code that nothing was fitted to, and of an evaluation, in the order in which a file has them.
CODE = ("software", "ratio", "samples_per_gpu", "per_doubling", "several_nodes", "residual", "rows", "source")
EVALUATION = ("samples", "every", "first", "work", "fixed", "beside", "source")
SUBMISSIONS = ("ratio", "residual", "rows", "source")


def is_of_tasks(columns: Iterable[str]) -> bool:
    """Whether a table holds reference points or submissions."""
    names = set(columns)
    return is_convergence(names) or names >= TrainingRuns.header


def asked_for_tasks(file: str) -> bool:
    """Whether a file is such a table, by its first line; False where it cannot be read (others say why)."""
    try:
        return is_of_tasks(pd.read_csv(file, nrows=0, compression="infer").columns)
    except (OSError, EOFError, ValueError):
        return False


def fit_tasks(files: Sequence[str], output_dir: str | None, date: str) -> int:
    """Fit laws to tables of reference points, then codes, samples and evaluations to tables of submissions; writes the
    task files into a folder [the catalog's]; the exit code."""
    folder = Path(output_dir) if output_dir is not None else catalog_root() / FOLDERS["tasks"]
    if not folder.is_dir():
        raise SpecError(f"--output-dir {folder}: is not a folder")
    for file in files:
        table = read_table(file)
        laws = is_convergence(table.columns)
        for path in write_laws(table, folder) if laws else write_submissions(table, folder, date):
            sys.stderr.write(f"wrote {path}\n")
        load_task.cache_clear()
    return 0


def write_submissions(table: pd.DataFrame, folder: Path, date: str) -> list[Path]:
    """Write what submissions teach into the task files of a folder, fitted towards the last round; the files."""
    rows, rounds = rows_of(table), sorted(set(table["round"].astype(str)))
    written = []
    for name in entries("tasks"):
        mine = [row for row in rows if row.task == name]
        if len(mine) < LEAST_ROWS:
            continue
        seen = sorted({row.round_name for row in mine})
        task = fitted_task(load_task(name), mine, rounds, seen[-1])
        code = task.code.model_copy(
            update={
                "residual": step_residual(mine, rounds),
                "source": f"{task.code.rows} submissions of rounds {seen[0]} to {seen[-1]}, fitted "
                f"{date}; residual: each round left out in turn",
            }
        )
        path = folder / f"{name}.yaml"
        text = entries("tasks")[name].read_text(encoding="utf-8")
        path.write_text(with_blocks(text, task.model_copy(update={"code": code})), encoding="utf-8")
        written.append(path)
    return written


def with_blocks(text: str, task: TrainingTask) -> str:
    """The text of a task file with its code, evaluation and submissions replaced; all else as it is."""
    text = _without(text, "submissions")
    text = _replaced(
        text, "evaluation", _block("evaluation", task.evaluation.model_dump(exclude_defaults=True), EVALUATION)
    )
    added = (
        ""
        if task.submissions is None
        else _block("submissions", task.submissions.model_dump(exclude_defaults=True), SUBMISSIONS)
    )
    return _replaced(text, "code", _block("code", task.code.model_dump(exclude_defaults=True), CODE) + added)


#: Units of fields that carry one.
UNITS = {"fixed": " s"}


def _block(name: str, values: Mapping[str, Any], order: Sequence[str]) -> str:
    lines = [f"  {key}: {_shown(values[key])}{UNITS.get(key, '')}" for key in order if key in values]
    return "\n".join([f"{name}:", *lines]) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {number:g}" for key, number in value.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else f"{value:.12g}"


def _replaced(text: str, name: str, block: str) -> str:
    return re.sub(rf"(?m)^{name}:\n(?:[ \t].*\n)+", lambda _: block, text, count=1)


def _without(text: str, name: str) -> str:
    return _replaced(text, name, "")
