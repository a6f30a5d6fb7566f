"""Steps and plans are those that were frozen; ``python -m tests.replay.freeze`` freezes them again."""

from __future__ import annotations

from collections import Counter

import pytest

from paleo.parallel.placement import STRATEGY_PRESETS
from paleo.schedules.base import SCHEDULES
from paleo.specs.catalog import entry_names
from paleo.specs.run import Run
from tests.replay.freeze import SPLITS, label, load, moved_figures

STEPS, PLANS = load("steps"), load("plans")


@pytest.mark.parametrize("first", range(0, len(STEPS), 20))
def test_steps_have_not_moved(first: int) -> None:
    moved = {label(case): moved_figures("steps", case, frozen) for case, frozen in STEPS[first : first + 20]}
    assert not {case: changes for case, changes in moved.items() if changes}


@pytest.mark.parametrize(("case", "frozen"), PLANS, ids=[label(case) for case, _ in PLANS])
def test_plans_have_not_moved(case: dict[str, object], frozen: dict[str, object]) -> None:
    assert moved_figures("plans", case, frozen) == []


def test_every_strategy_schedule_and_profile_is_among_the_cases() -> None:
    runs = [case["run"] for case, _ in STEPS]
    strategies = {run["strategy"].removesuffix(",vp=2") for run in runs}
    assert strategies == {*SPLITS, *STRATEGY_PRESETS}, "draw the cases anew"
    assert {run["software"] for run in runs} == set(entry_names("software")), "draw the cases anew"
    assert {Run.model_validate(run).pipeline.schedule for run in runs} == set(SCHEDULES), "draw the cases anew"
    recomputed = Counter(run["recompute"] for run in runs)
    assert min(recomputed[kind] for kind in ("none", "selective", "full")) > len(runs) / 10
