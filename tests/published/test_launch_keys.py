"""Every setting that a launcher writes is one of its framework, by the tables and files that frameworks publish."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest

from paleo.launch._base import LAUNCHERS, LaunchError
from tests.properties.test_launchers import random_job

PUBLISHED = Path(__file__).parent / "launch_keys.csv"
TABLES = {"megatron-core": "megatron_lm.csv", "maxtext": "maxtext.csv"}
SHARED = Path(__file__).parents[3] / "shared" / "frameworks"
PLANS = 60


def written(name: str) -> set[str]:
    """Keys of the settings of random plans."""
    rng, launcher, keys, plans = random.Random(f"keys of {name}"), LAUNCHERS[name], set[str](), 0
    while plans < PLANS:
        job = random_job(rng, name)
        try:
            keys |= set() if job is None else set(launcher.settings_of_plan(job))
            plans += job is not None
        except LaunchError:
            continue
    return keys


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(LAUNCHERS) - set(TABLES)))
def test_keys_stand_in_the_files_of_the_framework(name: str) -> None:
    """Each key has the file and line of the release that defines it."""
    with PUBLISHED.open() as file:
        known = {row["key"] for row in csv.DictReader(file) if name in row["launchers"].split()}
    assert written(name) <= known


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TABLES))
def test_keys_stand_in_the_table_of_the_framework(name: str) -> None:
    """Flags of Megatron-LM are in its parser, or fields of its configurations under the names that these give them."""
    if not SHARED.is_dir():
        pytest.skip("tables of the frameworks' settings are not here")
    known: set[str] = set()
    with (SHARED / TABLES[name]).open() as file:
        for row in csv.DictReader(file):
            spelling = row["key"].replace("_", "-")
            known |= {row["key"], f"--{spelling}", f"--no-{spelling}", *row["default"].split("'")}
    assert written(name) <= known
