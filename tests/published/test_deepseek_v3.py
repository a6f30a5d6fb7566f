"""DeepSeek-V3 as its technical report describes it (DeepSeek-AI, 2024); nothing is fitted to it."""

from __future__ import annotations

import pytest

from paleo.schedules.base import SCHEDULES


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (3, 8), (4, 8), (5, 13)])
def test_order_is_that_of_pytorch(stages: int, microbatches: int) -> None:
    """torch.distributed.pipelining, ScheduleDualPipeV: forward, backward of inputs (I) and of weights (W), both (B)."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs = object.__new__(schedules.ScheduleDualPipeV)
    theirs.pp_group_size, theirs._n_microbatches = stages, microbatches
    kinds = {"F": ("F",), "I": ("B",), "W": ("W",), "B": ("B", "W")}
    for stage in range(stages):
        expected = []
        for action in theirs._calculate_single_rank_operations(stage):
            parts = action.sub_actions or (action,)
            expected.append([
                (kind, part.microbatch_index, int(part.stage_index >= stages))
                for part in parts
                for kind in kinds[part.computation_type.value]
            ])  # fmt: skip
        assert [list(group) for group in SCHEDULES["dualpipev"].groups(stage, stages, microbatches, 2)] == expected
