"""The cross product of models, systems, runs, changed hardware and prices, as one table.

A study file names the axes. Those that change the step are predicted point by point, in this process, in several, or on
a Dask cluster; those that change only what is paid or how much is trained are arithmetic on arrays, a million rows a
second. Points are kept in parts beside the output while it is made, so that an interrupted sweep goes on where it
stopped; the table is the same whoever computed which point, byte for byte.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter

from paleo.errors import PaleoError, SpecError, near
from paleo.predict import Prediction, predict
from paleo.specs.hardware import System, load_system
from paleo.specs.loading import Spec, Text, read_yaml, validate
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.studies.cost import Tariff, power
from paleo.studies.training import JOULES_PER_KWH, rent

Value = int | float | str | bool | None
Point = dict[str, Value]
Record = dict[str, Any]

#: Axes that leave the step as it is: how much is trained, and what is paid for it.
AMOUNTS = ("epochs", "samples", "tokens")
ACCOUNTS = (*AMOUNTS, "critical_batch", "electricity", "pue", "host_power", "gpu_price")
#: Points of one part: enough to be worth a file or a message, few enough to lose little.
PART = 16
#: Rows that are written at once, and the most rows of a table.
BLOCK, MOST_ROWS = 200_000, 100_000_000
#: From this number of points on, several processes pay.
WORTH_PROCESSES = 128
_FACTOR = re.compile(r"x(\d+(?:\.\d*)?|\.\d+)\Z")
_STEP = re.compile(r"([a-z_0-9]+)(?:\[(\d+|\*)\])?\Z")
_FIGURES = (
    "plan", "dtype", "global_batch_size", "microbatch_size", "step_time_s", "step_time_low_s", "step_time_high_s",
    "samples_per_s", "tokens_per_s", "mfu", "memory_bytes", "memory_capacity_bytes", "fits", "compute_s",
    "memory_bound_s", "launch_s", "communication_exposed_s", "bubble_s", "optimizer_s", "gpu_power_w",
)  # fmt: skip
_HIDDEN = ("world", "rent_per_s", "tdp", "dataset_samples", "tokens_per_sample")


class Study(Spec):
    """A study file.

    ``axes`` are run fields, ``model.NAME``, ``system.PATH`` (such as ``system.device.memory.bandwidth``), amounts or
    prices, each with its values; a value of a system is ``x0.8`` (a factor) or a figure with its unit.
    """

    name: Text = "sweep"
    models: list[Text] = Field(min_length=1)
    systems: list[Text] = Field(min_length=1)
    run: dict[str, Any] = Field(default_factory=dict)
    axes: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default_factory=dict)

    @property
    def steps(self) -> dict[str, list[Any]]:
        """Axes that change the step, slowest first."""
        changing = {name: values for name, values in self.axes.items() if name not in ACCOUNTS}
        return {"model": list(self.models), "system": list(self.systems), **changing}

    @property
    def accounts(self) -> dict[str, list[Any]]:
        """Axes that change what is paid."""
        return {name: values for name, values in self.axes.items() if name in ACCOUNTS}

    @property
    def points(self) -> int:
        return math.prod(len(values) for values in self.steps.values())

    @property
    def rows(self) -> int:
        return self.points * math.prod(len(values) for values in self.accounts.values())

    def point(self, index: int) -> Point:
        """The values of one point; the last axis turns fastest."""
        found = {}
        for name, values in reversed(self.steps.items()):
            index, at = divmod(index, len(values))
            found[name] = values[at]
        return dict(reversed(found.items()))


def load_study(path: str | Path) -> Study:
    """A study from its YAML file, every axis checked before anything is computed."""
    study = validate(Study, {"name": Path(path).stem, **read_yaml(path)}, path)
    try:
        _check(study)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None
    return study


def _check(study: Study) -> None:
    if study.rows > MOST_ROWS:
        raise SpecError(f"axes: their product is {study.rows:,} rows; at most {MOST_ROWS:,} are made")
    if len([name for name in study.accounts if name in AMOUNTS]) > 1:
        raise SpecError(f"axes: {', '.join(name for name in study.accounts if name in AMOUNTS)}: state one of them")
    for name, values in study.axes.items():
        if len({json.dumps(value) for value in values}) < len(values):
            raise SpecError(f"axes.{name}: a value stands there twice")
        if name in study.run:
            raise SpecError(f"axes.{name}: stands under run, too; keep one")
    for name in study.models:
        load_model(name)
    for name in study.systems:
        machine = load_system(name)
        for key, values in study.axes.items():
            for value in values if key.startswith("system.") else ():
                changed(machine, key.removeprefix("system."), value)
    for point in _corners(study):
        _run(study, point)
    for account in _accounts(study):
        _account(account)


def _corners(study: Study) -> Iterator[Point]:
    """Points that hold every value of every axis once."""
    for index in range(max(len(values) for values in study.steps.values())):
        yield {name: values[min(index, len(values) - 1)] for name, values in study.steps.items()}


def _accounts(study: Study) -> list[Point]:
    """All combinations of what is paid, the last axis fastest."""
    names = list(study.accounts)
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*study.accounts.values())]


def _account(account: Point) -> Tariff:
    for name in (*AMOUNTS, "critical_batch"):
        value = account.get(name)
        if name in account and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise SpecError(f"axes.{name}: {value!r} must be a number above zero")
    stated = {key: account[key] for key in Tariff.model_fields if account.get(key) is not None}
    return validate(Tariff, stated, "axes")


def _run(study: Study, point: Point) -> Run:
    data = dict(study.run)
    for key, value in point.items():
        part, _, name = key.partition(".")
        if name and part in ("model", "input"):
            data[part] = {**data.get(part, {}), name: value}
        elif key not in ("model", "system") and not key.startswith("system."):
            if key not in Run.model_fields:
                known = [*Run.model_fields, *ACCOUNTS, "model.NAME", "input.NAME", "system.PATH"]
                raise SpecError(f"axes.{key}: unknown axis; {near(key, known)}")
            data[key] = value
    return validate(Run, data, "run")


# changed hardware


def changed(system: System, path: str, value: Any) -> System:
    """A system with one figure replaced by ``value`` (with its unit) or multiplied by a factor (``x0.8``).

    >>> slow = changed(load_system("dgx-h100"), "levels[*].link.bandwidth", "x0.5")
    >>> load_system("dgx-h100").levels[1].link.bandwidth / slow.levels[1].link.bandwidth
    2.0
    """
    made: System = _changed(system, path.split("."), value, path)
    return made


def _changed(owner: Any, steps: list[str], value: Any, path: str) -> Any:
    match = _STEP.match(steps[0])
    fields = list(type(owner).model_fields) if isinstance(owner, Spec) else list(owner)
    if match is None or match[1] not in fields:
        raise SpecError(f"axes.system.{path}: {steps[0]!r} is not there; {near(steps[0], fields)}")
    name, at = match[1], match[2]
    old = getattr(owner, name) if isinstance(owner, Spec) else owner[name]
    if at is not None:
        new: Any = _items(old, at, lambda one: _changed(one, steps[1:], value, path), path)
    elif len(steps) > 1:
        if not isinstance(old, Spec | Mapping):
            raise SpecError(f"axes.system.{path}: {name} has no parts ({type(old).__name__})")
        new = _changed(old, steps[1:], value, path)
    else:
        new = _replaced(owner, name, old, value, path)
    return owner.model_copy(update={name: new}) if isinstance(owner, Spec) else {**owner, name: new}


def _items(old: Any, at: str, change: Callable[[Any], Any], path: str) -> tuple[Any, ...]:
    if not isinstance(old, tuple) or (at != "*" and int(at) >= len(old)):
        raise SpecError(f"axes.system.{path}: there is no [{at}] in {len(old) if isinstance(old, tuple) else 0} items")
    return tuple(change(one) if at in ("*", str(index)) else one for index, one in enumerate(old))


def _replaced(owner: Any, name: str, old: Any, value: Any, path: str) -> Any:
    factor = _FACTOR.match(value) if isinstance(value, str) else None
    if factor is not None:
        if isinstance(old, Mapping) and old:
            return {key: one * float(factor[1]) for key, one in old.items()}
        if (old is not None and not isinstance(old, int | float)) or isinstance(old, bool):
            raise SpecError(f"axes.system.{path}: {value!r} is a factor, and {old!r} is no number")
        return None if old is None else old * float(factor[1])
    if not isinstance(owner, Spec):
        raise SpecError(f"axes.system.{path}: {value!r}: expected a factor such as 'x0.8'")
    field = type(owner).model_fields[name]
    kind: Any = field.annotation
    try:
        return TypeAdapter(Annotated[(kind, *field.metadata)] if field.metadata else kind).validate_python(value)
    except ValueError as error:
        reason = str(error).splitlines()
        raise SpecError(f"axes.system.{path}: {value!r}: {reason[min(1, len(reason) - 1)].strip()}") from None


@lru_cache(maxsize=256)
def _system(name: str, changes: tuple[tuple[str, Value], ...]) -> System:
    system = load_system(name)
    for path, value in changes:
        system = changed(system, path, value)
    return system


# points


def evaluate(study: Study, part: int) -> list[Record]:
    """The figures of the points of one part, in order; what cannot be planned keeps its reason."""
    return [_record(study, study.point(i)) for i in range(part * PART, min((part + 1) * PART, study.points))]


def _record(study: Study, point: Point) -> Record:
    changes = tuple((key.removeprefix("system."), value) for key, value in point.items() if key.startswith("system."))
    try:
        system = _system(str(point["system"]), changes)
        return _figures(predict(load_model(str(point["model"])), system, _run(study, point)))
    except PaleoError as error:
        return {"problem": " ".join(str(error).split())}


def _figures(made: Prediction) -> Record:
    plan, drawn, data = made.plan, power(made), made.model.dataset
    spent = {f"{name}_s": seconds for name, seconds in asdict(made.breakdown).items()}
    figures = {
        "plan": plan.strategy or "dp",
        "dtype": plan.dtype,
        "global_batch_size": plan.global_batch,
        "microbatch_size": plan.microbatch,
        "step_time_s": made.step_time,
        "step_time_low_s": made.interval[0],
        "step_time_high_s": made.interval[1],
        "samples_per_s": made.samples_per_s,
        "tokens_per_s": made.tokens_per_s,
        "mfu": made.mfu,
        "memory_bytes": made.memory.total,
        "memory_capacity_bytes": made.memory.capacity,
        "fits": made.memory.fits,
        "gpu_power_w": None if drawn is None else drawn.average,
        "world": plan.gpus,
        "rent_per_s": rent(made.system, plan.gpus)[0],
        "tdp": made.system.device.tdp,
        "dataset_samples": None if data is None else data.samples,
        "tokens_per_sample": made.graph.tokens_per_sample,
    }
    return {**{name: value for name, value in spent.items() if name in _FIGURES}, **figures, "problem": ""}


Progress = Callable[[int, int], None]
Evaluator = Callable[[Study, Sequence[int]], Iterator[tuple[int, list[Record]]]]


def serial(study: Study, parts: Sequence[int]) -> Iterator[tuple[int, list[Record]]]:
    """Parts one after the other, in this process."""
    for part in parts:
        yield part, evaluate(study, part)


def processes(jobs: int) -> Evaluator:
    """Parts in ``jobs`` processes of this machine."""

    def run(study: Study, parts: Sequence[int]) -> Iterator[tuple[int, list[Record]]]:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            yield from zip(parts, pool.map(evaluate, itertools.repeat(study), parts), strict=True)

    return run


def local(study: Study, jobs: int = 0) -> Evaluator:
    """This process, or ``jobs`` of them; 0 chooses by the number of points."""
    if jobs < 0:
        raise SpecError(f"--jobs {jobs}: must be 1 or more, or 0 for as many as pay")
    chosen = jobs or (len(os.sched_getaffinity(0)) if study.points >= WORTH_PROCESSES else 1)
    return serial if chosen == 1 else processes(chosen)


def dask(scheduler: str) -> Evaluator:
    """Parts on the workers of a Dask cluster; those of a worker that dies are computed again by others."""
    try:
        from distributed import Client, as_completed
    except ImportError:
        raise SpecError("--scheduler needs the extra dask: pip install 'paleo-perf[dask]'") from None

    def run(study: Study, parts: Sequence[int]) -> Iterator[tuple[int, list[Record]]]:
        with Client(scheduler) as client:
            held = client.scatter(study, broadcast=True)
            names = [f"paleo-{fingerprint(study)[:12]}-{part}" for part in parts]
            futures = client.map(evaluate, [held] * len(parts), list(parts), key=names, retries=3)
            numbers = dict(zip(names, parts, strict=True))
            for future, records in as_completed(futures, with_results=True):
                yield numbers[future.key], records

    return run


# tables


def sweep(study: Study, output: Path, evaluator: Evaluator | None = None, progress: Progress | None = None) -> int:
    """Write the table of a study; returns its rows. What an earlier run of the same study left is used."""
    writer = _writer(output)
    folder = output.with_name(output.name + ".parts")
    _claim(folder, study)
    count = math.ceil(study.points / PART)
    missing = [part for part in range(count) if not _part(folder, part).exists()]
    done = count - len(missing)
    for part, records in (evaluator or serial)(study, missing):
        _save(_part(folder, part), json.dumps(records))
        done += 1
        if progress is not None:
            progress(done, count)
    rows = writer(blocks(study, (json.loads(_part(folder, part).read_text()) for part in range(count))))
    for left in folder.iterdir():
        left.unlink()
    folder.rmdir()
    return rows


def fingerprint(study: Study) -> str:
    """What tells two studies apart."""
    return hashlib.sha256(json.dumps(study.model_dump(mode="json")).encode()).hexdigest()


def _claim(folder: Path, study: Study) -> None:
    """The folder of parts, made or found; that of another study is not touched."""
    mark = folder / "study.json"
    try:
        folder.mkdir(exist_ok=True)
        if not mark.exists():
            _save(mark, json.dumps(fingerprint(study)))
    except OSError as error:
        raise SpecError(f"{folder}: cannot be written ({error.strerror})") from None
    if json.loads(mark.read_text()) != fingerprint(study):
        raise SpecError(f"{folder}: holds parts of another study (or of this one before a change); delete it first")


def _part(folder: Path, part: int) -> Path:
    return folder / f"{part:07d}.json"


def _save(path: Path, text: str) -> None:
    """A file that is there whole or not at all."""
    made = path.with_suffix(".new")
    made.write_text(text)
    made.replace(path)


def blocks(study: Study, parts: Iterable[list[Record]]) -> Iterator[dict[str, Any]]:
    """Columns of the table, some rows at a time."""
    accounts = _accounts(study)
    held: list[tuple[Point, Record]] = []
    most = max(1, BLOCK // len(accounts))
    for index, record in enumerate(itertools.chain.from_iterable(parts)):
        held.append((study.point(index), record))
        if len(held) == most:
            yield _columns(study, held, accounts)
            held = []
    if held:
        yield _columns(study, held, accounts)


def _columns(study: Study, held: Sequence[tuple[Point, Record]], accounts: Sequence[Point]) -> dict[str, Any]:
    """One block: figures of points repeated for every account, then what each account makes of them."""
    many = len(accounts)
    columns: dict[str, Any] = {}
    for name in study.steps:
        columns[name] = np.repeat(_array([point[name] for point, _ in held]), many)
    for name in study.accounts:
        columns[name] = np.tile(_array([account[name] for account in accounts]), len(held))
    figures = {name: _figure(name, [record.get(name) for _, record in held]) for name in (*_FIGURES, *_HIDDEN)}
    columns |= {name: np.repeat(figures[name], many) for name in _FIGURES}
    columns |= _paid(study, {name: figures[name][:, None] for name in (*_FIGURES, *_HIDDEN)}, accounts)
    columns["problem"] = np.repeat(_array([record["problem"] for _, record in held]), many)
    return columns


_WHOLE = ("global_batch_size", "microbatch_size", "steps")
_NUMBERS = {*_FIGURES, *_HIDDEN} - {"plan", "dtype", "fits"}


def _figure(name: str, values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """A column with one type in every block."""
    if name in _NUMBERS:
        return np.array([math.nan if value is None else value for value in values], dtype=np.float64)
    return np.array(values, dtype=object)


def _array(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Numbers as floats or whole numbers, everything else as objects."""
    if any(isinstance(value, str | bool) for value in values) or all(value is None for value in values):
        return np.array(values, dtype=object)
    if all(isinstance(value, int) for value in values):
        return np.array(values, dtype=np.int64)
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def _paid(study: Study, known: Mapping[str, Any], accounts: Sequence[Point]) -> dict[str, Any]:
    """Samples, steps, time, cost and energy of every point (down) under every account (across), flattened."""
    if not any(name in study.accounts for name in AMOUNTS):
        return {}
    tariffs = [_account(account) for account in accounts]
    numbers = {name: known[name] for name in _NUMBERS}
    samples = _samples(study, numbers, accounts)
    critical = np.array([account.get("critical_batch") or math.inf for account in accounts], dtype=np.float64)
    samples = samples * (1.0 + numbers["global_batch_size"] / critical)
    steps = np.ceil(samples / numbers["global_batch_size"])
    seconds = steps * numbers["step_time_s"]
    host = np.array([tariff.host_power or 0.0 for tariff in tariffs])
    pue = np.array([tariff.pue for tariff in tariffs])
    energy = (numbers["gpu_power_w"] + host) * numbers["world"] * seconds * pue
    stated = np.array([math.nan if tariff.gpu_price is None else tariff.gpu_price for tariff in tariffs])
    each = np.array([math.nan if tariff.electricity is None else tariff.electricity for tariff in tariffs])
    hired = np.where(np.isnan(stated), numbers["rent_per_s"], stated * numbers["world"]) * seconds
    power_bill = np.where(np.isnan(stated) & ~np.isnan(numbers["rent_per_s"]), math.nan, energy * each)
    cost = np.where(np.isnan(hired) & np.isnan(power_bill), math.nan, np.nan_to_num(hired) + np.nan_to_num(power_bill))
    made = {
        "samples": samples,
        "steps": steps,
        "time_s": seconds,
        "cost_usd": cost,
        "energy_kwh": energy / JOULES_PER_KWH,
    }
    return {("trained_samples" if name == "samples" else name): value.ravel() for name, value in made.items()}


