"""Parameter sweeps: predictions for all combinations of models, systems, run options and prices, as one table."""

from __future__ import annotations

import asyncio
import csv
import errno
import gzip
import hashlib
import io
import itertools
import json
import logging
import math
import os
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import active_children, get_context
from pathlib import Path
from threading import Event, Thread, current_thread, main_thread
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import numpy as np
from pydantic import Field, field_validator

from paleo.errors import PaleoError, SpecError, suggest_names
from paleo.files import check_output_path, escape_csv_cell, exists, is_file, is_folder, write_atomically, write_text
from paleo.predict import Prediction, predict
from paleo.specs.calibration import load_calibration
from paleo.specs.catalog import code_and_catalog_digest, is_path
from paleo.specs.loading import NonEmptyText, Spec, changed_files, read_yaml, record_read_files, validate_mapping
from paleo.specs.model import ModelSpec, load_model
from paleo.specs.prices import billed_devices, machine_rent
from paleo.specs.run import FORMER_FIELD_NAMES, Run, flatten_to_paths
from paleo.specs.software import load_software
from paleo.specs.system import System, load_system
from paleo.studies.cost import JOULES_PER_KWH, MAX_TRAINING_AMOUNT, Tariff, comparable_tariff, device_power
from paleo.studies.gradient_exchange import consistency_study
from paleo.studies.what_if import change_system
from paleo.units import parse_quantity

if TYPE_CHECKING:
    import pandas as pd


_Value = int | float | str | bool | None
_Point = dict[str, _Value]

#: Axes that leave the step as it is: how much is trained, and what is paid for it.
_AMOUNTS = ("epochs", "samples", "tokens")
_COST_AXES = (*_AMOUNTS, "critical_batch", "electricity", "pue", "host_power", "gpu_price")
#: The most rows of a table.
_MOST_ROWS = 100_000_000


