"""What holds for every framework of the catalog."""

from __future__ import annotations

import re

import pytest

from paleo.operations.base import OPTIMIZERS
from paleo.operations.tensor import BYTES_PER_NUMBER
from paleo.parallel.framework_checks import restriction_messages
from paleo.schedules.base import SCHEDULES
from paleo.specs.catalog import entry_names
from paleo.specs.framework_capabilities import CONDITION_QUANTITIES, load_framework
from paleo.specs.software import load_software

FRAMEWORKS = entry_names("frameworks")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_values_are_those_of_runs(name: str) -> None:
    """Lists name schedules, formats and optimizers that exist, and every fact has a file (and line, or a page)."""
    framework = load_framework(name)
    assert set(framework.schedules.values) <= set(SCHEDULES)
    assert set(framework.optimizers.values) <= set(OPTIMIZERS)
    assert set(framework.dtypes.values) <= set(BYTES_PER_NUMBER)
    assert set(framework.zero.values) <= {0, 1, 2, 3}
    assert set(framework.recompute.values) <= {"none", "selective", "full"}
    sources = [fact.source for fact in (*framework.restrictions, *framework.habits.values())]
    assert all(re.fullmatch(r"[\w./-]+\.(py|md|yaml|yml):\d+", source) for source in sources)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_plain_data_parallelism_runs_everywhere(name: str) -> None:
    """The simplest plan of all contradicts no fact, and every condition is over quantities that a plan has."""
    simple = dict.fromkeys(CONDITION_QUANTITIES, 0) | dict.fromkeys(("dp", "tp", "cp", "ep", "pp", "vp", "shard"), 1)
    simple |= {"dp": 8, "gpus": 8, "overlapped": 1, "microbatch": 1, "microbatches": 1, "global_batch": 8}
    simple |= {"schedule": "none", "recompute": "none", "dtype": "bf16", "scaling": "none", "optimizer": "adamw"}
    assert restriction_messages(load_framework(name), simple) == []


def test_profiles_name_frameworks_that_exist() -> None:
    named = {name: load_software(name).framework for name in entry_names("software")}
    assert set(named.values()) - {None} <= set(FRAMEWORKS)
    assert named["nemo"] == named["megatron-core"] == "megatron-core" and named["torchtitan-eager"] == "torchtitan"
