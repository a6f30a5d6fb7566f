"""What all tests share: quick, repeatable hypothesis runs, and the measured tables beside the checkout, where they
are."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from paleo.cli.process import ALLOCATED
from paleo.validate.runner import FileReport, validate_file

settings.register_profile("paleo", deadline=None, max_examples=60, derandomize=True, database=None)
settings.load_profile("paleo")
#: Objects made between collections of garbage: as for commands. At Python's 700 collections take a sixth of the suite.
gc.set_threshold(ALLOCATED, 50, 100)

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of measured tables and hardware facts; tests that ask for it are skipped by name without it."""
    if not (SHARED / "measurements").is_dir():
        pytest.skip(f"{SHARED} is not here")
    return SHARED


@pytest.fixture(scope="session")
def validated(shared: Path) -> Callable[[str], FileReport]:
    """Predictions of all rows of a measured table, made once for all tests of a worker; tests of one table form a
    `group`."""
    return cache(lambda table: validate_file(shared / "measurements" / table))


#: Files whose tests share a fit, a table or a study that takes seconds: one worker runs them all, so that it is made
#: once.
TOGETHER = {
    "test_compression_rows",
    "test_consistency_rows",
    "test_contributing",
    "test_explorer",
    "test_fit_links",
    "test_fit_software",
    "test_flop_counter_language",
    "test_placement_rows",
    "test_report_page",
    "test_search",
    "test_step_tables",
}
#: Files whose tests share what the first of their parameters names, up to a dash: a measured table, a network.
BY_PARAMETER = {"test_kernel_tables", "test_predictions"}


def group(nodeid: str) -> str:
    """What one worker runs with a test: its file, its file and parameter, or nothing but itself.

    >>> group("tests/unit/test_fit_links.py::test_a_fit"), group("tests/unit/test_units.py::test_bytes[1]")
    ('test_fit_links', 'tests/unit/test_units.py::test_bytes[1]')
    """
    path, _, name = nodeid.partition("::")
    file = Path(path).stem
    if file in BY_PARAMETER:
        return file + name.partition("[")[2].partition("-")[0]
    return file if file in TOGETHER else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each `group` to one worker. The groups of xdist itself do nothing under pytest 9.2, whose tests keep their
    names."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    return Scheduling(config, log) if config.getvalue("dist") == "load" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``shared`` are skipped, each by its name, where the folder is absent."""
    if not SHARED.is_dir():
        for item in items:
            if item.get_closest_marker("shared"):
                item.add_marker(pytest.mark.skip(reason="needs ../shared"))
