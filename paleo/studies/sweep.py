"""The cross product of models, systems, runs, changed hardware and prices, as one table.

A study file names the axes. Those that change the step are predicted point by point, in this process, in several, or on
a Dask cluster; those that change only what is paid or how much is trained are arithmetic on arrays, a million rows a
second. Points are kept in parts beside the output until the table is there, so that an interrupted sweep goes on where
it stopped; the table is the same whoever computed which point, byte for byte. Parts belong to one study, the content of
every file that it names and one release of the program: parts of another are not used.
"""

from __future__ import annotations

import errno
import json
import math
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from paleo.errors import SpecError
from paleo.files import write_text
from paleo.studies.sweep_points import PART, job_of, serial
from paleo.studies.sweep_table import blocks, table_writer

if TYPE_CHECKING:
    import pandas as pd

    from paleo.studies.study_file import Study
    from paleo.studies.sweep_points import Evaluator
    from paleo.studies.sweep_table import Record

Progress = Callable[[int, int], None]


def frame(study: Study, evaluator: Evaluator | None = None) -> pd.DataFrame:
    """The table of a study as a data frame, in SI, with its rows in the order of the axes; nothing is written."""
    import pandas as pd

    job = job_of(study)
    records = dict((evaluator or serial)(job, range(math.ceil(study.points / PART))))
    columns = blocks(study, (records[part] for part in sorted(records)))
    return pd.concat([pd.DataFrame(block) for block in columns], ignore_index=True)


def sweep(
    study: Study, output: str | Path, evaluator: Evaluator | None = None, progress: Progress | None = None
) -> int:
    """Write the table of a study (.csv, .csv.gz or .parquet); returns its rows. What an earlier run of the same study
    left is used."""
    output = Path(output)
    write, job = table_writer(output), job_of(study)
    count = math.ceil(study.points / PART)
    with _claimed(output, job.fingerprint) as folder:
        missing = [part for part in range(count) if _finished_records(folder, study, part) is None]
        done = count - len(missing)
        for part, records in (evaluator or serial)(job, missing):
            write_text(_part(folder, part), json.dumps(records))
            done += 1
            if progress is not None:
                progress(done, count)
        rows = write(blocks(study, (json.loads(_part(folder, part).read_text()) for part in range(count))))
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    return rows


@contextmanager
def _claimed(output: Path, fingerprint: str) -> Iterator[Path]:
    """The folder of parts, new or left by an earlier run of the same job, for this process alone."""
    folder = Path(f"{os.path.realpath(output)}.parts")
    lock = _locked(folder, output)
    try:
        mark = folder / "study.json"
        if not mark.exists():
            write_text(mark, json.dumps(fingerprint))
        if mark.read_text() != json.dumps(fingerprint):
            raise SpecError(
                f"{folder}: holds parts of another study, or of this one before it, a file that it names or paleo "
                "changed; delete the folder to start anew"
            )
        yield folder
    finally:
        os.close(lock)


def _locked(folder: Path, output: Path) -> int:
    """A handle that holds the folder's lock as long as it is open, and no longer than the process lives."""
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
                os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
                return handle
        os.close(handle)


def _unlockable(output: Path, error: OSError, holder: str) -> str:
    if error.errno in (errno.EAGAIN, errno.EACCES):
        return f"{output}: another sweep ({holder or 'of another process'}) writes it; wait, or choose another output"
    return f"{output}: its folder cannot be locked ({error.strerror}); choose an output on another file system"


def _part(folder: Path, part: int) -> Path:
    return folder / f"{part:07d}.json"


def _finished_records(folder: Path, study: Study, part: int) -> list[Record] | None:
    """The records of a part that an earlier run finished; None where there are none, or not all."""
    try:
        records = json.loads(_part(folder, part).read_text())
    except (OSError, ValueError):
        return None
    expected = min(PART, study.points - part * PART)
    whole = isinstance(records, list) and len(records) == expected and all(isinstance(row, dict) for row in records)
    return records if whole and all("problem" in row for row in records) else None
