"""Reading of measured tables from CSV files, and of their columns as text or numbers."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from paleo.errors import SpecError, suggest_names
from paleo.files import read_bytes

Array = npt.NDArray[np.float64]
#: Six times the largest of the tables that this was made with; unpacked.
MAX_TABLE_BYTES = 64_000_000


def read_table(path: str | Path) -> pd.DataFrame:
    """Read a measured table from a CSV or CSV.gz file; empty cells of text columns hold ''.

    ``attrs["path"]`` of the table holds the path of the file, for kinds of tables that read a second file beside it.

    Parameters
    ----------
    path : str | Path
        The file.

    Returns
    -------
    DataFrame
        The table.

    Raises
    ------
    SpecError
        If the file is missing, is no CSV, has no rows, two columns of one name, or rows longer than the header.
    """
    raw = read_bytes(path, most=MAX_TABLE_BYTES, expected="a CSV or CSV.gz table")
    try:
        names = pd.read_csv(io.BytesIO(raw), header=None, nrows=1, dtype=str, keep_default_na=False).iloc[0]
        # Raise SpecError for a header of one name that holds another separator.
        separators = [mark for mark in ";\t|" if len(names) == 1 and mark in names.iloc[0]]
        if separators:
            decimals = ", and points for decimals" if separators[0] == ";" else ""
            raise SpecError(f"{path}: its cells are separated by {separators[0]!r}; expected commas{decimals}")
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame = pd.read_csv(io.BytesIO(raw), low_memory=False, index_col=False)
    except pd.errors.ParserWarning:
        raise SpecError(f"{path}: rows have more cells than the header has names") from None
    except SpecError:
        raise
    except (OSError, EOFError, ValueError, OverflowError, RecursionError) as error:  # pandas' own are ValueErrors
        raise SpecError(f"{path}: cannot be read as a CSV table: {str(error)[:200]}") from None
    stripped = names.str.strip()
    if (twice := stripped[(stripped != "") & stripped.duplicated()]).size:
        raise SpecError(f"{path}: two columns are named {twice.iloc[0][:80]!r}; expected each name once")
    frame.columns = pd.Index([str(column).strip() for column in frame.columns])
    if frame.empty:
        raise SpecError(f"{path}: the table has no rows")
    for column in frame.columns[[not pd.api.types.is_numeric_dtype(kind) for kind in frame.dtypes]]:
        frame[column] = frame[column].fillna("").astype(str)
    frame.attrs["path"] = str(path)
    return frame


def factorize_text_column(
    frame: pd.DataFrame, column: str, default: str = ""
) -> tuple[npt.NDArray[np.integer[Any]], list[str]]:
    """Encode a text column of a measured table as integer codes into a list of its distinct words (`pandas.factorize`).

    Parameters
    ----------
    frame : DataFrame
        The table.
    column : str
        Name of the column.
    default : str, optional
        Word for empty cells or a missing column.

    Returns
    -------
    tuple[npt.NDArray[np.integer[Any]], list[str]]
        (codes, words): the index into ``words`` of each row, shape (rows,); and the words, without surrounding spaces.
    """
    if column not in frame.columns:
        return np.zeros(len(frame), dtype=np.int8), [default]
    raw = frame[column]
    categorical = isinstance(raw.dtype, pd.CategoricalDtype)
    codes, words = (raw.cat.codes.to_numpy(), raw.cat.categories) if categorical else pd.factorize(raw)
    cleaned = [str(word).strip() or default for word in words]
    if (codes < 0).any():
        codes, cleaned = np.where(codes < 0, len(cleaned), codes), [*cleaned, default]
    return codes, cleaned


def text_column(frame: pd.DataFrame, column: str, default: str = "") -> pd.Series[str]:
    """Read a column of a measured table as text without surrounding spaces.

    Parameters
    ----------
    frame : DataFrame
        The table.
    column : str
        Name of the column.
    default : str, optional
        Text for empty cells or a missing column.

    Returns
    -------
    Series[str]
        One text per row.
    """
    codes, words = factorize_text_column(frame, column, default)
    return pd.Series(np.array(words, dtype=object)[codes], index=frame.index, dtype=object)


def word_mask(frame: pd.DataFrame, column: str, *words: str) -> npt.NDArray[np.bool_]:
    """Return a mask of the table rows whose cell in a text column is one of some words.

    Parameters
    ----------
    frame : DataFrame
        The table.
    column : str
        Name of the column.
    *words : str
        The words.

    Returns
    -------
    ndarray, shape (rows,)
        True where the cell is one of the words.
    """
    return text_column(frame, column).isin(words).to_numpy(dtype=bool)


def true_cells(frame: pd.DataFrame, column: str) -> npt.NDArray[np.bool_]:
    """Return a mask of the table rows whose cell says yes, in words or as a number.

    Parameters
    ----------
    frame : DataFrame
        The table.
    column : str
        Name of the column.

    Returns
    -------
    ndarray, shape (rows,)
        True for yes.
    """
    return text_column(frame, column).str.lower().isin(["true", "1", "1.0"]).to_numpy(dtype=bool)


def mapped_column(frame: pd.DataFrame, column: str, numbers: Mapping[str, float], default: float = math.nan) -> Array:
    """Read a text column of a measured table as the numbers that its words stand for, such as bytes by number format.

    Parameters
    ----------
    frame : DataFrame
        The table.
    column : str
        Name of the column.
    numbers : dict of str to float
        Numbers by word.
    default : float, optional
        Number for other words.

    Returns
    -------
    ndarray, shape (rows,)
        Numbers.
    """
    numbers_of_rows: Array = map_text_columns(frame, (column,), lambda word: numbers.get(word, default), np.float64)
    return numbers_of_rows


def map_text_columns(
    frame: pd.DataFrame, columns: Sequence[str], function: Callable[..., Any], dtype: Any = object
) -> Any:
    """Apply a function to text columns of a table, with one call for each distinct combination of texts.

    Parameters
    ----------
    frame : DataFrame
        The table.
    columns : sequence of str
        Names of the columns, in the order of the function's arguments.
    function : Callable[..., Any]
        Function that takes one text per column and returns the result of a row.
    dtype : Any, optional
        numpy type of the results.

    Returns
    -------
    ndarray, shape (rows,)
        Result of each row.

    Examples
    --------
    >>> table = pd.DataFrame({"a": ["x", "y", "x"], "b": ["1", "2", "1"]})
    >>> map_text_columns(table, ("a", "b"), lambda a, b: a + b).tolist()
    ['x1', 'y2', 'x1']
    """
    if frame.empty:
        return np.zeros(0, dtype=dtype)
    coded_columns = [factorize_text_column(frame, column) for column in columns]
    combination_of, combinations = factorize_combinations(coded_columns)
    table = np.empty(len(combinations), dtype=dtype)
    for place, words in enumerate(combinations):
        table[place] = function(*words)
    return table[combination_of]


def parse_release(version: str) -> tuple[int, ...]:
    """Parse a library version into numbers, to compare releases; parts such as ``0rc5`` are left out.

    Parameters
    ----------
    version : str
        Version of a library as a table states it, such as ``0.24.0``.

    Returns
    -------
    tuple of int
        The numbers between the dots, such as (0, 24, 0).

    Examples
    --------
    >>> parse_release("0.5.14"), parse_release("1.3.0rc20"), parse_release("") < (0, 24)
    ((0, 5, 14), (1, 3), True)
    """
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def factorize_combinations(
    coded_columns: Sequence[tuple[npt.NDArray[np.integer[Any]], list[str]]],
) -> tuple[npt.NDArray[np.intp], list[tuple[str, ...]]]:
    """Encode the combination of several text columns as one integer per row, to group rows by it.

    Parameters
    ----------
    coded_columns : Sequence[tuple[npt.NDArray[np.integer[Any]], list[str]]]
        One (codes, words) pair per column, as `factorize_text_column` returns them.

    Returns
    -------
    tuple[ndarray of int, list[tuple[str, ...]]]
        (codes, combinations): the index into ``combinations`` of each row, shape (rows,); and the distinct combinations
        of words that occur.
    """
    shape = [len(words) for _, words in coded_columns]
    codes_of_rows = np.zeros(len(coded_columns[0][0]), dtype=np.int64)
    for codes, words in coded_columns:
        if len(words) > 1:
            codes_of_rows = codes_of_rows * len(words) + codes
    count = math.prod(shape)
    if count > len(codes_of_rows):
        index, present = pd.factorize(codes_of_rows)
    else:
        present = np.flatnonzero(np.bincount(codes_of_rows, minlength=count))
        places = np.zeros(count, dtype=np.intp)
        places[present] = np.arange(len(present))
        index = places[codes_of_rows]
    picked = np.stack(np.unravel_index(present, shape), axis=1)
    return index, [tuple(words[code] for code, (_, words) in zip(row, coded_columns, strict=True)) for row in picked]


class UnreadableRowsError(SpecError):
    """Error for wrong cells in some rows of a table; ``rows`` holds their index labels, the other rows can be read."""

    def __init__(self, reason: str, rows: pd.Index[Any]) -> None:
        super().__init__(reason)
        self.rows = rows


def number_column(frame: pd.DataFrame, column: str, default: float | None = None) -> Array:
    """Read a column of a measured table as floats; raise an error for cells that are no finite number.

    Parameters
    ----------
    frame : DataFrame
        The table.
    column : str
        Name of the column.
    default : float, optional
        Number for empty cells or a missing column.

    Returns
    -------
    ndarray, shape (rows,)
        Numbers.

    Raises
    ------
    SpecError
        If the column is missing and there is no default.
    UnreadableRowsError
        If a cell is no finite number.
    """
    if column not in frame.columns:
        if default is None:
            raise SpecError(f"column {column!r} is missing; {suggest_names(column, map(str, frame.columns))}")
        return np.full(len(frame), default)
    raw = frame[column]
    if isinstance(raw.dtype, pd.CategoricalDtype):
        raw = raw.astype(object)
    if raw.dtype.kind in "if" and np.isfinite(raw.to_numpy()).all():
        return raw.to_numpy(dtype=np.float64)
    values = pd.to_numeric(raw, errors="coerce").to_numpy(dtype=np.float64)
    empty = raw.isna().to_numpy() | (raw.astype(str).str.strip() == "").to_numpy()
    wrong = ~np.isfinite(values) & ~(empty & (default is not None))
    if wrong.any():
        row = int(np.argmax(wrong))
        reason = f"column {column!r}, row {frame.index[row]}: {str(raw.iloc[row])[:40]!r} is not a finite number"
        raise UnreadableRowsError(reason, frame.index[wrong])
    return np.where(empty, np.nan if default is None else default, values)


def number_columns(frame: pd.DataFrame, columns: Sequence[str]) -> tuple[Array, ...]:
    """Read columns of a measured table as floats by `number_column`; none of them may be missing.

    Parameters
    ----------
    frame : DataFrame
        The table.
    columns : sequence of str
        Names of the columns.

    Returns
    -------
    tuple of ndarray, shape (rows,) each
        Numbers of each column.
    """
    return tuple(number_column(frame, column) for column in columns)


def number_or_nan(frame: pd.DataFrame, column: str) -> Array:
    """Read a column of a measured table as floats; nan for cells that are no finite number.

    Parameters
    ----------
    frame : DataFrame
        The table.
    column : str
        Name of the column; a missing column gives nan.

    Returns
    -------
    ndarray, shape (rows,)
        Numbers.
    """
    if column not in frame.columns:
        return np.full(len(frame), np.nan)
    values = pd.to_numeric(frame[column], errors="coerce").to_numpy(dtype=np.float64)
    return np.where(np.isfinite(values), values, np.nan)
