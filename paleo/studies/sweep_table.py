"""The table of a sweep: figures of points, repeated for every account, then what each account makes of them."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from paleo.errors import SpecError
from paleo.files import checked_output, csv_cell, write_whole
from paleo.specs.system import load_system
from paleo.studies.study_file import AMOUNTS, accounts_of, tariff_of
from paleo.studies.training import JOULES_PER_KWH, side_by_side

if TYPE_CHECKING:
    from paleo.studies.study_file import Point, Study

Record = dict[str, Any]
Columns = dict[str, Any]
Writer = Callable[[Iterator[Columns]], int]
Format = Callable[[BinaryIO, Path, Iterator[Columns]], int]

#: Rows that are written at once.
BLOCK = 200_000
#: What a consistency model adds to a point; empty for plain synchronous steps.
CYCLE = ("updates_per_s", "staleness_mean", "staleness_sd", "server_utilization", "knee")
FIGURES = (
    "plan", "dtype", "global_batch_size", "microbatch_size", "step_time_s", "step_time_low_s", "step_time_high_s",
    "samples_per_s", "tokens_per_s", "mfu", "memory_bytes", "memory_capacity_bytes", "fits", "compute_s",
    "memory_bound_s", "launch_s", "communication_exposed_s", "bubble_s", "optimizer_s", "gpu_power_w",
    *CYCLE,
)  # fmt: skip
#: Figures that accounts are worked out from and that no table shows: ``rent_per_s`` by any price, of the market too,
#: ``listed_rent_per_s`` by a price of the very system.
HIDDEN = ("world", "rent_per_s", "listed_rent_per_s", "tdp", "dataset_samples", "tokens_per_sample")
_WHOLE = ("global_batch_size", "microbatch_size", "steps")
_PAID = ("trained_samples", "steps", "time_s", "cost_usd", "energy_kwh")
_NUMBERS = {*FIGURES, *HIDDEN} - {"plan", "dtype", "fits"}


def blocks(study: Study, parts: Iterable[list[Record]]) -> Iterator[Columns]:
    """Columns of the table, some rows at a time."""
    accounts = accounts_of(study)
    block: list[tuple[Point, Record]] = []
    most = max(1, BLOCK // len(accounts))
    for index, record in enumerate(itertools.chain.from_iterable(parts)):
        block.append((study.point(index), record))
        if len(block) == most:
            yield _columns(study, block, accounts)
            block = []
    if block:
        yield _columns(study, block, accounts)


def _columns(study: Study, block: Sequence[tuple[Point, Record]], accounts: Sequence[Point]) -> Columns:
    """One block: every point times every account."""
    many = len(accounts)
    columns: Columns = {}
    for name in study.steps:
        columns[name] = np.repeat(_array([point[name] for point, _ in block]), many)
    for name in study.accounts:
        columns[name] = np.tile(_array([account[name] for account in accounts]), len(block))
    figures = {name: _figure(name, [record.get(name) for _, record in block]) for name in (*FIGURES, *HIDDEN)}
    columns |= {name: np.repeat(figures[name], many) for name in FIGURES}
    columns |= _paid(study, {name: figures[name][:, None] for name in (*FIGURES, *HIDDEN)}, accounts)
    columns["problem"] = np.repeat(_array([record["problem"] for _, record in block]), many)
    return columns


def _figure(name: str, values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """A column with one type in every block."""
    if name in _NUMBERS:
        return np.array([math.nan if value is None else value for value in values], dtype=np.float64)
    return np.array(values, dtype=object)


def _array(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Numbers as floats or whole numbers, everything else as objects."""
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return np.array(values, dtype=np.int64)
    if all(value is None or type(value) in (int, float) for value in values) and any(v is not None for v in values):
        return np.array([math.nan if value is None else value for value in values], dtype=np.float64)
    column = np.empty(len(values), dtype=object)
    column[:] = [str(value) if isinstance(value, list | dict) else value for value in values]
    return column


