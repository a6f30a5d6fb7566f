"""``paleo calibrate --fit`` on measured watts: what the board of each device draws (`paleo.pricing.power`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from paleo.calibrate.files import Fit, entry_of
from paleo.calibrate.fit import Rows, fit
from paleo.errors import PaleoError, SpecError, near
from paleo.predict import Prediction
from paleo.pricing.power import BOARD, PowerParameters
from paleo.validate.kinds.base import number, read_table
from paleo.validate.steps.base import CELL_ERRORS, records
from paleo.validate.steps.power import PowerTable, drawn, seconds_of

if TYPE_CHECKING:
    from paleo.calibrate.fit import Array
    from paleo.validate.steps.base import Row

#: The family of a board's figures in calibration files.
FAMILY = "power"
Predicted = Mapping[str, Prediction]


def asked_for_power(file: str) -> bool:
    """Whether a file holds measured watts, by its first line; False where it cannot be read (others say why)."""
    try:
        return set(pd.read_csv(file, nrows=0, compression="infer").columns) >= PowerTable.header
    except (OSError, EOFError, ValueError):
        return False


class Watts:
    """Measured watts as rows of a fit; the figures of its rows are the predictions of their runs."""

    configuration = ("model", "dataset", "batch_size")

    def time(self, frame: pd.DataFrame, figures: Predicted, parameters: PowerParameters) -> Array:
        """Predicted watts of rows."""
        return np.array([drawn(row, figures[run_of(row)], parameters).average for row in records(frame)])


def run_of(row: Row) -> str:
    """What makes two rows the same run, under other limits."""
    return "|".join(str(row.get(name)) for name in ("device", *Watts.configuration, "optimizer"))


def fit_power(files: Sequence[str], only: Sequence[str], date: str) -> list[Fit]:
    """The figures of each device's board, of the rows whose runs can be predicted; SpecError where there are none."""
    joined, known = _predicted(pd.concat([read_table(file) for file in files], ignore_index=True))
    devices = sorted({str(name) for name in joined["device"]})
    for name in only:
        if name not in devices:
            raise SpecError(f"the tables have no rows of {name!r} to fit; {near(name, devices)}")
    if not devices:
        raise SpecError(f"{files[0]}: no row can be fitted; `paleo validate` says why")
    label = ", ".join(Path(file).name for file in files)
    return [_fit_of(joined[joined["device"] == name], known, label, date) for name in only or devices]


def _predicted(frame: pd.DataFrame) -> tuple[pd.DataFrame, Predicted]:
    """The rows whose runs can be predicted and that state watts and a limit, and the predictions."""
    table, known = PowerTable(), dict[str, Prediction | None]()
    for row in records(frame):
        if run_of(row) not in known:
            known[run_of(row)] = _prediction(table, row)
    stated = np.isfinite(table.measured(frame)) & np.isfinite(number(frame, "power_limit_w", float("nan")))
    sound = stated & np.array([known[run_of(row)] is not None and _timed(row) for row in records(frame)], dtype=bool)
    return frame[sound], {name: prediction for name, prediction in known.items() if prediction is not None}


def _timed(row: Row) -> bool:
    """Whether what a row states of its times can be read."""
    try:
        seconds_of(row)
    except (PaleoError, *CELL_ERRORS):
        return False
    return True


def _prediction(table: PowerTable, row: Row) -> Prediction | None:
    try:
        return table.prediction(row, None)
    except (PaleoError, *CELL_ERRORS):
        return None


def _fit_of(frame: pd.DataFrame, known: Predicted, label: str, date: str) -> Fit:
    rows = Rows(frame.reset_index(drop=True), known, BOARD, PowerTable().measured(frame))
    result = fit(Watts(), [rows], PowerParameters(), starts=1, emphasis=0.0)
    values = dataclasses.asdict(result.parameters[BOARD])
    return Fit(str(frame["device"].iloc[0]), entry_of(FAMILY, BOARD, label, frame, values, result, date))
