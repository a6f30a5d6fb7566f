"""DeepSeek-V3 as its technical report describes it (DeepSeek-AI, 2024); nothing is fitted to it."""

from __future__ import annotations

import pytest

from paleo.predict import Prediction, predict
from paleo.schedules.base import SCHEDULES
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system
from paleo.units import HOUR

#: H800 hours for each trillion tokens of pre-training (section 1, table 1: 2,664 thousand for 14.8 trillion).
HOURS = 180_000.0


def trained(**more: object) -> Prediction:
    """Sections 3.2 to 3.4 and 4.2: 2,048 H800, 16 stages, experts over 64 GPUs, ZeRO-1, no tensor parallelism, batches
    of 15,360 sequences of 4,096, FP8, normalisations, up-projections of latent attention and SwiGLU recomputed.

    Its framework, HAI-LLM, is not public: host and fusion are those of Megatron-Core, tokens travel by DeepEP, which
    is DeepSeek's. Left out: the prediction of a second token (one more layer and head, which makes steps longer),
    tokens dispatched in FP8 and sends between stages beside computation (shorter)."""
    run = {
        "gpus": 2048, "global_batch": 15360, "microbatch": 1, "strategy": "pp=16,ep=64,zero=1", "dtype": "fp8",
        "recompute": "selective", "recompute.modules": ["layernorm", "mla_up_proj", "moe_act"],
        "experts.dispatch": "deepep", "software": "megatron-core", "schedule": "dualpipe", **more,
    }  # fmt: skip
    return predict(load_model("deepseek_v3"), load_system("h800-8"), Run.model_validate(run))


def hours(prediction: Prediction) -> float:
    """GPU hours for a trillion tokens."""
    return prediction.step_time * 2048 / HOUR / (15360 * 4096) * 10.0**12


def test_hours_for_a_trillion_tokens() -> None:
    """180 thousand, as published; schedules that hide no exchange take 1.4 times as many."""
    dualpipe = trained()
    assert hours(dualpipe) == pytest.approx(HOURS, rel=0.05)
    assert dualpipe.interval[0] < dualpipe.step_time * HOURS / hours(dualpipe) < dualpipe.interval[1]
    for schedule in ("1f1b", "zb-h1"):
        assert hours(trained(schedule=schedule)) > 1.4 * hours(dualpipe)
    assert hours(trained(experts={"overlap": False})) > 1.4 * hours(dualpipe)


def test_parameters_are_there_twice() -> None:
    """Table 2: twice the parameters of 1F1B with the same cut, whose fullest stage holds one piece."""
    cut = {"pipeline.cut": [3, *[4] * 14, 2]}
    dualpipe, plain = trained(**cut), trained(schedule="1f1b", **cut)
    stages = [each.step_arrays.stage_memory.states.parameters[:, 0] for each in (dualpipe, plain)]
    assert stages[0] == pytest.approx(stages[1] + stages[1][::-1])


@pytest.mark.slow
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
        assert [list(group) for group in SCHEDULES["dualpipev"].pass_groups(stage, stages, microbatches, 2)] == expected