def _paid(study: Study, known: Mapping[str, Any], accounts: Sequence[Point]) -> Columns:
    """Samples, steps, time, cost and energy of every point (down) under every account (across), flattened."""
    if not any(name in study.accounts for name in AMOUNTS):
        return {}
    systems = [load_system(name) for name in study.systems]
    tariffs = [side_by_side(tariff_of(account), systems) for account in accounts]
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
    electricity = np.array([math.nan if tariff.electricity is None else tariff.electricity for tariff in tariffs])
    market = np.array([tariff.market for tariff in tariffs])
    rent = np.where(market, numbers["rent_per_s"], numbers["listed_rent_per_s"])
    hired = np.where(np.isnan(stated), rent, stated * numbers["world"]) * seconds
    power_bill = np.where(np.isnan(stated) & ~np.isnan(rent), math.nan, energy * electricity)
    cost = np.where(np.isnan(hired) & np.isnan(power_bill), math.nan, np.nan_to_num(hired) + np.nan_to_num(power_bill))
    values = (samples, steps, seconds, cost, energy / JOULES_PER_KWH)
    return {name: value.ravel() for name, value in zip(_PAID, values, strict=True)}


def _samples(study: Study, numbers: Mapping[str, Any], accounts: Sequence[Point]) -> Any:
    """Samples of every point under every account; NaN where the model has no data set, or no tokens."""
    name = next(name for name in AMOUNTS if name in study.accounts)
    amounts = np.array([account[name] for account in accounts], dtype=np.float64)
    if name == "epochs":
        return numbers["dataset_samples"] * amounts
    if name == "tokens":
        return amounts / numbers["tokens_per_sample"]
    return np.broadcast_to(amounts, (len(numbers["world"]), len(accounts)))


def table_writer(output: Path) -> Writer:
    """What writes a table by the suffix of its name; checked before anything is computed."""
    if output.exists() and not output.is_file() and not output.is_dir():
        raise SpecError(f"{output}: a sweep keeps its parts beside its table; name a file, not a device or a pipe")
    if not output.name.endswith((".csv", ".csv.gz", ".parquet")):
        raise SpecError(f"{output}: the name of a table ends in .csv, .csv.gz or .parquet")
    checked_output(output)
    if output.suffix == ".parquet":
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            raise SpecError(
                "Parquet needs the extra parquet: pip install 'paleo-perf[parquet]'; or write .csv"
            ) from None
    write = _write_parquet if output.suffix == ".parquet" else _write_csv
    return lambda columns: _written(output, write, columns)


def _written(output: Path, write: Format, columns: Iterator[Columns]) -> int:
    rows = 0

    def counted(file: BinaryIO) -> None:
        nonlocal rows
        rows = write(file, output, columns)

    write_whole(output, counted)
    return rows


def _write_csv(raw: BinaryIO, output: Path, blocks_of: Iterator[Columns]) -> int:
    rows = 0
    packed: Any = gzip.GzipFile("", "wb", mtime=0, fileobj=raw) if output.suffix == ".gz" else raw
    file = io.TextIOWrapper(packed, "utf-8", newline="")
    table = csv.writer(file, lineterminator="\n")
    for columns in blocks_of:
        if not rows:
            table.writerow(columns)
        table.writerows(zip(*(_texts(name, values) for name, values in columns.items()), strict=True))
        rows += len(columns["model"])
    file.detach()
    if packed is not raw:
        packed.close()
    return rows


def _texts(name: str, values: np.ndarray[Any, Any]) -> list[Any]:
    """A column as text: each value that repeats is written once; what is not there is empty."""
    if values.dtype == object:
        return ["" if value is None else csv_cell(value) for value in values.tolist()]
    unique, inverse = np.unique(values, return_inverse=True)
    write = (lambda value: str(int(value))) if name in _WHOLE else repr
    texts = ["" if value != value else write(value) for value in unique.tolist()]
    return list(np.array(texts, dtype=object)[inverse])


def _write_parquet(raw: BinaryIO, output: Path, blocks_of: Iterator[Columns]) -> int:
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
    """A column with one type in every block, empty or not: figures are numbers, everything else text."""
    import pyarrow as pa

    if name in _NUMBERS or name in _PAID:
        return pa.array(values, type=pa.float64())
    if name == "fits":
        return pa.array([None if value is None else bool(value) for value in values], type=pa.bool_())
    if values.dtype != object:
        return pa.array(values)
    return pa.array([None if value is None else str(value) for value in values], type=pa.string())