class SweepStudy(Spec):
    """Study file (parameter sweep): one run, and the axes over which its values vary.

    ``axes`` are run fields, ``model.NAME``, ``system.PATH`` (such as ``system.device.memory.bandwidth``), amounts or
    prices, each with a list of values. A value of a system is ``x0.8`` (a factor) or a quantity with its unit.
    """

    name: NonEmptyText = "sweep"
    models: list[NonEmptyText] = Field(min_length=1)
    systems: list[NonEmptyText] = Field(min_length=1)
    run: dict[str, Any] = Field(default_factory=dict)
    axes: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default_factory=dict)

    @field_validator("axes")
    @classmethod
    def _amounts_with_prefixes(cls, axes: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Convert amounts of training on the axes, such as ``15T`` tokens or ``4M`` samples, to numbers."""
        numbers = {
            name: [parse_quantity(value, "count") if isinstance(value, str) else value for value in axes[name]]
            for name in axes.keys() & set(_AMOUNTS)
        }
        return axes | numbers

    @property
    def step_axes(self) -> dict[str, list[Any]]:
        """Axes that change the predicted step, with their values; the last one varies fastest."""
        changing = {name: values for name, values in self.axes.items() if name not in _COST_AXES}
        return {"model": list(self.models), "system": list(self.systems), **changing}

    @property
    def cost_axes(self) -> dict[str, list[Any]]:
        """Axes of prices and amounts of training, which leave the predicted step as it is."""
        return {name: values for name, values in self.axes.items() if name in _COST_AXES}

    @property
    def point_count(self) -> int:
        return math.prod(len(values) for values in self.step_axes.values())

    @property
    def row_count(self) -> int:
        return self.point_count * math.prod(len(values) for values in self.cost_axes.values())

    def axis_values_at(self, index: int) -> _Point:
        """Return the axis values of one point of the sweep by index; the last axis changes fastest.

        Parameters
        ----------
        index : int
            Number of the point, from 0.

        Returns
        -------
        dict of str to value
            Value of each axis, by name of the axis.
        """
        point = {}
        for name, values in reversed(self.step_axes.items()):
            index, position = divmod(index, len(values))
            point[name] = values[position]
        return dict(reversed(point.items()))

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the result columns, without those of the axes."""
        return _FIGURES

    def validate_axes_and_load_files(self) -> None:
        """Check every value of every axis, and load the software and calibration files that workers will read.

        Raises SpecError for the first run that is not valid.
        """
        for point in _corners(self):
            run = _run_of(self, point)
            load_software(run.software)
            if is_path(run.calibration):
                load_calibration(run.calibration)

    def predict_table_row(self, job: SweepJob, point: _Point) -> _Record:
        """Predict the run at one point of the sweep, and return its row of the result table.

        Parameters
        ----------
        job : SweepJob
            The sweep with its models and systems loaded.
        point : dict of str to value
            Value of each axis; keys that begin with "system." change fields of the system.

        Returns
        -------
        dict of str to value
            Value of each result column.

        Raises
        ------
        PaleoError
            If the run cannot be predicted, for example because a value of an axis is not valid.
        """
        changes = [(key.removeprefix("system."), value) for key, value in point.items() if key.startswith("system.")]
        system = job.changed_system(str(point["system"]), tuple(changes))
        return _figures(predict(job.models[str(point["model"])], system, _run_of(self, point)))


def load_sweep_study(path: str | Path) -> SweepStudy:
    """Load the study file of a parameter sweep and check every axis before anything is computed.

    Parameters
    ----------
    path : str | Path
        YAML file.

    Returns
    -------
    SweepStudy
        The run and the axes over which it varies.

    Raises
    ------
    SpecError
        If an axis, value or name is not valid.
    """
    return build_sweep_study(SweepStudy, path, read_yaml(path))


def build_sweep_study(kind: type[SweepStudy], path: str | Path, data: dict[str, Any]) -> SweepStudy:
    """Build a parameter sweep from the parsed data of its study file, and check every axis.

    Parameters
    ----------
    kind : type
        Class of the study: `SweepStudy`, or a subclass for serving.
    path : str | Path
        YAML file, for messages and the default name.
    data : dict of str to Any
        Parsed content of the file.

    Returns
    -------
    SweepStudy
        The run and the axes over which it varies.

    Raises
    ------
    SpecError
        If an axis, value or name is not valid.
    """
    study = validate_mapping(kind, {"name": Path(path).stem, **data}, path)
    try:
        check_sweep_study(study)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None
    return study


def check_sweep_study(study: SweepStudy) -> None:
    """Check the axes, values and names of a parameter sweep.

    Parameters
    ----------
    study : SweepStudy
        Study file: a run, and the axes that it varies.

    Raises
    ------
    SpecError
        For the first axis, value or name that is not valid.
    """
    if study.row_count > _MOST_ROWS:
        raise SpecError(f"axes: their product is {study.row_count:,} rows; at most {_MOST_ROWS:,} are made")
    if len([name for name in study.cost_axes if name in _AMOUNTS]) > 1:
        raise SpecError(f"axes: {', '.join(name for name in study.cost_axes if name in _AMOUNTS)}: state one of them")
    for name, values in {"models": study.models, "systems": study.systems}.items():
        if len(set(values)) < len(values):
            raise SpecError(f"{name}: an entry stands there twice")
    for name, values in study.axes.items():
        if len({json.dumps(value) for value in values}) < len(values):
            raise SpecError(f"axes.{name}: a value stands there twice")
        if name in study.run:
            raise SpecError(f"axes.{name}: stands under run, too; keep one")
    for name in study.models:
        load_model(name, run_code=False)
    for name in study.systems:
        machine = load_system(name)
        for key, values in study.axes.items():
            for value in values if key.startswith("system.") else ():
                change_system(machine, key.removeprefix("system."), value)
    study.validate_axes_and_load_files()
    for account in _accounts_of(study):
        _tariff_of(account)


def _corners(study: SweepStudy) -> Iterator[_Point]:
    """Yield a few points of a sweep that together contain every value of every axis, for checks."""
    for index in range(max(len(values) for values in study.step_axes.values())):
        yield {name: values[min(index, len(values) - 1)] for name, values in study.step_axes.items()}


def _accounts_of(study: SweepStudy) -> list[_Point]:
    """Return all combinations of prices and amounts of training of a sweep; the last axis changes fastest."""
    names = list(study.cost_axes)
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*study.cost_axes.values())]