def _samples(study: Study, numbers: Mapping[str, Any], accounts: Sequence[Point]) -> Any:
    """Samples of every point under every account; NaN where the model has no data set, or no tokens."""
    if "epochs" in study.accounts:
        return numbers["dataset_samples"] * np.array([account["epochs"] for account in accounts], dtype=np.float64)
    if "tokens" in study.accounts:
        return np.array([account["tokens"] for account in accounts], dtype=np.float64) / numbers["tokens_per_sample"]
    return np.broadcast_to(
        np.array([account["samples"] for account in accounts], dtype=np.float64),
        (len(numbers["world"]), len(accounts)),
    )


Writer = Callable[[Iterator[dict[str, Any]]], int]


def _writer(output: Path) -> Writer:
    """What writes a table by the suffix of its name; checked before anything is computed."""
    if not output.parent.is_dir():
        raise SpecError(f"{output}: there is no folder {str(output.parent)!r}")
    if output.name.endswith((".csv", ".csv.gz")):
        return lambda made: _write_csv(output, made)
    if output.suffix == ".parquet":
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            raise SpecError(
                "Parquet needs the extra parquet: pip install 'paleo-perf[parquet]'; or write .csv"
            ) from None
        return lambda made: _write_parquet(output, made)
    raise SpecError(f"{output}: the name of a table ends in .csv, .csv.gz or .parquet")


