"""Tables of whole steps: each row becomes a run, and the run a prediction."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import pandas as pd

from paleo.errors import PaleoError, SpecError
from paleo.specs.catalog import names
from paleo.specs.software import TPU_PROFILE, load_software
from paleo.step.interval import INTERVALS
from paleo.units import MILLISECOND
from paleo.validate.kinds.base import number_or_nan, text
from paleo.validate.tables import Predictions

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.specs.calibration import Calibration
    from paleo.specs.software import Software
    from paleo.specs.system import System
    from paleo.step.interval import Uncertainty
    from paleo.step.memory import Footprint
    from paleo.validate.kinds.base import Array

#: What reading a malformed cell, or computing with an absurd one, raises.
CELL_ERRORS = (KeyError, ValueError, OverflowError, ZeroDivisionError)
Row = Mapping[str, Any]
#: What a report says of a run that ran out of memory.
DEAD = "ran out of memory; predicted: {}"
#: Profiles for rows whose own is not in the catalog, by a word of the framework that they name; the first that fits.
LIKENESS = (
    ("megatron-core", "megatron-core"),
    ("nemo", "megatron-core"),
    ("megatron", "megatron-2021"),
    ("deepspeed", "megatron-2021"),
    ("titan", "torchtitan"),
    ("nanotron", "nanotron"),
    ("fsdp", "fsdp-composer"),
    ("composer", "fsdp-composer"),
    ("xla", "tensorflow-xla"),
    ("tensorflow", "tensorflow1"),
    ("mxnet", "mxnet"),
    ("caffe", "caffe"),
    ("torch7", "torch7-cudnn"),
)


#: Finer profiles than the one that a row names, by a word of its framework.
FINER = {
    ("pytorch-eager", "huggingface"): "huggingface-eager",
    ("tensorflow1", "1.15.4"): "tensorflow1.15-ngc",
    ("tensorflow1", "1.15.5"): "tensorflow1.15-ngc",
    ("tensorflow1", "-tf1-"): "tensorflow1.15-ngc",
    ("tensorflow1", "1.15"): "tensorflow1.15",
    ("tensorflow2", "-py3"): "tensorflow2-ngc",
    ("mxnet", "-py3"): "mxnet-nvidia",
    ("megatron-2021", "megatron-deepspeed 2022"): "megatron-deepspeed",
    ("megatron-2021", "bigscience"): "megatron-deepspeed",
    ("megatron-core", "nemo"): "nemo",
    ("megatron-core", "internevo"): "internevo",
}

#: The same by a word of a row's notes.
NOTED = {("torchtitan", "fsdp (eager)"): "torchtitan-eager"}


#: What the sources begin with that run NVIDIA's example scripts in its containers.
EXAMPLES = ("DeepLearningExamples",)


def software_of(row: Row, default: str = "pytorch-eager") -> str:
    """The profile that a row names, or a finer one of its framework; where the catalog lacks it, the nearest. TPUs run
    what XLA compiles, whatever the framework."""
    if str(row.get("device", "")).startswith("tpu"):
        return TPU_PROFILE
    stated = str(row.get("software") or "").strip()
    if stated in names("software"):
        texts = (str(row.get("framework", "")).lower(), FINER), (str(row.get("notes", "")).lower(), NOTED)
        finer = (
            name for text, known in texts for (coarse, word), name in known.items() if coarse == stated and word in text
        )
        return next(finer, stated)
    words = f"{stated} {row.get('framework', '')}".lower()
    return next((profile for word, profile in LIKENESS if word in words), default)


def stands_in(row: Row) -> bool:
    """Whether the profile of a row is another's: that of the software that the row names is not in the catalog.

    >>> stands_in({"software": "deepspeed"}), stands_in({"software": "megatron-core"}), stands_in({})
    (True, False, False)
    """
    stated = str(row.get("software") or "").strip() if filled(row, "software") else ""
    return bool(stated) and stated not in names("software")


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def filled(row: Row, key: str) -> bool:
    """Whether a cell holds something."""
    value = row.get(key)
    return value is not None and value == value and str(value).strip() != ""


def profile_then(row: Row, name: str) -> str:
    """The profile of that name as it was when a row's software came out, where that was otherwise: by its release, a
    version or a date of its framework, or a date of its source."""
    software = load_software(name)
    for version in _versions(row) if software.earlier else ():
        try:
            date = software.date_of(version)
        except SpecError:
            continue
        return f"{name}@{version}" if software.eras(date) else name
    return name


_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
#: A month with its year (Sep-2020), a year, a conference of that year (SC21).
_DATED = re.compile(rf"\b(?:({'|'.join(_MONTHS)})[a-z]*[- ])?(20[12][0-9])\b|\b(?:sc|mlsys|asplos) ?'?([12][0-9])\b")


def _versions(row: Row) -> Iterator[str]:
    """What may be the release or the date of a row's software, the surest first."""
    texts = [str(row[key]).lower() for key in ("release", "framework", "source") if filled(row, key)]
    if filled(row, "release"):
        yield texts[0].strip()
    for words in texts:
        yield from re.findall(r"\b[0-9]+\.[0-9]+(?:\.[0-9]+)?\b", words)
        for month, year, short in _DATED.findall(words):
            yield f"{year or f'20{short}'}{f'-{_MONTHS.index(month) + 1:02}' if month else ''}"


