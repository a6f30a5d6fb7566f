"""Files are written whole or not at all, whatever stands in their place."""

from __future__ import annotations

import os
import select
import stat
import threading
from pathlib import Path
from typing import BinaryIO

import pytest

from paleo.errors import SpecError
from paleo.files import append_csv_row, check_output_path, read_csv_rows, write_atomically, write_text


def contents(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "t.yaml"
    target.write_text("old")

    def full(file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(SpecError, match=r"t\.yaml: cannot be written \(No space left on device\)"):
        write_atomically(target, full)
    assert target.read_text() == "old"
    assert contents(tmp_path) == ["t.yaml"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_has_the_mode_that_the_mask_leaves(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        write_text(tmp_path / "new", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == mode


def test_a_replaced_file_keeps_its_mode(tmp_path: Path) -> None:
    target = tmp_path / "kept"
    target.write_text("old")
    target.chmod(0o640)
    write_text(target, "new")
    assert (target.read_text(), stat.S_IMODE(target.stat().st_mode)) == ("new", 0o640)


def test_a_symlink_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_a_pipe_is_written_through_and_one_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(SpecError, match="pipe: cannot be written"):
        write_text(pipe, "lost")
    received: list[bytes] = []
    handle = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    text = "x" * 200_000  # more than a pipe holds, so that the writer has to wait

    def read() -> None:
        select.select([handle], [], [])  # until the writer is there: before that a pipe is at its end
        os.set_blocking(handle, True)
        with os.fdopen(handle, "rb") as file:
            received.append(file.read())

    thread = threading.Thread(target=read)
    writer = threading.Thread(target=write_text, args=(pipe, text))
    writer.start()
    thread.start()
    writer.join()
    thread.join()
    assert received == [text.encode()]


def test_devices_are_written_through_and_a_full_one_says_so() -> None:
    write_text("/dev/null", "text")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    with pytest.raises(SpecError, match="/dev/full: cannot be written"):
        write_text("/dev/full", "text")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("folder.yaml", "is a folder"),
        ("folder.yaml/", "is a folder"),
        ("no/where.yaml", "there is no folder"),
        ("table.txt", "expected a name that ends in .yaml"),
        ("nul\0.yaml", "cannot be written"),
        ("", "name of a file"),
        ("new/", "not of a folder"),
        ("x" * 300 + ".yaml", "cannot be written"),
    ],
)
def test_an_output_that_cannot_be_is_refused_beforehand(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(SpecError, match=f"--plot.*{words}"):
        check_output_path(f"{tmp_path}/{name}" if name else "", (".yaml",), option="--plot")


def test_a_table_grows_and_drops_its_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    append_csv_row(path, ["n", "time"], {"n": 1, "time": 2.5, "more": "left out"})
    append_csv_row(path, ["n", "time"], {"n": 2})
    with path.open("a") as file:
        file.write("3,1.")
    assert read_csv_rows(path) == [{"n": "1", "time": "2.5"}, {"n": "2", "time": ""}]
    append_csv_row(path, ["n", "time"], {"n": 4, "time": 1})
    assert path.read_text() == "n,time\n1,2.5\n2,\n4,1\n"


def test_a_torn_header_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("n,ti")
    append_csv_row(path, ["n", "time"], {"n": 1, "time": 2})
    assert path.read_text() == "n,time\n1,2\n"
