"""Software parameters from whole steps: ``paleo calibrate --fit`` on tables of training iterations.

A profile has few numbers that no kernel table can tell: what an operation costs the host, what collectives beside
computation cost, how much slower an old attention kernel is. They are fitted to the steps of one profile by the same
robust log-error least squares as kernels, on the rows of half the configurations, and tested on rows of others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd
import yaml

from paleo.calibrate.files import ERROR_DIGITS, rounded, rounded_residual
from paleo.calibrate.fit import Rows, count, divided, fit
from paleo.errors import SpecError, near
from paleo.specs.calibration import Residual
from paleo.specs.device import find_device
from paleo.specs.loading import Spec
from paleo.specs.software import SoftwareFit, load_software
from paleo.units import GIGA, MEBIBYTE, MICROSECOND, MILLISECOND, Quantity
from paleo.validate.kinds.base import read_table, text
from paleo.validate.steps.base import StepTable, records, stands_in
from paleo.validate.tables import table_of

if TYPE_CHECKING:
    from paleo.calibrate.fit import FitResult
    from paleo.specs.software import Software

Array = npt.NDArray[np.float64]
#: Rows that a fit sees: host time and one more term are settled by about forty.
TRAINING_ROWS = 60
#: Columns that name a configuration; rows that differ in replicas or in the global batch alone are one.
CONFIGURATION = (
    "model", "model_slug", "system", "device", "layers", "hidden", "seq_len", "tp", "pp", "micro_batch",
    "batch_per_gpu", "recompute",
)  # fmt: skip
#: Fewer rows than this are no fit of two parameters that can be tested.
LEAST_STEPS = 12


def _bounded(low: float, high: float, **more: Any) -> Any:
    return field(default=1.0, metadata={"low": low, "high": high, **more})


@dataclass(frozen=True, slots=True)
class SoftwareParameters:
    """What is fitted of a profile.

    ``host_forward`` [s] is the host's time for one operation; ``ratio``, that of its backward pass over it, is not
    fitted, as steps of training do not tell the two apart. ``contention`` and ``attention_slowdown`` as in `Software`.
    """

    host_forward: float = _bounded(0.1 * MICROSECOND, MILLISECOND)
    ratio: float = _bounded(0.1, 10.0, fitted=False)
    contention: float = _bounded(0.01, 4.0)
    attention_slowdown: float = _bounded(1.0, 8.0)

    @classmethod
    def of(cls, profile: Software, architecture: str) -> SoftwareParameters:
        """The numbers that a profile states."""
        ratio = profile.host.backward / profile.host.forward if profile.host.forward else 1.0
        return cls(profile.host.forward, ratio, profile.overlap.contention, profile.slowdown_on(architecture))

    def applied(self, profile: Software) -> Software:
        """The profile with these numbers."""
        return profile.changed(
            {
                "host.forward": self.host_forward,
                "host.backward": self.host_forward * self.ratio,
                "overlap.contention": self.contention,
                "attention.slowdown": self.attention_slowdown,
            }
        )


class ProfileFigures(NamedTuple):
    """What predicts rows: the kind of table, and the profile before the fit."""

    table: StepTable
    profile: Software


class _Steps:
    """Step tables as what `fit` asks of a kind."""

    def __init__(self, configuration: Sequence[str]) -> None:
        self.configuration = tuple(configuration)

    def time(self, frame: pd.DataFrame, figures: ProfileFigures, parameters: SoftwareParameters) -> Array:
        """Predicted seconds of each row."""
        profile = parameters.applied(figures.profile)
        return np.array([figures.table.step(row, profile).value for row in records(frame)])


@dataclass(frozen=True, slots=True)
class SoftwareJob:
    """The rows of one profile in one table, by architecture."""

    profile: Software
    file: str
    source: str
    rows: tuple[Rows, ...]
    skipped: int

    @property
    def steps(self) -> int:
        """How many rows there are to fit and to test on."""
        return count(self.rows)

    @property
    def divided(self) -> tuple[int, int]:
        """How many rows a fit uses, and how many it is tested on."""
        fitted, _, held_out = divided(_kind(self), self.rows, training_rows=TRAINING_ROWS)
        return count(fitted), count(held_out)

    @property
    def origin(self) -> str:
        """The table, and whose rows of it."""
        return f"{self.file} ({self.source})"

    @property
    def architectures(self) -> tuple[str, ...]:
        """Those of the devices that ran the steps."""
        return tuple(group.stack for group in self.rows)

    @property
    def label(self) -> str:
        """For people: profile and count of rows."""
        return f"{self.profile.name} ({self.steps} steps)"


@dataclass(frozen=True, slots=True)
class SoftwareFitted:
    """A profile with fitted numbers, and what it was before."""

    before: Software
    after: Software

    def numbers(self) -> Iterator[tuple[str, tuple[str, str]]]:
        """Name of each number that may have moved, before and after."""
        for name in ("forward", "backward"):
            values = [getattr(profile.host, name) / MICROSECOND for profile in (self.before, self.after)]
            yield f"host.{name}", (f"{values[0]:.4g} us", f"{values[1]:.4g} us")
        contention = [_shown(profile.overlap.contention) for profile in (self.before, self.after)]
        yield "overlap.contention", (contention[0], contention[1])
        slowdown = [_shown(profile.attention.slowdown) for profile in (self.before, self.after)]
        yield "attention.slowdown", (slowdown[0], slowdown[1])


def software_jobs(file: str | Path, only: Sequence[str] = ()) -> list[SoftwareJob]:
    """What there is to fit in a table of steps; ``only`` names profiles. Rows that cannot be predicted, and those for
    which the profile stands in (`stands_in`), are counted."""
    frame = read_table(file)
    table = table_of(frame.columns)
    if not isinstance(table, StepTable) or not table.calibrates:
        return []
    frame = frame.reset_index(drop=True)
    profiles = pd.Series([table.profile(row) for row in records(frame)], index=frame.index)
    for name in only:
        if name not in set(profiles):
            raise SpecError(f"{file}: no row of the profile {name!r}; {near(name, {*profiles, 'fabric'})}")
    chosen = [name for name in sorted(set(profiles)) if not only or name in only]
    return [_job(table, Path(file).name, frame[profiles == name], load_software(name)) for name in chosen]


def _job(table: StepTable, file: str, frame: pd.DataFrame, profile: Software) -> SoftwareJob:
    predicted = table.predict(frame)
    named = np.array([not stands_in(row) for row in records(frame)])
    fine = frame[np.isfinite(predicted.seconds) & named]
    architectures = [find_device(str(name)).architecture for name in fine["device"]]
    measured = table.measured(fine)
    groups = []
    for architecture in sorted(set(architectures)):
        mask = np.array([name == architecture for name in architectures])
        groups.append(Rows(fine[mask], ProfileFigures(table, profile), architecture, measured[mask]))
    sources = ", ".join(sorted(set(text(fine, "source")) - {""}))
    return SoftwareJob(profile, file, sources, tuple(groups), len(frame) - len(fine))


def fit_software(job: SoftwareJob, date: str, free: Sequence[str] = ()) -> SoftwareFitted:
    """The fit of one profile: of ``free``, or of the numbers that it states and that are not neutral."""
    profile = job.profile
    moving = tuple(free) or tuple(_stated(profile))
    if not moving:
        raise SpecError(f"{profile.name}: the profile states no host time, contention or slowdown to fit; name them")
    known = {parameter.name: parameter for parameter in dataclasses.fields(SoftwareParameters)}
    for name in moving:
        if name not in known or name == "ratio":
            raise SpecError(f"--free {name}: no such number of a profile; {near(name, set(known) - {'ratio'})}")
    start = _inside(SoftwareParameters.of(profile, job.rows[0].stack), moving)
    result = fit(
        _kind(job), job.rows, start,
        fixed=[name for name in known if name not in moving and name != "ratio"],
        per_stack=[name for name in ("attention_slowdown",) if name in moving],
        training_rows=TRAINING_ROWS, starts=1, emphasis=0.0, evaluations=15,
    )  # fmt: skip
    return SoftwareFitted(profile, _profile(job, result, moving, date))


def _kind(job: SoftwareJob) -> _Steps:
    columns = set(job.rows[0].frame.columns)
    return _Steps([name for name in CONFIGURATION if name in columns])


def _stated(profile: Software) -> Iterator[str]:
    """Numbers of a profile that are at work in it."""
    if profile.host.forward > 0:
        yield "host_forward"
    if profile.overlap.contention > 0:
        yield "contention"
    if profile.attention.slowdown not in (1.0, {}):
        yield "attention_slowdown"


def _inside(start: SoftwareParameters, moving: Sequence[str]) -> SoftwareParameters:
    """The start, with what is fitted from nothing set off its bound."""
    floor = {parameter.name: parameter.metadata["low"] for parameter in dataclasses.fields(SoftwareParameters)}
    return dataclasses.replace(start, **{name: max(getattr(start, name), floor[name]) for name in moving})


def _profile(job: SoftwareJob, result: FitResult[SoftwareParameters], moving: Sequence[str], date: str) -> Software:
    shared = next(iter(result.parameters.values()))
    update: dict[str, Any] = {}
    if "host_forward" in moving:
        update |= {
            "host.forward": rounded(shared.host_forward, ERROR_DIGITS),
            "host.backward": rounded(shared.host_forward * shared.ratio, ERROR_DIGITS),
        }
    if "contention" in moving:
        update["overlap.contention"] = rounded(shared.contention, ERROR_DIGITS)
    if "attention_slowdown" in moving:
        slow = {
            stack: rounded(parameters.attention_slowdown, ERROR_DIGITS)
            for stack, parameters in result.parameters.items()
        }
        kept = job.profile.attention.slowdown
        update["attention.slowdown"] = {**(kept if isinstance(kept, dict) else {}), **slow}
    record = SoftwareFit(
        source=job.origin,
        date=date,
        architectures=job.architectures,
        rows_fitted=result.rows_fitted,
        rows_held_out=result.rows_held_out,
        uncertainty={name: rounded(value, 2) for name, value in result.uncertainty.items()},
        residual=Residual(**rounded_residual(result.residual)),
    )
    return job.profile.changed({**update, "fit": record})


def _shown(value: float | Mapping[str, float]) -> str:
    return (
        f"{value:g}" if isinstance(value, float) else ", ".join(f"{name} {number:g}" for name, number in value.items())
    )


#: How a profile's file states quantities.
UNITS = {"time": ("us", MICROSECOND), "bytes": ("MiB", MEBIBYTE), "bandwidth": ("GB/s", GIGA)}


def software_text(profile: Software) -> str:
    """A profile as the text of its file, times in microseconds, memory in MiB, rates in GB/s."""
    data: dict[str, Any] = profile.model_dump(exclude_defaults=True, exclude={"name"}, mode="json", by_alias=True)
    for name, group in data.items():
        if isinstance(fields := getattr(profile, name, None), Spec) and name != "fit":
            data[name] = {key: _with_unit(fields, key, value) for key, value in group.items()}
    return str(yaml.safe_dump(data, sort_keys=False, width=118, allow_unicode=True))


def _with_unit(group: Spec, name: str, value: Any) -> Any:
    """A field's value as a file states it."""
    field = type(group).model_fields[name]
    optional = (each for choice in get_args(field.annotation) for each in getattr(choice, "__metadata__", ()))
    quantities = (each for each in (*field.metadata, *optional) if isinstance(each, Quantity))
    unit = next((UNITS[quantity.dimension] for quantity in quantities), None)
    return value if unit is None else f"{value / unit[1]:.6g} {unit[0]}"
