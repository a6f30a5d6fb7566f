"""The smallest order of machines: rounder counts below a count that is late are tried, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system
from paleo.studies.purchase import PurchaseRequirements, _Searches

DAY = 86_400.0


@dataclass
class Timed:
    """A plan that fits and takes so long."""

    training_time: float
    row: Any = field(default_factory=lambda: SimpleNamespace(fits=True))

    def meets(self, wish: PurchaseRequirements) -> bool:
        return wish.deadline is None or self.training_time <= wish.deadline


def orders(days: Callable[[int], float], deadline: float) -> tuple[int, list[int]]:
    """The smallest count of DGX B200's GPUs that is found for Llama 3 70B, and all that were tried."""
    wish = PurchaseRequirements(None, deadline * DAY, None, "gpus")
    tried = _Searches(load_model("llama3-70b"), Run(global_batch=2048), wish, lambda system, gpus: ("", None), 1)
    seen: dict[int, Timed] = {}

    def at(system: object, gpus: int) -> Timed:
        seen[gpus] = Timed(days(gpus) * DAY)
        return seen[gpus]

    tried.best_plan = at  # type: ignore[method-assign, assignment]
    tried.search_smallest_count(load_system("dgx-b200"))
    return min(gpus for gpus, plan in seen.items() if plan.meets(wish)), list(seen)


def waste(gpus: int) -> float:
    """Time of 87,000 GPU-days of work, a tenth longer where stages must share an odd count."""
    return 87_000 / gpus * (1.0 if gpus & (gpus - 1) == 0 else 1.1)


@pytest.mark.parametrize(("deadline", "expected"), [(90.0, 1024), (170.0, 512), (10_900.0, 8)])
def test_a_late_count_rules_out_no_rounder_one(deadline: float, expected: int) -> None:
    found, tried = orders(waste, deadline)
    assert found == expected and len(tried) <= 12


def test_time_that_falls_steadily_is_bisected() -> None:
    found, tried = orders(lambda gpus: 87_000 / gpus, 100.0)
    assert found == 896 and len(tried) <= 12  # 870 GPUs, the next of which 80 layers and the batch share evenly