def integer(row: Row, key: str, default: int | None = None) -> int:
    """A cell as a whole number; SpecError where it is none, or empty without a default."""
    if not filled(row, key):
        if default is None:
            raise SpecError(f"{key} is not stated")
        return default
    try:
        value = float(row[key])
    except (TypeError, ValueError, OverflowError):
        value = float("nan")
    if not value.is_integer() or value < 0:
        raise SpecError(f"{key} {row[key]!r} is not a whole number")
    return int(value)


def died(row: Row) -> bool:
    """Whether the row says that its run ran out of memory.

    >>> died({"notes": "OOM at this batch"}), died({"notes": "zoom 2"})
    (True, False)
    """
    words = " ".join(str(row.get(key, "")) for key in ("kind", "what", "notes"))
    return re.search(r"\boom\b|out of memory|outofmemory", words.lower()) is not None


@dataclass(frozen=True, slots=True)
class Step:
    """A predicted value with its interval, the bare roofline, the device of the prediction and, for a step, the parts
    of the interval."""

    value: float
    low: float
    high: float
    roofline: float
    subject: str
    origin: str
    uncertainty: Uncertainty | None = field(default=None, compare=False)  # low and high follow from it


def ideal_seconds(prediction: Prediction) -> float:
    """The model's FLOP at the peak of all devices: the roofline whose one constant is the baseline of steps."""
    peak = prediction.system.device.peak_flops_per_s(prediction.plan.dtype)
    return prediction.flops / (peak * prediction.plan.gpus)


