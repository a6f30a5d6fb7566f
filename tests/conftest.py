"""What all tests share: quick, repeatable hypothesis runs, and the measured tables beside the checkout, where they
are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from paleo.validate.runner import FileReport, validate_file

settings.register_profile("paleo", deadline=None, max_examples=60, derandomize=True, database=None)
settings.load_profile("paleo")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of measured tables and hardware facts; tests that ask for it are skipped by name without it."""
    if not (SHARED / "measurements").is_dir():
        pytest.skip(f"{SHARED} is not here")
    return SHARED


@pytest.fixture(scope="session")
def validated(shared: Path) -> Callable[[str], FileReport]:
    """Predictions of all rows of a measured table, made once for all tests of a worker; tests of one table carry its
    name as their ``xdist_group``."""
    return cache(lambda table: validate_file(shared / "measurements" / table))


#: Files whose tests share a fit or a study that takes seconds: one worker runs them all, so that it is made once.
TOGETHER = {
    "test_compression_rows",
    "test_contributing",
    "test_consistency_rows",
    "test_fit_links",
    "test_fit_software",
    "test_flop_counter_language",
    "test_report_page",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``shared`` are skipped, each by its name, where the folder is absent; those of files that belong
    together form a group for ``--dist loadgroup``."""
    for item in items:
        if item.path.stem in TOGETHER:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    if not SHARED.is_dir():
        for item in items:
            if item.get_closest_marker("shared"):
                item.add_marker(pytest.mark.skip(reason="needs ../shared"))