def _write_csv(output: Path, made: Iterator[dict[str, Any]]) -> int:
    new, rows = output.with_name(f".{output.name}.new"), 0
    with new.open("wb") as raw:
        packed: Any = gzip.GzipFile("", "wb", mtime=0, fileobj=raw) if output.suffix == ".gz" else raw
        with io.TextIOWrapper(packed, "utf-8", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            for columns in made:
                if not rows:
                    table.writerow(columns)
                table.writerows(zip(*(_texts(name, values) for name, values in columns.items()), strict=True))
                rows += len(columns["model"])
    new.replace(output)
    return rows


def _texts(name: str, values: np.ndarray[Any, Any]) -> list[Any]:
    """A column as text: each value that repeats is written once; what is not there is empty."""
    if values.dtype == object:
        return ["" if value is None else value for value in values.tolist()]
    unique, inverse = np.unique(values, return_inverse=True)
    write = (lambda value: str(int(value))) if name in _WHOLE else repr
    texts = ["" if value != value else write(value) for value in unique.tolist()]
    return list(np.array(texts, dtype=object)[inverse])


def _write_parquet(output: Path, made: Iterator[dict[str, Any]]) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    new, rows, writer = output.with_name(f".{output.name}.new"), 0, None
    for columns in made:
        table = pa.table({name: _arrow(name, values) for name, values in columns.items()})
        writer = writer or pq.ParquetWriter(new, table.schema)
        writer.write_table(table.cast(writer.schema))
        rows += table.num_rows
    if writer is not None:
        writer.close()
    new.replace(output)
    return rows


def _arrow(name: str, values: Any) -> Any:
    """A column with one type in every block, empty or not: figures are numbers, everything else text."""
    import pyarrow as pa

    if name in _NUMBERS or name in ("trained_samples", "steps", "time_s", "cost_usd", "energy_kwh"):
        return pa.array(values, type=pa.float64())
    if name == "fits":
        return pa.array([None if one is None else bool(one) for one in values], type=pa.bool_())
    if values.dtype != object:
        return pa.array(values)
    return pa.array([None if one is None else str(one) for one in values], type=pa.string())