class StepTable(ABC):
    """A kind of table whose rows are runs; subclasses say how a row is run. ``calibration`` is a user's, for the
    rows of its device or system."""

    name: ClassVar[str]
    header: ClassVar[frozenset[str]]
    configuration: ClassVar[tuple[str, ...]]
    measured_column: ClassVar[str] = "iteration_ms"
    measured_unit: ClassVar[float] = MILLISECOND
    #: Columns that may hold what was measured, where it is not `measured_column` alone.
    measured_columns: ClassVar[tuple[str, ...]] = ()

    #: Whether software profiles and links are fitted to such rows.
    calibrates: ClassVar[bool] = True

    def __init__(self, calibration: Calibration | None = None) -> None:
        self.calibration = calibration

    def with_calibration(self, calibration: Calibration | None) -> Self:
        """The same kind of table, its rows priced by a user's calibration."""
        return type(self)(calibration)

    def calibration_of(self, system: System) -> Calibration | None:
        """The user's calibration if it is one of this system, of its devices or of the intervals of all steps, else
        None."""
        subjects = (system.name, system.device.name, INTERVALS)
        applies = self.calibration is not None and self.calibration.subject in subjects
        return self.calibration if applies else None

    def system(self, row: Row) -> System:
        """What a row ran on; PaleoError with the reason where that is not known."""
        raise SpecError(f"rows of {self.name} name no system")

    @abstractmethod
    def step(self, row: Row, software: Software | None = None) -> Step:
        """The prediction of one row, under ``software`` if given; PaleoError with the reason if the row cannot be
        modelled."""

    def measured(self, frame: pd.DataFrame) -> Array:
        """What was measured, in SI; nan where the cell is empty or holds no number."""
        return number_or_nan(frame, self.measured_column) * self.measured_unit

    def unmeasured(self, row: Mapping[Any, Any]) -> str:
        """Why there is nothing to compare a row with; of a run that ran out of memory, whether that was to be
        expected."""
        columns = self.measured_columns or (self.measured_column,)
        wrong = [column for column in columns if filled(row, column) and not _above_zero(row[column])]
        if not died(row) and wrong:
            return f"{wrong[0]} {str(row[wrong[0]])[:40]!r} is not a number above zero"
        if not died(row) and len(columns) > 1:
            return f"none of {', '.join(columns)} says what was measured"
        if not died(row):
            return f"{self.measured_column} is empty: nothing to compare with"
        try:
            return DEAD.format("fits, WRONGLY" if self.memory_of(row).fits else "does not fit")
        except PaleoError as error:
            return DEAD.format(f"is not modelled ({error})")

    def memory_of(self, row: Row) -> Footprint:
        """The memory of a row's run; PaleoError where the kind of table does not say enough."""
        raise SpecError(f"rows of {self.name} do not say enough of memory")

    def predict(self, frame: pd.DataFrame) -> Predictions:
        """Predictions row by row; a row that was predicted before is not predicted again."""
        frame = frame.reset_index(drop=True)
        out = Predictions.none(len(frame))
        out.subjects[:] = text(frame, "device").to_numpy()
        for index, step in enumerate(self.steps(frame)):
            if isinstance(step, str):
                out.reasons[index] = step
                continue
            out.seconds[index], out.low[index], out.high[index] = step.value, step.low, step.high
            out.baseline[index], out.subjects[index], out.origins[index] = step.roofline, step.subject, step.origin
        return out

    def steps(self, frame: pd.DataFrame) -> Iterator[Step | str]:
        """The step of each row, or why there is none."""
        measured = self.measured(frame)
        known: dict[tuple[str, ...], Step | str] = {}
        for index, row in enumerate(frame.to_dict("records")):
            if not measured[index] > 0:
                yield self._why_unmeasured(row)
                continue
            key = tuple(str(row.get(name)) for name in (*self.header, *self.configuration))
            if key not in known:
                known[key] = self._step_or_reason(row)
            yield known[key]

    def profile(self, row: Row) -> str:
        """The software profile of a row."""
        return software_of(row)

    def parts(self, frame: pd.DataFrame) -> dict[str, tuple[Array, Array]]:
        """What the measured quantity is made of, where a table has that beside it: predicted and measured, by name."""
        return {}

    def curves(self, frame: pd.DataFrame) -> pd.DataFrame | None:
        """None, unless a subclass knows what its rows have in common."""
        return None

    def _step_or_reason(self, row: Mapping[Any, Any]) -> Step | str:
        try:
            step = self.step(row)
        except (PaleoError, *CELL_ERRORS) as error:
            return _reason(error, row)
        return step if np.isfinite(step.value) and step.value > 0 else "the prediction is no finite time"

    def _why_unmeasured(self, row: Mapping[Any, Any]) -> str:
        try:
            return self.unmeasured(row)
        except (PaleoError, *CELL_ERRORS) as error:
            return _reason(error, row)


def _above_zero(cell: object) -> bool:
    try:
        return 0 < float(str(cell)) < math.inf
    except ValueError:
        return False


def _reason(error: Exception, row: Row) -> str:
    """Why a row cannot be read or modelled; errors that have nothing to do with its cells go on."""
    if isinstance(error, PaleoError):
        return str(error)
    if isinstance(error, KeyError):
        if str(error.args[0]) in row:
            raise error
        return f"column {error.args[0]!r} is missing"
    return f"a cell is not what it should be ({' '.join(str(error).split())[:120]})"


def of_prediction(prediction: Prediction, seconds: float | None = None) -> Step:
    """A predicted step time (or another time of the same prediction) with the step's relative interval."""
    value = prediction.step_time if seconds is None else seconds
    low, high = (end / prediction.step_time for end in prediction.interval)
    return Step(
        value,
        value * low,
        value * high,
        ideal_seconds(prediction),
        prediction.system.device.name,
        prediction.run.software,
        prediction.uncertainty,
    )