def _tariff_of(account: _Point) -> Tariff:
    """Return the tariff of one combination of prices; raise SpecError for an amount of training not above zero."""
    for name in (*_AMOUNTS, "critical_batch"):
        value = account.get(name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if name in account and not (number and 0 < value <= MAX_TRAINING_AMOUNT):  # type: ignore[operator]
            expected = f"must be a number above zero, and at most {MAX_TRAINING_AMOUNT:.0e}"
            raise SpecError(f"axes.{name}: {value!r:.60} {expected}")
    stated = {key: account[key] for key in Tariff.model_fields if account.get(key) is not None}
    return validate_mapping(Tariff, stated, "axes")


def _run_of(study: SweepStudy, point: _Point) -> Run:
    """Return the run at one point of a sweep: the common options of the study, with the values of the axes."""
    data = flatten_to_paths(study.run)
    for key, value in point.items():
        if key not in ("model", "system") and not key.startswith("system."):
            known = [*Run.model_fields, *Run.extra_keys(), *_COST_AXES, "model.NAME", "input.NAME", "system.PATH"]
            if key not in known and key not in FORMER_FIELD_NAMES and not key.startswith(("model.", "input.")):
                raise SpecError(f"axes.{key}: unknown axis; {suggest_names(key, known)}")
            data |= flatten_to_paths({key: value})
    return validate_mapping(Run, data, "run")


_Record = dict[str, Any]
_Columns = dict[str, Any]
_Writer = Callable[[Iterator[_Columns]], int]

#: Rows that are written at once.
_BLOCK = 200_000
#: What a consistency model adds to a point; empty for plain synchronous steps.
_CYCLE = ("updates_per_s", "staleness_mean", "staleness_sd", "server_utilization", "knee")
_FIGURES = (
    "plan", "dtype", "global_batch_size", "microbatch_size", "step_time_s", "step_time_low_s", "step_time_high_s",
    "samples_per_s", "tokens_per_s", "mfu", "memory_bytes", "memory_capacity_bytes", "fits", "compute_s",
    "memory_bound_s", "launch_s", "communication_exposed_s", "bubble_s", "optimizer_s", "gpu_power_w", *_CYCLE,
)  # fmt: skip
#: Figures that accounts are worked out from and that no table shows: ``rent_per_s`` by any price, of the market too,
#: ``listed_rent_per_s`` by a price of the very system.
_HIDDEN = ("world", "billed", "watts", "rent_per_s", "listed_rent_per_s", "tdp", "dataset_samples", "tokens_per_sample")
_WHOLE = ("global_batch_size", "microbatch_size", "steps")
_PAID = ("trained_samples", "steps", "time_s", "cost_usd", "energy_kwh")
_WORDS = frozenset(["plan", "dtype", "fits"])
_NUMBERS = {*_FIGURES, *_HIDDEN} - _WORDS


def _blocks(study: SweepStudy, parts: Iterable[list[_Record]]) -> Iterator[_Columns]:
    """Yield the result table of a sweep in blocks of rows, each block as columns by name.

    ``parts`` are the results of consecutive points of the sweep.
    """
    accounts = _accounts_of(study)
    block: list[tuple[_Point, _Record]] = []
    most = max(1, _BLOCK // len(accounts))
    for index, record in enumerate(itertools.chain.from_iterable(parts)):
        block.append((study.axis_values_at(index), record))
        if len(block) == most:
            yield _columns(study, block, accounts)
            block = []
    if block:
        yield _columns(study, block, accounts)


def _columns(study: SweepStudy, block: Sequence[tuple[_Point, _Record]], accounts: Sequence[_Point]) -> _Columns:
    """Return the table columns of some points of a sweep, each with every combination of prices and amounts."""
    many = len(accounts)
    columns: _Columns = {}
    for name in study.step_axes:
        columns[name] = np.repeat(_array([point[name] for point, _ in block]), many)
    for name in study.cost_axes:
        columns[name] = np.tile(_array([account[name] for account in accounts]), len(block))
    figures = {}
    for name in (*study.columns, *_HIDDEN):  # NaN where a number is missing
        kind = object if name in _WORDS else np.float64
        figures[name] = np.array([record.get(name) for _, record in block], dtype=kind)
    columns |= {name: np.repeat(figures[name], many) for name in study.columns}
    columns |= _paid(study, {name: figures[name][:, None] for name in figures}, accounts)
    columns["problem"] = np.repeat(_array([record["problem"] for _, record in block]), many)
    return columns


def _array(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Convert the values of an axis to an array of floats or integers, or of objects if they are no numbers."""
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return np.array(values, dtype=np.int64)
    if all(value is None or type(value) in (int, float) for value in values) and any(v is not None for v in values):
        return np.array(values, dtype=np.float64)
    column = np.empty(len(values), dtype=object)
    column[:] = [str(value) if isinstance(value, list | dict) else value for value in values]
    return column


def _paid(study: SweepStudy, known: Mapping[str, Any], accounts: Sequence[_Point]) -> _Columns:
    """Return samples, steps, time, cost and energy of training for every point, price and amount of a sweep.

    ``known`` holds result columns of shape (points, 1). Each returned column is flattened, with points as slowest
    index. Without an axis for the amount of training, no columns are returned.
    """
    if not any(name in study.cost_axes for name in _AMOUNTS):
        return {}
    systems = [load_system(name) for name in study.systems]
    tariffs = [comparable_tariff(_tariff_of(account), systems) for account in accounts]
    numbers = {name: known[name] for name in _NUMBERS}
    # The samples of every point under every account; NaN where the model has no data set, or no tokens.
    name = next(name for name in _AMOUNTS if name in study.cost_axes)
    amounts = np.array([account[name] for account in accounts], dtype=np.float64)
    if name == "epochs":
        samples = numbers["dataset_samples"] * amounts
    elif name == "tokens":
        samples = amounts / numbers["tokens_per_sample"]
    else:
        samples = np.broadcast_to(amounts, (len(numbers["world"]), len(accounts)))
    critical = np.array([account.get("critical_batch") or math.inf for account in accounts], dtype=np.float64)
    samples = samples * (1.0 + numbers["global_batch_size"] / critical)
    steps = np.ceil(samples / numbers["global_batch_size"])
    seconds = steps * numbers["step_time_s"]
    host = np.array([tariff.host_power or 0.0 for tariff in tariffs])
    pue = np.array([tariff.pue for tariff in tariffs])
    energy = (numbers["watts"] + host * numbers["billed"]) * seconds * pue
    stated = np.array([tariff.gpu_price for tariff in tariffs], dtype=np.float64)
    electricity = np.array([tariff.electricity for tariff in tariffs], dtype=np.float64)
    market = np.array([tariff.market for tariff in tariffs])
    rent = np.where(market, numbers["rent_per_s"], numbers["listed_rent_per_s"])
    hired = np.where(np.isnan(stated), rent, stated * numbers["billed"]) * seconds
    power_bill = np.where(np.isnan(stated) & ~np.isnan(rent), math.nan, energy * electricity)
    cost = np.where(np.isnan(hired) & np.isnan(power_bill), math.nan, np.nan_to_num(hired) + np.nan_to_num(power_bill))
    values = (samples, steps, seconds, cost, energy / JOULES_PER_KWH)
    return {name: value.ravel() for name, value in zip(_PAID, values, strict=True)}


def _table_writer(output: Path) -> _Writer:
    """Return the function that writes a table as CSV or Parquet, by the suffix of its file name.

    SpecError is raised for an unknown suffix, a path that cannot be written, or missing pyarrow.
    """
    if exists(output) and not is_file(output) and not is_folder(output):
        raise SpecError(f"{output}: a sweep keeps its parts beside its table; name a file, not a device or a pipe")
    if not output.name.endswith((".csv", ".csv.gz", ".parquet")):
        raise SpecError(f"{output}: the name of a table ends in .csv, .csv.gz or .parquet")
    check_output_path(output)
    if output.suffix == ".parquet":
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            missing = "Parquet needs the extra parquet: pip install 'paleo-perf[parquet]'; or write .csv"
            raise SpecError(missing) from None
    write = _write_parquet if output.suffix == ".parquet" else _write_csv
    return lambda columns: write_atomically(output, lambda file: write(file, output, columns))


def _write_csv(raw: BinaryIO, output: Path, blocks_of: Iterator[_Columns]) -> int:
    rows = 0
    packed: Any = gzip.GzipFile("", "wb", mtime=0, fileobj=raw) if output.suffix == ".gz" else raw
    file = io.TextIOWrapper(packed, "utf-8", newline="")
    table = csv.writer(file, lineterminator="\n")
    for columns in blocks_of:
        if not rows:
            table.writerow(columns)
        table.writerows(zip(*(_texts(name, values) for name, values in columns.items()), strict=True))
        rows += len(columns["system"])
    file.detach()
    if packed is not raw:
        packed.close()
    return rows


def _texts(name: str, values: np.ndarray[Any, Any]) -> list[Any]:
    """Convert a table column to text for CSV files; missing values are empty.

    Repeated values are converted once.
    """
    if values.dtype == object:
        return ["" if value is None else escape_csv_cell(value) for value in values.tolist()]
    unique, inverse = np.unique(values, return_inverse=True)
    write = (lambda value: str(int(value))) if name in _WHOLE else repr
    texts = ["" if value != value else write(value) for value in unique.tolist()]
    return list(np.array(texts, dtype=object)[inverse])


def _write_parquet(raw: BinaryIO, output: Path, blocks_of: Iterator[_Columns]) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows, writer = 0, None
    for columns in blocks_of:
        table = pa.table({name: _arrow(name, values) for name, values in columns.items()})
        writer = writer or pq.ParquetWriter(raw, table.schema)
        writer.write_table(table.cast(writer.schema))
        rows += table.num_rows
    if writer is not None:
        writer.close()
    return rows


def _arrow(name: str, values: Any) -> Any:
    """Convert a table column to an Arrow array whose type is the same in every block of rows."""
    import pyarrow as pa

    if name in _NUMBERS or name in _PAID:
        return pa.array(values, type=pa.float64())
    if name == "fits":
        return pa.array([None if value is None else bool(value) for value in values], type=pa.bool_())
    if values.dtype != object:
        return pa.array(values)
    return pa.array([None if value is None else str(value) for value in values], type=pa.string())


#: Points of one part: enough to be worth a file or a message, few enough to lose little.
_PART = 16
#: From this number of points on, several processes pay.
_WORTH_PROCESSES = 128
#: How long a scheduler may take to answer [s].
_CONNECT_S = 5
#: How often the workers of a cluster are counted [s].
_LOOK_S = 3
#: This program and its shipped figures, as they were when the process started.
_RELEASE = code_and_catalog_digest()


@dataclass(frozen=True, eq=False)
class SweepJob:
    """Parameter sweep together with all model and system files that it names, as worker processes get it.

    ``file_digests`` are digests of the files that a worker reads itself. ``fingerprint`` is a digest of everything on
    which results depend, so that finished parts of another sweep are not reused.
    """

    study: SweepStudy
    models: Mapping[str, ModelSpec]
    systems: Mapping[str, System]
    file_digests: Mapping[str, str]
    fingerprint: str
    release: str = _RELEASE
    _changed: dict[Any, System] = field(default_factory=dict, repr=False)

    def changed_system(self, name: str, changes: tuple[tuple[str, Any], ...]) -> System:
        """Return a system with changed properties; it is built once for all points of the sweep that share it.

        Parameters
        ----------
        name : str
            Name of the system, as in the study file.
        changes : tuple[tuple[str, Any], ...]
            Pairs of path and value, as in `paleo.studies.what_if.change_system`.

        Returns
        -------
        System
            The changed system.
        """
        key = (name, json.dumps(changes))
        if key not in self._changed:
            system = self.systems[name]
            for path, value in changes:
                system = change_system(system, path, value)
            if len(self._changed) > 256:
                self._changed.clear()
            self._changed[key] = system
        return self._changed[key]

    def check_release_and_files(self) -> None:
        """Check that a worker process runs the same release and sees the same files as the main process.

        Raises SpecError if it does not.
        """
        if self.release != _RELEASE:
            raise SpecError("a worker runs another release of paleo, or one with other figures; restart the workers")
        if gone := changed_files(self.file_digests):
            raise SpecError(f"{gone[0]}: is not what it was when the sweep started; start the sweep again")


def _job_of(study: SweepStudy) -> SweepJob:
    """Prepare a parameter sweep for worker processes: load its models and systems, and compute its fingerprint."""
    with record_read_files() as named:
        models = {name: load_model(name, run_code=False) for name in study.models}
        systems = {name: load_system(name) for name in study.systems}
    with record_read_files() as read:
        study.validate_axes_and_load_files()
    content = json.dumps([study.model_dump(mode="json"), sorted(named.values()), sorted(read.values()), _RELEASE])
    files = {path: digest for path, digest in read.items() if path not in named}
    return SweepJob(study, models, systems, files, hashlib.sha256(content.encode()).hexdigest())


def _evaluate(job: SweepJob, part: int) -> list[_Record]:
    """Predict the points of one part of a sweep in order; a point that cannot be predicted gets the reason instead."""
    job.check_release_and_files()
    first, last = part * _PART, min((part + 1) * _PART, job.study.point_count)
    records: list[_Record] = []
    for index in range(first, last):
        try:
            records.append(job.study.predict_table_row(job, job.study.axis_values_at(index)))
        except PaleoError as error:
            records.append({"problem": " ".join(str(error).split())})
    return records


def _figures(prediction: Prediction) -> _Record:
    plan, watts, data = prediction.plan, device_power(prediction), prediction.model.dataset
    study = consistency_study(prediction)
    seconds = prediction.step_time if study is None else study.step_time
    low, high = (end * seconds / prediction.step_time for end in prediction.interval)
    spent = {f"{name}_s": value for name, value in asdict(prediction.breakdown).items()}
    tokens, offer = prediction.graph.tokens_per_sample, machine_rent(prediction.system, plan.gpus)
    devices = billed_devices(prediction.system, plan.gpus).devices
    cycle: _Record = dict.fromkeys(_CYCLE)
    if study is not None:
        result = study.consistency_result
        values = (result.updates_per_s, result.staleness_mean, result.staleness_sd, result.utilization, result.knee)
        known = map(float, values)
        cycle = {name: None if math.isnan(value) else value for name, value in zip(_CYCLE, known, strict=True)}
    figures = {
        "plan": plan.strategy_text or "dp",
        "dtype": plan.dtype,
        "global_batch_size": plan.global_batch,
        "microbatch_size": plan.microbatch,
        "step_time_s": seconds,
        "step_time_low_s": low,
        "step_time_high_s": high,
        "samples_per_s": plan.global_batch / seconds,
        "tokens_per_s": None if tokens is None else tokens * plan.global_batch / seconds,
        "mfu": prediction.mfu * prediction.step_time / seconds,
        "memory_bytes": prediction.memory.total,
        "memory_capacity_bytes": prediction.memory.capacity,
        "fits": prediction.memory.fits,
        "gpu_power_w": None if watts is None else watts.average,
        "world": plan.gpus,
        "billed": devices,
        "watts": None if watts is None else watts.average * plan.mesh.size + watts.idle * (devices - plan.mesh.size),
        "rent_per_s": None if offer is None else offer[0],
        "listed_rent_per_s": offer[0] if offer is not None and offer[2] else None,
        "tdp": prediction.system.device.tdp,
        "dataset_samples": None if data is None else data.samples,
        "tokens_per_sample": tokens,
        **cycle,
    }
    return {**{name: value for name, value in spent.items() if name in _FIGURES}, **figures, "problem": ""}


SweepEvaluator = Callable[[SweepJob, Sequence[int]], Iterator[tuple[int, list[_Record]]]]


def _serial(job: SweepJob, parts: Sequence[int]) -> Iterator[tuple[int, list[_Record]]]:
    """Yield the number and the results of each part of a sweep, computed one after the other in this process."""
    for part in parts:
        yield part, _evaluate(job, part)


_JOBS: list[SweepJob] = []


def _remember(job: SweepJob) -> None:
    _JOBS[:] = [job]


def _evaluate_job_of_process(part: int) -> list[_Record]:
    return _evaluate(_JOBS[0], part)


def _processes(jobs: int) -> SweepEvaluator:
    """Return an evaluator that computes the parts of a sweep in ``jobs`` processes of this machine."""

    def run(job: SweepJob, parts: Sequence[int]) -> Iterator[tuple[int, list[_Record]]]:
        context, others = get_context("spawn"), set(active_children())
        with ProcessPoolExecutor(jobs, mp_context=context, initializer=_remember, initargs=(job,)) as pool:
            try:
                with _interrupts_held():
                    results = [pool.submit(_evaluate_job_of_process, part) for part in parts]
                for part, result in zip(parts, results, strict=True):
                    yield part, result.result()
            except BrokenExecutor:
                raise SpecError(f"--jobs {jobs}: a process was killed; {_GOES_ON}") from None
            except BaseException:  # an interrupt, too: processes do not see it, and are not waited for
                for process in set(active_children()) - others:
                    process.terminate()
                raise

    return run


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Block interrupts (Ctrl-C) while worker processes are started, inside a ``with`` block.

    The terminal sends interrupts to all processes. Workers inherit the signal mask, so that only the main process
    answers. Python's handler is replaced, too, since the mask covers one thread alone.
    """
    if current_thread() is not main_thread():
        yield
        return
    interrupts: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
        if interrupts:
            signal.raise_signal(signal.SIGINT)


#: Most processes of a sweep.
MAX_PROCESSES = 4096
_GOES_ON = "what was computed is kept: the same command goes on from there"


def local_evaluator(study: SweepStudy, jobs: int = 0) -> SweepEvaluator:
    """Return an evaluator that computes the points of a sweep in this process or in several local ones.

    Parameters
    ----------
    study : SweepStudy
        Study file: a run, and the axes that it varies.
    jobs : int, optional
        Number of processes; 0 chooses by the number of points.

    Returns
    -------
    SweepEvaluator
        Function that yields the results of each part of a sweep.

    Raises
    ------
    SpecError
        If the number of processes is out of range.
    """
    if not 0 <= jobs <= MAX_PROCESSES:
        raise SpecError(f"--jobs {jobs}: must be 1 or more (at most {MAX_PROCESSES}), or 0 for as many as pay")
    chosen = jobs or (len(os.sched_getaffinity(0)) if study.point_count >= _WORTH_PROCESSES else 1)
    return _serial if chosen == 1 else _processes(chosen)


def dask_evaluator(scheduler: str, warn: Callable[[str], object] = lambda text: None) -> SweepEvaluator:
    """Return an evaluator that computes the points of a sweep on a Dask cluster.

    Parts of a worker that dies are computed again by other workers.

    Parameters
    ----------
    scheduler : str
        Address of the Dask scheduler.
    warn : Callable[[str], object], optional
        Called with a sentence when the cluster has no worker (left); the evaluator waits for one.

    Returns
    -------
    SweepEvaluator
        Function that yields the results of each part of a sweep.

    Raises
    ------
    SpecError
        If Dask is not installed or the scheduler cannot be reached.
    """
    try:
        from distributed import as_completed
    except ImportError:
        raise SpecError("--scheduler needs the extra dask: pip install 'paleo-perf[dask]'") from None

    def run(job: SweepJob, parts: Sequence[int]) -> Iterator[tuple[int, list[_Record]]]:
        if not parts:
            return
        with _connected(scheduler) as client, _one_line(scheduler), _watched(client, scheduler, warn):
            name = f"paleo-{job.fingerprint[:16]}"
            shared = client.submit(_unchanged, job, key=name, retries=3)  # a task, so that it outlives its worker
            keys = [f"{name}-{part}" for part in parts]
            futures = client.map(_evaluate, [shared] * len(keys), list(parts), key=keys, retries=3)
            numbers = dict(zip(keys, parts, strict=True))
            for future, records in as_completed(futures, with_results=True):
                if isinstance(records, BaseException):  # what a future holds whose scheduler has gone
                    raise CancelledError(str(records))
                yield numbers[future.key], records

    return run


def _unchanged(job: SweepJob) -> SweepJob:
    return job


@contextmanager
def _connected(scheduler: str) -> Iterator[Any]:
    """Connect to a Dask cluster inside a ``with`` block; raise SpecError if no scheduler answers at that address."""
    from distributed import Client

    for name in ("distributed", "tornado", *logging.root.manager.loggerDict):  # Dask sets levels of single modules
        if name.startswith(("distributed", "tornado")):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        client = Client(scheduler, timeout=_CONNECT_S)
    except (OSError, ValueError, ImportError, TypeError) as error:
        raise SpecError(f"--scheduler {scheduler[:200]}: does not answer ({_first_line(error)})") from None
    try:
        yield client
    finally:
        with suppress(OSError, CancelledError):
            client.close(timeout=_CONNECT_S)


@contextmanager
def _watched(client: Any, scheduler: str, warn: Callable[[str], object]) -> Iterator[None]:
    """Watch a Dask cluster inside a ``with`` block, and call ``warn`` each time that no worker is left."""
    over = Event()

    def watch() -> None:
        populated = True
        while not over.is_set():
            with suppress(OSError, CancelledError, RuntimeError):  # a scheduler that has gone is another's to say
                before, populated = populated, bool(client.scheduler_info()["workers"])
                if before and not populated:
                    waiting = f"waiting for one (start workers, or stop: {_GOES_ON})"
                    warn(f"--scheduler {scheduler}: has no worker; {waiting}")
            over.wait(_LOOK_S)

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join(_LOOK_S)


@contextmanager
def _one_line(scheduler: str) -> Iterator[None]:
    """Convert exceptions of a failing Dask cluster, inside a ``with`` block, to a SpecError of one sentence."""
    from distributed import KilledWorker

    try:
        yield
    except KilledWorker:
        raise SpecError(f"--scheduler {scheduler}: workers died again and again; {_GOES_ON}") from None
    except RuntimeError as error:
        if "deserialization" not in str(error):
            raise
        raise SpecError(f"--scheduler {scheduler}: has another release of paleo than this one, or none") from None
    except (OSError, CancelledError, asyncio.CancelledError) as error:
        raise SpecError(f"--scheduler {scheduler}: went away ({_first_line(error)}); {_GOES_ON}") from None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]


Progress = Callable[[int, int], None]


def sweep_table(study: SweepStudy, evaluator: SweepEvaluator | None = None) -> pd.DataFrame:
    """Compute a parameter sweep, and return its result table as a DataFrame.

    Parameters
    ----------
    study : SweepStudy
        Study file: a run, and the axes that it varies.
    evaluator : SweepEvaluator, optional
        Function that computes the points; by default in this process.

    Returns
    -------
    DataFrame
        Table in SI units, rows in the order of the axes.
    """
    import pandas as pd

    job = _job_of(study)
    records = dict((evaluator or _serial)(job, range(math.ceil(study.point_count / _PART))))
    columns = _blocks(study, (records[part] for part in sorted(records)))
    return pd.concat([pd.DataFrame(block) for block in columns], ignore_index=True)


def write_sweep_table(
    study: SweepStudy, output: str | Path, evaluator: SweepEvaluator | None = None, progress: Progress | None = None
) -> int:
    """Compute a parameter sweep, and write its result table to a file.

    Parts that an interrupted run of the same sweep has finished are reused.

    Parameters
    ----------
    study : SweepStudy
        Study file: a run, and the axes that it varies.
    output : str | Path
        File with suffix .csv, .csv.gz or .parquet.
    evaluator : SweepEvaluator, optional
        Function that computes the points; by default in this process.
    progress : Progress, optional
        Called with the numbers of finished and of all parts.

    Returns
    -------
    int
        Number of rows written.
    """
    output = Path(output)
    write, job = _table_writer(output), _job_of(study)
    count = math.ceil(study.point_count / _PART)
    with _claimed(output, job.fingerprint) as folder:
        missing = [part for part in range(count) if _finished_records(folder, job, part) is None]
        done = count - len(missing)
        for part, records in (evaluator or _serial)(job, missing):
            write_text(_part(folder, part), _sealed(job, json.dumps(records)))
            done += 1
            if progress is not None:
                progress(done, count)
        rows = write(_blocks(study, (_records_of(folder, job, part) for part in range(count))))
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    return rows


@contextmanager
def _claimed(output: Path, fingerprint: str) -> Iterator[Path]:
    """Open and lock the folder of a sweep's finished parts inside a ``with`` block.

    The folder is new or left by an interrupted run of the same sweep. SpecError is raised if another process has locked
    it, or if it holds parts of another sweep.
    """
    folder = Path(f"{os.path.realpath(output)}.parts")
    lock = _locked(folder, output)
    try:
        if any(_part_fingerprint(file) not in ("", fingerprint) for file in folder.glob("*.json")):
            raise SpecError(
                f"{folder}: holds parts of another study, or of this one before it, a file that it names or paleo "
                "changed; delete the folder to start anew"
            )
        yield folder
    finally:
        os.close(lock)


def _locked(folder: Path, output: Path) -> int:
    """Lock the folder of a sweep's parts; return the file descriptor of the lock, which its close releases."""
    import fcntl

    path = folder / "lock"
    while True:
        try:
            folder.mkdir(exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # the sweep that held it has just finished and taken its folder away
            continue
        except OSError as error:
            raise SpecError(f"{folder}: cannot be written ({error.strerror})") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(handle, 200).decode("utf-8", "replace").strip()
            os.close(handle)
            raise SpecError(_unlockable(output, error, holder)) from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                os.ftruncate(handle, 0)
                with suppress(OSError):  # a full disk: the lock holds without the name of its process
                    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
                return handle
        os.close(handle)


def _unlockable(output: Path, error: OSError, holder: str) -> str:
    if error.errno in (errno.EAGAIN, errno.EACCES):
        return f"{output}: another sweep ({holder or 'of another process'}) writes it; wait, or choose another output"
    return f"{output}: its folder cannot be locked ({error.strerror}); choose an output on another file system"


def _part(folder: Path, part: int) -> Path:
    return folder / f"{part:07d}.json"


def _sealed(job: SweepJob, body: str) -> str:
    """Return the file content of one finished part: fingerprint of the sweep, digest, and results as JSON."""
    return f"{job.fingerprint} {_digest(job.fingerprint + body)}\n{body}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _part_fingerprint(file: Path) -> str:
    """Read the fingerprint of the sweep that wrote a part's file; empty if the file is incomplete or damaged."""
    try:
        head, _, body = file.read_text("utf-8").partition("\n")
    except (OSError, ValueError):
        return ""
    fingerprint, _, digest = head.partition(" ")
    return fingerprint if digest == _digest(fingerprint + body) else ""


def _finished_records(folder: Path, job: SweepJob, part: int) -> list[_Record] | None:
    """Read the results of a part that an earlier run of the sweep finished; None if missing or incomplete."""
    file = _part(folder, part)
    if _part_fingerprint(file) != job.fingerprint:
        return None
    records: list[_Record] = json.loads(file.read_text("utf-8").partition("\n")[2])
    return records


def _records_of(folder: Path, job: SweepJob, part: int) -> list[_Record]:
    """Read the results of a finished part of a sweep; raise SpecError if its file is missing or damaged."""
    records = _finished_records(folder, job, part)
    if records is None:
        raise SpecError(f"{_part(folder, part)}: was changed while the sweep ran; {_GOES_ON}")
    return records
