"""``paleo calibrate --fit … --only ledger``: what each source of measured rows would get had it been left out.

A source of steps is predicted with constants of whole steps that were fitted to the others (`arithmetic`), inside
intervals that were fitted to the others (`spreads`); one of served runs with what others suggest of the engines. A
source of kernels is predicted with parameters that were fitted to the other sources of its family and device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from paleo.calibrate.files import LEAST_ROWS, FitJob, fit_of, table_name
from paleo.calibrate.fit import Rows, count, predictions
from paleo.tables.cells import text
from paleo.tables.errors import ResidualErrors, residual
from paleo.tables.runner import FileReport, validate_file

if TYPE_CHECKING:
    from paleo.specs.calibration import Calibration

Report = Callable[[str], object]
#: What `--only` asks for.
ASKED = "ledger"
#: Kinds of tables of steps of networks, and the one whose steps tell what sustained arithmetic costs.
TRANSFORMERS = "llm_iterations"
TABLES = (TRANSFORMERS, "cnn_iterations", "other_iterations", "serving", "mlperf/inference")
#: Columns of the ledger; errors, biases and coverages as fractions.
COLUMNS = (
    "table", "source", "rows", "mean_error", "bias", "left_out_error", "left_out_bias", "coverage",
    "left_out_coverage", "one_constant",
)  # fmt: skip
#: Fewest rows of a source in the ledger, and digits of its numbers.
LEAST, DIGITS = 6, 4


def step_ledger(files: Sequence[str], report: Report = str) -> pd.DataFrame:
    """Set down the errors of each source of steps, fitted and left out.

    Parameters
    ----------
    files : sequence of str
        Tables of steps of networks.
    report : callable
        Called with a label as each part of the work starts.

    Returns
    -------
    DataFrame
        Columns as in `COLUMNS`, one source of `LEAST` rows or more a line.
    """
    from paleo.calibrate import arithmetic, spreads

    known = arithmetic.dense_steps([file for file in files if table_name(file) == TRANSFORMERS], report)
    calibrations = {name: arithmetic.calibration(arithmetic.fitted(others)) for name, _, others in known.by_source()}
    coverages = spreads.cross_validated(spreads.evidence(files, report)).set_index("source")
    lines = []
    for file in files:
        report(f"{Path(file).name}: each source left out")
        whole = validate_file(file)
        for source, errors in whole.by(whole.sources).items():
            if errors.rows >= LEAST:
                tested = _left_out(whole, source, calibrations.get(source)) or errors
                inside = coverages["inside"].get(f"{whole.table.name}: {source}", np.nan)
                shares = errors.coverage, inside, errors.baseline_mape
                values = (errors.mape, errors.bias, tested.mape, tested.bias, *shares)
                numbers = [np.nan if value is None else round(float(value), DIGITS) for value in values]
                lines.append((Path(file).name, source, errors.rows, *numbers))
    return pd.DataFrame(lines, columns=COLUMNS)


def _left_out(whole: FileReport, source: str, calibration: Calibration | None) -> ResidualErrors | None:
    """Return the errors on a source's rows with arithmetic or engines fitted without it; None where they are the
    same."""
    chosen = whole.predicted & (whole.sources == source)
    table: Any = whole.table
    other = table.without(source) if calibration is None else table.with_calibration(calibration)
    if other is table:
        return None
    seconds = other.predict(whole.frame[chosen]).seconds
    return residual(seconds, whole.measured[chosen])


def kernel_sources(job: FitJob) -> Iterator[tuple[str, ResidualErrors]]:
    """Predict each source of a family's rows with what the other sources give.

    Parameters
    ----------
    job : FitJob
        Rows of a family on a device.

    Yields
    ------
    tuple of (str, ResidualErrors)
        Source, and the errors of its rows.
    """
    names = np.concatenate([text(rows.frame, "source").to_numpy() for rows in job.rows])
    for name in np.unique(names):
        parts = [_split(rows, str(name)) for rows in job.rows]
        remainder = tuple(complement for _, complement in parts if len(complement.measured))
        tested = [part for part, complement in parts if len(part.measured) and len(complement.measured)]
        if tested and count(remainder) >= LEAST_ROWS:
            result = fit_of(FitJob(job.kind, job.file, job.subject, job.family, job.stack, remainder), {}).result()
            yield str(name), residual(*predictions(job.kind, tested, result.parameters))


def _split(rows: Rows, source: str) -> tuple[Rows, Rows]:
    chosen = (text(rows.frame, "source") == source).to_numpy()
    return rows.take(chosen), rows.take(~chosen)


def worse(before: pd.DataFrame, after: pd.DataFrame, points: float = 0.02) -> list[tuple[str, str]]:
    """Name the sources whose error, left out, has grown by more than some points.

    Parameters
    ----------
    before, after : DataFrame
        Ledgers, with columns as in `COLUMNS`.
    points : float, default 0.02
        Growth that is let pass, as a fraction.

    Returns
    -------
    list of tuple of (str, str)
        Source, and a sentence with both errors; a source that is no longer there is named as well.

    Examples
    --------
    >>> line = pd.DataFrame([("t", "lab", 9, *[0.1] * 7)], columns=COLUMNS)
    >>> worse(line, line.assign(left_out_error=0.13))
    [('lab', 't, lab: 13.0 % where the ledger has 10.0 %')]
    """
    both = before.merge(after, on=["table", "source"], how="left", suffixes=("", "_now"))
    grown = both[~(both["left_out_error_now"] <= both["left_out_error"] + points)]
    errors, stored = (100.0 * grown[name] for name in ("left_out_error_now", "left_out_error"))
    return [
        (source, f"{table}, {source}: {new:.1f} % where the ledger has {old:.1f} %")
        for table, source, new, old in zip(grown["table"], grown["source"], errors, stored, strict=True)
    ]
