"""Writing of complete files, reading of limited ones, and text that is safe in a table.

A regular file is written next to its final path and moved there. A reader therefore sees the old content or the new one
and never a part, and a full disk or a signal leaves the old one. A symbolic link stays and its target is replaced. A
device or a pipe (``/dev/stdout``, ``>(gzip)``) is written directly. A folder is refused.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
import secrets
import shutil
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from paleo.errors import SpecError

#: File formats of pictures.
PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
#: First bytes of a gzip file.
GZIP_MAGIC = b"\x1f\x8b"
#: What a function that writes a file returns.
Written = TypeVar("Written")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def exists(path: str | Path) -> bool:
    """Return True if a path exists; False for a name that the file system cannot hold (too long, a zero byte).

    Parameters
    ----------
    path : str | Path
        The path.

    Returns
    -------
    bool
        True if it exists.
    """
    return os.path.exists(path)  # noqa: PTH110 (a Path raises OSError for such a name)


def is_folder(path: str | Path) -> bool:
    """Return True if a path is a folder; False for a name that the file system cannot hold.

    Parameters
    ----------
    path : str | Path
        The path.

    Returns
    -------
    bool
        True if it is.
    """
    return os.path.isdir(path)  # noqa: PTH112 (as above)


def is_file(path: str | Path) -> bool:
    """Return True if a path is a regular file; False for a name that the file system cannot hold.

    Parameters
    ----------
    path : str | Path
        The path.

    Returns
    -------
    bool
        True if it is.
    """
    return os.path.isfile(path)  # noqa: PTH113 (as above)


def check_output_path(path: str | Path, suffixes: Iterable[str] = (), *, option: str = "-o") -> Path:
    """Check, before anything is computed, that a file can be written.

    Parameters
    ----------
    path : str | Path
        The file; devices and pipes may have any name.
    suffixes : iterable of str, optional
        Suffixes that a file may have; any by default.
    option : str, optional
        Name of the option, for messages.

    Returns
    -------
    Path
        The path.

    Raises
    ------
    SpecError
        If the file cannot be written there or has another suffix.
    """
    text, endings = str(path), tuple(suffixes)
    kind = _kind(text, option)
    if kind in ("device", "pipe"):
        return Path(text)
    if endings and not text.lower().endswith(endings):
        raise SpecError(f"{option} {text[:200]}: expected a name that ends in {', '.join(endings)}")
    place = Path(os.path.realpath(text))
    if not is_folder(place.parent):
        raise SpecError(f"{option} {text[:200]}: there is no folder {str(place.parent)[:200]!r}")
    if not os.access(place.parent, os.W_OK) or (kind == "file" and not os.access(place, os.W_OK)):
        raise SpecError(f"{option} {text[:200]}: cannot be written (Permission denied)")
    return Path(text)


def _kind(path: str, option: str) -> str:
    """Return the kind of the existing path (file, device, pipe, nothing); SpecError for one that cannot be written."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 (a Path would drop a trailing slash, which means a folder)
    except FileNotFoundError:
        if path.endswith("/") or not path:
            raise SpecError(f"{option} {path[:200]!r}: expected the name of a file, not of a folder") from None
        return "nothing"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecError(f"{option} {path[:200]!r}: cannot be written ({reason})") from None
    if stat.S_ISDIR(mode):
        raise SpecError(f"{option} {path[:200]}: is a folder; expected the name of a file")
    if stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        raise SpecError(f"{option} {path[:200]}: is a disk or a socket; expected the name of a file")
    return "device" if stat.S_ISCHR(mode) else "pipe" if stat.S_ISFIFO(mode) else "file"


def write_atomically(path: str | Path, write: Callable[[BinaryIO], Written]) -> Written:
    """Write a file so that it appears whole or not at all.

    Parameters
    ----------
    path : str | Path
        The file.
    write : Callable[[BinaryIO], Written]
        Writes to the open file that it gets.

    Returns
    -------
    Written
        What `write` returned.

    Raises
    ------
    SpecError
        If the file cannot be written.
    """
    try:
        if _kind(str(path), "-o") in ("device", "pipe"):
            # Write directly into a device or a pipe; a pipe without a reader is refused.
            with tempfile.TemporaryFile() as draft:
                result = write(draft)
                draft.seek(0)
                handle = os.open(str(path), os.O_WRONLY | os.O_NONBLOCK)
                os.set_blocking(handle, True)
                with os.fdopen(handle, "wb") as file:
                    shutil.copyfileobj(draft, file)
            return result
        return _write_beside(Path(os.path.realpath(path)), write)
    except OSError as error:
        raise SpecError(f"{str(path)[:200]}: cannot be written ({error.strerror or error})") from None


def write_text(path: str | Path, text: str) -> None:
    """Write a text file as UTF-8, whole or not at all.

    Parameters
    ----------
    path : str | Path
        The file.
    text : str
        Its content.

    Raises
    ------
    SpecError
        If the file cannot be written.
    """
    write_atomically(path, lambda file: file.write(text.encode("utf-8")))


