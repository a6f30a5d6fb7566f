"""What all tests share: quick, repeatable hypothesis runs, and the measured tables beside the checkout, where they
are."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("paleo", deadline=None, max_examples=60, derandomize=True, database=None)
settings.load_profile("paleo")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of measured tables and hardware facts; tests that ask for it are skipped by name without it."""
    if not (SHARED / "measurements").is_dir():
        pytest.skip(f"{SHARED} is not here")
    return SHARED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``shared`` are skipped, each by its name, where the folder is absent."""
    if not SHARED.is_dir():
        for item in items:
            if item.get_closest_marker("shared"):
                item.add_marker(pytest.mark.skip(reason="needs ../shared"))