def _write_beside(place: Path, write: Callable[[BinaryIO], Written]) -> Written:
    """Write a file under a temporary name in the target's folder, then rename it to the target.

    The permissions of a replaced file are kept; a new file gets those of the user's mask.
    """
    draft = place.with_name(f".{place.name[:64]}.{secrets.token_hex(6)}.new")
    try:
        with draft.open("xb") as file:
            result = write(file)
        with suppress(FileNotFoundError):
            draft.chmod(stat.S_IMODE(place.stat().st_mode))
        draft.replace(place)
        return result
    finally:
        draft.unlink(missing_ok=True)


def read_bytes(path: str | Path, *, most: int, expected: str) -> bytes:
    """Read a regular file and decompress it if it is a gzip file.

    A pipe or device, which may never end, is refused.

    Parameters
    ----------
    path : str | Path
        The file.
    most : int
        Most bytes, after unpacking.
    expected : str
        Description of the expected file, for messages.

    Returns
    -------
    bytes
        Its content.

    Raises
    ------
    SpecError
        If the file cannot be read or is larger.
    """
    short_path = str(path)[:200]
    require_regular_file(path, expected)
    try:
        with Path(path).open("rb") as file:
            packed = file.read(2) == GZIP_MAGIC
            file.seek(0)
            content = (gzip.GzipFile(fileobj=file) if packed else file).read(most + 1)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecError(f"{short_path!r}: cannot be read ({str(reason)[:200]})") from None
    if len(content) > most:
        raise SpecError(f"{short_path}: holds more than {most} bytes; expected {expected}")
    return content


def require_regular_file(path: str | Path, expected: str) -> None:
    """Check that a path is a regular file; a pipe or device may never end.

    Parameters
    ----------
    path : str | Path
        The path.
    expected : str
        Description of the expected file, for messages.

    Raises
    ------
    SpecError
        If it is missing, a folder, a pipe or a device.
    """
    short_path = str(path)[:200]
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 (a Path would drop a trailing slash)
    except FileNotFoundError:
        raise SpecError(f"{short_path}: no such file; expected {expected}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecError(f"{short_path!r}: cannot be read ({reason})") from None
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
        raise SpecError(f"{short_path}: is {kind}; expected {expected}")


def append_csv_row(path: Path, names: Iterable[str], row: Mapping[str, Any]) -> None:
    """Append a row to a CSV table in one write; a new table gets a header.

    An incomplete last line, from a signal or a full disk, is dropped first.

    Parameters
    ----------
    path : Path
        The table.
    names : iterable of str
        Columns.
    row : dict of str to Any
        Cell by column.
    """
    columns = list(names)
    with path.open("a+b") as file:
        end = _complete_lines_length(file)
        file.truncate(end)
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        for cells in ([] if end else [columns]) + [[row.get(name, "") for name in columns]]:
            table.writerow([escape_csv_cell(cell) for cell in cells])
        file.write(text.getvalue().encode("utf-8"))


def _complete_lines_length(file: BinaryIO) -> int:
    """Return the number of bytes up to the last end of a line."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 65536)
        file.seek(start)
        last = file.read(end - start).rfind(b"\n")
        if last >= 0:
            return start + last + 1
        end = start
    return 0


def csv_columns(path: Path) -> list[str] | None:
    """Read the columns of a CSV table.

    Parameters
    ----------
    path : Path
        The table.

    Returns
    -------
    list of str, optional
        Columns; None if the first line is missing or incomplete.
    """
    with path.open("rb") as file:
        line = file.readline()
    return next(csv.reader([line.decode("utf-8")])) if line.endswith(b"\n") else None


def read_csv_rows(path: Path) -> list[dict[str, str]]:
    """Read the rows of a CSV table that may be growing; an incomplete last line is dropped.

    Parameters
    ----------
    path : Path
        The table.

    Returns
    -------
    list[dict[str, str]]
        Cells by column, one dict a row.
    """
    with path.open("rb") as file:
        end = _complete_lines_length(file)
        file.seek(0)
        text = file.read(end).decode("utf-8")
    return list(csv.DictReader(text.splitlines()))


def escape_csv_cell(value: Any) -> Any:
    """Protect a cell from spreadsheets: text that begins with = + - @ gets an apostrophe.

    Parameters
    ----------
    value : Any
        The cell.

    Returns
    -------
    Any
        The cell as it is written.

    References
    ----------
    OWASP, CSV Injection.

    Examples
    --------
    >>> escape_csv_cell("=HYPERLINK(1)"), escape_csv_cell("-1.5"), escape_csv_cell(-1.5), escape_csv_cell("plain")
    ("'=HYPERLINK(1)", '-1.5', -1.5, 'plain')
    """
    if not isinstance(value, str) or not value.startswith(_FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value
